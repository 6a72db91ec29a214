"""The seam between decoding and models: `Engine`, `Session`, and the records that they exchange.

An engine is one model on one or more devices and speaks token ids only. A session is one response in progress on one
engine; it keeps its KV cache between turns. `decoding.py`, `labels.py` and the serving ingress are written against
these protocols; `engines/` implements them (transformers, vLLM, scripted for tests). One conformance suite
(`tests/conformance.py`) runs against every implementation.

Bookkeeping: `Session.num_tokens` says how many ids of the response's context the session holds. The caller owns the
ids and sends `ids[session.num_tokens:]` with the next turn. A session never holds the last token that it sampled,
unless it looked past it (a turn that ends by `handoff`): that token has no KV-cache entry yet, and the caller may
replace it. A session that had to be rebuilt reports `num_tokens == 0`, and the same rule sends everything again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


class Finish(StrEnum):
    """Why a turn ended."""

    EOS = "eos"  # the last token is an end-of-sequence id
    HANDOFF = "handoff"  # the score of the next position fell below the threshold; no token was written there
    LENGTH = "length"  # `max_tokens` were written


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a session picks tokens. The default is greedy.

    Attributes:
        temperature: 0 means greedy (argmax, lowest id wins ties).
        top_p: nucleus mass in (0, 1].
        top_k: number of candidates kept; 0 keeps all.
        seed: makes sampling a function of (seed, position), so that a rebuilt session draws the same tokens.
        ignore_eos: keep writing past end-of-sequence ids.
        presence_penalty: taken off the logit of every id that the response has already, whoever wrote it.
        frequency_penalty: the same, times how often the response has it.
        response_start: where the response begins in the context; penalties count from there.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    response_start: int = 0

    @property
    def is_argmax(self) -> bool:
        """Whether the token is the argmax of the model's own logits."""
        return self.temperature == 0 and not self.has_penalties

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens of the response change the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of a session wrote.

    Attributes:
        token_ids: the tokens written, at most `max_tokens`; empty if the first position was handed off.
        logprobs: natural-log probabilities (temperature 1) of `token_ids`, float32, same length.
        scores: the scorer's value for every position that was decided in this turn, in order: one for each token,
            and one more for the position that was handed off. Empty if the session has no scorer.
        finish: why the turn ended.
        distributions: float32 [R, V] or None; natural-log probabilities over the shared vocabulary, from speculative
            sessions alone. One row for each id that was fed in this turn, `new_ids` and tokens of the turn (of a
            pending prompt the last id alone): what follows after it. `token_ids` were picked from the last rows.
    """

    token_ids: list[int]
    logprobs: list[float]
    scores: list[float]
    finish: Finish
    distributions: npt.NDArray[np.float32] | None = field(default=None)


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt and the response that is scored against it, as token ids."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Scores:
    """One teacher-forced pass over a `TokenSequence` of T response positions.

    Attributes:
        greedy: int32 [T]; the model's greedy token at every response position, given the response before it.
        reference_logprob: float32 [T]; natural-log probability of the response's own token.
        hidden: float32 [T, H] or None; the last layer's output after the final norm at the last token of the state of
            each position (the vector that the logits of `greedy` come from).
    """

    greedy: npt.NDArray[np.int32]
    reference_logprob: npt.NDArray[np.float32]
    hidden: npt.NDArray[np.float32] | None = field(default=None)


@runtime_checkable
class Session(Protocol):
    """One response in progress. Not safe for concurrent turns."""

    @property
    def num_tokens(self) -> int:
        """How many leading ids of the context the session holds, pending prompt included."""
        ...

    async def turn(self, new_ids: Sequence[int], max_tokens: int) -> Turn:
        """Append `new_ids` to the context and decode up to `max_tokens` tokens.

        Raises:
            ValueError: there is nothing to compute (no pending prompt and no new ids), `max_tokens < 1`, or the
                context length would be exceeded.
            RetryableError: the engine lost the session; `num_tokens` is 0 and the next turn may rebuild it.
        """
        ...

    async def close(self) -> None:
        """Free the KV cache. Safe to call twice, and after an error."""
        ...


@runtime_checkable
class Engine(Protocol):
    """One model on one or more devices."""

    @property
    def max_model_len(self) -> int:
        """The longest context, in tokens, prompt and response together."""
        ...

    async def score(self, batch: Sequence[TokenSequence], *, hidden: bool = False) -> list[Scores]:
        """One pass a sequence; see `Scores`. Order is kept."""
        ...

    async def open(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        scorer: str | None = None,
        threshold: float = 0.0,
    ) -> Session:
        """Start a response.

        Args:
            prompt_ids: the context so far; computed with the first turn.
            sampling: how tokens are picked.
            scorer: name of a scorer that the engine was built with (`"router"`, `"max_probability"`, ...), or None.
            threshold: with a scorer, a position whose score is below it is handed off (`policy.hands_off`).

        Raises:
            ValueError: an empty prompt, a prompt that does not fit, or an unknown scorer (the known ones are named).
        """
        ...

    async def close(self) -> None:
        """Free the model. Safe to call twice."""
        ...


class SpeculativeSession(Session, Protocol):
    """A session whose turns show their distributions, and which can forget what was rejected."""

    def rewind(self, num_tokens: int) -> None:
        """Keep the leading `num_tokens` ids (all of them if it holds no more), between two turns.

        Raises:
            ValueError: `num_tokens` is negative.
        """
        ...


@runtime_checkable
class SpeculativeEngine(Engine, Protocol):
    """An engine that can draft and verify: what speculative decoding and its cascades need beyond `Engine`."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a response."""
        ...

    async def open_speculative(self, prompt_ids: Sequence[int]) -> SpeculativeSession:
        """Start a greedy response; see `open`."""
        ...
