"""`ScriptedEngine`: a fake for tests, whose tokens and scores are functions of the context.

It keeps the contract's books strictly and records every turn, so that a test sees which model produced which token
from which context. No model, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from citer_ray.engine import Finish, Sampling, Scores, TokenSequence, Turn
from citer_ray.errors import RetryableError
from citer_ray.policy import hands_off

Rule = Callable[[Sequence[int]], int]


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One call of `turn`: the ids sent, the ids held before, and what came back."""

    new_ids: list[int]
    held: int
    turn: Turn


class ScriptedSession:
    """A response on a `ScriptedEngine`."""

    def __init__(
        self, engine: ScriptedEngine, prompt_ids: Sequence[int], threshold: float | None, *, speculative: bool = False
    ) -> None:
        self._engine, self._threshold, self._speculative = engine, threshold, speculative
        self._ids, self._computed, self._closed = list(prompt_ids), 0, False

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    async def turn(self, new_ids: Sequence[int], max_tokens: int) -> Turn:
        if self._closed:
            raise ValueError("the session is closed")
        if self._engine.fail_turns.pop(len(self._engine.turns), False):
            self._ids, self._computed = [], 0
            raise RetryableError("scripted failure")
        held = len(self._ids)
        self._ids.extend(new_ids)
        if len(self._ids) == self._computed:
            raise ValueError("nothing to compute: send the ids that the session does not hold, ids[num_tokens:]")
        first = max(len(self._ids) - len(new_ids), self._computed + 1)
        turn = self._decode(max_tokens)
        if self._speculative:
            turn = replace(turn, distributions=self._distributions(first))
        self._engine.turns.append(RecordedTurn(list(new_ids), held, turn))
        return turn

    def _decode(self, max_tokens: int) -> Turn:
        tokens: list[int] = []
        scores: list[float] = []
        while True:
            self._computed = len(self._ids)
            if self._threshold is not None:
                scores.append(self._engine.score_of(self._ids))
                if hands_off(scores[-1], self._threshold):
                    return Turn(tokens, [0.0] * len(tokens), scores, Finish.HANDOFF)
            tokens.append(self._engine.next_token(self._ids))
            if tokens[-1] == self._engine.eos_id:
                return Turn(tokens, [0.0] * len(tokens), scores, Finish.EOS)
            if len(tokens) == max_tokens:
                return Turn(tokens, [0.0] * len(tokens), scores, Finish.LENGTH)
            self._ids.append(tokens[-1])

    def _distributions(self, first: int) -> npt.NDArray[np.float32]:
        """What follows after each id from the `first`-th on."""
        contexts = [self._ids[:end] for end in range(first, len(self._ids) + 1)]
        return np.log(np.array([self._engine.distribution_of(context) for context in contexts], np.float32))

    def rewind(self, num_tokens: int) -> None:
        self._ids = self._ids[:num_tokens]
        self._computed = min(self._computed, len(self._ids))

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.num_open -= 1


class ScriptedEngine:
    """See the module's docstring.

    Args:
        next_token: the token that this model writes after a context.
        score_of: the score at a context; needed for sessions with a scorer.
        eos_id: ends a response.
        max_model_len: longest context.
        distribution_of: probabilities of the next token, for speculative sessions; None puts 0.9 on `next_token`.
        vocab_size: of the default distribution.

    Attributes:
        turns: every turn, in order.
        num_open: sessions that were opened and not closed.
        fail_turns: indices of turns that lose their session, for tests of rebuilding.
    """

    def __init__(
        self,
        next_token: Rule,
        score_of: Callable[[Sequence[int]], float] = lambda ids: 1.0,
        *,
        eos_id: int = 2,
        max_model_len: int = 1000,
        distribution_of: Callable[[Sequence[int]], Sequence[float]] | None = None,
        vocab_size: int = 300,
    ) -> None:
        self.distribution_of = distribution_of or self._peaked
        self._vocab_size = vocab_size
        self.next_token, self.score_of, self.eos_id = next_token, score_of, eos_id
        self._max_model_len = max_model_len
        self.turns: list[RecordedTurn] = []
        self.fail_turns: dict[int, bool] = {}
        self.num_open = 0

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    async def open(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        scorer: str | None = None,
        threshold: float = 0.0,
    ) -> ScriptedSession:
        self.num_open += 1
        return ScriptedSession(self, prompt_ids, None if scorer is None else threshold)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset([self.eos_id])

    async def open_speculative(self, prompt_ids: Sequence[int]) -> ScriptedSession:
        self.num_open += 1
        return ScriptedSession(self, prompt_ids, None, speculative=True)

    def _peaked(self, ids: Sequence[int]) -> list[float]:
        probabilities = [0.1 / (self._vocab_size - 1)] * self._vocab_size
        probabilities[self.next_token(ids)] = 0.9
        return probabilities

    async def score(self, batch: Sequence[TokenSequence], *, hidden: bool = False) -> list[Scores]:
        scored = []
        for sequence in batch:
            states = [[*sequence.prompt_ids, *sequence.response_ids[:i]] for i in range(len(sequence.response_ids))]
            greedy = np.array([self.next_token(state) for state in states], np.int32)
            vectors = np.array([[float(state[-1]), float(len(state))] for state in states], np.float32)
            scored.append(Scores(greedy, np.zeros(len(states), np.float32), vectors if hidden else None))
        return scored

    async def close(self) -> None:
        pass
