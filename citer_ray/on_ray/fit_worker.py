"""The training loop of one Ray Train worker: `training.RouterFit` with checkpoints and progress.

`train.fit_router` starts it in every worker. All workers report to Ray Train equally often; rank 0 saves.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from safetensors.numpy import save_file

from citer_ray.config import FitConfig, RouterConfig
from citer_ray.on_ray.label_shards import sharded_data
from citer_ray.synchronised_norm import world_size
from citer_ray.training import FitState, RouterFit, Scored, best_router
from citer_ray.training_plan import TrainingPlan
from citer_ray.training_state import load_state, save_state

SCORES_FILE = "validation.safetensors"


@dataclass(frozen=True, slots=True)
class FitJob:
    """What a worker needs: the plan, the configuration, and where to post progress (None for nowhere)."""

    plan: TrainingPlan
    hidden_size: int
    router: RouterConfig
    fit: FitConfig
    seed: int
    checkpoint_every_s: float
    board: Any


def fit_in_worker(config: dict[str, FitJob]) -> None:
    """Ray Train's loop: go on from a checkpoint or start, train, and report the last state with validation scores."""
    job = config["job"]
    device = ray.train.torch.get_device()
    if device.type == "cpu":
        torch.set_num_threads(max(1, int(job.fit.num_cpus)))
    data = sharded_data(job.plan, job.hidden_size, job.fit.workers)
    fit = RouterFit(data, job.fit, seed=job.seed, device=device)
    state = _restored(job, device) or fit.start(job.router)
    reporter = _Reporter(job, device)
    fit.run(state, reporter.after_epoch)
    scores = None if state.best_weights is None else fit.scored_validation(best_router(state))
    reporter.report(state, scores)


def _restored(job: FitJob, device: torch.device) -> FitState | None:
    """The state of the last checkpoint, or None at the first start."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return load_state(Path(folder), job.router, job.fit, device)


class _Reporter:
    """Tells the driver about epochs, and saves checkpoints from time to time."""

    def __init__(self, job: FitJob, device: torch.device) -> None:
        self._job = job
        self._device = device
        self._is_first = ray.train.get_context().get_world_rank() == 0
        self._saved_at = time.monotonic()

    def after_epoch(self, state: FitState) -> None:
        """Post the epoch, and save the state if it is time; the last state is saved with the scores instead."""
        if self._is_first and self._job.board is not None:
            ray.get(self._job.board.post.remote(state.history[-1]))
        if state.stopped is None and self._is_due():
            self.report(state, None)

    def _is_due(self) -> bool:
        """Rank 0's clock decides for all: every worker must report equally often."""
        due = time.monotonic() - self._saved_at >= self._job.checkpoint_every_s
        if world_size() == 1:
            return due
        decision = torch.tensor([due], dtype=torch.uint8, device=self._device)
        dist.broadcast(decision, src=0)
        return bool(decision.item())

    def report(self, state: FitState, scores: Scored | None) -> None:
        """Save the state (rank 0) and report to Ray Train (all)."""
        metrics = {"epoch": state.epoch, "best_loss": state.best_loss, "best_epoch": state.best_epoch}
        with tempfile.TemporaryDirectory() if self._is_first else nullcontext() as folder:
            checkpoint = None
            if folder is not None:
                save_state(state, Path(folder))
                if scores is not None:
                    arrays = {name: np.ascontiguousarray(getattr(scores, name)) for name in Scored.__slots__}
                    save_file(arrays, Path(folder) / SCORES_FILE)
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=checkpoint)
        self._saved_at = time.monotonic()
