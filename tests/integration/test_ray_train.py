"""Fitting on Ray Train: the router of one process, from one or two workers, streamed or not, after a kill too."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from citer_ray.config import FitConfig, RouterConfig
from citer_ray.errors import DataError
from citer_ray.label_store import LabelStore
from citer_ray.on_ray.train import FitResult, fit_router
from citer_ray.training import EpochRecord, RouterFit, best_router
from citer_ray.training_data import stored_data
from citer_ray.training_plan import make_plan
from tests.planted_labels import HIDDEN_SIZE, write_planted_labels

pytestmark = pytest.mark.ray
CONFIG = FitConfig(batch_size=64, max_epochs=5, patience=5, learning_rate=3e-3, validation_fraction=0.25, num_cpus=0.5)
ROUTER = RouterConfig()
WINDOW = 250  # positions, so that there are several windows


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> LabelStore:
    return write_planted_labels(tmp_path_factory.mktemp("labels"))


@pytest.fixture(scope="module")
def alone(labels: LabelStore) -> RouterFit:
    plan = make_plan(labels, validation_fraction=0.25, window_positions=WINDOW, seed=0)
    assert len(plan.windows) > 1
    return RouterFit(stored_data(labels, plan), CONFIG, seed=0)


def fit_on_ray(labels: LabelStore, storage: Path, config: FitConfig = CONFIG, **options: object) -> FitResult:
    return fit_router(
        labels.folder,
        ROUTER,
        config,
        seed=0,
        storage=storage,
        name="fit",
        window_bytes=2 * HIDDEN_SIZE * WINDOW,
        **options,  # type: ignore[arg-type]
    )


def assert_same_fit(result: FitResult, alone: RouterFit) -> None:
    """The same losses and the same scores, to what float32 sums in another order leave."""
    state = alone.run(alone.start(ROUTER))
    losses = [[record.train_loss, record.validation_loss] for record in result.history]
    expected = [[record.train_loss, record.validation_loss] for record in state.history]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert result.best_epoch == state.best_epoch
    hidden_BH = torch.randn(64, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            result.router.p_slm(hidden_BH), best_router(state).p_slm(hidden_BH), rtol=1e-3, atol=1e-3
        )


class KillOnce:
    """Kills the training worker after the second epoch, when it is called with the fit's progress."""

    def __init__(self) -> None:
        self.records: list[EpochRecord] = []
        self.killed: list[psutil.Process] = []

    def __call__(self, record: EpochRecord) -> None:
        self.records.append(record)
        if record.epoch >= 2 and not self.killed:
            for process in psutil.Process().children(recursive=True):
                if "RayTrainWorker" in " ".join(process.cmdline()):
                    process.kill()
                    self.killed.append(process)


@pytest.mark.parametrize(("workers", "small"), [(1, 2**20), (2, 0)], ids=["one worker", "two workers, streamed"])
def test_ray_train_fits_the_router_of_one_process(
    ray_session: None, labels: LabelStore, alone: RouterFit, tmp_path: Path, workers: int, small: int
) -> None:
    records: list[EpochRecord] = []
    # All of Ray's CPUs: reading the labels must not wait for one.
    config = CONFIG.model_copy(update={"workers": workers, "num_cpus": 2.0 / workers})
    result = fit_on_ray(labels, tmp_path, config, progress=records.append, small_labels_bytes=small)
    assert_same_fit(result, alone)
    assert records == list(result.history)
    assert list(tmp_path.iterdir()) == [], "a finished fit leaves nothing in the storage"


def test_a_killed_worker_goes_on_from_its_checkpoint(
    ray_session: None, labels: LabelStore, alone: RouterFit, tmp_path: Path
) -> None:
    kill = KillOnce()
    # Enough epochs that the worker is still training when this process hears of the second.
    config = CONFIG.model_copy(update={"max_epochs": 20, "patience": 20})
    result = fit_on_ray(labels, tmp_path, config, progress=kill, checkpoint_every_s=0.0)
    records = kill.records
    assert len(kill.killed) == 1
    assert [record.epoch for record in result.history] == list(range(1, 21))
    # Epochs that were reported before the kill and trained again after it are the same; few were.
    again = records[len(result.history) :]
    assert len(again) < 10, "the fit started from scratch"
    assert {record.epoch: record for record in records} == {record.epoch: record for record in result.history}


def test_an_unfinished_fit_of_something_else_is_kept(ray_session: None, labels: LabelStore, tmp_path: Path) -> None:
    (tmp_path / "fit").mkdir()
    (tmp_path / "fit" / "fit.json").write_text('{"digest": "of another fit"}')
    with pytest.raises(DataError, match="another fit"):
        fit_on_ray(labels, tmp_path)
    assert (tmp_path / "fit" / "fit.json").exists()
