"""Fitting a router with Ray Train: `fit_router` plans here on the driver, `fit_worker` trains in the workers.

Fed by a folder of complete labels; the result goes to `router_artifact`. A fit that was killed goes on from its last
checkpoint when `fit_router` is called again with the same storage and name; a finished one leaves nothing there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer
from safetensors.numpy import load_file

from citer_ray.config import FitConfig, RouterConfig
from citer_ray.errors import ConfigError, DataError, RetryableError
from citer_ray.file_replacement import replacing
from citer_ray.label_store import LabelManifest, LabelStore
from citer_ray.on_ray.fit_worker import SCORES_FILE, FitJob, fit_in_worker
from citer_ray.on_ray.label_shards import SMALL_LABELS_BYTES, shard_datasets
from citer_ray.on_ray.progress_board import start_board
from citer_ray.on_ray.session import joined_cluster
from citer_ray.router import Router
from citer_ray.router_metrics import RouterMetrics, router_metrics
from citer_ray.storage import absolute, arrow_filesystem, remove_tree, storage_path
from citer_ray.training import EpochRecord, Scored, best_router
from citer_ray.training_plan import make_plan
from citer_ray.training_state import load_state

logger = logging.getLogger(__name__)

# A window of hidden states (float16) that is shuffled together and held by the workers: 1 GiB in all.
WINDOW_BYTES = 2**30
# A kill loses at most this much training; a checkpoint after every epoch would slow down short fits.
CHECKPOINT_EVERY_S = 5.0

_DIGEST_FILE = "fit.json"
_POLL_S = 0.2
_WORKER_RESTARTS = 2
_START_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class FitResult:
    """A fitted router.

    Attributes:
        router: with the weights of the best validation loss, in eval mode, on the CPU.
        metrics: on the validation part.
        history: one record for each epoch.
        best_epoch: the epoch of the weights, from 1.
        best_loss: their validation loss under the objective.
        stopped: `patience` or `max_epochs`.
        validation: the validation positions with the router's logits; `p_slm` is their sigmoid.
    """

    router: Router
    metrics: RouterMetrics
    history: tuple[EpochRecord, ...]
    best_epoch: int
    best_loss: float
    stopped: str
    validation: Scored


def fit_router(
    labels: Path | str,
    router_config: RouterConfig,
    fit_config: FitConfig,
    *,
    seed: int,
    storage: Path | str,
    name: str,
    progress: Callable[[EpochRecord], None] | None = None,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
    window_bytes: int = WINDOW_BYTES,
    small_labels_bytes: int = SMALL_LABELS_BYTES,
) -> FitResult:
    """Fit a router on complete labels; Ray must be initialised.

    Args:
        labels: folder of a `LabelStore`.
        router_config: the router's shape.
        fit_config: how it is fitted.
        seed: of the weights, the order of positions and dropout; not of the split, which is always the same.
        storage: folder of unfinished fits; must be shared by all nodes. Nothing is written elsewhere.
        name: of this fit in `storage`, unique for its labels, configuration and seed.
        progress: called in this process after each epoch.
        checkpoint_every_s: seconds of training between checkpoints; 0 is after every epoch.
        window_bytes: hidden states that are shuffled together and held in memory by all workers together.
        small_labels_bytes: labels up to this size are not streamed (`label_shards`).

    Raises:
        DataError: incomplete, damaged or too few labels; or `storage` holds an unfinished fit of something else.
        ConfigError: more workers than this single node can ever hold.
        RetryableError: workers failed or could not be started; calling again goes on from the last checkpoint.
    """
    store = LabelStore(absolute(storage_path(labels)))
    manifest = store.read_manifest()
    plan = make_plan(
        store,
        validation_fraction=fit_config.validation_fraction,
        window_positions=max(fit_config.batch_size, window_bytes // (2 * manifest.hidden_size)),
        seed=seed % 2**64,
    )
    _check_resources(fit_config)
    folder = absolute(storage_path(storage)) / name
    _claim(folder, fit_digest(manifest, router_config, fit_config, seed))
    board = start_board() if progress is not None else None
    job = FitJob(plan, manifest.hidden_size, router_config, fit_config, seed, checkpoint_every_s, board)
    logger.info(
        "fitting on %d positions of %d examples, validating on %d positions of %d examples",
        plan.train_positions,
        plan.train_examples,
        plan.validation_positions,
        len(plan.validation_starts),
    )
    filesystem, parent = arrow_filesystem(folder.parent)
    trainer = TorchTrainer(
        fit_in_worker,
        train_loop_config={"job": job},
        datasets={**shard_datasets(plan, fit_config.workers, small_bytes=small_labels_bytes)},
        dataset_config=ray.train.DataConfig(datasets_to_split=[]),
        scaling_config=ray.train.ScalingConfig(
            num_workers=fit_config.workers,
            use_gpu=fit_config.use_gpu,
            resources_per_worker={"CPU": fit_config.num_cpus, **({"GPU": 1} if fit_config.use_gpu else {})},
        ),
        run_config=ray.train.RunConfig(  # type: ignore[call-arg]  # mypy sees the class of Ray Train v1
            name=name,
            storage_path=parent,
            storage_filesystem=filesystem,
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
            failure_config=ray.train.FailureConfig(  # type: ignore[call-arg]  # likewise
                max_failures=_WORKER_RESTARTS, controller_failure_limit=_START_ATTEMPTS
            ),
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
        ),
    )
    with _driver_settings():
        checkpoint = _run(trainer, board, progress)
    result = _read_result(checkpoint, router_config, fit_config)
    remove_tree(folder)
    return result


def fit_digest(manifest: LabelManifest, router_config: RouterConfig, fit_config: FitConfig, seed: int) -> str:
    """Digest of everything that decides a router; where it is computed does not (workers, CPUs, GPU)."""
    content = {
        "labels": manifest.digest(),
        "router": router_config.model_dump(mode="json"),
        "fit": fit_config.model_dump(mode="json", exclude={"workers", "num_cpus", "use_gpu"}),
        "seed": seed,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check_resources(config: FitConfig) -> None:
    """Refuse what one node without autoscaling can never start, before it waits for minutes."""
    total = ray.cluster_resources()
    wanted = {"CPU": config.workers * config.num_cpus, "GPU": float(config.workers * config.use_gpu)}
    for kind, count in wanted.items():
        if count <= total.get(kind, 0.0):
            continue
        message = (
            f"fit.workers: {config.workers} workers want {count:g} {kind}s, Ray has {total.get(kind, 0.0):g}; lower "
            "fit.workers or fit.num_cpus, set fit.use_gpu to false, or start Ray with more"
        )
        # The head of a cluster that grows on demand often has no CPU itself, or the job was submitted to it.
        if len(ray.nodes()) == 1 and total.get("CPU", 0) > 0 and not joined_cluster():
            raise ConfigError(message)
        logger.warning("%s (waiting for the cluster to grow)", message)


def _claim(folder: Path, digest: str) -> None:
    """Say whose unfinished fit a folder is, so that another one does not go on from its checkpoints."""
    path = folder / _DIGEST_FILE
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8")).get("digest")
        if found != digest:
            raise DataError(
                f"{folder} holds an unfinished fit of other labels, configuration or seed (digest {found}, this one "
                f"has {digest}); delete the folder or use another name"
            )
        logger.info("going on with the unfinished fit in %s", folder)
        return
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"digest": digest}) + "\n", encoding="utf-8")


@contextmanager
def _driver_settings() -> Iterator[None]:
    """Ray Train settings that exist as environment variables alone; what the user has set stays."""
    wanted = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(_POLL_S)}  # of 2 s, which a short fit spends waiting
    if len(ray.nodes()) == 1:
        wanted["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # this process would be preempted, too
    added = {key: value for key, value in wanted.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)


def _run(
    trainer: TorchTrainer, board: Any | None, progress: Callable[[EpochRecord], None] | None
) -> ray.train.Checkpoint:
    """Run the trainer to its last checkpoint, handing on progress.

    In a thread of its own: in the main thread, Ray Train replaces the handler of Ctrl-C by one that exits with 0.
    """
    outcome: list[ray.train.Result | BaseException] = []

    def fit() -> None:
        try:
            outcome.append(trainer.fit())
        except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
            outcome.append(error)

    thread = threading.Thread(target=fit, name="fit-router", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        if board is not None and progress is not None:
            for record in ray.get(board.take.remote()):
                progress(record)
    (result,) = outcome
    if isinstance(result, ray.train.TrainingFailedError):
        raise RetryableError(
            f"fitting failed in Ray Train's workers: {result}; run it again, it goes on from the last checkpoint"
        ) from result
    if isinstance(result, BaseException):
        raise result
    checkpoint: ray.train.Checkpoint | None = result.checkpoint
    if checkpoint is None:
        raise RetryableError("Ray Train ended without a checkpoint; run the fit again")
    return checkpoint


def _read_result(checkpoint: ray.train.Checkpoint, router_config: RouterConfig, fit_config: FitConfig) -> FitResult:
    """The result from the last checkpoint."""
    with checkpoint.as_directory() as folder:
        state = load_state(Path(folder), router_config, fit_config, torch.device("cpu"))
        router = best_router(state)
        validation = Scored(**load_file(Path(folder) / SCORES_FILE))
    p_slm_B = torch.sigmoid(torch.from_numpy(validation.logit_B)).numpy()
    assert state.stopped is not None
    return FitResult(
        router=router.requires_grad_(False),
        metrics=router_metrics(p_slm_B, validation.label_B, validation.case_B, logit_B=validation.logit_B),
        history=tuple(state.history),
        best_epoch=state.best_epoch,
        best_loss=state.best_loss,
        stopped=state.stopped,
        validation=validation,
    )
