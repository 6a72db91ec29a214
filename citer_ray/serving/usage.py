"""What a response used: tokens by writer, visits, and gigabytes moved, beside what the LLM alone would have moved.

Passes are derived from who wrote each token, not from the turns that happened: then usage depends on the response
alone, and not on how a stream was cut into turns or on sessions that were rebuilt. A unit test holds the derivation to
the passes of `decoding.Trace`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from citer_ray.cost import PairCost, autoregressive_passes
from citer_ray.policy import Writer

Passes = list[tuple[int, int]]


@dataclass(slots=True)
class Tally:
    """Counts of one response, or of the choices of one request.

    Attributes:
        writers: who wrote each token.
        scores: `p_slm` of each position, where the router was asked.
    """

    prompt_tokens: int
    writers: list[Writer] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)

    def add(self, writer: Writer, score: float | None) -> None:
        """Count a token."""
        self.writers.append(writer)
        self.scores.append(score)

    @property
    def llm_tokens(self) -> int:
        """Tokens of the LLM."""
        return sum(writer is Writer.LLM for writer in self.writers)

    @property
    def slm_tokens(self) -> int:
        """Tokens of the SLM."""
        return len(self.writers) - self.llm_tokens

    @property
    def visits(self) -> int:
        """Visits of the LLM; a response of the LLM alone is one."""
        routed = sum(w is Writer.LLM and s is not None for w, s in zip(self.writers, self.scores, strict=True))
        return routed or int(self.llm_tokens > 0)

    def passes(self) -> tuple[Passes, Passes]:
        """`(new_tokens, cached_tokens)` of every pass of the SLM and of the LLM."""
        slm: Passes = []
        llm: Passes = []
        held = {Writer.SLM: 0, Writer.LLM: 0}
        for index, (writer, score) in enumerate(zip(self.writers, self.scores, strict=True)):
            context = self.prompt_tokens + index
            if writer is Writer.SLM or score is not None:  # the SLM decided here
                slm.append((context - held[Writer.SLM], held[Writer.SLM]))
                held[Writer.SLM] = context
            if writer is Writer.LLM:
                llm.append((context - held[Writer.LLM], held[Writer.LLM]))
                held[Writer.LLM] = context
        return slm, llm

    def gigabytes(self, cost: PairCost) -> tuple[float, float]:
        """Gigabytes moved at batch 1: by this response, and by the LLM alone for as many tokens."""
        slm, llm = self.passes()
        decisions = sum(score is not None for score in self.scores) if cost.router else 0
        alone = autoregressive_passes(self.prompt_tokens, len(self.writers))
        return cost.response(slm, llm, decisions).gigabytes, cost.response((), alone).gigabytes
