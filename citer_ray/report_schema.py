"""The schema of `report.json`.

Built by `report.build_report`; rendered by `report_text`; read back by `report.load_report`, so that a report
can be checked and compared without the run that wrote it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from citer_ray.claims import Claim, NotChecked

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


class ShareReport(_Part):
    """A method's accuracy at one LLM share, interpolated between its points."""

    llm_share: Share
    accuracy: Share
    accuracy_interval: Bounds


class CostReport(_Part):
    """A cost with its bootstrap interval."""

    value: float
    interval: Bounds


class NearLlmReport(_Part):
    """The smallest costs at which a method's accuracy is within `claims.NEAR_LLM` of the LLM's."""

    llm_share: CostReport
    gigabytes: CostReport
    flops: CostReport


class MethodReport(_Part):
    """One method."""

    points: list[PointReport] = Field(description="In order of LLM share.")
    area: Share = Field(description="Mean accuracy over LLM shares from 0 to `max_share`.")
    area_interval: Bounds
    at_shares: list[ShareReport]
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
