"""`RemoteEngine`: the LLM behind an OpenAI-compatible `/v1/completions` that takes and returns token ids.

A turn is one call with the whole context; the server's prefix cache stands in for a session, and there is nothing that
a fault could lose. It has no scorer and no hidden states, so it is never the SLM.

Turns must not change tokens (`engine.py`), and a server's seeded noise depends on where a call begins. So one call
writes a whole greedy turn, but a single token where tokens are sampled or penalised: its seed is a hash of (seed,
position), and penalties for the response so far travel as `logit_bias`.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from citer_ray.engine import Finish, Sampling, Scores, TokenSequence, Turn
from citer_ray.engines.remote_client import RemoteClient
from citer_ray.errors import ConfigError, RetryableError

_FORBIDDEN = -100.0  # the API's smallest logit bias


class RemoteSession:
    """A response in progress on a `RemoteEngine`; made by `RemoteEngine.open`."""

    def __init__(self, engine: RemoteEngine, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._ids, self._computed, self._closed = list(prompt_ids), 0, False

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    async def turn(self, new_ids: Sequence[int], max_tokens: int) -> Turn:
        if self._closed:
            raise ValueError("the session is closed")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        context = [*self._ids, *new_ids]
        longest = self._engine.max_model_len
        if len(context) + max_tokens - 1 > longest:
            raise ValueError(f"{len(context)} tokens of context and {max_tokens} new ones exceed the model's {longest}")
        if len(context) == self._computed:
            raise ValueError("nothing to compute: send the ids that the session does not hold, ids[num_tokens:]")
        try:
            turn = await self._engine.write(context, max_tokens, self._sampling)
        except RetryableError:
            self._ids, self._computed = [], 0
            raise
        self._ids = [*context, *turn.token_ids[:-1]]
        self._computed = len(self._ids)
        return turn

    async def close(self) -> None:
        self._closed = True


class RemoteEngine:
    """One model on a server, behind the `Engine` protocol.

    Args:
        client: the server.
        shared_vocab_size: ids that both models know; the server may write no others.
        eos_token_ids: ids that end a response.
        max_model_len: longest context, in tokens.
        masked_ids: ids that are never written (the handoff token).

    Attributes:
        read_ids: ids of all contexts that were sent, which is what a server bills as prompt tokens.
        written_ids: ids that came back.
    """

    def __init__(
        self,
        client: RemoteClient,
        *,
        shared_vocab_size: int,
        eos_token_ids: Iterable[int],
        max_model_len: int,
        masked_ids: Sequence[int] = (),
    ) -> None:
        self._client, self._shared_vocab_size = client, shared_vocab_size
        self._eos, self._max_model_len, self._masked = frozenset(eos_token_ids), max_model_len, tuple(masked_ids)
        self._closed = False
        self.read_ids = self.written_ids = 0

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    async def open(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, scorer: str | None = None, threshold: float = 0.0
    ) -> RemoteSession:
        if self._closed:
            raise RetryableError("the engine is closed")
        if scorer is not None:
            raise ValueError(f"a remote engine has no scorers, so {scorer!r} is unknown; only the LLM can be remote")
        if len(prompt_ids) == 0:
            raise ValueError("the prompt is empty; give at least one token id (a BOS token, for example)")
        if len(prompt_ids) > self._max_model_len:
            raise ValueError(f"the prompt has {len(prompt_ids)} tokens, the model takes {self._max_model_len}")
        return RemoteSession(self, prompt_ids, sampling)

    async def write(self, context: Sequence[int], max_tokens: int, sampling: Sampling) -> Turn:
        """Up to `max_tokens` tokens after a context."""
        ids = list(context)
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < max_tokens:
            count = max_tokens - len(tokens) if sampling.is_argmax else 1
            written = await self._client.complete(ids, count, **self._fields(ids, sampling))
            self.read_ids += len(ids)
            self.written_ids += len(written.token_ids)
            for token, logprob in zip(written.token_ids[:count], written.logprobs, strict=False):
                self._check(token, logprob)
                ids.append(token)
                tokens.append(token)
                logprobs.append(float(logprob or 0.0))
                if token in self._eos and not sampling.ignore_eos:
                    return Turn(tokens, logprobs, [], Finish.EOS)
            if not written.token_ids:
                raise ConfigError("the LLM's server wrote nothing; it may not know ignore_eos (use vLLM's extension)")
        return Turn(tokens, logprobs, [], Finish.LENGTH)

    def _fields(self, ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        """The body's fields for the call that continues `ids`."""
        fields: dict[str, Any] = {
            "temperature": sampling.temperature,
            # What ends a response is the pair's matter, not the server's.
            "ignore_eos": True,
            "stop_token_ids": [] if sampling.ignore_eos else sorted(self._eos),
        }
        if sampling.temperature > 0:
            fields |= {"top_p": sampling.top_p, "seed": _seed(sampling.seed, len(ids))}
            fields |= {"top_k": sampling.top_k} if sampling.top_k else {}
        bias = dict.fromkeys(self._masked, _FORBIDDEN)
        if sampling.has_penalties:
            for token, count in Counter(ids[sampling.response_start :]).items():
                penalty = sampling.presence_penalty + sampling.frequency_penalty * count
                bias[token] = max(_FORBIDDEN, min(bias.get(token, 0.0) - penalty, -_FORBIDDEN))
        return fields | ({"logit_bias": {str(token): value for token, value in bias.items()}} if bias else {})

    def _check(self, token: int, logprob: float | None) -> None:
        if token >= self._shared_vocab_size:
            raise ConfigError(
                f"the LLM's server wrote token id {token}, but the pair shares the ids below "
                f"{self._shared_vocab_size}; is it the LLM of this pair?"
            )
        if logprob is None or not math.isfinite(logprob):
            raise ConfigError(f"the LLM's server gave no usable log-probability ({logprob}) for token id {token}")

    async def score(self, batch: Sequence[TokenSequence], *, hidden: bool = False) -> list[Scores]:
        """See `Engine.score`; a call a sequence, by `echo`.

        Raises:
            ValueError: `hidden`: no server returns hidden states.
            ConfigError: the server echoes no log-probabilities.
        """
        if hidden:
            raise ValueError("a remote engine has no hidden states; only the LLM can be remote")
        return [await self._score(sequence) for sequence in batch]

    async def _score(self, sequence: TokenSequence) -> Scores:
        ids = [*sequence.prompt_ids, *sequence.response_ids]
        start = len(sequence.prompt_ids)
        if start == 0:
            raise ValueError("a sequence has an empty prompt; give at least one token id")
        if len(ids) > self._max_model_len:
            raise ValueError(f"a sequence has {len(ids)} tokens, the model takes {self._max_model_len}")
        if start == len(ids):
            return Scores(np.zeros(0, np.int32), np.zeros(0, np.float32))
        written = await self._client.complete(ids, 0, echo=True, temperature=0.0)
        self.read_ids += len(ids)
        logprobs, best = written.logprobs[start : len(ids)], written.best[start : len(ids)]
        if written.token_ids[: len(ids)] != ids or None in logprobs or not all(best):
            raise ConfigError(
                "the LLM's server does not echo a prompt with its log-probabilities, which scoring needs; use vLLM, or "
                "set engine.remote.url to null for this job"
            )
        return Scores(np.array([_greedy(one) for one in best], np.int32), np.array(logprobs, np.float32))

    async def close(self) -> None:
        self._closed = True
        await self._client.close()


def _greedy(best: dict[int, float] | None) -> int:
    """The most probable id; the lowest wins ties."""
    assert best
    return min(best, key=lambda token: (-best[token], token))


def _seed(seed: int, position: int) -> int:
    """63 bits of (seed, position): what a server draws one token from."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
