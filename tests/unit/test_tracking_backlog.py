"""A backend that is away, comes back, refuses, and a process that dies in between. No MLflow here."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

import pytest

from citer_ray.config import CiterConfig
from citer_ray.errors import RetryableError
from citer_ray.tracking_backlog import BACKLOG_JSONL, BufferedTracker, Operation


class FakeBackend:
    """Records operations; `away` and `refuses` make it fail."""

    description = "the fake at http://fake"

    def __init__(self) -> None:
        self.applied: list[Operation] = []
        self.attempts = 0
        self.away = False
        self.refuses: set[str] = set()

    def apply(self, operation: Operation) -> str | None:
        self.attempts += 1
        if self.away:
            raise RetryableError("ConnectionError: no route")
        if operation.kind in self.refuses:
            raise ValueError(f"bad {operation.kind}")
        self.applied.append(operation)
        return "7" if operation.kind == "router" else None

    @property
    def kinds(self) -> list[str]:
        return [operation.kind for operation in self.applied]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tracker(backend: FakeBackend, clock: Clock, tmp_path: Path) -> BufferedTracker:
    return BufferedTracker(backend, tmp_path, clock=clock)


def kept(folder: Path) -> list[Operation]:
    text = (folder / BACKLOG_JSONL).read_text(encoding="utf-8")
    return [Operation(**json.loads(line)) for line in text.splitlines()]


def config(folder: Path) -> CiterConfig:
    values = {"pair": {"slm": {"path": "a"}, "llm": {"path": "b"}}, "data": {"collect": "c"}}
    return CiterConfig.model_validate({"name": "demo", "output_dir": str(folder), **values})


def test_operations_carry_their_round(tracker: BufferedTracker, backend: FakeBackend, tmp_path: Path) -> None:
    tracker.start_experiment(config(tmp_path))
    tracker.start_round(2, {"threshold": 0.9})
    tracker.log_metrics({"train/loss": 0.5}, step=3)
    tracker.log_metrics({"eval/area": 0.8})
    tracker.log_curve("frontier", [{"llm_share": 0.05, "accuracy": 0.9}])
    assert tracker.register_router(tmp_path / "router", 2) == "7"
    tracker.end_round()
    tracker.log_artifact(tmp_path / "report.json")
    tracker.promote(2)
    tracker.close()
    assert [(o.kind, o.round) for o in backend.applied] == [
        ("experiment", None),
        ("round", 2),
        ("metrics", 2),
        ("metrics", 2),
        ("metrics", 2),
        ("router", 2),
        ("end", 2),
        ("artifact", None),
        ("promote", 2),
        ("end", None),
    ]
    assert backend.applied[0].arguments["params"]["pair.slm.path"] == "a"
    assert backend.applied[2].arguments == {"values": [("train/loss", 0.5, 3)], "by_round": False}
    assert backend.applied[3].arguments == {"values": [("eval/area", 0.8, 0)], "by_round": True}
    assert backend.applied[8].arguments == {"alias": "champion"}
    assert backend.applied[9].arguments == {"status": "finished"}
    assert not (tmp_path / BACKLOG_JSONL).exists()


def test_operations_are_plain_json(tracker: BufferedTracker, backend: FakeBackend, tmp_path: Path) -> None:
    tracker.start_experiment(config(tmp_path))
    tracker.log_curve("frontier", [{"llm_share": 0.05, "accuracy": 0.9}])
    tracker.log_artifact(tmp_path / "a", "b")
    for operation in backend.applied:
        assert json.loads(json.dumps(asdict(operation)))["kind"] == operation.kind


def test_lost_backend_is_said_once_and_everything_is_kept(
    tracker: BufferedTracker, backend: FakeBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker.start_round(1, {})
    backend.away = True
    for step in range(5):
        tracker.log_metrics({"train/loss": 1.0}, step)
    assert tracker.register_router(tmp_path, 1) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    message = caplog.records[0].getMessage()
    assert "the fake at http://fake cannot be reached (ConnectionError: no route). The run goes on" in message
    assert str(tmp_path / BACKLOG_JSONL) in message
    assert [operation.kind for operation in kept(tmp_path)] == ["metrics"] * 5 + ["router"]
    assert backend.attempts == 2  # one that worked and one that failed: the rest did not wait for anything


def test_backlog_is_sent_in_order_when_the_backend_is_back(
    tracker: BufferedTracker, backend: FakeBackend, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    backend.away = True
    tracker.start_round(1, {})
    tracker.log_metrics({"a": 1.0}, 0)
    backend.away = False
    tracker.log_metrics({"a": 2.0}, 1)
    assert backend.applied == []  # too early to try again
    clock.now += 31
    tracker.log_metrics({"a": 3.0}, 2)
    assert backend.kinds == ["round", "metrics", "metrics", "metrics"]
    assert [operation.arguments["values"][0][2] for operation in backend.applied[1:]] == [0, 1, 2]
    assert not (tmp_path / BACKLOG_JSONL).exists()
    assert "is back: 3 entries were sent" in caplog.records[-1].getMessage()


def test_attempts_get_rarer(tracker: BufferedTracker, backend: FakeBackend, clock: Clock) -> None:
    backend.away = True
    for second in range(3600):
        clock.now = float(second)
        tracker.log_metrics({"a": 0.0}, second)
    # At 0, then after pauses of 30, 60, 120, 240, 480 and 600 s.
    assert backend.attempts == 1 + 5 + (3600 - 930) // 600


def test_outage_in_the_middle_of_sending_keeps_the_rest(
    tracker: BufferedTracker, backend: FakeBackend, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.away = True
    for step in range(4):
        tracker.log_metrics({"a": 0.0}, step)
    backend.away = False
    apply = backend.apply

    def fail_on_third(operation: Operation) -> str | None:
        backend.away = len(backend.applied) == 2
        return apply(operation)

    monkeypatch.setattr(backend, "apply", fail_on_third)
    clock.now += 31
    tracker.log_metrics({"a": 0.0}, 4)
    steps = [operation.arguments["values"][0][2] for operation in kept(tmp_path)]
    assert (len(backend.applied), steps) == (2, [2, 3, 4])


def test_next_process_sends_what_the_last_one_could_not(
    tracker: BufferedTracker, backend: FakeBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend.away = True
    tracker.start_round(1, {"x": 1})
    tracker.end_round()
    tracker.close()
    assert "3 tracked entries could not be sent to the fake" in caplog.records[-1].getMessage()
    with (tmp_path / BACKLOG_JSONL).open("a", encoding="utf-8") as stream:
        stream.write('{"kind": "metr')  # killed while writing
    later = FakeBackend()
    resumed = BufferedTracker(later, tmp_path)
    assert "damaged line" in caplog.records[-1].getMessage()
    resumed.start_round(2, {})
    assert [(operation.kind, operation.round) for operation in later.applied] == [
        ("round", 1),
        ("end", 1),
        ("end", None),
        ("round", 2),
    ]
    assert later.applied[0].arguments == {"params": {"x": "1"}}
    assert not (tmp_path / BACKLOG_JSONL).exists()


def test_close_makes_a_last_attempt(tracker: BufferedTracker, backend: FakeBackend, tmp_path: Path) -> None:
    backend.away = True
    tracker.log_metrics({"a": 1.0})
    backend.away = False
    tracker.close()
    assert backend.kinds == ["metrics", "end"]
    assert not (tmp_path / BACKLOG_JSONL).exists()


@pytest.mark.parametrize("open_round", [True, False])
def test_close_in_an_open_round_means_failed(tracker: BufferedTracker, backend: FakeBackend, open_round: bool) -> None:
    tracker.start_round(1, {})
    if not open_round:
        tracker.end_round()
    tracker.close()
    tracker.close()
    ends = [(o.round, o.arguments["status"]) for o in backend.applied if o.kind == "end"]
    assert ends == ([(1, "failed"), (None, "failed")] if open_round else [(1, "finished"), (None, "finished")])


def test_close_may_say_how_it_ended(tracker: BufferedTracker, backend: FakeBackend) -> None:
    tracker.start_round(1, {})
    tracker.close("killed")
    assert [o.arguments["status"] for o in backend.applied if o.kind == "end"] == ["killed", "killed"]


def test_unused_tracker_touches_nothing(tracker: BufferedTracker, backend: FakeBackend, tmp_path: Path) -> None:
    tracker.end_round()
    tracker.close()
    assert backend.attempts == 0
    assert list(tmp_path.iterdir()) == []


def test_refused_operation_is_said_once_and_dropped(
    tracker: BufferedTracker, backend: FakeBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend.refuses = {"metrics"}
    for step in range(3):
        tracker.log_metrics({"a": 1.0}, step)
    tracker.promote(1)
    assert backend.kinds == ["promote"]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["the fake at http://fake refused metrics and it is left out: ValueError: bad metrics"]
    assert not (tmp_path / BACKLOG_JSONL).exists()


def test_refused_operation_does_not_block_the_backlog(
    tracker: BufferedTracker, backend: FakeBackend, clock: Clock, tmp_path: Path
) -> None:
    backend.away = True
    tracker.log_metrics({"a": 1.0})
    tracker.promote(1)
    backend.away, backend.refuses = False, {"metrics"}
    clock.now += 31
    tracker.end_round()
    tracker.promote(2)
    assert [(o.kind, o.round) for o in backend.applied] == [("promote", 1), ("promote", 2)]
    assert not (tmp_path / BACKLOG_JSONL).exists()


def test_full_disk_does_not_stop_the_run(
    backend: FakeBackend, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    tracker = BufferedTracker(backend, blocked / "below", clock=clock)
    backend.away = True
    tracker.log_metrics({"a": 1.0})
    assert "cannot be written" in caplog.records[-1].getMessage()
    backend.away = False
    clock.now += 31
    tracker.log_metrics({"a": 2.0})
    assert backend.kinds == ["metrics", "metrics"]
