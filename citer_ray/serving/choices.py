"""One choice of a response: reports of ids in, pieces of text with their writers out.

Cuts at stop strings, counts what was used, and ends the job as soon as the answer is complete.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, Protocol

from citer_ray.engine import Finish
from citer_ray.policy import Writer
from citer_ray.serving.jobs import Job, Report
from citer_ray.serving.metrics import Metrics
from citer_ray.serving.text import Decoder, Piece, TextStream
from citer_ray.serving.usage import Tally

FinishReason = Literal["stop", "length"]


class Backend(Protocol):
    """Whatever decodes jobs: replicas behind handles, or engines in this process."""

    def respond(self, job: Job) -> AsyncGenerator[Report, None]:
        """Reports of a job, to the one with `finish`. Closing the generator frees everything at once."""
        ...

    async def ready(self) -> bool:
        """Whether jobs can be taken."""
        ...


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the answer; `text` is what it added to the content."""

    token_id: int
    text: str
    writer: Writer
    p_slm: float | None
    logprob: float


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in a choice; the last one has a finish reason."""

    index: int
    tokens: list[Token]
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(token.text for token in self.tokens)


@dataclass(slots=True)
class Choice:
    """A choice in progress.

    Attributes:
        index: in the response.
        job: what is decoded.
        tally: what was used.
        degraded: the SLM wrote what the router wanted from the LLM.
        rebuilds: sessions of the LLM that were rebuilt.
    """

    index: int
    job: Job
    tally: Tally
    stops: tuple[str, ...] = ()
    degraded: bool = False
    rebuilds: int = 0
    _records: list[tuple[int, Writer, float | None, float]] = field(default_factory=list)

    async def run(
        self, backend: Backend, tokenizer: Decoder, end_ids: Collection[int], metrics: Metrics
    ) -> AsyncIterator[Delta]:
        """Deltas as they come."""
        text = TextStream(tokenizer, self.job.prompt_ids, self.stops, end_ids)
        began = time.monotonic()
        async with aclosing(backend.respond(self.job)) as reports:
            async for report in reports:
                self._take(report, metrics, began)
                pieces = self._feed(report, text)
                if text.stopped:
                    yield self._delta(pieces, "stop")
                    return
                if report.finish is not None:
                    reason: FinishReason = "stop" if report.finish is Finish.EOS else "length"
                    yield self._delta([*pieces, *text.finish()], reason)
                    return
                if pieces:
                    yield self._delta(pieces)
                began = time.monotonic() if report.runs else began

    def _take(self, report: Report, metrics: Metrics, began: float) -> None:
        router = "" if self.job.router is None else self.job.router.version
        seconds = time.monotonic() - began
        for run in report.runs:
            metrics.tokens(self.job.model, router, run.writer, len(run.token_ids), seconds / len(report.runs))
            metrics.scores(router, [score for score in run.scores if score is not None])
        if report.degraded and not self.degraded:
            self.degraded = True
            metrics.degraded(router)
        if report.rebuilds:
            self.rebuilds += report.rebuilds
            metrics.rebuilds("llm", report.rebuilds)

    def _feed(self, report: Report, text: TextStream) -> list[Piece]:
        """Feed the report's tokens, up to the one that completes a stop string."""
        pieces: list[Piece] = []
        for run in report.runs:
            for token_id, score, logprob in zip(run.token_ids, run.scores, run.logprobs, strict=True):
                if text.stopped:
                    return pieces
                self._records.append((token_id, run.writer, score, logprob))
                self.tally.add(run.writer, score)
                pieces += text.add(token_id)
        return pieces

    def _delta(self, pieces: list[Piece], reason: FinishReason | None = None) -> Delta:
        tokens = []
        for piece in pieces:
            token_id, writer, score, logprob = self._records[piece.index]
            tokens.append(Token(token_id, piece.text, writer, score, logprob))
        return Delta(self.index, tokens, reason)
