"""The worker of an evaluation: both models of the pair in one process, and everything that is asked of them.

`on_ray/evaluate.py` keeps a pool of these. Methods are plain calls with plain results; routers are loaded when a call
names them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from citer_ray.answers import grade
from citer_ray.baseline_labels import marginal_labels
from citer_ray.config import RouterConfig
from citer_ray.cost import ModelCost, PairCost, RouterCost
from citer_ray.decoding import Trace
from citer_ray.engine import TokenSequence
from citer_ray.engines.build import EngineSpec, build_evaluated_pair, freeze_startup_objects, limit_threads
from citer_ray.evaluation import Decoder, Setting
from citer_ray.label_rows import LabelRow
from citer_ray.label_transport import rows_from_bytes, rows_to_bytes
from citer_ray.labelling import response_text
from citer_ray.learned import ShownResponse
from citer_ray.methods import knob_scores
from citer_ray.pair.models import load_hf_config, load_tokenizer
from citer_ray.policy import AlwaysLlm, AlwaysSlm, Policy
from citer_ray.preparation import examples_from_json
from citer_ray.router_artifact import load_router, read_metadata


@dataclass(frozen=True, slots=True)
class Routers:
    """Routers by method name, and the SLM that they must belong to."""

    folders: Mapping[str, Path]
    slm_fingerprint: str

    def digests(self) -> dict[str, str | None]:
        """What each router's file contains, in short."""
        return {name: read_metadata(folder).weights_sha256 for name, folder in sorted(self.folders.items())}


@dataclass(frozen=True, slots=True)
class Answered:
    """How both models alone answer an example: the LLM's response as text, and who is right."""

    example_id: str
    llm_response: str
    slm_correct: bool
    llm_correct: bool


class EvaluationWorker:
    """See the module's docstring."""

    def __init__(self, spec: EngineSpec) -> None:
        workers = spec.config.evaluate.workers
        limit_threads(spec.config, workers)
        self._spec = spec
        self._runner = asyncio.Runner()
        self._tokenizer = load_tokenizer(spec.config.pair.slm)
        # Several routers and the untrained scorers share one SLM here, which vLLM's cannot do.
        self._slm, self._llm = build_evaluated_pair(spec, worker=workers)
        self._loaded: dict[str, str | None] = {}
        self._router_costs: dict[str, RouterCost] = {}
        freeze_startup_objects()

    def ready(self) -> bool:
        """True once the models are loaded."""
        return True

    def close(self) -> None:
        """Stop the engines."""
        for engine in (self._slm, self._llm):
            self._runner.run(engine.close())
        self._runner.close()

    def measure(self, routers: Routers, settings: Sequence[Setting], examples: str) -> pa.Table:
        """Rows of `Decoder.measure`."""
        decoder = self._decoder(routers)
        return self._runner.run(decoder.measure(settings, examples_from_json(examples)))

    def knob_scores(self, routers: Routers, probes: Sequence[Policy], examples: str) -> list[list[float]]:
        """For every method's probe, its scores on the examples."""
        traces = self._runner.run(self._decoder(routers).traces(probes, examples_from_json(examples)))
        return [
            [score for trace in found for score in knob_scores(trace, probe)]
            for probe, found in zip(probes, traces, strict=True)
        ]

    def timed(self, routers: Routers, settings: Sequence[Setting], examples: str) -> list[dict[str, Any]]:
        """Rows with wall times of responses that are decoded alone; the first one of each setting warms up."""
        decoder, found = self._decoder(routers), examples_from_json(examples)
        rows = []
        for index, setting in enumerate(settings):
            self._runner.run(decoder.timed(setting, found[0]))
            rows += [{**self._runner.run(decoder.timed(setting, example)), "setting": index} for example in found]
        return rows

    def shown(self, routers: Routers, policy: Policy, examples: str) -> list[ShownResponse]:
        """Responses of a policy, token by token."""
        found = examples_from_json(examples)
        (traces,) = self._runner.run(self._decoder(routers).traces([policy], found))
        return [
            ShownResponse(
                question=example.question or example.prompt or "",
                correct=grade(self._text(trace), example).correct,
                tokens=[self._tokenizer.decode([token]) for token in trace.token_ids],
                by_llm=[writer.value == "llm" for writer in trace.writers],
                scores=list(trace.scores),
            )
            for example, trace in zip(found, traces, strict=True)
        ]

    def answered(self, routers: Routers, examples: str) -> list[Answered]:
        """How both models alone answer the examples."""
        found = examples_from_json(examples)
        slm, llm = self._runner.run(self._decoder(routers).traces([AlwaysSlm(), AlwaysLlm()], found))
        return [
            Answered(
                example_id=example.id,
                llm_response=self._text(theirs),
                slm_correct=grade(self._text(ours), example).correct,
                llm_correct=grade(self._text(theirs), example).correct,
            )
            for example, ours, theirs in zip(found, slm, llm, strict=True)
        ]

    def marginal(self, rows: bytes) -> bytes:
        """Label rows with Co-LLM's labels: who gives the reference token the larger probability."""
        found = rows_from_bytes(rows)
        sequences = [TokenSequence(row.prompt_ids, row.reference_ids) for row in found]
        slm = self._runner.run(self._slm.score(sequences))
        llm = self._runner.run(self._llm.score(sequences))
        return rows_to_bytes(
            [
                replace(row, label=marginal_labels(ours.reference_logprob, theirs.reference_logprob), rollouts=0)
                for row, ours, theirs in zip(found, slm, llm, strict=True)
            ]
        )

    def features(self, rows: bytes, router: RouterConfig) -> bytes:
        """Label rows whose hidden states are replaced by what a router of this shape reads."""
        found = rows_from_bytes(rows)
        read = self._slm.features(np.concatenate([row.hidden for row in found]), router)
        ends = np.cumsum([len(row.hidden) for row in found])[:-1]
        parts: list[LabelRow] = [
            replace(row, hidden=part) for row, part in zip(found, np.split(read, ends), strict=True)
        ]
        return rows_to_bytes(parts)

    def _text(self, trace: Trace) -> str:
        return response_text(trace.token_ids, self._tokenizer, self._spec.eos_token_ids)

    def _decoder(self, routers: Routers) -> Decoder:
        config = self._spec.config
        for name, digest in routers.digests().items():
            if self._loaded.get(name) != digest:
                router, metadata = load_router(routers.folders[name], slm_fingerprint=routers.slm_fingerprint)
                self._slm.set_scorer(f"router:{name}", self._slm.router_scorer(router))
                self._router_costs[f"router:{name}"] = router_cost(metadata.architecture, metadata.hidden_size)
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
            dict(self._router_costs),
        )


def router_cost(shape: RouterConfig, input_size: int) -> RouterCost:
    """The price of one decision of a router."""
    return RouterCost.from_widths(input_size, shape.widths, batch_norm=shape.batch_norm)


def pair_cost(spec: EngineSpec) -> PairCost:
    """The cost model of the pair and of a router of the configured shape."""
    slm, llm = (load_hf_config(spec.model(role)) for role in ("slm", "llm"))
    router = router_cost(spec.config.router, int(slm.hidden_size))
    return PairCost(ModelCost.from_config(slm), ModelCost.from_config(llm), router)
