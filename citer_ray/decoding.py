"""The one routed decoding loop: two sessions, a policy, and a trace of who wrote what.

Label rollouts, evaluation and serving all call `decode` (or `decode_many`, which runs many of them at once; engines
batch what is concurrent). It sees token ids and the `Engine`/`Session` protocols only. The caller of a session owns the
ids and sends what the session does not hold (`engine.py`), so a lost session is rebuilt by the same rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from citer_ray.engine import GREEDY, Engine, Finish, Sampling, Session, SpeculativeEngine, Turn
from citer_ray.policy import (
    AlwaysLlm,
    AlwaysSlm,
    Cascade,
    Oracle,
    Policy,
    Speculative,
    Threshold,
    Writer,
    hands_off,
)
from citer_ray.speculation import Verdict, verify


@dataclass(frozen=True, slots=True)
class Pass:
    """Forward passes of one turn: the first computes `new_tokens` over `cached_tokens`, each further one 1 token.

    Attributes:
        writer: the model that ran.
        new_tokens: ids that the turn sent (what the model pre-fills).
        cached_tokens: ids that the session held before.
        steps: positions decided, which is the number of forward passes.
    """

    writer: Writer
    new_tokens: int
    cached_tokens: int
    steps: int


@dataclass(slots=True)
class Trace:
    """A response and how it came about; all lists but `passes` have one entry per token.

    Attributes:
        token_ids: the response.
        writers: who wrote each token.
        scores: the scorer's value at each position; None where the SLM was not asked or has no scorer.
        logprobs: natural-log probability of each token under its writer.
        finish: `eos` or `length`.
        visits: turns of the LLM.
        passes: what each model computed, in order.
        answer_score: a cascade's score of the SLM's answer.
        drafted: tokens that the SLM drafted for the LLM to verify.
        judged: drafted tokens up to the first rejected one of each draft.
        accepted: drafted tokens that stood.
    """

    token_ids: list[int] = field(default_factory=list)
    writers: list[Writer] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = Finish.LENGTH
    visits: int = 0
    passes: list[Pass] = field(default_factory=list)
    answer_score: float | None = None
    drafted: int = 0
    judged: int = 0
    accepted: int = 0

    @property
    def num_llm_tokens(self) -> int:
        return sum(writer is Writer.LLM for writer in self.writers)

    @property
    def llm_share(self) -> float:
        """LLM tokens / all tokens; 0 for an empty response."""
        return self.num_llm_tokens / len(self.token_ids) if self.token_ids else 0.0

    def prefilled(self, writer: Writer) -> int:
        """Ids that a model computed which it had not written itself within the same turn."""
        return sum(one.new_tokens for one in self.passes if one.writer is writer)


@dataclass(frozen=True, slots=True)
class Request:
    """One response to decode."""

    prompt_ids: Sequence[int]
    policy: Policy
    max_new_tokens: int
    sampling: Sampling = GREEDY


class Observer(Protocol):
    """Watches a response while it is decoded. Its limits cut turns short, which changes no token."""

    def turn_limit(self, writer: Writer) -> int:
        """Tokens that the coming turn of a run may write, at least 1."""
        ...

    def on_turn(self, writer: Writer, turn: Turn, scores: Sequence[float | None]) -> None:
        """A turn's tokens joined the response; `scores` has one entry a token."""
        ...


class _Response:
    """The state of one response: its ids, its trace, and at most one session on each engine."""

    def __init__(
        self, slm: Engine | None, llm: Engine | None, request: Request, observer: Observer | None = None
    ) -> None:
        self._observer = observer
        self._engines = {Writer.SLM: slm, Writer.LLM: llm}
        self._request = request
        self._sessions: dict[Writer, Session] = {}
        self._ids = list(request.prompt_ids)
        self.trace = Trace()

    @property
    def remaining(self) -> int:
        return self._request.max_new_tokens - len(self.trace.token_ids)

    def run_limit(self, writer: Writer) -> int:
        """Tokens of the coming turn in a run of one model."""
        return self.remaining if self._observer is None else min(self.remaining, self._observer.turn_limit(writer))

    async def turn(self, writer: Writer, max_tokens: int, draft: Sequence[int] = ()) -> Turn:
        """One turn of a model, over everything that it has not seen, and over a draft that is not kept yet."""
        session = self._sessions.get(writer)
        cached = 0 if session is None else session.num_tokens
        if session is None:
            session = self._sessions[writer] = await self._open(writer)
        sent = len(self._ids) + len(draft) - cached
        turn = await session.turn([*self._ids[session.num_tokens :], *draft], max_tokens)
        self.trace.passes.append(Pass(writer, sent, cached, max(len(turn.scores), len(turn.token_ids))))
        self.trace.visits += writer is Writer.LLM
        return turn

    async def _open(self, writer: Writer) -> Session:
        engine = self._engines[writer]
        if engine is None:
            raise ValueError(f"the policy {self._request.policy} needs the {writer.value.upper()}, but there is none")
        if isinstance(self._request.policy, Speculative):
            return await self._open_speculative(engine)
        scorer, threshold = None, 0.0
        if writer is Writer.SLM and isinstance(self._request.policy, Threshold):
            scorer, threshold = self._request.policy.scorer, self._request.policy.threshold
        return await engine.open(self._ids, self._request.sampling, scorer=scorer, threshold=threshold)

    async def _open_speculative(self, engine: Engine) -> Session:
        if not isinstance(engine, SpeculativeEngine) or self._request.sampling.temperature != 0:
            raise ValueError(
                f"the policy {self._request.policy} verifies drafts, which needs greedy sampling and an engine that "
                f"shows distributions (engine.kind: transformers), not {type(engine).__name__}"
            )
        return await engine.open_speculative(self._ids)

    def rewind(self) -> None:
        """Let both sessions forget everything but the response without its last token: that replaced a drafted one."""
        for session in self._sessions.values():
            session.rewind(len(self._ids) - 1)  # type: ignore[attr-defined]  # `_open_speculative` made them

    def restart(self) -> None:
        """Drop the response so far; what it cost stays in the trace."""
        del self._ids[len(self._request.prompt_ids) :]
        fresh = Trace(visits=self.trace.visits, passes=self.trace.passes, answer_score=self.trace.answer_score)
        self.trace = fresh

    def keep(self, writer: Writer, turn: Turn, scores: Sequence[float | None]) -> None:
        """Append a turn's tokens to the response."""
        self._ids.extend(turn.token_ids)
        self.trace.token_ids.extend(turn.token_ids)
        self.trace.writers.extend([writer] * len(turn.token_ids))
        self.trace.logprobs.extend(turn.logprobs)
        self.trace.scores.extend(scores)
        if turn.finish is Finish.EOS:
            self.trace.finish = Finish.EOS
        if self._observer is not None:
            self._observer.on_turn(writer, turn, scores)

    def keep_verified(self, drafted: Turn, verdict: Verdict) -> None:
        """Append the accepted beginning of a draft and the LLM's token after it, as far as there is room."""
        kept = verdict.kept
        whole = kept == len(drafted.token_ids)
        ended = whole and drafted.finish is Finish.EOS
        finish = Finish.EOS if ended else Finish.LENGTH
        accepted = Turn(drafted.token_ids[:kept], drafted.logprobs[:kept], [], finish)
        self.keep(Writer.SLM, accepted, verdict.scores[:kept])
        if ended or self.remaining == 0:
            return
        llm = self._engines[Writer.LLM]
        assert isinstance(llm, SpeculativeEngine)
        finish = Finish.EOS if verdict.next_token in llm.eos_token_ids else Finish.LENGTH
        following = Turn([verdict.next_token], [verdict.next_logprob], [], finish)
        self.keep(Writer.LLM, following, verdict.scores[kept:] or [None])

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()


async def decode(
    slm: Engine | None, llm: Engine | None, request: Request, *, observer: Observer | None = None
) -> Trace:
    """Decode one response with a policy.

    Args:
        slm: the SLM's engine; may be None if the policy never runs it.
        llm: the LLM's engine; likewise.
        request: prompt, policy, limit and sampling.
        observer: is told of tokens as they come.

    Returns:
        The response and its trace. It ends with the first EOS, whoever wrote it, or at `max_new_tokens`.

    Raises:
        ValueError: `max_new_tokens < 1`, the context would not fit, or the policy needs an engine that is None.
    """
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
    response = _Response(slm, llm, request, observer)
    try:
        match request.policy:
            case AlwaysSlm():
                await _alone(response, Writer.SLM)
            case AlwaysLlm():
                await _alone(response, Writer.LLM)
            case Threshold():
                await _routed(response, request.policy)
            case Oracle():
                await _oracle(response)
            case Cascade():
                await _cascade(response, request.policy)
            case Speculative():
                await _speculative(response, request.policy)
    finally:
        await response.close()
    return response.trace


async def _alone(response: _Response, writer: Writer) -> None:
    while response.remaining > 0 and response.trace.finish is not Finish.EOS:
        turn = await response.turn(writer, response.run_limit(writer))
        response.keep(writer, turn, [None] * len(turn.token_ids))


async def _routed(response: _Response, policy: Threshold) -> None:
    """The SLM writes until its score falls below the threshold; the LLM then writes one visit's tokens."""
    while response.remaining > 0 and response.trace.finish is not Finish.EOS:
        turn = await response.turn(Writer.SLM, response.run_limit(Writer.SLM))
        written = len(turn.token_ids)
        response.keep(Writer.SLM, turn, turn.scores[:written])
        if turn.finish is not Finish.HANDOFF:
            continue
        visit = await response.turn(Writer.LLM, min(policy.llm_tokens_per_visit, response.remaining))
        unasked = [None] * (len(visit.token_ids) - 1)
        response.keep(Writer.LLM, visit, [turn.scores[written], *unasked])


async def _oracle(response: _Response) -> None:
    """Both models propose each token; where they differ, the LLM's is kept and counts as its own."""
    while response.remaining > 0 and response.trace.finish is not Finish.EOS:
        ours = await response.turn(Writer.SLM, 1)
        theirs = await response.turn(Writer.LLM, 1)
        agree = ours.token_ids == theirs.token_ids
        response.keep(Writer.SLM if agree else Writer.LLM, theirs, [None])


async def _cascade(response: _Response, policy: Cascade) -> None:
    """The SLM answers; an answer whose score is too low is dropped, and the LLM answers anew."""
    await _alone(response, Writer.SLM)
    response.trace.answer_score = answer_score(policy, response.trace.logprobs)
    if hands_off(response.trace.answer_score, policy.threshold):
        response.restart()
        await _alone(response, Writer.LLM)


def answer_score(policy: Cascade, logprobs: Sequence[float]) -> float:
    """The probability that a cascade compares with its threshold; see `Cascade`."""
    match policy.statistic:
        case "sum":
            return float(np.exp(np.sum(logprobs)))
        case "average":
            return float(np.exp(np.mean(logprobs)))
        case "quantile":
            return float(np.exp(np.quantile(logprobs, policy.quantile)))


async def _speculative(response: _Response, policy: Speculative) -> None:
    """The SLM drafts; the LLM reads the draft in one pass, keeps its accepted beginning, and adds its own token."""
    while response.remaining > 0 and response.trace.finish is not Finish.EOS:
        drafted = await response.turn(Writer.SLM, min(policy.draft_length, response.remaining))
        draft = drafted.token_ids
        checked = await response.turn(Writer.LLM, 1, draft)
        assert drafted.distributions is not None and checked.distributions is not None
        verdict = verify(policy, draft, drafted.distributions[-len(draft) :], checked.distributions[-len(draft) - 1 :])
        response.trace.drafted += len(draft)
        response.trace.judged += len(verdict.scores)
        response.trace.accepted += verdict.kept
        response.keep_verified(drafted, verdict)
        response.rewind()


async def decode_many(
    slm: Engine | None,
    llm: Engine | None,
    requests: Sequence[Request],
    *,
    in_flight: int,
    on_done: Callable[[int, Trace], None] | None = None,
) -> list[Trace]:
    """Decode many responses at once; engines batch their turns.

    Args:
        slm: as in `decode`.
        llm: as in `decode`.
        requests: in the order of the result.
        in_flight: responses in progress at any time.
        on_done: called with a request's index and its trace as soon as it is finished.

    Raises:
        The first error of any response, after the others were cancelled and their sessions closed.
    """
    traces: list[Trace | None] = [None] * len(requests)
    queue = iter(range(len(requests)))

    async def worker() -> None:
        for index in queue:
            trace = await decode(slm, llm, requests[index])
            traces[index] = trace
            if on_done is not None:
                on_done(index, trace)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(in_flight, len(requests))):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [trace for trace in traces if trace is not None]
