"""What a router has learned, for people: responses token by token, the tokens it routes most, and its calibration.

Fed by responses decoded with the router and by the metrics of its fit; `report_pages.py` writes the page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from citer_ray.router_metrics import ReliabilityBin

_MOST_ROUTED = 40


class ShownResponse(BaseModel):
    """A response as text, token by token; the lists have one entry for each token."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    question: str = Field(description="What was asked.")
    correct: bool = Field(description="Whether the answer is right.")
    tokens: list[str] = Field(description="Each token's text.")
    by_llm: list[bool] = Field(description="Whether the LLM wrote it.")
    scores: list[float | None] = Field(description="p_slm before it; null where the router was not asked.")


class RoutedToken(BaseModel):
    """How often a token that the LLM wrote occurs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str = Field(description="Its text.")
    by_llm: int = Field(description="Written by the LLM.")
    total: int = Field(description="Written at all.")


class LearnedPage(BaseModel):
    """The content of `learned.html`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str = Field(description="The router's name in the report.")
    threshold: float = Field(description="The LLM writes where p_slm is below.")
    examples: int = Field(description="Responses that the counts are over.")
    accuracy: float
    llm_share: float
    responses: list[ShownResponse] = Field(description="The first of them.")
    most_routed: list[RoutedToken] = Field(description="Tokens that the LLM wrote most often.")
    reliability: tuple[ReliabilityBin, ...] = Field(description="On the held-out labels of the fit.")

    @classmethod
    def build(
        cls,
        method: str,
        threshold: float,
        responses: Sequence[ShownResponse],
        *,
        shown: int,
        reliability: Sequence[ReliabilityBin],
    ) -> LearnedPage:
        """Count the tokens of all responses and keep the first ones to show."""
        llm: Counter[str] = Counter()
        total: Counter[str] = Counter()
        for response in responses:
            total.update(response.tokens)
            llm.update(token for token, by_llm in zip(response.tokens, response.by_llm, strict=True) if by_llm)
        return cls(
            method=method,
            threshold=threshold,
            examples=len(responses),
            accuracy=sum(response.correct for response in responses) / max(1, len(responses)),
            llm_share=sum(llm.values()) / max(1, sum(total.values())),
            responses=list(responses[:shown]),
            most_routed=[
                RoutedToken(token=token, by_llm=count, total=total[token])
                for token, count in llm.most_common(_MOST_ROUTED)
            ],
            reliability=tuple(reliability),
        )
