"""The schema of `report.json`.

Built by `report.build_report`; rendered by `report_text`; read back by `report.load_report`, so that a report
can be checked and compared without the run that wrote it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from citer_ray.claims import Claim, NotChecked
from citer_ray.pass_times import PassTimes

Share = Annotated[float, Field(ge=0, le=1)]
Bounds = tuple[float, float]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PointReport(_Part):
    """One measured setting of a method."""

    knob: float | None = Field(description="Threshold, probability or other setting; null if there is none.")
    llm_share: Share = Field(description="LLM tokens / all tokens over all responses.")
    accuracy: Share = Field(description="Part of the examples answered right.")
    gigabytes: float = Field(description="Mean bytes moved per answer by the cost model, in 1e9 bytes.")
    flops: float = Field(description="Mean floating-point operations per answer by the cost model.")
    tokens_per_answer: float = Field(description="Mean length of a response in tokens.")
    accuracy_interval: Bounds = Field(description="Bootstrap interval of the accuracy.")
    unanswered: int = Field(ge=0, description="Responses without an extractable answer; they count as wrong.")
    seconds: float | None = Field(None, description="Mean wall time of an answer alone, from measured pass times.")
    slm_passes: float | None = Field(None, description="Mean forward passes of the SLM for an answer.")
    llm_passes: float | None = Field(None, description="Mean forward passes of the LLM for an answer.")

    def curve(self) -> dict[str, float]:
        """The point's numbers, for a tracker."""
        values = self.model_dump(exclude={"accuracy_interval", "knob"})
        return {name: float(value) for name, value in values.items() if value is not None}


class ShareReport(_Part):
    """A method's accuracy at one LLM share, interpolated between its points."""

    llm_share: Share
    accuracy: Share
    accuracy_interval: Bounds


class CostReport(_Part):
    """A cost with its bootstrap interval."""

    value: float
    interval: Bounds


class BudgetReport(_Part):
    """A method's accuracy where it moves a part of what the LLM alone moves, interpolated between its points."""

    of_llm_only: float = Field(description="Bytes moved as a part of the LLM-only answer's.")
    gigabytes: float
    accuracy: Share
    accuracy_interval: Bounds


class DraftReport(_Part):
    """Exact speculation with one draft length."""

    draft_length: int = Field(ge=1)
    acceptance: Share = Field(description="Accepted tokens of those that were judged: the chance that one stands.")
    tokens_per_llm_pass: float
    gigabytes: float = Field(description="Mean bytes moved per answer, in 1e9 bytes.")
    of_llm_only: float = Field(description="The same as a part of the LLM-only answer's.")
    modelled_break_even: Share = Field(description="LLM share at which routing moves as much, by `break_even`.")


class SpeculationReport(_Part):
    """Why not just speculate: exact speculation has the LLM's answers, so routing must be cheaper."""

    drafts: list[DraftReport]
    cheapest: int = Field(description="The draft length that moves the fewest bytes.")
    method: str | None = Field(description="The routed method that it is compared with: CITER's last round.")
    break_even_share: Share | None = Field(description="Measured: that method moves fewer bytes below this LLM share.")
    accuracy_there: Share | None = Field(description="Its accuracy at that share.")
    llm_accuracy: Share


class TimedReport(_Part):
    """Responses of one setting that were decoded alone."""

    method: str
    knob: float | None
    responses: int
    seconds: float = Field(description="Measured mean wall time of a response.")
    predicted: float = Field(description="The same from the passes, with `pass_times`.")
    tokens_per_second: float


class NearLlmReport(_Part):
    """The smallest costs at which a method's accuracy is within `claims.NEAR_LLM` of the LLM's."""

    llm_share: CostReport
    gigabytes: CostReport
    flops: CostReport
    seconds: CostReport | None = Field(None, description="Null where no wall times were measured.")


class MethodReport(_Part):
    """One method."""

    points: list[PointReport] = Field(description="In order of LLM share.")
    area: Share = Field(description="Mean accuracy over LLM shares from 0 to `max_share`.")
    area_interval: Bounds
    at_shares: list[ShareReport]
    at_budgets: list[BudgetReport] = Field(default_factory=list, description="At equal bytes moved.")
    area_gigabytes: Share | None = Field(
        None, description="Mean accuracy over bytes moved, from the SLM-only answer's to the LLM-only answer's."
    )
    area_gigabytes_interval: Bounds | None = None
    near_llm: NearLlmReport | None = Field(description="Null where the method never comes so close.")


class RoundReport(_Part):
    """One round of collect, fit, evaluate; stages may add figures of their own."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    round: int = Field(ge=1)
    method: str = Field(description="Name under `methods` of this round's router.")
    rollout_threshold: float | None = Field(None, description="Threshold of the rollout policy; null: SLM alone.")
    cases: dict[str, int] = Field(default_factory=dict, description="Positions per case.")
    rollouts: int | None = Field(None, description="Rollouts decoded in this round.")
    label_mean: float | None = Field(None, description="Mean label: the part of positions that prefer the SLM.")
    label_flips: int | None = Field(None, description="Labels that differ from the round before.")
    fit: dict[str, float] = Field(default_factory=dict, description="Validation loss, AUC, Brier score, ...")
    validation_area: float | None = Field(None, description="Area on the validation split; decides when to stop.")


class Measurement(_Part):
    """How the figures were obtained."""

    resamples: int
    seed: int
    confidence: float
    max_share: float = Field(description="Upper end of the LLM shares that `area` covers.")
    notes: list[str] = Field(description="What the run says about itself, such as where thresholds were chosen.")


class Report(_Part):
    """`report.json`."""

    schema_version: Literal[1] = 1
    pair: dict[str, JsonValue]
    n: int = Field(ge=1, description="Examples.")
    methods: dict[str, MethodReport]
    rounds: list[RoundReport]
    claims: list[Claim]
    not_checked: list[NotChecked]
    measurement: Measurement
    not_run: dict[str, str] = Field(default_factory=dict, description="Methods that could not run, and why.")
    pass_times: PassTimes | None = Field(None, description="What passes took on the machine that measured.")
    timed: list[TimedReport] = Field(default_factory=list, description="Responses decoded alone.")
    speculation: SpeculationReport | None = Field(None, description="Null where exact speculation was not run.")
