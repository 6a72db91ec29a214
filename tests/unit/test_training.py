"""Fitting: it learns, keeps the best weights, stops, is reproducible, and goes on from a saved state."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from citer_ray.config import FitConfig, RouterConfig
from citer_ray.errors import DataError
from citer_ray.router_metrics import router_metrics
from citer_ray.training import FitState, RouterFit, best_router, learning_rate
from citer_ray.training_data import TrainingData, stored_data
from citer_ray.training_plan import make_plan
from citer_ray.training_state import load_state, save_state
from tests.planted_labels import write_planted_labels

CONFIG = FitConfig(batch_size=64, max_epochs=8, patience=8, learning_rate=3e-3, validation_fraction=0.25)
ROUTER = RouterConfig()
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    store = write_planted_labels(tmp_path_factory.mktemp("labels"), examples=240)
    return stored_data(store, make_plan(store, validation_fraction=0.25, window_positions=10**6, seed=0))


def fitted(data: TrainingData, config: FitConfig = CONFIG, *, seed: int = 0) -> tuple[RouterFit, FitState]:
    fit = RouterFit(data, config, seed=seed)
    return fit, fit.run(fit.start(ROUTER))


def same_weights(a: FitState, b: FitState) -> bool:
    left, right = a.router.state_dict(), b.router.state_dict()
    return all(torch.equal(left[name], right[name]) for name in left)


def test_a_planted_rule_is_learned(data: TrainingData) -> None:
    fit, state = fitted(data)
    scored = fit.scored_validation(best_router(state))
    p_slm = 1 / (1 + np.exp(-scored.logit_B))
    metrics = router_metrics(p_slm, scored.label_B, scored.case_B, logit_B=scored.logit_B)
    # The rule itself has an AUC of about 0.95 on these labels; guessing the mean has a loss of about 0.6.
    assert metrics.auc is not None
    assert metrics.auc > 0.9
    assert metrics.log_loss < 0.35
    assert metrics.log_loss == pytest.approx(state.best_loss, rel=1e-5)


def test_the_kept_weights_give_the_best_validation_loss(data: TrainingData) -> None:
    # A high rate overshoots, so that the last epoch is not the best one.
    config = CONFIG.model_copy(update={"learning_rate": 0.3, "patience": 3, "max_epochs": 30})
    fit, state = fitted(data, config)
    losses = [record.validation_loss for record in state.history]
    assert state.best_loss == min(losses)
    assert losses[-1] > min(losses)
    assert fit.validation_loss(best_router(state)) == state.best_loss
    assert fit.validation_loss(state.router) == losses[-1]


def test_patience_stops_and_the_limit_stops(data: TrainingData) -> None:
    _, state = fitted(data, CONFIG.model_copy(update={"learning_rate": 0.3, "patience": 2, "max_epochs": 100}))
    assert state.stopped == "patience"
    assert state.epoch == state.best_epoch + 2 < 100
    _, state = fitted(data, CONFIG.model_copy(update={"max_epochs": 2}))
    assert (state.stopped, state.epoch, len(state.history)) == ("max_epochs", 2, 2)


def test_a_seed_gives_the_same_router_bit_for_bit(data: TrainingData) -> None:
    before = torch.random.get_rng_state()
    first, again, other = (fitted(data, seed=seed)[1] for seed in (1, 1, 2))
    assert same_weights(first, again)
    assert first.history == again.history
    assert not same_weights(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_saved_state_goes_on_as_if_nothing_had_happened(data: TrainingData, tmp_path: Path, stop_after: int) -> None:
    class Killed(Exception):
        pass

    def kill(state: FitState) -> None:
        if state.epoch == stop_after:
            save_state(state, tmp_path)
            raise Killed

    fit = RouterFit(data, CONFIG, seed=4)
    with pytest.raises(Killed):
        fit.run(fit.start(ROUTER), kill)
    resumed = RouterFit(data, CONFIG, seed=4).run(load_state(tmp_path, ROUTER, CONFIG, CPU))
    _, undisturbed = fitted(data, seed=4)
    assert same_weights(resumed, undisturbed)
    assert resumed.history == undisturbed.history
    assert resumed.best_epoch == undisturbed.best_epoch
    assert fit.validation_loss(best_router(resumed)) == undisturbed.best_loss


def test_a_finished_state_stays_finished(data: TrainingData, tmp_path: Path) -> None:
    fit, state = fitted(data)
    save_state(state, tmp_path)
    loaded = load_state(tmp_path, ROUTER, CONFIG, CPU)
    assert fit.run(loaded).epoch == state.epoch
    assert same_weights(loaded, state)


def test_a_state_before_the_first_epoch_is_saved_too(data: TrainingData, tmp_path: Path) -> None:
    fit = RouterFit(data, CONFIG, seed=0)
    save_state(fit.start(ROUTER), tmp_path)
    loaded = load_state(tmp_path, ROUTER, CONFIG, CPU)
    assert loaded.best_weights is None
    assert loaded.best_loss == math.inf
    assert same_weights(fit.run(loaded), fitted(data)[1])


@pytest.mark.parametrize("remainder", [0, 1, 2])
def test_a_remainder_of_one_position_does_not_break_batch_norm(data: TrainingData, remainder: int) -> None:
    batch_size = (data.plan.train_positions - remainder) // 3
    assert data.plan.train_positions % batch_size in (remainder, remainder + 1, remainder + 2)
    fit, state = fitted(data, CONFIG.model_copy(update={"batch_size": batch_size, "max_epochs": 1}))
    assert math.isfinite(state.best_loss)
    sizes = [len(batch) for batch in data.plan.windows[0].batches(batch_size, 0, 0, 0)]
    assert min(sizes) >= batch_size
    assert fit.total_steps == len(sizes) == 3


def test_several_windows_train_on_the_same_positions(tmp_path: Path) -> None:
    store = write_planted_labels(tmp_path)
    losses = []
    for window_positions in (120, 10**6):
        plan = make_plan(store, validation_fraction=0.25, window_positions=window_positions, seed=0)
        losses.append(fitted(stored_data(store, plan))[1].best_loss)
        assert (len(plan.windows) > 2) == (window_positions == 120)
    # Not the same batches, so not the same router, but one that is as good.
    assert losses[0] == pytest.approx(losses[1], rel=0.15)


@pytest.mark.parametrize("objective", ["preference", "dpo"])
@pytest.mark.parametrize("class_weights", ["none", "balanced"])
def test_all_objectives_rank_the_positions(data: TrainingData, objective: str, class_weights: str) -> None:
    update = {"objective": objective, "class_weights": class_weights, "dpo_beta": 0.5}
    fit, state = fitted(data, CONFIG.model_copy(update=update))
    scored = fit.scored_validation(best_router(state))
    p_slm = 1 / (1 + np.exp(-scored.logit_B))
    auc = router_metrics(p_slm, scored.label_B, scored.case_B, logit_B=scored.logit_B).auc
    assert auc is not None
    assert auc > 0.9


def test_labels_that_cannot_be_fitted_end_with_a_message(data: TrainingData) -> None:
    _, state = fitted(data, CONFIG.model_copy(update={"learning_rate": 1e30, "patience": 2}))
    if state.best_weights is not None:  # the first epoch may still be finite
        state = replace(state, best_weights=None)
    with pytest.raises(DataError, match=r"never finite.*learning_rate"):
        best_router(state)


def test_the_rate_warms_up_and_falls_to_zero() -> None:
    rates = [learning_rate(step, 1000, 2.0) for step in range(1001)]
    assert rates[0] == pytest.approx(2.0 / 50)
    assert max(rates) == rates[50] == 2.0
    assert rates[1000] == pytest.approx(0.0, abs=1e-12)
    assert all(a >= b for a, b in pairwise(rates[50:]))
    assert learning_rate(0, 1, 2.0) == 2.0
