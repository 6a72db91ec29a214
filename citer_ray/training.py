"""Fitting the router: epochs over shuffled positions, validation, early stopping. Plain torch, one or more
workers.

Fed by a `TrainingData` (the labels, split by example) and the configuration; `on_ray/train.py` runs it in
Ray Train's workers and checkpoints the `FitState` after an epoch. Everything random is a function of (seed,
epoch, window, batch).

With several workers of a process group, every worker goes through the same batches and computes the rows
that it holds. Batch norm's statistics and the gradients are summed over the workers, and dropout masks are
drawn for the
whole batch: n workers do the arithmetic of one in another order, and agree with it to float32 rounding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from citer_ray.adamw import AdamW
from citer_ray.config import FitConfig, RouterConfig
from citer_ray.errors import DataError
from citer_ray.objectives import make_objective
from citer_ray.router import Router
from citer_ray.synchronised_norm import world_size
from citer_ray.training_data import Shard, TrainingData

_SCORING_ROWS = 8192
_WARM_UP_STEPS = 50


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch in numbers: mean losses a position, under the objective that is fitted."""

    epoch: int
    train_loss: float
    validation_loss: float
    is_best: bool


@dataclass(slots=True)
class FitState:
    """Everything that training needs to go on after an epoch.

    Attributes:
        router: the current weights.
        optimizer: moments of the gradients.
        epoch: epochs that are done.
        best_weights: a copy of the router's state at the best validation loss; None before the first epoch.
        best_loss: that loss.
        best_epoch: the epoch of it, from 1.
        stopped: why training ended (`patience` or `max_epochs`); None while it goes on.
        history: one record for each epoch.
    """

    router: Router
    optimizer: AdamW
    epoch: int = 0
    best_weights: dict[str, Tensor] | None = None
    best_loss: float = math.inf
    best_epoch: int = 0
    stopped: str | None = None
    history: list[EpochRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scored:
    """Validation positions with the router's logits, by ascending number."""

    number_B: npt.NDArray[np.int64]
    logit_B: npt.NDArray[np.float32]
    label_B: npt.NDArray[np.float32]
    case_B: npt.NDArray[np.int8]


def new_state(
    hidden_size: int, router_config: RouterConfig, fit_config: FitConfig, seed: int, device: torch.device
) -> FitState:
    """Fresh weights, the same in every worker."""
    generator = torch.Generator().manual_seed(_mixed_seed(seed))
    router = Router(hidden_size, router_config, generator=generator).to(device)
    return FitState(router, AdamW(router.parameters(), weight_decay=fit_config.weight_decay))


def best_router(state: FitState) -> Router:
    """A router with the weights of the best validation loss.

    Raises:
        DataError: no epoch gave a finite validation loss.
    """
    if state.best_weights is None:
        raise DataError(
            "the validation loss was never finite; lower fit.learning_rate, or check the labels' hidden states"
        )
    router = copy.deepcopy(state.router)
    router.load_state_dict(state.best_weights)
    return router.eval()


class RouterFit:
    """Fits one router. All workers make one, with their own data over one plan, and call the same methods."""

    def __init__(self, data: TrainingData, config: FitConfig, *, seed: int, device: torch.device | None = None) -> None:
        self.data = data
        self.config = config
        self.seed = seed
        self.device = device or torch.device("cpu")
        self.total_steps = config.max_epochs * data.plan.steps_per_epoch(config.batch_size)
        self.objective = make_objective(
            config.objective,
            config.class_weights,
            dpo_beta=config.dpo_beta,
            label_mean=data.plan.label_mean,
        )

    def start(self, router_config: RouterConfig) -> FitState:
        """Fresh weights, the same in every worker."""
        return new_state(self.data.hidden_size, router_config, self.config, self.seed, self.device)

    def run(self, state: FitState, after_epoch: Callable[[FitState], None] | None = None) -> FitState:
        """Train until the validation loss stops falling, or for `max_epochs`; `state` is changed and returned."""
        while state.stopped is None:
            self._run_epoch(state)
            if after_epoch is not None:
                after_epoch(state)
        return state

    def _run_epoch(self, state: FitState) -> None:
        """One pass over the training positions, validation, and the decision to go on."""
        train_loss = self._train(state)
        validation_loss = self.validation_loss(state.router)
        is_best = validation_loss < state.best_loss
        if is_best:
            # A copy: state_dict() shares memory with the live weights, which move on.
            state.best_weights = copy.deepcopy(state.router.state_dict())
            state.best_loss, state.best_epoch = validation_loss, state.epoch + 1
        state.epoch += 1
        state.history.append(EpochRecord(state.epoch, train_loss, validation_loss, is_best))
        if state.epoch - state.best_epoch >= self.config.patience:
            state.stopped = "patience"
        elif state.epoch >= self.config.max_epochs:
            state.stopped = "max_epochs"

    def _train(self, state: FitState) -> float:
        """One epoch of steps; returns the mean loss of a position."""
        state.router.train()
        plan, batch_size = self.data.plan, self.config.batch_size
        order = np.random.default_rng([_mixed_seed(self.seed), state.epoch]).permutation(len(plan.windows))
        step = state.epoch * plan.steps_per_epoch(batch_size)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for index in order.tolist():
            shard = self.data.window(index)
            window = plan.windows[index]
            row_of = np.full(window.positions, -1, dtype=np.int64)
            row_of[shard.number_B] = np.arange(len(shard))
            batches = window.batches(batch_size, _mixed_seed(self.seed), state.epoch, index)
            for number, batch in enumerate(batches):
                masks = self._dropout(state, len(batch), index, number)
                loss_sum += self._step(state, shard, row_of[batch], masks, step)
                step += 1
        return float(_summed(loss_sum)) / plan.train_positions

    def _step(
        self, state: FitState, shard: Shard, rows: npt.NDArray[np.int64], masks: list[Tensor] | None, step: int
    ) -> Tensor:
        """One optimizer step on a batch; `rows` are the shard's rows, -1 for positions of other workers."""
        mine = torch.from_numpy(np.flatnonzero(rows >= 0))
        rows_B = torch.from_numpy(rows)[mine]
        hidden_BH = shard.hidden_BH[rows_B].to(self.device).float()
        keep = None if masks is None else [mask[mine].to(self.device) for mask in masks]
        logit_B = state.router(hidden_BH, keep)
        loss = self.objective.losses(logit_B, shard.label_B[rows_B].to(self.device)).sum()
        state.optimizer.zero_grad()
        (loss / len(rows)).backward()
        _sum_gradients(state.router)
        state.optimizer.step(learning_rate(step, self.total_steps, self.config.learning_rate))
        return loss.detach().double()

    def _dropout(self, state: FitState, rows: int, window: int, batch: int) -> list[Tensor] | None:
        """Masks for a whole batch, a function of the seed and the batch's place alone."""
        seed = _mixed_seed(self.seed, state.epoch, window, batch)
        return state.router.draw_dropout(rows, torch.Generator().manual_seed(seed))

    def validation_loss(self, router: Router) -> float:
        """Mean loss of a validation position under the objective, over all workers."""
        shard = self.data.validation()
        logit_B = score(router, shard.hidden_BH, self.device)
        loss = self.objective.losses(logit_B, shard.label_B.to(self.device)).double().sum()
        return float(_summed(loss)) / self.data.plan.validation_positions

    def scored_validation(self, router: Router) -> Scored:
        """The validation positions of all workers with their logits."""
        shard = self.data.validation()
        logit_B = score(router, shard.hidden_BH, self.device).cpu().numpy()
        mine = Scored(shard.number_B, logit_B, shard.label_B.numpy(), shard.case_B)
        parts: list[Scored] = [mine] * world_size()
        if world_size() > 1:
            dist.all_gather_object(parts, mine)
        order = np.argsort(np.concatenate([part.number_B for part in parts]), kind="stable")
        return Scored(
            *(
                np.concatenate([getattr(part, name) for part in parts])[order]
                for name in ("number_B", "logit_B", "label_B", "case_B")
            )
        )


@torch.no_grad()
def score(router: Router, hidden_BH: Tensor, device: torch.device) -> Tensor:
    """Logits in eval mode, float32 [B] on `device`, a few thousand rows at a time."""
    router.eval()
    parts = [router(rows_BH.to(device)) for rows_BH in hidden_BH.split(_SCORING_ROWS) if len(rows_BH)]
    return torch.cat(parts) if parts else torch.zeros(0, device=device)


def learning_rate(step: int, total_steps: int, peak: float) -> float:
    """A short linear warm-up to `peak`, then half a cosine down to 0 at `total_steps`."""
    warm_up = min(_WARM_UP_STEPS, max(1, total_steps // 10))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, total_steps - warm_up)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def _sum_gradients(router: Router) -> None:
    """Sum the gradients over the workers, in one message.

    Not DistributedDataParallel: its messages start inside the backward pass and would interleave with batch
        norm's in
    an order that may differ between workers; and it averages, where workers hold different numbers of rows.
    """
    if world_size() == 1:
        return
    gradients = [parameter.grad for parameter in router.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _summed(value: Tensor) -> Tensor:
    """Sum over the workers, without gradients."""
    if world_size() > 1:
        dist.all_reduce(value)
    return value


def _mixed_seed(*parts: int) -> int:
    """One 63-bit seed of several integers of any sign."""
    entropy = [part % 2**64 for part in parts]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)
