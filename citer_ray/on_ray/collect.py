"""Collecting labels with Ray Data: chunks of examples through pools of workers, one Parquet file for each.

A row of the data set is a chunk: its examples, and the label rows made so far. The first round passes the SLM's pool,
the LLM's pool and the pool that decides labels by rollouts; a later round starts from the first round's rows and
passes the last pool alone. Whoever finishes a chunk writes its file in one step, and a chunk is done iff its file is
there. So a killed collection goes on where it stopped, and since what shares a forward pass depends on the chunk
alone, it ends with the same labels, bit for bit. (Row-level checkpoints of Ray Data would regroup what is left.)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray.data

from citer_ray.config import Replicas
from citer_ray.engine import Engine
from citer_ray.engines.build import EngineSpec, build_engine, build_pair, freeze_startup_objects, limit_threads
from citer_ray.errors import DataError
from citer_ray.examples import Example, LoadedExamples, QuarantinedRow
from citer_ray.label_rows import LabelRow, rows_to_table
from citer_ray.label_store import LabelManifest, LabelStore, read_part
from citer_ray.label_transport import rows_from_bytes, rows_from_table, rows_to_bytes
from citer_ray.labelling import Labeller
from citer_ray.labels import Case
from citer_ray.on_ray.session import unwrapped_errors
from citer_ray.pair.models import load_tokenizer
from citer_ray.policy import AlwaysLlm, AlwaysSlm, Policy, Threshold
from citer_ray.preparation import Prepared, examples_from_json, examples_to_json, write_quarantine
from citer_ray.progress import progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CollectPlan:
    """What every worker of one collection knows.

    Attributes:
        spec: how to build engines.
        eos_token_id: ends a reference.
        round: number of the round, from 1.
        policy: the rollouts' policy.
        router: folder of the policy's router, if it has one.
        labels: folder of the finished chunks.
        previous: folder of the first round's labels, from round 2 on.
    """

    spec: EngineSpec
    eos_token_id: int
    round: int
    policy: Policy
    router: Path | None
    labels: Path
    previous: Path | None

    def labeller(self) -> Labeller:
        """The labelling of this round."""
        config = self.spec.config
        return Labeller(
            load_tokenizer(config.pair.slm),
            config.prompt,
            config.collect,
            seed=config.seed,
            eos_token_id=self.eos_token_id,
            eos_token_ids=self.spec.eos_token_ids,
            round=self.round,
            policy=self.policy,
        )

    def engines_of_rollouts(self) -> tuple[Engine | None, Engine | None]:
        """The engines that rollouts need."""
        if self.spec.config.collect.both_wrong == "slm":
            return None, None
        worker = self.spec.config.collect.rollouts
        if isinstance(self.policy, Threshold | AlwaysLlm):
            return build_pair(self.spec, router=self.router, worker=worker)
        return build_engine("slm", self.spec, router=self.router, worker=worker), None


class _Worker:
    """Base of the pools: an event loop for the engines, which live as long as the worker."""

    def __init__(self, plan: CollectPlan, replicas: Replicas) -> None:
        limit_threads(plan.spec.config, replicas)
        self._plan = plan
        self._labeller = plan.labeller()
        self._runner = asyncio.Runner()


class SlmWorker(_Worker):
    """Adds the SLM's greedy tokens and hidden states to a chunk; sets aside examples that it cannot score."""

    def __init__(self, plan: CollectPlan) -> None:
        super().__init__(plan, plan.spec.config.collect.slm)
        self._engine = build_engine("slm", plan.spec, purpose="score", worker=plan.spec.config.collect.slm)
        freeze_startup_objects()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        examples, chunk = examples_from_json(row["examples"]), int(row["chunk"])
        rows, bad = self._scored(examples, chunk)
        quarantined = "".join(one.model_dump_json() + "\n" for one in bad)
        return {**row, "rows": rows_to_bytes(rows) if rows else b"", "quarantined": quarantined}

    def _scored(self, examples: list[Example], chunk: int) -> tuple[list[LabelRow], list[QuarantinedRow]]:
        try:
            rows = self._runner.run(self._labeller.score_slm(self._engine, examples, chunk))
            rows_to_bytes(rows)  # refuses what cannot be stored, such as hidden states that are not finite
            return rows, []
        except (DataError, ValueError) as error:
            if len(examples) == 1:
                (one,) = examples
                return [], [QuarantinedRow(source=one.source, row=one.row, id=one.id, reason=str(error))]
        # One of them is bad: find it.
        parts = [self._scored([example], chunk) for example in examples]
        return [row for rows, _ in parts for row in rows], [one for _, bad in parts for one in bad]


class LlmWorker(_Worker):
    """Adds the LLM's greedy tokens and the cases to a chunk."""

    def __init__(self, plan: CollectPlan) -> None:
        super().__init__(plan, plan.spec.config.collect.llm)
        self._engine = build_engine("llm", plan.spec, purpose="score", worker=plan.spec.config.collect.llm)
        freeze_startup_objects()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if not row["rows"]:
            return row
        rows = self._runner.run(self._labeller.score_llm(self._engine, rows_from_bytes(row["rows"])))
        return {**row, "rows": rows_to_bytes(rows)}


class DecideWorker(_Worker):
    """Decides a chunk's labels, by rollouts where needed, and writes the chunk."""

    def __init__(self, plan: CollectPlan) -> None:
        super().__init__(plan, plan.spec.config.collect.rollouts)
        self._slm, self._llm = plan.engines_of_rollouts()
        self._store = LabelStore(plan.labels)
        freeze_startup_objects()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        chunk = int(row["chunk"])
        if self._plan.previous is not None:
            rows = rows_from_table(read_part(LabelStore(self._plan.previous).part(chunk)))
        else:
            rows = rows_from_bytes(row["rows"]) if row["rows"] else []
        examples = {example.id: example for example in examples_from_json(row["examples"])}
        if rows:
            rows = self._runner.run(self._labeller.decide(self._slm, self._llm, rows, examples))
        hidden_size = rows[0].hidden.shape[1] if rows else 1
        self._store.write_chunk(chunk, rows_to_table(rows, hidden_size))
        scored = 0 if self._plan.previous else sum(len(one.prompt_ids) + len(one.reference_ids) for one in rows)
        return {
            "chunk": chunk,
            "examples": len(examples),
            # Both models read every prompt and reference once.
            "tokens": 2 * scored + sum(one.rollout_tokens for one in rows),
            "quarantined": row.get("quarantined", ""),
        }


def run_collection(
    prepared: Prepared,
    spec: EngineSpec,
    examples: LoadedExamples,
    *,
    name: str,
    digest: str,
    round: int = 1,
    policy: Policy = AlwaysSlm(),  # noqa: B008 - frozen
    router: Path | None = None,
    previous: Path | None = None,
) -> LabelManifest:
    """Label all examples into the workspace's folder `name`, or finish a collection that was cut short.

    Args:
        prepared: the run.
        spec: how to build engines.
        examples: what to label, in a fixed order.
        name: name of the labels.
        digest: of everything that the labels depend on; a folder of another one is refused.
        round: number of the round, from 1.
        policy: the rollouts' policy.
        router: the policy's router.
        previous: labels of the first round, whose passes need not be repeated.

    Raises:
        DataError: the folder belongs to another configuration, or cannot be written.
    """
    store = LabelStore.open(prepared.workspace.labels(name), digest=digest)
    if store.is_complete():
        logger.info("labels %s are complete", name)
        return store.read_manifest()
    plan = CollectPlan(spec, prepared.eos_token_id, round, policy, router, store.folder, previous)
    started = time.monotonic()
    summaries = _run_chunks(plan, chunked(examples.examples, spec.config.collect.examples_per_chunk), store, name)
    bad = [
        QuarantinedRow.model_validate_json(line)
        for summary in summaries
        for line in summary["quarantined"].splitlines()
    ]
    if bad:
        write_quarantine(prepared.workspace.quarantine(f"{name}-scoring"), bad)
    manifest = summarise(
        store,
        prepared,
        digest=digest,
        data_digest=examples.digest,
        round=round,
        quarantined=len(examples.quarantined) + len(examples) - _count_rows(store),
        new_tokens=sum(int(summary["tokens"]) for summary in summaries),
        seconds=time.monotonic() - started,
    )
    store.write_manifest(manifest)
    return manifest


def chunked(examples: Sequence[Example], size: int) -> list[list[Example]]:
    """Chunks of `size` examples, in order; chunk numbers are indices."""
    return [list(examples[start : start + size]) for start in range(0, len(examples), size)]


def _run_chunks(
    plan: CollectPlan, chunks: list[list[Example]], store: LabelStore, name: str
) -> list[Mapping[str, Any]]:
    done = set(store.done_chunks())
    todo = [
        {"chunk": chunk, "examples": examples_to_json(examples)}
        for chunk, examples in enumerate(chunks)
        if chunk not in done
    ]
    total = sum(len(examples) for examples in chunks)
    summaries: list[Mapping[str, Any]] = []
    with progress(f"collect {name}", total, "examples") as advance, unwrapped_errors():
        advance(sum(len(chunks[chunk]) for chunk in done))
        if todo:
            for summary in _pipeline(plan, todo).iter_rows():
                summaries.append(summary)
                advance(int(summary["examples"]), tokens=int(summary["tokens"]))
    return summaries


def _pipeline(plan: CollectPlan, rows: list[dict[str, Any]]) -> ray.data.Dataset:
    """The pools, one after the other; a block is one chunk, so that chunks stream."""
    settings = plan.spec.config.collect
    dataset: ray.data.Dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    stages: list[tuple[type[_Worker], Replicas]] = [(DecideWorker, settings.rollouts)]
    if plan.previous is None:
        stages = [(SlmWorker, settings.slm), (LlmWorker, settings.llm), *stages]
    for worker, replicas in stages:
        dataset = dataset.map(
            worker,  # type: ignore[arg-type]
            fn_constructor_args=(plan,),
            compute=ray.data.ActorPoolStrategy(size=min(replicas.count, len(rows))),
            num_cpus=replicas.num_cpus,
            num_gpus=replicas.num_gpus,
        )
    return dataset


def _count_rows(store: LabelStore) -> int:
    return sum(table.num_rows for table in store.tables(["example_id"]))


def summarise(
    store: LabelStore,
    prepared: Prepared,
    *,
    digest: str,
    data_digest: str,
    round: int,
    quarantined: int,
    new_tokens: int,
    seconds: float,
) -> LabelManifest:
    """Count a finished label folder; see `LabelManifest` for the fields."""
    counts: Counter[str] = Counter()
    cases: Counter[int] = Counter()
    slm_labels = 0.0
    hidden_size = 1
    columns = ["prompt_ids", "reference_ids", "case", "label", "rollouts", "rollout_tokens"]
    for part in store.parts():
        table = read_part(part, columns)
        if table.num_rows == 0:
            continue
        hidden_size = int(table.schema.metadata[b"hidden_size"])
        case = table["case"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        label = table["label"].combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.float64)
        cases.update(case.tolist())
        labelled = label[~np.isnan(label)]
        slm_labels += float(labelled.sum())
        counts["labels"] += len(labelled)
        counts["examples"] += table.num_rows
        counts["positions"] += len(case)
        counts["prompt"] += len(table["prompt_ids"].combine_chunks().flatten())
        counts["rollouts"] += int(np.sum(table["rollouts"].to_numpy()))
        counts["rollout_tokens"] += int(np.sum(table["rollout_tokens"].to_numpy()))
    scored = 2 * (counts["prompt"] + counts["positions"]) if round == 1 else 0
    return LabelManifest(
        fingerprint=prepared.fingerprint,
        hidden_size=hidden_size,
        config_digest=digest,
        data_digest=data_digest,
        round=round,
        examples=counts["examples"],
        positions=counts["positions"],
        cases={case.name.lower(): cases[case] for case in Case},
        labels=counts["labels"],
        slm_labels=slm_labels,
        tokens=scored + counts["rollout_tokens"],
        tokens_per_second=new_tokens / seconds if seconds > 0 else 0.0,
        rollouts=counts["rollouts"],
        rollout_tokens=counts["rollout_tokens"],
        quarantined=quarantined,
    )
