"""One response on a `VLLMEngine`: a resumable vLLM request whose KV cache lives from turn to turn.

vLLM calls it streaming input: a request whose prompt comes in pieces. Each turn sends a piece and reads until
the engine stops. vLLM then forgets the last token that it sampled, which has no KV entry yet (the handoff
token, after a handoff); `num_tokens` keeps the same books. The session also keeps the ids themselves: when the
engine needs its memory it drops an idle session's request, and the next turn begins a new one with
everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from citer_ray.engine import Finish, Sampling, Turn
from citer_ray.engines.vllm_errors import translated_errors
from citer_ray.errors import RetryableError

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.engine.protocol import StreamingInput

    from citer_ray.engines.visit_gate import VisitGate
    from citer_ray.engines.vllm_loop import EngineLoop
    from citer_ray.engines.vllm_scorers import TurnScorer


class RequestStream:
    """A resumable request; lives in the engine's loop.

    Args:
        start: begins a request that reads its prompt from a generator, and yields its outputs.
    """

    def __init__(self, start: StartStream) -> None:
        self._inputs: asyncio.Queue[StreamingInput] = asyncio.Queue()
        self._start = start
        self._outputs: AsyncGenerator[RequestOutput, None] | None = None

    async def turn(self, new_ids: list[int], params: SamplingParams) -> TurnRecord:
        """Send ids, and read until the engine stops.

        Raises:
            ValueError: vLLM refuses the parameters.
            RetryableError: the engine gave the request up, or died.
        """
        from vllm.engine.protocol import StreamingInput
        from vllm.inputs import tokens_input

        self._inputs.put_nowait(StreamingInput(tokens_input(new_ids), params))
        if self._outputs is None:
            self._outputs = self._start(self._feed(), params)
        record = TurnRecord()
        with translated_errors():
            async for output in self._outputs:
                if record.add(output):
                    return record
        raise RetryableError("vLLM ended the request without a reason; send the whole context again")

    async def _feed(self) -> AsyncGenerator[StreamingInput, None]:
        while True:
            yield await self._inputs.get()

    async def close(self) -> None:
        """Abort the request, which frees its KV blocks. Safe to call twice."""
        from vllm.v1.engine.exceptions import EngineDeadError

        outputs, self._outputs = self._outputs, None
        if outputs is not None:
            with suppress(EngineDeadError):  # a dead engine holds nothing
                await outputs.aclose()


class StartStream(Protocol):
    """`AsyncLLM.generate` with a fresh request id."""

    def __call__(
        self, inputs: AsyncGenerator[StreamingInput, None], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]: ...


@dataclass(slots=True)
class TurnRecord:
    """What vLLM sent in one turn."""

    token_ids: list[int] = field(default_factory=list)
    columns: list[dict[int, float]] = field(default_factory=list)  # logprobs by id, the sampled token's among them
    stop_reason: str = ""
    stop_token: int | str | None = None

    def add(self, output: RequestOutput) -> bool:
        """Take an output in; True at the end of the turn."""
        completion = output.outputs[0]
        self.token_ids.extend(completion.token_ids)
        for position in completion.logprobs or []:
            assert position is not None
            self.columns.append({token: entry.logprob for token, entry in position.items()})
        self.stop_reason = completion.finish_reason or ""
        self.stop_token = completion.stop_reason
        return bool(self.stop_reason)

    def to_turn(self, handoff: int | None, scorer: TurnScorer | None, position: int) -> Turn:
        """The turn in the project's terms.

        Args:
            handoff: the handoff token's id, or None.
            scorer: of the session, if it has one.
            position: of the turn's first new token.

        Raises:
            RetryableError: the request was aborted, or failed inside the engine.
        """
        assert len(self.columns) == len(self.token_ids), "vLLM returns one column of logprobs a token"
        if self.stop_reason == "length":
            finish = Finish.LENGTH
        elif self.stop_reason == "stop":
            finish = Finish.HANDOFF if self.stop_token == handoff else Finish.EOS
        else:
            raise RetryableError(f"vLLM gave the request up ({self.stop_reason}); send the whole context again")
        written = self.token_ids[:-1] if finish is Finish.HANDOFF else self.token_ids
        logprobs = [column[token] for token, column in zip(written, self.columns, strict=False)]
        scores = [] if scorer is None else scorer.scores(position, self.columns)
        return Turn(written, logprobs, scores, finish)


class SessionHost(Protocol):
    """What a session needs of its engine."""

    loop: EngineLoop
    handoff_token_id: int | None
    keeps_requests: bool
    closed: bool
    gate: VisitGate

    def check_turn(self, total: int, max_tokens: int) -> None: ...

    async def make_room(self, session: VLLMSession, needed: int) -> None: ...

    async def end_turn(self, session: VLLMSession) -> None: ...

    def start_stream(self) -> RequestStream: ...

    def turn_params(self, session: VLLMSession, context: Sequence[int], max_tokens: int) -> SamplingParams: ...

    def forget(self, session: VLLMSession) -> None: ...


class VLLMSession:
    """A response in progress; made by `VLLMEngine.open`.

    Attributes:
        sampling: how tokens are picked.
        scorer: what decides on handoffs, or None.
        threshold: with a scorer, the score below which a position is handed off.
        stream: the request that holds the KV cache, if there is one. Belongs to the engine's loop.
        busy: a turn is in progress.
    """

    def __init__(
        self,
        host: SessionHost,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        scorer: TurnScorer | None = None,
        threshold: float = 0.0,
    ) -> None:
        self._host = host
        self.sampling, self.scorer, self.threshold = sampling, scorer, threshold
        self._ids = list(prompt_ids)
        self._num_sent = 0  # leading ids that the request has been given and keeps
        self._prompt_pending = True
        self.stream: RequestStream | None = None
        self.busy = False
        self._lost = False  # a turn failed: nothing is held, whatever the engine's loop still does with that turn
        self._closed = False
        self._lock = asyncio.Lock()  # a cancelled turn ends a moment after its caller knows

    @property
    def num_tokens(self) -> int:
        return 0 if self._lost else len(self._ids)

    async def turn(self, new_ids: Sequence[int], max_tokens: int) -> Turn:
        if self._closed:
            raise ValueError("the session is closed; open a new one")
        total = self.num_tokens + len(new_ids)
        self._host.check_turn(total, max_tokens)
        if not new_ids and (self._lost or not self._prompt_pending):
            raise ValueError("nothing to compute: send the ids that the session does not hold (ids[num_tokens:])")
        restart, self._lost = self._lost, False
        try:
            return await self._host.loop.call(self._turn(list(new_ids), max_tokens, restart))
        except BaseException:
            self._lost = True
            raise

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self._host.closed:  # a closed engine holds nothing
                await self._host.loop.call(self._close())

    async def drop(self) -> None:
        """Give the KV cache back, keep the ids; the next turn computes them again. In the engine's loop."""
        stream, self.stream = self.stream, None
        self._num_sent = 0
        if stream is not None:
            await stream.close()

    async def _turn(self, new_ids: list[int], max_tokens: int, restart: bool) -> Turn:
        async with self._lock:
            self.busy = True
            try:
                if restart:
                    self._ids = []
                    await self.drop()
                return await self._locked_turn(new_ids, max_tokens)
            except BaseException:
                await self.drop()  # what the request holds is not known any more
                raise
            finally:
                self.busy = False
                await self._host.end_turn(self)

    async def _locked_turn(self, new_ids: list[int], max_tokens: int) -> Turn:
        context = [*self._ids, *new_ids]
        await self._host.make_room(self, len(context) + max_tokens)
        if self.stream is None:
            self.stream = self._host.start_stream()
        params = self._host.turn_params(self, context, max_tokens)
        async with self._host.gate.turn(max_tokens):
            record = await self.stream.turn(context[self._num_sent :], params)
        turn = record.to_turn(self._host.handoff_token_id, self.scorer, len(context))
        kept = turn.token_ids if turn.finish is Finish.HANDOFF else turn.token_ids[:-1]
        self._ids = [*context, *kept]
        self._num_sent = len(self._ids)
        self._prompt_pending = False
        if not self._host.keeps_requests:
            await self.drop()
        return turn

    async def _close(self) -> None:
        async with self._lock:  # after a turn that was cancelled has let go
            self._host.forget(self)
            await self.drop()
