"""An engine whose passes take a fixed time: the scheduling of routed decoding, apart from any arithmetic.

On a GPU a pass over few tokens is bound by memory: it takes as long for one response as for sixty. `PacedEngine` has
that contract and no model. Its tokens are numbers; the random policy decides on handoffs, so that a response costs what
it would cost. `VirtualClock` runs it without waiting: time jumps to the next event, and the result does not depend on
the machine. Read by `vllm.py`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from citer_ray.engine import Finish, Sampling, Scores, TokenSequence, Turn
from citer_ray.engines.scorers import random_scores, random_seed, response_key
from citer_ray.engines.visit_gate import VisitGate
from citer_ray.policy import hands_off

Result = TypeVar("Result")
_MAX_LENGTH = 1 << 20
_TOKEN = 7
_LEARNT = 0.05  # of each timer's error


@dataclass(eq=False, slots=True)
class _Request:
    """A turn in progress."""

    session: PacedSession
    new: int
    max_tokens: int
    future: asyncio.Future[Turn]
    scores: list[float] = field(default_factory=list)
    written: int = 0

    @property
    def tokens(self) -> int:
        """What the next pass computes for it."""
        return self.new if self.written == 0 else 1


class PacedSession:
    """A response in progress on a `PacedEngine`."""

    def __init__(self, engine: PacedEngine, prompt: Sequence[int], seed: int | None, threshold: float) -> None:
        self._engine, self.seed, self.threshold = engine, seed, threshold
        self.key, self.length, self._pending = response_key(prompt), len(prompt), len(prompt)
        self._closed = False
        engine.num_sessions += 1

    @property
    def num_tokens(self) -> int:
        return self.length

    async def turn(self, new_ids: Sequence[int], max_tokens: int) -> Turn:
        new = self._pending + len(new_ids)
        self.length, self._pending = self.length + len(new_ids), 0
        async with self._engine.gate.turn(max_tokens):
            turn = await self._engine.submit(_Request(self, new, max_tokens, asyncio.Future()))
        # As everywhere: the last sampled token is not held, unless the session looked past it.
        self.length += len(turn.token_ids) - (turn.finish is not Finish.HANDOFF)
        return turn

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.num_sessions -= 1
            self._engine.gate.look()


class PacedEngine:
    """See the module.

    Args:
        seconds: of one pass.
        max_rows: responses that share one pass.
        max_tokens: tokens that a pass computes in that time; more take longer in proportion. None: no limit.
        hold: passes that visits wait for others (`VisitGate`).
    """

    def __init__(self, seconds: float, *, max_rows: int = 64, max_tokens: int | None = None, hold: float = 0.0) -> None:
        self._seconds, self._max_rows, self._max_tokens = seconds, max_rows, max_tokens
        self.num_sessions = 0
        self.gate = VisitGate(hold, lambda: self.num_sessions)
        self._queue: list[_Request] = []
        self._driver: asyncio.Task[None] | None = None
        self.num_passes = self.num_written = 0
        self._late = 0.0  # seconds, by which timers are set early

    @property
    def max_model_len(self) -> int:
        return _MAX_LENGTH

    async def open(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, scorer: str | None = None, threshold: float = 0.0
    ) -> PacedSession:
        return PacedSession(self, prompt_ids, None if scorer is None else random_seed(scorer), threshold)

    async def submit(self, request: _Request) -> Turn:
        """Queue a turn for the next passes and wait for its end."""
        self._queue.append(request)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return await request.future

    async def _drive(self) -> None:
        await asyncio.sleep(0)  # what arrives in the same moment shares the first pass
        while self._queue:
            group = self._queue[: self._max_rows]
            tokens = sum(request.tokens for request in group)
            slower = 1.0 if self._max_tokens is None else max(1.0, tokens / self._max_tokens)
            await self._pass(self._seconds * slower)
            self.num_passes += 1
            for request in group:
                self._advance(request)
            rest = self._queue[len(group) :]
            self._queue = rest + [request for request in group if not request.future.done()]
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def _pass(self, seconds: float) -> None:
        """Take a time, on the mean: timers fire late, by about as much each time."""
        clock = asyncio.get_running_loop().time
        began = clock()
        await asyncio.sleep(max(0.0, seconds - self._late))
        self._late = max(0.0, self._late + _LEARNT * (clock() - began - seconds))

    def _advance(self, request: _Request) -> None:
        session = request.session
        position = session.length + request.written
        finish = None
        if session.seed is not None:
            score = float(random_scores(session.seed, [session.key], [position])[0])
            request.scores.append(score)
            if hands_off(score, session.threshold):
                finish = Finish.HANDOFF
        if finish is None:
            request.written += 1
            self.num_written += 1
            if request.written < request.max_tokens:
                return
            finish = Finish.LENGTH
        tokens = [_TOKEN] * request.written
        request.future.set_result(Turn(tokens, [0.0] * len(tokens), request.scores, finish))

    async def score(self, batch: Sequence[TokenSequence], *, hidden: bool = False) -> list[Scores]:
        raise NotImplementedError("a paced engine has no model to score with")

    async def close(self) -> None:
        pass


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting for `timeout` seconds, moves the loop's clock on by as much."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout > 0:
            self.now += timeout
        return super().select(0)


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop in which sleeping takes no time; `time()` is what would have passed."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, Result]) -> tuple[Result, float]:
    """The result of `work`, and the seconds that it would have taken."""
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        result = runner.run(work)
        return result, runner.get_loop().time()
