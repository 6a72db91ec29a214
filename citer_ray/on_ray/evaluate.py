"""Evaluation on Ray: a pool of workers that hold both models and measure chunks of examples.

Results of a chunk are stored under a name that digests everything they depend on, so an evaluation that was cut short
goes on, and one that is repeated costs nothing. The pool outlives the rounds of an iteration: models load once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.util import ActorPool

from citer_ray.cost import ModelCost, PairCost, RouterCost
from citer_ray.engines.build import EngineSpec, build_engine, limit_threads
from citer_ray.engines.hf import TransformersEngine
from citer_ray.engines.scorers import RouterScorer
from citer_ray.evaluation import ROW_SCHEMA, Decoder, Setting
from citer_ray.examples import Example
from citer_ray.file_replacement import replacing
from citer_ray.on_ray.session import unwrapped_errors
from citer_ray.pair.models import load_hf_config, load_tokenizer
from citer_ray.preparation import examples_from_json, examples_to_json
from citer_ray.progress import progress
from citer_ray.router_artifact import load_router, read_metadata

Unit = TypeVar("Unit")

_EXAMPLES_PER_UNIT = 40  # enough responses to fill batches, few enough to balance workers and to lose little


@dataclass(frozen=True, slots=True)
class Routers:
    """Routers by method name, and the SLM that they must belong to."""

    folders: Mapping[str, Path]
    slm_fingerprint: str

    def digests(self) -> dict[str, str | None]:
        """What each router's file contains, in short."""
        return {name: read_metadata(folder).weights_sha256 for name, folder in sorted(self.folders.items())}


class EvaluationWorker:
    """Both models of the pair in one process. Routers are loaded when a call names them."""

    def __init__(self, spec: EngineSpec) -> None:
        # Several routers and the untrained scorers share one engine here, which vLLM's cannot do yet.
        engine = spec.config.engine.model_copy(update={"kind": "transformers"})
        spec = replace(spec, config=spec.config.model_copy(update={"engine": engine}))
        limit_threads(spec.config, spec.config.evaluate.workers)
        self._spec = spec
        self._runner = asyncio.Runner()
        self._tokenizer = load_tokenizer(spec.config.pair.slm)
        self._slm, self._llm = build_engine("slm", spec), build_engine("llm", spec)
        self._loaded: dict[str, str | None] = {}

    def ready(self) -> bool:
        """True once the models are loaded."""
        return True

    def measure(self, routers: Routers, settings: Sequence[Setting], examples: str) -> pa.Table:
        """Rows of `Decoder.measure`."""
        decoder = self._decoder(routers)
        return self._runner.run(decoder.measure(settings, examples_from_json(examples)))

    def slm_scores(self, routers: Routers, scorers: Sequence[str], examples: str) -> dict[str, list[float]]:
        """Scores of `Decoder.slm_scores`."""
        return self._runner.run(self._decoder(routers).slm_scores(scorers, examples_from_json(examples)))

    def _decoder(self, routers: Routers) -> Decoder:
        config = self._spec.config
        assert isinstance(self._slm, TransformersEngine)
        for name, digest in routers.digests().items():
            if self._loaded.get(name) != digest:
                router, _ = load_router(routers.folders[name], slm_fingerprint=routers.slm_fingerprint)
                self._slm.set_scorer(f"router:{name}", RouterScorer(router))
                self._loaded[name] = digest
        return Decoder(
            self._slm,
            self._llm,
            self._tokenizer,
            config.prompt,
            self._spec.eos_token_ids,
            pair_cost(self._spec),
            config.evaluate.max_new_tokens,
            config.evaluate.responses_in_flight,
        )


def pair_cost(spec: EngineSpec) -> PairCost:
    """The cost model of the pair and of a router of the configured shape."""
    slm, llm = (load_hf_config(spec.model(role)) for role in ("slm", "llm"))
    shape = spec.config.router
    router = RouterCost.from_widths(int(slm.hidden_size), shape.widths, batch_norm=shape.batch_norm)
    return PairCost(ModelCost.from_config(slm), ModelCost.from_config(llm), router)


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

        Args:
            name: shown with the progress.
            folder: where results of chunks are kept.
            routers: routers that the settings name.
            settings: what to measure.
            examples: on what.
        """
        missing = []
        tables = []
        for chunk in _units(examples):
            path = folder / f"{self._key(routers, settings, chunk)}.parquet"
            if path.exists():
                tables.append(pq.read_table(path, schema=ROW_SCHEMA))
            else:
                missing.append((path, chunk))

        def call(actor: Any, unit: tuple[Path, list[Example]]) -> Any:
            return actor.measure.remote(routers, list(settings), examples_to_json(unit[1]))

        done = len(settings) * (len(examples) - sum(len(chunk) for _, chunk in missing))
        with progress(f"evaluate {name}", len(settings) * len(examples), "responses") as advance:
            advance(done)
            for (path, _), table in self._map(call, missing):
                with replacing(path) as temporary:
                    pq.write_table(table, temporary)
                tables.append(table)
                advance(table.num_rows, tokens=int(pa.compute.sum(table["tokens"]).as_py()))
        return pa.concat_tables(tables)

    def slm_scores(
        self, routers: Routers, scorers: Sequence[str], examples: Sequence[Example]
    ) -> dict[str, list[float]]:
        """Each scorer's values on the SLM's own responses to the examples."""

        def call(actor: Any, chunk: list[Example]) -> Any:
            return actor.slm_scores.remote(routers, list(scorers), examples_to_json(chunk))

        found: dict[str, list[float]] = {scorer: [] for scorer in scorers}
        for _, scores in self._map(call, _units(examples)):
            for scorer, values in scores.items():
                found[scorer] += values
        return found

    def _map(self, call: Callable[[Any, Unit], Any], units: Sequence[Unit]) -> Iterator[tuple[Unit, Any]]:
        """Results in the order of `units`, computed by all workers."""
        with unwrapped_errors():
            yield from zip(units, self._pool.map(call, list(units)), strict=True)

    def _key(self, routers: Routers, settings: Sequence[Setting], examples: Sequence[Example]) -> str:
        config = self._spec.config
        content = [
            routers.slm_fingerprint,
            routers.digests(),
            [setting.key() for setting in settings],
            [example.content() for example in examples],
            config.prompt.model_dump(mode="json"),
            config.evaluate.max_new_tokens,
            config.pair.model_dump(mode="json"),
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _units(examples: Sequence[Example]) -> list[list[Example]]:
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
