"""What the batcher works on: a session's state, a turn in progress, one forward pass and its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from citer_ray.engine import Finish, Sampling, Turn
from citer_ray.engines.row_cache import PassIndex
from citer_ray.engines.scorers import Scorer


@dataclass(eq=False, slots=True)
class SessionState:
    """What the batcher keeps of a session.

    Attributes:
        ids: the context; the leading `num_computed` ids have keys and values in `row`.
        key: identifies the response for scorers that hash it.
        start: length of the response's first context.
        speculative: turns return their distributions.
        lost: the row's content is unknown; it is freed as soon as no pass uses it.
    """

    ids: list[int]
    sampling: Sampling
    scorer_name: str | None
    scorer: Scorer | None
    threshold: float
    key: int
    start: int = 0
    speculative: bool = False
    num_computed: int = 0
    row: int | None = None
    lost: bool = False


@dataclass(eq=False, slots=True)
class Request:
    """One turn in progress."""

    state: SessionState
    max_tokens: int
    future: asyncio.Future[Turn]
    wanted_rows: int = 1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    distributions: list[npt.NDArray[np.float32]] = field(default_factory=list)

    def finish(self, reason: Finish) -> None:
        rows = np.concatenate(self.distributions) if self.distributions else None
        self.future.set_result(Turn(self.token_ids, self.logprobs, self.scores, reason, rows))


@dataclass(frozen=True, slots=True)
class Pass:
    """Tensors of one forward pass; `batch_rows[i]` and `last[i]` locate the state of request i.

    `shown` locates the positions whose distributions speculative sessions return, in the order of `requests`.
    """

    requests: list[Request]
    ids_BT: torch.Tensor
    index: PassIndex
    batch_rows: torch.Tensor
    last: torch.Tensor
    shown: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pass says about the next position of each request."""

    greedy: list[int]
    greedy_logprobs: list[float]
    scores: list[float]
    logits_NV: torch.Tensor
    logsumexp: list[float]
    shown_NV: npt.NDArray[np.float32] | None


def num_pending(request: Request) -> int:
    """Ids that the request's next pass has to compute."""
    return len(request.state.ids) - request.state.num_computed


def num_shown(request: Request) -> int:
    """How many distributions the request's next pass returns."""
    return min(request.wanted_rows, num_pending(request)) if request.state.speculative else 0


def shown_positions(
    group: Sequence[Request], batch_rows: npt.NDArray[np.int64], last: npt.NDArray[np.int64], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Batch rows and positions of the distributions that a pass returns; None if it returns none."""
    counts = [num_shown(request) for request in group]
    if not any(counts):
        return None
    positions = [np.arange(end + 1 - count, end + 1) for end, count in zip(last, counts, strict=True)]
    rows = torch.from_numpy(np.repeat(batch_rows, counts))
    return rows.to(device), torch.from_numpy(np.concatenate(positions)).to(device)


def row_of(state: SessionState) -> int:
    """The row of a session in a pass."""
    assert state.row is not None, "a session in a pass has a row"
    return state.row
