"""The scorers that a `VLLMEngine` knows: what a turn asks of the logits processor, and how its scores come back.

The router's scores travel in the handoff column (`vllm_score_column.py`). The random baseline's are a hash, drawn in
the logits processor (`vllm_handoff.py`) and once more here. Made by `VLLMEngine.open`, one for a session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from citer_ray.engines.scorers import random_scores
from citer_ray.engines.vllm_score_column import decode_score
from citer_ray.engines.vllm_settings import RANDOM_KEY, RandomRouting

Columns = Sequence[Mapping[int, float]]  # log-probabilities by id that vLLM returned, one mapping a decided position


class TurnScorer(Protocol):
    """Scores of one session's turns."""

    def extra_args(self, position: int) -> dict[str, Any]:
        """What the logits processor must know, beside the threshold, of a turn whose first token is at `position`."""
        ...

    def scores(self, position: int, columns: Columns) -> list[float]:
        """One score for every decided position of that turn."""
        ...


@dataclass(frozen=True, slots=True)
class ColumnScores:
    """What the routed model wrote into the column of `handoff_token_id`."""

    handoff_token_id: int

    def extra_args(self, position: int) -> dict[str, Any]:
        return {}

    def scores(self, position: int, columns: Columns) -> list[float]:
        return [decode_score(column[self.handoff_token_id]) for column in columns]


@dataclass(frozen=True, slots=True)
class RandomScores:
    """`scorers.random_scores` of a seed and a response's key."""

    seed: int
    key: int

    def extra_args(self, position: int) -> dict[str, Any]:
        return {RANDOM_KEY: asdict(RandomRouting(self.seed, self.key, position))}

    def scores(self, position: int, columns: Columns) -> list[float]:
        count = len(columns)
        drawn: list[float] = random_scores(self.seed, [self.key] * count, range(position, position + count)).tolist()
        return drawn
