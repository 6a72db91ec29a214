"""Routers of the methods that CITER is compared with: their labels, then the same fit as CITER's.

RouteLLM-style and Co-LLM take the references and hidden states of round 1's labels; R2R-style collects its own on the
LLM's responses (`baseline_labels.py` has the rules). Each stage looks for its finished output first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from citer_ray.baseline_labels import query_label, query_row, with_reference
from citer_ray.config import BaselineConfig, FitConfig
from citer_ray.config_loading import config_digest
from citer_ray.errors import DataError
from citer_ray.examples import Example, LoadedExamples
from citer_ray.file_replacement import replacing
from citer_ray.label_rows import LabelRow, rows_to_table
from citer_ray.label_store import LabelManifest, LabelStore, read_part
from citer_ray.label_transport import rows_from_table
from citer_ray.method_names import COLLM, R2R, ROUTELLM
from citer_ray.on_ray.collect import run_collection
from citer_ray.on_ray.evaluate import EvaluationPool, Routers
from citer_ray.on_ray.evaluation_worker import Answered
from citer_ray.on_ray.fit_stage import PoolMaker, derive_labels, fitted_router
from citer_ray.policy import AlwaysLlm
from citer_ray.preparation import Prepared, engine_spec
from citer_ray.workspace import round_name

# What labels of the collection depend on, whatever they label.
_SECTIONS = ("seed", "prompt", "collect")


class Baselines:
    """Fits the routers of other methods for one run.

    Args:
        prepared: the run.
        pool: its workers.
        pool_maker: the same, for stages that ask for workers only if they need them.
        examples: of `data.collect`.
    """

    def __init__(
        self, prepared: Prepared, pool: EvaluationPool, pool_maker: PoolMaker, examples: LoadedExamples
    ) -> None:
        self._prepared, self._pool, self._pool_maker = prepared, pool, pool_maker
        self._settings = prepared.config.baselines
        self._examples = list(examples.examples[: self._settings.examples])
        self._data_digest = examples.digest

    def routers(self, methods: Sequence[str]) -> tuple[dict[str, Path], dict[str, str]]:
        """Folders of the routers of some methods, and why others have none."""
        folders: dict[str, Path] = {}
        missing: dict[str, str] = {}
        for method in methods:
            try:
                self._fit(method)
                folders[method] = self._prepared.workspace.router(method)
            except DataError as error:
                missing[method] = str(error)
        return folders, missing

    def _fit(self, method: str) -> None:
        settings: Mapping[str, BaselineConfig] = {
            ROUTELLM: self._settings.routellm,
            COLLM: self._settings.collm,
            R2R: self._settings.r2r,
        }
        {ROUTELLM: self._query_labels, COLLM: self._marginal_labels, R2R: self._divergence_labels}[method]()
        chosen = settings[method]
        own: FitConfig = self._prepared.config.fit
        fit = chosen.fit.model_copy(update={"workers": own.workers, "num_cpus": own.num_cpus, "use_gpu": own.use_gpu})
        fitted_router(self._prepared, method, chosen.router, fit, self._pool_maker)

    @cached_property
    def _answers(self) -> dict[str, Answered]:
        """Both models' own answers to the examples, kept in the workspace."""
        path = self._prepared.workspace.evaluation("collect") / f"answers-{self._digest('answers')[:12]}.json"
        if path.exists():
            return {one["example_id"]: Answered(**one) for one in json.loads(path.read_text(encoding="utf-8"))}
        answers = self._pool.answered(Routers({}, self._prepared.fingerprint.slm), self._examples)
        fields = Answered.__slots__
        content = json.dumps([{name: getattr(one, name) for name in fields} for one in answers])
        with replacing(path) as temporary:
            temporary.write_text(content, encoding="utf-8")
        return {one.example_id: one for one in answers}

    def _query_labels(self) -> LabelManifest:
        def label(row: LabelRow) -> LabelRow:
            answer = self._answers[row.example_id]
            return query_row(row, query_label(slm_correct=answer.slm_correct, llm_correct=answer.llm_correct))

        def write(source: LabelStore, target: LabelStore) -> None:
            for chunk in set(source.done_chunks()) - set(target.done_chunks()):
                rows = [
                    row for row in rows_from_table(read_part(source.part(chunk))) if row.example_id in self._answers
                ]
                if rows:
                    labelled = [label(row) for row in rows]
                    target.write_chunk(chunk, rows_to_table(labelled, labelled[0].hidden.shape[1]))

        return self._derived(ROUTELLM, write)

    def _marginal_labels(self) -> LabelManifest:
        return self._derived(COLLM, lambda source, target: self._pool.map_rows(source, target, "marginal"))

    def _derived(self, method: str, write: Callable[[LabelStore, LabelStore], None]) -> LabelManifest:
        source = self._prepared.workspace.labels(round_name(1))
        manifest = LabelStore(source).read_manifest()  # complete, or say so now
        target = self._prepared.workspace.labels(method)
        digest = self._digest(method, manifest.digest())
        return derive_labels(self._prepared, source, target, digest, write)

    def _divergence_labels(self) -> LabelManifest:
        """R2R's: on the LLM's responses, both continuations by the LLM."""
        collect = self._prepared.config.collect.model_copy(
            update={"branches": "mismatches", "both_wrong": "rollout", "shortcut": True, "rollouts_per_state": 1}
        )
        config = self._prepared.config.model_copy(update={"collect": collect})
        prepared = replace(self._prepared, config=config)
        responses: list[Example] = [
            with_reference(example, self._answers[example.id].llm_response)
            for example in self._examples
            if self._answers[example.id].llm_response
        ]
        return run_collection(
            prepared,
            engine_spec(prepared),
            LoadedExamples(tuple(responses)),
            name=R2R,
            digest=self._digest(R2R),
            policy=AlwaysLlm(),
        )

    def _digest(self, *parts: str) -> str:
        content = [
            *parts,
            self._data_digest,
            len(self._examples),
            config_digest(self._prepared.config, _SECTIONS, exclude=("collect.thresholds",)),
            self._prepared.config.evaluate.max_new_tokens,
            self._prepared.fingerprint.model_dump(mode="json"),
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()
