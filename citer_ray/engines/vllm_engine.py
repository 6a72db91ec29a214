"""`VLLMEngine`: the production engine, on stock vLLM, with the router inside the SLM.

What is ours runs inside vLLM through its public extension points: routed model classes (`vllm_routed.py`),
logits processors (`vllm_handoff.py`, `vllm_sampling.py`) and resumable requests (`vllm_session.py`). vLLM
itself lives in processes of its own; this object is their client, usable from any event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from citer_ray.engine import Sampling, Scores, Session, TokenSequence
from citer_ray.engines.scorers import random_seed, response_key
from citer_ray.engines.visit_gate import VisitGate
from citer_ray.engines.vllm_errors import translated_errors
from citer_ray.engines.vllm_launch import VLLMOptions, check, launch_decoder, launch_scorer
from citer_ray.engines.vllm_loop import EngineLoop, without_running_loop
from citer_ray.engines.vllm_scorers import ColumnScores, RandomScores, TurnScorer
from citer_ray.engines.vllm_scoring import score_by_logprobs, score_by_states
from citer_ray.engines.vllm_session import RequestStream, VLLMSession
from citer_ray.engines.vllm_settings import SAMPLING_KEY, THRESHOLD_KEY, ModelSettings
from citer_ray.engines.vllm_stats import EngineWatch
from citer_ray.errors import ConfigError, PairError, RetryableError

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.v1.engine.async_llm import AsyncLLM

_ROUTER = "router"
_OUTPUT_INTERVAL = 1 << 20  # tokens: one output at the start of a request and one at the end of each turn


class VLLMEngine:
    """One model on vLLM behind the `Engine` protocol. Ready when the constructor returns.

    Args:
        model: folder or hub name of the weights.
        shared_vocab_size: number of ids that the pair shares; others are never written.
        eos_token_ids: ids that end a response.
        handoff_token_id: the reserved id, which neither model ever writes. None takes the router's own. With it,
            `open(..., scorer="random:SEED")` works.
        router: folder of a router's artifact: then `open(..., scorer="router")` works. None for the LLM.
        slm_fingerprint: of the SLM that the router must belong to; None leaves the check out.
        masked_ids: further ids that are never written.
        purpose: `decode` opens sessions and scores; hidden states need a second copy of the weights, which is
            loaded when they are first asked for. `score` loads that copy only and opens no sessions.
        needs_hidden_states: with `score`, False also takes a model that has no routed version.
        options: how vLLM runs.

    Raises:
        ConfigError, PairError: something does not fit; found before weights are loaded.
    """

    def __init__(
        self,
        model: str,
        *,
        shared_vocab_size: int,
        eos_token_ids: Iterable[int],
        handoff_token_id: int | None = None,
        router: Path | None = None,
        slm_fingerprint: str | None = None,
        masked_ids: Sequence[int] = (),
        purpose: Literal["decode", "score"] = "decode",
        needs_hidden_states: bool = True,
        options: VLLMOptions | None = None,
    ) -> None:
        self._options = options = options or VLLMOptions()
        if router is not None and handoff_token_id is None:
            handoff_token_id = _own_handoff_token_id(router)
        masked = {*masked_ids, *([] if handoff_token_id is None else [handoff_token_id])}
        folder = None if router is None else str(router.resolve())
        self._settings = ModelSettings(shared_vocab_size, tuple(sorted(masked)), handoff_token_id, folder)
        self._model = model
        self._architecture = check(model, self._settings, options, slm_fingerprint)
        self._eos = sorted(set(eos_token_ids))
        self.handoff_token_id = handoff_token_id
        self._has_router = router is not None
        # Where a stop falls among tokens that were accepted together, vLLM's count of computed tokens includes
        # some behind it, and the request cannot go on.
        self.keeps_requests = options.speculation is None
        self.watch = EngineWatch()
        self._decoder: AsyncLLM | None = None
        self._scorer: AsyncLLM | None = None
        if purpose == "decode" or (self._architecture is None and not needs_hidden_states):
            launch = partial(launch_decoder, model, self._settings, options, self._architecture, self.watch.factory)
            self._decoder = without_running_loop(launch)
        else:
            self._scorer = without_running_loop(self._launch_scorer)
        started = self._decoder or self._scorer
        assert started is not None, "one of the two was launched"
        # One token less than vLLM takes, because it counts a sampled token (a handoff, too) before it looks.
        self._max_model_len = int(started.model_config.max_model_len) - 1
        self._hidden_size = int(started.model_config.get_hidden_size())
        cache = started.vllm_config.cache_config
        self._block_size = int(cache.block_size)
        self._num_blocks = int(cache.num_gpu_blocks or 0)
        self.loop = EngineLoop(f"vllm:{model}")
        self._scorer_starting = asyncio.Lock()
        self._request_ids = itertools.count()
        # Sessions that have a request, least recently used first, with the KV blocks reserved for each.
        self._sessions: dict[VLLMSession, int] = {}
        self.gate = VisitGate(options.visit_hold, lambda: len(self._sessions))
        self.closed = False

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit into the KV cache."""
        return self._num_blocks * self._block_size

    async def open(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        scorer: str | None = None,
        threshold: float = 0.0,
    ) -> Session:
        self._check_alive(self._decoder)
        if self._decoder is None:
            raise ConfigError("this vLLM engine was started with purpose='score'; start one that decodes")
        if len(prompt_ids) == 0:
            raise ValueError("the prompt is empty; give at least one token id (a BOS token, for example)")
        if len(prompt_ids) > self._max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens, the engine takes {self._max_model_len}; shorten it, or "
                "raise max_model_len if the model allows"
            )
        found = None if scorer is None else self._find_scorer(scorer, prompt_ids)
        if not 0 <= threshold < float("inf"):
            raise ValueError(f"threshold must be a number in [0, inf), got {threshold}")
        if not sampling.is_argmax and self._options.speculation is not None:
            raise ValueError("an engine that speculates is greedy; set temperature and penalties to 0")
        return VLLMSession(self, prompt_ids, sampling, found, float(threshold))

    async def score(self, batch: Sequence[TokenSequence], *, hidden: bool = False) -> list[Scores]:
        self._check_alive(self._scorer if hidden or self._decoder is None else self._decoder)
        for index, sequence in enumerate(batch):
            self._check_sequence(index, sequence)
        return await self.loop.call(self._score(batch, hidden))

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.loop.close()
            for client in (self._decoder, self._scorer):
                if client is not None:
                    await asyncio.get_running_loop().run_in_executor(None, client.shutdown)

    async def reset_prefix_cache(self) -> None:
        """Forget the contexts of the past; sessions that hold a request keep theirs."""
        if self._decoder is not None:
            await self.loop.call(self._decoder.reset_prefix_cache())

    # -- checks ----------------------------------------------------------------------------------------------

    def _check_alive(self, client: AsyncLLM | None) -> None:
        if self.closed:
            raise RetryableError("the engine is closed")
        if client is not None and client.errored:
            raise RetryableError("vLLM's engine process died; start the engine again")

    def _find_scorer(self, name: str, prompt_ids: Sequence[int]) -> TurnScorer:
        handoff, seed = self.handoff_token_id, random_seed(name)
        if handoff is not None and self._options.speculation is None:
            if name == _ROUTER and self._has_router:
                return ColumnScores(handoff)
            if seed is not None:
                return RandomScores(seed, response_key(prompt_ids))
        raise ValueError(f"the vLLM engine has no scorer {name!r}; it has {self._scorer_names()}")

    def _scorer_names(self) -> str:
        if self._options.speculation is not None:
            return "none, because it speculates"
        if self.handoff_token_id is None:
            return "none: it was started without a router or a handoff token id"
        return "router, random:SEED" if self._has_router else "random:SEED; it was started without a router"

    def _check_sequence(self, index: int, sequence: TokenSequence) -> None:
        if len(sequence.prompt_ids) == 0:
            raise ValueError(f"sequence {index} has an empty prompt; give at least one token id")
        length = len(sequence.prompt_ids) + len(sequence.response_ids)
        if length > self._max_model_len:
            raise ValueError(f"sequence {index} has {length} tokens, the engine takes {self._max_model_len}")

    def check_turn(self, total: int, max_tokens: int) -> None:
        """Refuse a turn that cannot be computed."""
        self._check_alive(self._decoder)
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if total + max_tokens - 1 > self._max_model_len:
            raise ValueError(
                f"{total} tokens of context and {max_tokens} new ones exceed the engine's {self._max_model_len}"
            )

    # -- for sessions, in the engine's loop ------------------------------------------------------------------

    def start_stream(self) -> RequestStream:
        """A new resumable request."""
        decoder = self._decoder
        assert decoder is not None, "`open` checks it"

        def start(
            inputs: AsyncGenerator[StreamingInput, None], params: SamplingParams
        ) -> AsyncGenerator[RequestOutput, None]:
            return decoder.generate(inputs, params, f"session-{next(self._request_ids)}")

        return RequestStream(start)

    def turn_params(self, session: VLLMSession, context: Sequence[int], max_tokens: int) -> SamplingParams:
        """One turn's parameters, after `context`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling, handoff, position = session.sampling, self.handoff_token_id, len(context)
        column = handoff if self._has_router else None
        extra: dict[str, Any] = {}
        if not sampling.is_argmax:
            response_ids = context[sampling.response_start :] if sampling.has_penalties else []
            extra[SAMPLING_KEY] = {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "seed": sampling.seed,
                "position": position,
                "presence_penalty": sampling.presence_penalty,
                "frequency_penalty": sampling.frequency_penalty,
                "response_ids": list(response_ids),
            }
        stop = [] if sampling.ignore_eos else list(self._eos)
        if session.scorer is not None and handoff is not None:
            extra |= {THRESHOLD_KEY: session.threshold} | session.scorer.extra_args(position)
            stop.append(handoff)
        return SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            stop_token_ids=stop,
            ignore_eos=True,  # the ids in `stop_token_ids` decide, not the checkpoint's
            # All requests of an engine ask alike: vLLM cannot mix the two kinds in one batch.
            logprobs=0 if column is None else None,
            logprob_token_ids=None if column is None else [column],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=_OUTPUT_INTERVAL,
            extra_args=extra or None,
            skip_clone=True,
        )

    async def make_room(self, session: VLLMSession, needed: int) -> None:
        """Reserve KV blocks for a turn; idle sessions give theirs up if there are too few."""
        self._sessions.pop(session, None)
        self._sessions[session] = self._blocks(needed)
        await self._trim()

    async def end_turn(self, session: VLLMSession) -> None:
        """Correct the reservation to what the session holds."""
        if session.stream is None:
            self._sessions.pop(session, None)
        elif session in self._sessions:
            self._sessions[session] = self._blocks(session.num_tokens)
        await self._trim()

    def forget(self, session: VLLMSession) -> None:
        """A session was closed."""
        self._sessions.pop(session, None)
        self.gate.look()

    async def _trim(self) -> None:
        # vLLM preempts requests that run, but never one that waits for its next turn: without this, idle
        # sessions could hold every block while a turn waits for one.
        while sum(self._sessions.values()) > self._num_blocks or len(self._sessions) > self._options.max_num_seqs:
            idle = next((one for one in self._sessions if not one.busy), None)
            if idle is None:
                return
            del self._sessions[idle]
            await idle.drop()

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    # -- scoring ---------------------------------------------------------------------------------------------

    async def _score(self, batch: Sequence[TokenSequence], hidden: bool) -> list[Scores]:
        if hidden:
            async with self._scorer_starting:
                if self._scorer is None:
                    self._scorer = await asyncio.to_thread(self._launch_scorer)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._score_one(sequence, hidden)) for sequence in batch]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return [task.result() for task in tasks]

    async def _score_one(self, sequence: TokenSequence, hidden: bool) -> Scores:
        if len(sequence.response_ids) == 0:
            none = np.empty((0, self._hidden_size), np.float32) if hidden else None
            return Scores(np.empty(0, np.int32), np.empty(0, np.float32), none)
        request_id = f"score-{next(self._request_ids)}"
        with translated_errors():
            if hidden or self._decoder is None:
                assert self._scorer is not None, "`_score` started it"
                scores = await score_by_states(self._scorer, request_id, sequence)
                return scores if hidden else Scores(scores.greedy, scores.reference_logprob)
            masked = self._architecture is not None
            return await score_by_logprobs(self._decoder, request_id, sequence, self._settings, masked)

    def _launch_scorer(self) -> AsyncLLM:
        if self._architecture is None:
            raise PairError(
                f"{self._model} has no routed version, so vLLM cannot give its hidden states; add a line to "
                "citer_ray/engines/vllm_architectures.py, or set engine.kind: transformers"
            )
        return launch_scorer(self._model, self._settings, self._options, self._architecture)


def _own_handoff_token_id(router: Path) -> int | None:
    from citer_ray.router_artifact import read_metadata

    return read_metadata(router).handoff_token_id
