"""A tracker whose backend may be away: what cannot be sent now is kept in a file and sent later, in order.

Fed by the driver through the `Tracker` protocol; feeds a `Backend` (MLflow) with small self-contained operations that
name rounds instead of the backend's ids, so that they can be sent by a later process as well. Each attempt that fails
costs its time-out once; attempts then get rarer, so that a server that stays away costs a run next to nothing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from citer_ray.config import CiterConfig
from citer_ray.errors import DataError, RetryableError
from citer_ray.file_replacement import replacing
from citer_ray.storage import absolute, is_remote, make_folder, storage_path
from citer_ray.tracking import CHAMPION, Status, curve_metrics, flatten_params

logger = logging.getLogger(__name__)

BACKLOG_JSONL = "tracking_backlog.jsonl"
_FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 600.0


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing to tell the backend.

    Attributes:
        kind: `experiment`, `round`, `metrics`, `artifact`, `dataset`, `router`, `promote` or `end`.
        round: the round it belongs to; None is the experiment itself.
        at_ms: when it happened, in milliseconds since the epoch; sending it twice has the effect of once.
        arguments: JSON values.
    """

    kind: str
    round: int | None
    at_ms: int
    arguments: dict[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """Carries out operations; each must be safe to repeat."""

    @property
    def description(self) -> str:
        """What and where it is, for messages; no credentials."""
        ...

    def apply(self, operation: Operation) -> str | None:
        """Carry out one operation; `router` returns the version.

        Raises:
            RetryableError: the backend is away; the operation may succeed later.
            Exception: the operation itself is refused and will never succeed.
        """
        ...


class BufferedTracker:
    """See the module's docstring and `tracking.Tracker`.

    Args:
        backend: where operations go.
        output_dir: the run's folder; the backlog is kept in it, and replayed from it by a later process.
        clock: seconds that never go back.
    """

    def __init__(self, backend: Backend, output_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._path = output_dir / BACKLOG_JSONL
        self._clock = clock
        self._lock = threading.RLock()
        self._pending = deque(_read(self._path))
        self._pause_s = _FIRST_PAUSE_S
        self._retry_at = 0.0
        self._away = False
        self._refused: set[str] = set()
        self._round: int | None = None
        self._used = False

    def start_experiment(self, config: CiterConfig) -> None:
        """See `Tracker`."""
        self._round = None
        self._do("experiment", params=flatten_params(config.model_dump(mode="json")))

    def start_round(self, round_number: int, params: Mapping[str, object]) -> None:
        """See `Tracker`."""
        self._round = round_number
        self._do("round", params=flatten_params(params))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """See `Tracker`."""
        values = [(key, float(value), step or 0) for key, value in metrics.items()]
        self._do("metrics", values=values, by_round=step is None)

    def log_curve(self, name: str, points: Sequence[Mapping[str, float]]) -> None:
        """See `Tracker`."""
        self._do("metrics", values=curve_metrics(name, points), by_round=False)

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """See `Tracker`."""
        self._do("artifact", path=str(absolute(storage_path(path))), folder=folder)

    def log_dataset(self, digest: str, source: str, num_examples: int, context: str = "collect") -> None:
        """See `Tracker`."""
        self._do("dataset", digest=digest, source=source, num_examples=num_examples, context=context)

    def register_router(self, folder: Path, round_number: int) -> str | None:
        """See `Tracker`."""
        return self._do("router", at_round=round_number, folder=str(absolute(storage_path(folder))))

    def promote(self, round_number: int, alias: str = CHAMPION) -> None:
        """See `Tracker`."""
        self._do("promote", at_round=round_number, alias=alias)

    def end_round(self, status: Status = "finished") -> None:
        """See `Tracker`."""
        if self._round is not None:
            self._do("end", status=status)
            self._round = None

    def close(self, status: Status | None = None) -> None:
        """See `Tracker`. Makes one last attempt to send the backlog, however short the pause so far."""
        with self._lock:
            if not self._used:
                return
            cut_short = self._round is not None
            self.end_round(status or "failed")
            self._retry_at = self._clock()
            self._do("end", status=status or ("failed" if cut_short else "finished"))
            self._used = False
            if self._pending:
                logger.warning(
                    "%d tracked entries could not be sent to %s and stay in %s; run the same command again when "
                    "the server is back to send them",
                    len(self._pending),
                    self._backend.description,
                    self._path,
                )

    def _do(self, kind: str, *, at_round: int | None = None, **arguments: Any) -> str | None:
        with self._lock:
            self._used = True
            number = self._round if at_round is None else at_round
            operation = Operation(kind, number, time.time_ns() // 1_000_000, arguments)
            if self._pending and not self._replay():
                self._keep(operation)
                return None
            try:
                return self._send(operation)
            except RetryableError as error:
                self._lost(error)
                self._keep(operation)
                return None

    def _send(self, operation: Operation) -> str | None:
        """Apply an operation; one that is refused is said and dropped, since a run outlives its tracking.

        Raises:
            RetryableError: the backend is away.
        """
        try:
            return self._backend.apply(operation)
        except RetryableError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if reason not in self._refused:  # the same fault comes with every operation of its kind
                self._refused.add(reason)
                logger.warning(
                    "%s refused %s and it is left out: %s", self._backend.description, operation.kind, reason
                )
                logger.debug("refused: %s", operation, exc_info=True)
            return None

    def _replay(self) -> bool:
        """Send what is pending, oldest first, unless it was tried a moment ago; True if nothing is left."""
        if self._clock() < self._retry_at:
            return False
        total = len(self._pending)
        try:
            while self._pending:
                self._send(self._pending[0])
                self._pending.popleft()
        except RetryableError as error:
            self._lost(error)
            return False
        finally:
            if len(self._pending) < total:
                self._save()
        logger.info("%s is back: %d entries were sent", self._backend.description, total)
        self._away, self._pause_s = False, _FIRST_PAUSE_S
        return True

    def _lost(self, error: RetryableError) -> None:
        if not self._away:
            logger.warning(
                "%s cannot be reached (%s). The run goes on; what it tracks is kept in %s and sent when the server "
                "is back",
                self._backend.description,
                error,
                self._path,
            )
        self._away = True
        self._retry_at = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _keep(self, operation: Operation) -> None:
        self._pending.append(operation)
        if is_remote(self._path):  # nothing can be appended there
            self._save()
            return
        try:
            make_folder(self._path.parent)
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(operation), ensure_ascii=False) + "\n")
        except OSError as error:  # a full disk: what is pending still goes out if the server comes back in time
            logger.warning("the tracking backlog %s cannot be written: %s", self._path, error)

    def _save(self) -> None:
        try:
            if self._pending:
                lines = [json.dumps(asdict(operation), ensure_ascii=False) for operation in self._pending]
                with replacing(self._path) as temporary:
                    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
            else:
                self._path.unlink(missing_ok=True)
        except (OSError, DataError) as error:  # repeating what was sent does no harm
            logger.warning("the tracking backlog %s cannot be written: %s", self._path, error)


def _read(path: Path) -> list[Operation]:
    """Operations that an earlier process could not send; a line cut off by its death is left out."""
    if not path.exists():
        return []
    operations = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            operations.append(Operation(**json.loads(line)))
        except (ValueError, TypeError):
            logger.warning("a damaged line of %s is left out: %.80s", path, line)
    return operations
