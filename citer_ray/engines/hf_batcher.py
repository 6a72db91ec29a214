"""Turns of many sessions, run as shared forward passes.

`TransformersEngine` queues turns here. A driver task forms a pass of everything that is ready, runs it, gives finished
turns back, and yields once, so that callers' next turns join the next pass. Three steps a pass: `_prepare` and `_apply`
run in the event loop and own all bookkeeping; `_compute` between them touches tensors only and may run in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt
import torch

from citer_ray.engine import Finish, Turn
from citer_ray.engines.hf_model import HiddenStateModel
from citer_ray.engines.hf_pass import (
    Outcome,
    Pass,
    Request,
    SessionState,
    num_pending,
    num_shown,
    row_of,
    shown_positions,
)
from citer_ray.engines.prefix_leaders import Leaders
from citer_ray.engines.row_cache import PassIndex, RowCache
from citer_ray.engines.sampling import sample
from citer_ray.engines.scorers import StepState
from citer_ray.errors import RetryableError
from citer_ray.policy import hands_off

_FULL_PASS = 64  # requests; with as many a pass is worth running at once
_MIN_SHARED_PREFIX = 8  # tokens; a shorter common prefix is cheaper to compute than to wait for


class Batcher:
    """Shared passes of one model; see the module's docstring. Arguments as in `TransformersEngine`."""

    def __init__(
        self,
        model: HiddenStateModel,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        max_rows: int,
        max_pass_tokens: int,
        executor: Executor | None,
        delay: int = 0,
    ) -> None:
        self._model, self.eos_token_ids, self._delay = model, eos_token_ids, delay
        self._max_pass_tokens, self._executor = max_pass_tokens, executor
        self._cache = RowCache(model.num_layers, max_rows, max_model_len)
        self._requests: list[Request] = []
        self._in_pass: frozenset[SessionState] = frozenset()
        self._row_freed = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self.num_passes = 0

    @property
    def num_free_rows(self) -> int:
        """Sessions that could still get a KV cache."""
        return self._cache.num_free

    async def submit(self, state: SessionState, max_tokens: int, wanted_rows: int = 1) -> Turn:
        """Queue a turn and wait for it. If that fails or is cancelled, the session is lost and must be rebuilt."""
        request = Request(state, max_tokens, asyncio.get_running_loop().create_future(), wanted_rows)
        self._requests.append(request)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await request.future
        except BaseException:
            if request in self._requests:
                self._requests.remove(request)
            self.forget(state)
            raise

    def forget(self, state: SessionState) -> None:
        """Drop a session's ids and free its row, now or after the pass that is using it."""
        state.ids, state.num_computed, state.lost = [], 0, True
        if state not in self._in_pass:
            self._free_row(state)

    def rewind(self, state: SessionState, num_tokens: int) -> None:
        """Forget the ids after the leading `num_tokens`, between two turns."""
        state.ids = state.ids[:num_tokens]
        if state.num_computed > len(state.ids):
            state.num_computed = len(state.ids)
            self._cache.truncate(row_of(state), len(state.ids))

    def fail_all(self, error: Exception) -> None:
        """End every queued turn with `error`."""
        for request in self._requests:
            if not request.future.done():
                request.future.set_exception(error)

    async def run(self, function: object, *args: object) -> object:
        """Call `function` where passes run."""
        assert callable(function)
        if self._executor is None:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args))

    def _free_row(self, state: SessionState) -> None:
        if state.row is not None:
            self._cache.release(state.row)
            state.row = None
            self._row_freed.set()
        state.lost = False

    # -- the driver ------------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        try:
            await self._run_until_idle()
        except Exception as error:  # noqa: BLE001
            # A fault of this module must reach whoever waits: a turn that never ends would be a hang.
            self.fail_all(error)

    async def _run_until_idle(self) -> None:
        while self._requests:
            await self._wait_for_more()
            ready = self._admit()
            if not ready:  # every row is held by a session between two turns
                self._row_freed.clear()
                await self._row_freed.wait()
                continue
            for group in self._groups(ready):
                await self._run_pass(group)
            self._requests = [request for request in self._requests if not request.future.done()]
            await asyncio.sleep(0)

    async def _wait_for_more(self) -> None:
        """Hold a pass back for up to `delay` turns of the event loop, in which other engines run their passes."""
        for _ in range(self._delay):
            if len(self._requests) >= _FULL_PASS:
                return
            await asyncio.sleep(0)

    async def _run_pass(self, group: list[Request]) -> None:
        group = [request for request in group if not request.future.done()]
        if not group:
            return
        self._in_pass = frozenset(request.state for request in group)
        try:
            prepared = self._prepare(group)
            outcome = await self.run(self._compute, prepared)
            assert isinstance(outcome, Outcome)
            self._apply(prepared, outcome)
        except Exception as error:  # noqa: BLE001 - handed to every caller of this pass
            for request in group:
                if not request.future.done():
                    request.future.set_exception(RetryableError(f"a forward pass failed: {error!r}"))
        finally:
            self._in_pass = frozenset()
            for request in group:
                if request.state.lost:
                    self._free_row(request.state)

    def _admit(self) -> list[Request]:
        """Requests that can run now. New ones get a row and the longest prefix that another row holds.

        A new session that shares a prefix with another new one waits for the pass that computes it, then copies.
        """
        self._cache.forget_if_idle()
        ready = [request for request in self._requests if request.state.row is not None]
        new = [request for request in self._requests if request.state.row is None]
        new = new[: self._cache.num_free]
        leaders = Leaders()
        copies: list[tuple[int, int, int]] = []
        # Longest first, so that what others share is computed by the one that has most of it.
        for request in sorted(new, key=lambda request: -len(request.state.ids)):
            ids = np.asarray(request.state.ids, np.int32)
            # What is copied is not computed, and so shows no distributions.
            shown = max(1, num_shown(request))
            source, length = self._cache.shared_prefix(ids[:-shown])
            if leaders.common_prefix(ids) >= length + _MIN_SHARED_PREFIX:
                continue
            leaders.add(ids)
            row = self._cache.take()
            request.state.row, request.state.num_computed = row, 0
            if length >= _MIN_SHARED_PREFIX:
                copies.append((source, row, length))
                request.state.num_computed = length
            ready.append(request)
        if copies:
            self._cache.copy_prefixes(copies)
        return ready

    def _groups(self, ready: Sequence[Request]) -> list[list[Request]]:
        """Passes of similar numbers of new tokens, within the limit of padded tokens."""
        groups: list[list[Request]] = []
        shortest = 0
        for request in sorted(ready, key=num_pending):
            pending = num_pending(request)
            fits = groups and (len(groups[-1]) + 1) * pending <= self._max_pass_tokens
            if fits and pending <= 2 * shortest + 8:
                groups[-1].append(request)
            else:
                groups.append([request])
                shortest = pending
        return groups

    # -- one pass --------------------------------------------------------------------------------------------------

    def _prepare(self, group: list[Request]) -> Pass:
        longest = max(num_pending(request) for request in group)
        group = sorted(group, key=lambda request: row_of(request.state))
        rows = [row_of(request.state) for request in group]
        first, end = rows[0], rows[-1] + 1
        # Idle rows inside a mostly busy span ride along on a dummy token: cheaper than gathering the caches.
        span = (first, end) if 2 * len(rows) >= end - first else None
        batch_rows = np.asarray(rows) - first if span else np.arange(len(rows))
        cache_rows = np.arange(first, end) if span else np.asarray(rows)
        starts = self._cache.lengths[cache_rows]
        kv_length = int(starts.max()) + longest
        self._cache.reserve(kv_length)
        ids_BT = np.zeros((len(cache_rows), longest), np.int64)
        last = np.zeros(len(group), np.int64)
        for batch_row, (position, request) in zip(batch_rows, enumerate(group), strict=True):
            pending = request.state.ids[request.state.num_computed :]
            ids_BT[batch_row, : len(pending)] = pending
            last[position] = len(pending) - 1
        device = self._model.device
        index = PassIndex(
            torch.from_numpy(cache_rows).to(device),
            span,
            torch.from_numpy(starts[:, None] + np.arange(longest)).to(device),
            kv_length,
        )
        return Pass(
            group,
            torch.from_numpy(ids_BT).to(device),
            index,
            torch.from_numpy(batch_rows).to(device),
            torch.from_numpy(last).to(device),
            shown_positions(group, batch_rows, last, device),
        )

    @torch.inference_mode()
    def _compute(self, prepared: Pass) -> Outcome:
        self.num_passes += 1
        self._cache.index = prepared.index
        hidden_BTH = self._model.step_hidden(
            prepared.ids_BT, prepared.index.positions_BT, prepared.index.kv_length, self._cache
        )
        hidden_NH = hidden_BTH[prepared.batch_rows, prepared.last]
        logits_NV = self._model.logits(hidden_NH)
        best = logits_NV.max(-1)
        logsumexp_N = torch.logsumexp(logits_NV, -1)
        return Outcome(
            greedy=best.indices.tolist(),
            greedy_logprobs=(best.values - logsumexp_N).tolist(),
            scores=self._scores(prepared.requests, hidden_NH, logits_NV),
            logits_NV=logits_NV,
            logsumexp=logsumexp_N.tolist(),
            shown_NV=None if prepared.shown is None else self._distributions(hidden_BTH[prepared.shown]),
        )

    def _distributions(self, hidden_NH: torch.Tensor) -> npt.NDArray[np.float32]:
        """Log-probabilities over the shared vocabulary."""
        distributions: npt.NDArray[np.float32] = self._model.logits(hidden_NH).log_softmax(-1).cpu().numpy()
        return distributions

    @staticmethod
    def _scores(requests: list[Request], hidden_NH: torch.Tensor, logits_NV: torch.Tensor) -> list[float]:
        """One value per request; NaN where the session has no scorer."""
        state = StepState(
            hidden_NH,
            logits_NV,
            [len(request.state.ids) for request in requests],
            [request.state.key for request in requests],
            [request.state.start for request in requests],
        )
        members: dict[str, list[int]] = {}
        for position, request in enumerate(requests):
            if request.state.scorer_name is not None:
                members.setdefault(request.state.scorer_name, []).append(position)
        scores = np.full(len(requests), np.nan)
        for positions in members.values():
            scorer = requests[positions[0]].state.scorer
            assert scorer is not None
            scores[positions] = (
                scorer(state if len(positions) == len(requests) else state.select(positions)).cpu().numpy()
            )
        values: list[float] = scores.tolist()
        return values

    def _apply(self, prepared: Pass, outcome: Outcome) -> None:
        shown = 0
        for position, request in enumerate(prepared.requests):
            state = request.state
            rows = num_shown(request)
            shown += rows
            if request.future.done():  # cancelled while the pass ran
                continue
            if rows:
                assert outcome.shown_NV is not None
                request.distributions.append(outcome.shown_NV[shown - rows : shown])
                request.wanted_rows = 1
            self._cache.extend(row_of(state), state.ids[state.num_computed :])
            state.num_computed = len(state.ids)
            if state.scorer is not None:
                score = outcome.scores[position]
                request.scores.append(score)
                if hands_off(score, state.threshold):
                    request.finish(Finish.HANDOFF)
                    continue
            if state.sampling.is_argmax:
                token, logprob = outcome.greedy[position], outcome.greedy_logprobs[position]
            else:
                logits_V = outcome.logits_NV[position].double().cpu().numpy()
                response_ids = state.ids[state.sampling.response_start :] if state.sampling.has_penalties else ()
                token = sample(logits_V, state.sampling, len(state.ids), response_ids)
                logprob = float(logits_V[token]) - outcome.logsumexp[position]
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            if token in self.eos_token_ids and not state.sampling.ignore_eos:
                request.finish(Finish.EOS)
            elif len(request.token_ids) == request.max_tokens:
                request.finish(Finish.LENGTH)
            else:
                state.ids.append(token)
