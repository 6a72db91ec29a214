"""Label files as Ray Data sets for Ray Train: one for each window and worker.

The driver makes them from the plan; a worker reads its own through `train.get_dataset_shard`. A worker's shard is
whole files (`training_data.worker_files`), which needs no splitting at run time, and training does not depend on who
holds which rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import ray.data
import ray.train
from ray.data import Dataset

from citer_ray.label_store import read_part
from citer_ray.storage import storage_path
from citer_ray.training_data import SHARD_COLUMNS, TrainingData, worker_files
from citer_ray.training_plan import TrainingPlan

# Labels up to this size go through the object store at once: starting read tasks costs seconds, reading them less.
SMALL_LABELS_BYTES = 256 * 2**20


def shard_name(window: int, rank: int) -> str:
    """Name of the data set of one worker and window."""
    return f"window-{window}-worker-{rank}"


def shard_datasets(plan: TrainingPlan, workers: int, *, small_bytes: int = SMALL_LABELS_BYTES) -> dict[str, Dataset]:
    """The data sets of all windows and workers; a worker without files in a window has none there.

    Small labels are read here and put into the object store. Larger ones are streamed from their files each time, by
    tasks that take no CPU: the workers may hold all of them, and the tasks would wait for ever. (`read_parquet` does:
    its listing of the files takes a whole CPU, whatever `num_cpus` says.)
    """
    small = sum(path.stat().st_size for path in plan.files) <= small_bytes
    datasets: dict[str, Dataset] = {}
    for window in range(len(plan.windows)):
        for rank in range(workers):
            paths = worker_files(plan, window, rank=rank, workers=workers)
            if not paths:
                continue
            if small:
                # One table: Ray Data starts a task for each.
                table = pa.concat_tables([read_part(path, SHARD_COLUMNS) for path in paths])
                datasets[shard_name(window, rank)] = ray.data.from_arrow(table)
            else:
                names = ray.data.from_arrow([pa.table({"path": [str(path)]}) for path in paths])
                datasets[shard_name(window, rank)] = names.map_batches(
                    _read_files, batch_size=None, batch_format="pyarrow", num_cpus=0, concurrency=2
                )
    return datasets


def _read_files(paths: pa.Table) -> Iterator[pa.Table]:
    """The label files that a table names, one table each."""
    for path in paths["path"].to_pylist():
        yield read_part(storage_path(path), SHARD_COLUMNS)


def sharded_data(plan: TrainingPlan, hidden_size: int, workers: int) -> TrainingData:
    """The training data of the Ray Train worker that this runs in."""
    rank = ray.train.get_context().get_world_rank()

    def read_window(index: int) -> Iterator[pa.Table]:
        if not worker_files(plan, index, rank=rank, workers=workers):
            return
        shard = ray.train.get_dataset_shard(shard_name(index, rank))
        yield from shard.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)

    return TrainingData(plan, hidden_size, read_window)
