"""`TransformersEngine`: the reference engine, exact, on CPU or GPU, with batches that sessions join and leave.

All sessions of an engine share its forward passes (`hf_batcher.py`), so thousands of responses that are decoded
concurrently (`decoding.decode_many`) run as batches without knowing of each other. A new session copies the KV cache
of the longest prefix that any row holds; rollouts from many positions of one example share their work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from citer_ray.config import RouterConfig
from citer_ray.engine import GREEDY, Sampling, Scores, TokenSequence, Turn
from citer_ray.engines.hf_batcher import Batcher
from citer_ray.engines.hf_model import HiddenStateModel
from citer_ray.engines.hf_pass import SessionState
from citer_ray.engines.scorers import RouterScorer, Scorer, find_scorer, response_key
from citer_ray.errors import RetryableError
from citer_ray.features import HIDDEN_ALONE, FeatureReader
from citer_ray.router import Router

_HEAD_ROWS = 256  # positions of one output-layer call: 50 MB of float32 logits at a vocabulary of 50k


class TransformersSession:
    """A response in progress on a `TransformersEngine`; made by `TransformersEngine.open`."""

    def __init__(self, batcher: Batcher, state: SessionState, max_model_len: int) -> None:
        self._batcher, self._state, self._max_model_len = batcher, state, max_model_len
        self._closed = False

    @property
    def num_tokens(self) -> int:
        return len(self._state.ids)

    async def turn(self, new_ids: Sequence[int], max_tokens: int) -> Turn:
        if self._closed:
            raise ValueError("the session is closed")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        total = self.num_tokens + len(new_ids)
        # The last sampled token is never fed back within a turn.
        if total + max_tokens - 1 > self._max_model_len:
            raise ValueError(
                f"{total} tokens of context and {max_tokens} new ones exceed the model's {self._max_model_len}"
            )
        if total == self._state.num_computed:
            raise ValueError("nothing to compute: send the ids that the session does not hold, ids[num_tokens:]")
        self._state.ids.extend(new_ids)
        return await self._batcher.submit(self._state, max_tokens, len(new_ids) + 1)

    def show_distributions(self) -> None:
        """Return distributions with every turn from now on."""
        self._state.speculative = True

    def rewind(self, num_tokens: int) -> None:
        if num_tokens < 0:
            raise ValueError(f"num_tokens must be at least 0, got {num_tokens}")
        self._batcher.rewind(self._state, num_tokens)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._batcher.forget(self._state)


class TransformersEngine:
    """One transformers model behind the `Engine` protocol.

    Args:
        model: a causal language model in eval mode, on its device.
        shared_vocab_size: number of ids that the pair shares; others are never written.
        eos_token_ids: ids that end a response.
        max_model_len: longest context, in tokens.
        scorers: scorers by name, beside the built-in ones (`engines/scorers.py`).
        masked_ids: ids that are never written (the handoff token).
        max_rows: sessions that hold a KV cache at once; more wait.
        max_pass_tokens: padded tokens of one forward pass.
        executor: where passes run. None runs them in the event loop: then what shares a pass depends on nothing but
            the order of calls, and a repeated job gives bit-identical results. Serving passes a one-thread executor.
        delay: turns of the event loop for which a pass waits for more requests (delayed batching). Many routed
            responses share the LLM's passes better; with passes in the event loop a turn is one pass of the SLM.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        shared_vocab_size: int,
        eos_token_ids: Iterable[int],
        max_model_len: int,
        scorers: Mapping[str, Scorer] | None = None,
        masked_ids: Sequence[int] = (),
        max_rows: int = 256,
        max_pass_tokens: int = 8192,
        executor: Executor | None = None,
        delay: int = 0,
    ) -> None:
        self._model = HiddenStateModel(model, shared_vocab_size, masked_ids)
        self._max_model_len, self._max_pass_tokens = max_model_len, max_pass_tokens
        self._scorers = dict(scorers or {})
        self._batcher = Batcher(
            self._model, frozenset(eos_token_ids), max_model_len, max_rows, max_pass_tokens, executor, delay
        )
        self._closed = False

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._batcher.eos_token_ids

    @property
    def num_free_rows(self) -> int:
        """Sessions that could still get a KV cache."""
        return self._batcher.num_free_rows

    @property
    def num_passes(self) -> int:
        """Forward passes of turns so far."""
        return self._batcher.num_passes

    def set_scorer(self, name: str, scorer: Scorer) -> None:
        """Add or replace a scorer; sessions that are open keep theirs."""
        self._scorers[name] = scorer

    def router_scorer(self, router: Router) -> RouterScorer:
        """A router as a scorer of this engine, with the features that it reads."""
        alone = router.config.features == HIDDEN_ALONE
        return RouterScorer(router, None if alone else FeatureReader(router.config, self._model.embedding_VH))

    @torch.inference_mode()
    def features(self, hidden_TH: npt.NDArray[np.floating], config: RouterConfig) -> npt.NDArray[np.float32]:
        """What a router of this shape reads at positions whose hidden states are known, [T, F]."""
        reader = FeatureReader(config, self._model.embedding_VH)
        hidden = torch.from_numpy(np.asarray(hidden_TH, np.float32)).to(self._model.device, self._model.dtype)
        parts = [reader(rows_CH, self._model.logits(rows_CH)) for rows_CH in hidden.split(_HEAD_ROWS)]
        return torch.cat(parts).cpu().numpy()

    async def open(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        scorer: str | None = None,
        threshold: float = 0.0,
    ) -> TransformersSession:
        if self._closed:
            raise RetryableError("the engine is closed")
        if len(prompt_ids) == 0:
            raise ValueError("the prompt is empty; give at least one token id (a BOS token, for example)")
        if len(prompt_ids) > self._max_model_len:
            raise ValueError(f"the prompt has {len(prompt_ids)} tokens, the model takes {self._max_model_len}")
        found = None if scorer is None else find_scorer(scorer, self._scorers)
        state = SessionState(
            list(prompt_ids), sampling, scorer, found, threshold, response_key(prompt_ids), len(prompt_ids)
        )
        return TransformersSession(self._batcher, state, self._max_model_len)

    async def open_speculative(self, prompt_ids: Sequence[int]) -> TransformersSession:
        session = await self.open(prompt_ids, GREEDY)
        session.show_distributions()
        return session

    async def close(self) -> None:
        self._closed = True
        self._batcher.fail_all(RetryableError("the engine was closed"))

    async def score(self, batch: Sequence[TokenSequence], *, hidden: bool = False) -> list[Scores]:
        results: dict[int, Scores] = {}
        for group in self._score_groups(batch):
            scored = await self._batcher.run(self._score_group, [batch[index] for index in group], hidden)
            results.update(zip(group, cast(list[Scores], scored), strict=True))
        return [results[index] for index in range(len(batch))]

    def _score_groups(self, batch: Sequence[TokenSequence]) -> list[list[int]]:
        """Indices of sequences of similar length, so that little of a pass is padding."""
        lengths = [len(sequence.prompt_ids) + len(sequence.response_ids) for sequence in batch]
        for index, (length, sequence) in enumerate(zip(lengths, batch, strict=True)):
            if len(sequence.prompt_ids) == 0:
                raise ValueError(f"sequence {index} has an empty prompt; give at least one token id")
            if length > self._max_model_len:
                raise ValueError(f"sequence {index} has {length} tokens, the model takes {self._max_model_len}")
        groups: list[list[int]] = []
        for index in sorted(range(len(batch)), key=lambda i: lengths[i]):
            if groups and (len(groups[-1]) + 1) * lengths[index] <= self._max_pass_tokens:
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    @torch.inference_mode()
    def _score_group(self, sequences: list[TokenSequence], hidden: bool) -> list[Scores]:
        lengths = [len(sequence.prompt_ids) + len(sequence.response_ids) for sequence in sequences]
        ids_BT = torch.zeros((len(sequences), max(lengths)), dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids_BT[row, : lengths[row]] = torch.tensor([*sequence.prompt_ids, *sequence.response_ids])
        hidden_BTH = self._model.score_hidden(ids_BT.to(self._model.device))
        # The state of response position i ends at token len(prompt) + i - 1.
        hidden_NH = torch.cat(
            [
                hidden_BTH[row, len(sequence.prompt_ids) - 1 : length - 1]
                for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
            ]
        )
        targets_N = torch.tensor([token for sequence in sequences for token in sequence.response_ids])
        greedy_N, logprobs_N = self._greedy_and_logprobs(hidden_NH, targets_N.to(hidden_NH.device))
        hidden_states = hidden_NH.float().cpu().numpy() if hidden else None
        bounds = np.cumsum([0, *(len(sequence.response_ids) for sequence in sequences)])
        return [
            Scores(greedy_N[a:b], logprobs_N[a:b], None if hidden_states is None else hidden_states[a:b])
            for a, b in pairwise(bounds.tolist())
        ]

    def _greedy_and_logprobs(
        self, hidden_NH: torch.Tensor, targets_N: torch.Tensor
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        greedy, logprobs = [], []
        for hidden_CH, targets_C in zip(hidden_NH.split(_HEAD_ROWS), targets_N.split(_HEAD_ROWS), strict=True):
            logits_CV = self._model.logits(hidden_CH)
            greedy.append(logits_CV.argmax(-1))
            chosen_C = logits_CV.gather(1, targets_C[:, None])[:, 0]
            logprobs.append(chosen_C - torch.logsumexp(logits_CV, -1))
        return torch.cat(greedy).to(torch.int32).cpu().numpy(), torch.cat(logprobs).cpu().numpy()
