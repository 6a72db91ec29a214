"""What a run tells the outside while it goes on: the `Tracker` protocol and the names of metrics.

Fed by the driver of a job alone, never by its workers; implemented by `NullTracker` and, behind
`tracking_backlog.BufferedTracker`, by MLflow (`mlflow_tracker`). The shape is one experiment with one run for each
round: what is logged between `start_round` and `end_round` belongs to the round, everything else to the experiment.
A tracker never raises and never waits for long; a run does not depend on it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from citer_ray.config import CiterConfig
from citer_ray.redaction import without_credentials

Status = Literal["finished", "failed", "killed"]

CHAMPION = "champion"  # alias of the registered router of the best round
FRONTIER = "frontier"  # prefix of the metrics of `log_curve`

TRAIN_LOSS = "train/loss"
VALIDATION_LOSS = "validation/loss"
VALIDATION_AREA = "validation/area"
LABELS_MEAN = "labels/mean"
LABELS_FLIPS = "labels/flips"
LABELS_ROLLOUTS = "labels/rollouts"
LABELS_TOKENS_PER_SECOND = "labels/tokens_per_second"
EVAL_ACCURACY = "eval/accuracy"
EVAL_LLM_SHARE = "eval/llm_share"
EVAL_AREA = "eval/area"

# MLflow's limits (6000 and 250), which other trackers share or exceed.
MAX_PARAM_LENGTH = 6000
MAX_KEY_LENGTH = 250
# `log_curve` puts a point's LLM share on the step axis, in hundredths of a per cent.
STEPS_PER_SHARE = 10_000


class Tracker(Protocol):
    """Where a run's parameters, metrics and artifacts go."""

    def start_experiment(self, config: CiterConfig) -> None:
        """Begin, or go on with, the experiment of this output folder."""
        ...

    def start_round(self, round_number: int, params: Mapping[str, object]) -> None:
        """Begin, or go on with, a round; nested params are flattened to dotted keys."""
        ...

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers. Without a step they describe the round as a whole, and the experiment shows them by round."""
        ...

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Log a file or a folder, under `folder`. It must stay where it is until the run ends."""
        ...

    def log_curve(self, name: str, points: Sequence[Mapping[str, float]]) -> None:
        """Log points as `name/field` metrics; the step is `llm_share` in units of 1 / `STEPS_PER_SHARE`.

        Args:
            name: prefix of the metrics, such as `FRONTIER`.
            points: each has `llm_share` and other numbers, such as `accuracy`, `gigabytes`, `threshold`.
        """
        ...

    def log_dataset(self, digest: str, source: str, num_examples: int, context: str = "collect") -> None:
        """Log which data a round, or the experiment, used."""
        ...

    def register_router(self, folder: Path, round_number: int) -> str | None:
        """Put a round's router into the registry.

        Returns:
            Its version, or None while there is no registry to reach. The same router gets the same version.
        """
        ...

    def promote(self, round_number: int, alias: str = CHAMPION) -> None:
        """Give the alias to the last router that was registered for a round."""
        ...

    def end_round(self, status: Status = "finished") -> None:
        """End the current round."""
        ...

    def close(self, status: Status | None = None) -> None:
        """End the experiment; None means failed if a round is open, else finished. Safe to call twice."""
        ...


class NullTracker:
    """Tracks nothing."""

    def start_experiment(self, config: CiterConfig) -> None:
        """See `Tracker`."""

    def start_round(self, round_number: int, params: Mapping[str, object]) -> None:
        """See `Tracker`."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """See `Tracker`."""

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """See `Tracker`."""

    def log_curve(self, name: str, points: Sequence[Mapping[str, float]]) -> None:
        """See `Tracker`."""

    def log_dataset(self, digest: str, source: str, num_examples: int, context: str = "collect") -> None:
        """See `Tracker`."""

    def register_router(self, folder: Path, round_number: int) -> str | None:
        """See `Tracker`."""
        return None

    def promote(self, round_number: int, alias: str = CHAMPION) -> None:
        """See `Tracker`."""

    def end_round(self, status: Status = "finished") -> None:
        """See `Tracker`."""

    def close(self, status: Status | None = None) -> None:
        """See `Tracker`."""


def flatten_params(params: Mapping[str, object]) -> dict[str, str]:
    """Nested parameters as dotted keys and short strings.

    Lists are JSON. A value beyond `MAX_PARAM_LENGTH` is cut and ends with a digest of the whole, so that two long
    values that begin alike can still be told apart; the complete configuration is in `run.yaml`. Passwords in URLs
    are left out.
    """
    return {
        _fit(key, MAX_KEY_LENGTH): _fit(without_credentials(_text(value)), MAX_PARAM_LENGTH)
        for key, value in _leaves(params, "")
    }


def curve_metrics(name: str, points: Sequence[Mapping[str, float]]) -> list[tuple[str, float, int]]:
    """`log_curve`'s metrics as (key, value, step), in order of LLM share."""
    ordered = sorted(points, key=lambda point: point["llm_share"])
    return [
        (f"{name}/{field}", float(value), round(point["llm_share"] * STEPS_PER_SHARE))
        for point in ordered
        for field, value in point.items()
    ]


def _leaves(params: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _fit(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    tail = f"... sha256:{digest}"
    return text[: limit - len(tail)] + tail
