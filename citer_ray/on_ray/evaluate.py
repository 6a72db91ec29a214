"""Evaluation on Ray: a pool of workers that hold both models and measure chunks of examples.

Results of a chunk are stored under a name that digests everything they depend on, so an evaluation that was cut short
goes on, and one that is repeated costs nothing. The pool outlives the rounds of an iteration: models load once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.util import ActorPool

from citer_ray.engines.build import EngineSpec
from citer_ray.evaluation import ROW_SCHEMA, Setting
from citer_ray.examples import Example
from citer_ray.file_replacement import replacing
from citer_ray.label_rows import rows_to_table
from citer_ray.label_store import LabelStore, read_part
from citer_ray.label_transport import rows_from_bytes, rows_from_table, rows_to_bytes
from citer_ray.learned import ShownResponse
from citer_ray.on_ray.evaluation_worker import Answered, EvaluationWorker, Routers
from citer_ray.on_ray.session import unwrapped_errors
from citer_ray.policy import Policy, Threshold
from citer_ray.preparation import examples_to_json
from citer_ray.progress import progress

__all__ = ["EvaluationPool", "Routers", "evaluation_pool"]

Unit = TypeVar("Unit")

_EXAMPLES_PER_UNIT = 50  # with a method's settings enough responses to fill batches, few enough to balance workers


class EvaluationPool:
    """Workers that stay for several evaluations; made by `evaluation_pool`."""

    def __init__(self, spec: EngineSpec, actors: list[Any]) -> None:
        self._spec, self._pool = spec, ActorPool(actors)

    def measure(
        self,
        name: str,
        folder: Path,
        routers: Routers,
        settings: Sequence[Setting],
        examples: Sequence[Example],
    ) -> pa.Table:
        """One row for each setting and example, from `folder` where stored.

        A unit of work is one method on a chunk of examples, stored under a digest of everything that it depends on: so
        a repeated evaluation decodes what is new alone, whichever methods it is asked for.

        Args:
            name: shown with the progress.
            folder: where results of units are kept.
            routers: routers that the settings name.
            settings: what to measure.
            examples: on what.
        """
        units = [
            _Unit(folder / f"{self._key(routers, [settings[at] for at in group], chunk)}.parquet", group, chunk)
            for group in _groups(settings)
            for chunk in _chunks(examples)
        ]
        tables = [unit.stored() for unit in units if unit.path.exists()]
        missing = [unit for unit in units if not unit.path.exists()]

        def call(actor: Any, unit: _Unit) -> Any:
            return actor.measure.remote(
                routers, [settings[at] for at in unit.settings], examples_to_json(unit.examples)
            )

        with progress(f"evaluate {name}", len(settings) * len(examples), "responses") as advance:
            advance(sum(table.num_rows for table in tables))
            for unit, table in self._map(call, missing):
                with replacing(unit.path) as temporary:
                    pq.write_table(table, temporary)
                tables.append(unit.numbered(table))
                advance(table.num_rows, tokens=int(pa.compute.sum(table["tokens"]).as_py()))
        return pa.concat_tables(tables)

    def knob_scores(
        self, routers: Routers, probes: Mapping[str, Policy], examples: Sequence[Example]
    ) -> dict[str, list[float]]:
        """Each method's own scores on the examples, decoded with its probe (`methods.Sweep`)."""

        def call(actor: Any, unit: tuple[str, list[Example]]) -> Any:
            return actor.knob_scores.remote(routers, [probes[unit[0]]], examples_to_json(unit[1]))

        found: dict[str, list[float]] = {method: [] for method in probes}
        units = [(method, chunk) for method in probes for chunk in _chunks(examples)]
        with progress("validation scores", len(probes) * len(examples), "responses") as advance:
            for (method, chunk), (scores,) in self._map(call, units):
                found[method] += scores
                advance(len(chunk))
        return found

    def timed(self, routers: Routers, settings: Sequence[Setting], examples: Sequence[Example]) -> list[dict[str, Any]]:
        """Rows of responses that are decoded alone, with their `seconds`."""

        def call(actor: Any, unit: list[int]) -> Any:
            return actor.timed.remote(routers, [settings[at] for at in unit], examples_to_json(examples))

        rows = []
        with progress("wall times", len(settings) * len(examples), "responses") as advance:
            for unit, found in self._map(call, [[at] for at in range(len(settings))]):
                rows += [{**row, "setting": unit[row["setting"]]} for row in found]
                advance(len(found))
        return rows

    def shown(self, routers: Routers, policy: Policy, examples: Sequence[Example]) -> list[ShownResponse]:
        """Responses of a policy, token by token."""

        def call(actor: Any, chunk: list[Example]) -> Any:
            return actor.shown.remote(routers, policy, examples_to_json(chunk))

        return [response for _, found in self._map(call, _chunks(examples)) for response in found]

    def answered(self, routers: Routers, examples: Sequence[Example]) -> list[Answered]:
        """How both models alone answer the examples."""

        def call(actor: Any, chunk: list[Example]) -> Any:
            return actor.answered.remote(routers, examples_to_json(chunk))

        found: list[Answered] = []
        with progress("answers of both models", len(examples), "examples") as advance:
            for chunk, answers in self._map(call, _chunks(examples)):
                found += answers
                advance(len(chunk))
        return found

    def map_rows(self, source: LabelStore, target: LabelStore, name: str, *arguments: object) -> None:
        """Write what the worker's method `name` makes of each chunk of label rows; finished chunks are left alone."""
        done = set(target.done_chunks())
        chunks = []
        for chunk in (number for number in source.done_chunks() if number not in done):
            table = read_part(source.part(chunk))
            if table.num_rows:
                chunks.append(chunk)
            else:
                target.write_chunk(chunk, table)

        def call(actor: Any, chunk: int) -> Any:
            rows = rows_from_table(read_part(source.part(chunk)))
            return getattr(actor, name).remote(rows_to_bytes(rows), *arguments)

        for chunk, data in self._map(call, chunks):
            rows = rows_from_bytes(data)
            target.write_chunk(chunk, rows_to_table(rows, rows[0].hidden.shape[1]))

    def _map(self, call: Callable[[Any, Unit], Any], units: Sequence[Unit]) -> Iterator[tuple[Unit, Any]]:
        """Results in the order of `units`, computed by all workers."""
        with unwrapped_errors():
            yield from zip(units, self._pool.map(call, list(units)), strict=True)

    def _key(self, routers: Routers, settings: Sequence[Setting], examples: Sequence[Example]) -> str:
        config = self._spec.config
        content = [
            routers.slm_fingerprint,
            {name: digest for name, digest in routers.digests().items() if name in _router_names(settings)},
            ROW_SCHEMA.names,
            [setting.key() for setting in settings],
            [example.content() for example in examples],
            config.prompt.model_dump(mode="json"),
            config.evaluate.max_new_tokens,
            config.pair.model_dump(mode="json"),
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Settings of one method (by number) on a chunk of examples, and the file of its results."""

    path: Path
    settings: list[int]
    examples: list[Example]

    def stored(self) -> pa.Table:
        return self.numbered(pq.read_table(pa.BufferReader(self.path.read_bytes()), schema=ROW_SCHEMA))

    def numbered(self, table: pa.Table) -> pa.Table:
        """The rows with the numbers of the whole evaluation's settings."""
        numbers = pa.array(self.settings, pa.int32()).take(table["setting"].combine_chunks())
        return table.set_column(table.schema.get_field_index("setting"), table.schema.field("setting"), numbers)


def _router_names(settings: Sequence[Setting]) -> set[str]:
    """Routers that the settings' policies ask."""
    scorers = (setting.policy.scorer for setting in settings if isinstance(setting.policy, Threshold))
    return {scorer.rpartition("router:")[2] for scorer in scorers if "router:" in scorer}


def _groups(settings: Sequence[Setting]) -> list[list[int]]:
    """Numbers of the settings of each method; methods of one setting form a group together."""
    by_method: dict[str, list[int]] = {}
    for number, setting in enumerate(settings):
        by_method.setdefault(setting.method, []).append(number)
    single = [numbers[0] for numbers in by_method.values() if len(numbers) == 1]
    # The longest first, so that no worker starts it last.
    several = sorted((numbers for numbers in by_method.values() if len(numbers) > 1), key=lambda one: -len(one))
    return [*([single] if single else []), *several]


def _chunks(examples: Sequence[Example]) -> list[list[Example]]:
    return [list(examples[start : start + _EXAMPLES_PER_UNIT]) for start in range(0, len(examples), _EXAMPLES_PER_UNIT)]


@contextmanager
def evaluation_pool(spec: EngineSpec) -> Iterator[EvaluationPool]:
    """Start the workers, wait until their models are loaded, and stop them at the end."""
    replicas = spec.config.evaluate.workers
    options = {
        "num_cpus": replicas.num_cpus,
        "num_gpus": replicas.num_gpus,
        "max_restarts": 3,
        "max_task_retries": 3,
    }
    worker = ray.remote(EvaluationWorker).options(**options)
    actors: list[Any] = [worker.remote(spec) for _ in range(replicas.count)]
    try:
        with unwrapped_errors():
            ray.get([actor.ready.remote() for actor in actors])
        yield EvaluationPool(spec, actors)
    finally:
        for actor in actors:
            ray.kill(actor)
