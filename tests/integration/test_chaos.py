"""Runs that are killed at random moments, and the same command again: three seeded trials of `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chaos import VICTIMS, Trial, Undisturbed, compare, draw_trials, run_until_hit

pytestmark = pytest.mark.ray
SEED = 6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed.run(tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.mark.parametrize(
    "trial",
    [
        Trial(1, "collect", "all of Ray", 0.85),
        Trial(2, "fit", "driver", 0.9),
        Trial(3, "iterate", "worker", 0.6),
    ],
    ids=lambda trial: f"{trial.command}, {trial.victim}",
)
def test_a_killed_run_ends_as_the_undisturbed_one(trial: Trial, undisturbed: Undisturbed, tmp_path: Path) -> None:
    trial = run_until_hit(trial, undisturbed, tmp_path, SEED)
    assert trial.hit is not None, "no moment had anything to kill"
    assert trial.faults == [] and trial.left == 0, trial.summary()


def test_what_was_lost_doubled_or_changed_is_found(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The comparison can fail: a run of which nothing is there."""
    assert compare("collect", undisturbed.folder, tmp_path) == ["labels of round-1 are not complete"]


def test_trials_meet_every_command_and_victim() -> None:
    trials = draw_trials(20, seed=0)
    assert len({(one.command, one.victim) for one in trials[:9]}) == 9 and len(trials) == 20
    assert all(0.1 <= one.moment <= 1 and one.victim in VICTIMS for one in trials)
    assert [one.moment for one in trials] == [one.moment for one in draw_trials(20, seed=0)]
