"""One run, stage by stage: collect, fit, calibrate, evaluate, and the rounds that chain them.

The command line and `jobs/` call this; each stage looks for its finished output first, so that a run that was cut
short goes on at the round and stage where it stopped. Everything tracked is logged here, in the driver.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console

from citer_ray.calibration import CalibrationTable
from citer_ray.config import CiterConfig
from citer_ray.config_loading import config_digest, write_run_yaml
from citer_ray.engines.build import EngineSpec
from citer_ray.evaluation import aim_thresholds, end_settings, points, threshold_settings
from citer_ray.examples import LoadedExamples
from citer_ray.file_replacement import replacing
from citer_ray.frontier import CITER_S, LLM, SLM, Frontier, MethodCurve, Point, citer_method, citer_rounds
from citer_ray.label_store import LabelManifest, LabelStore
from citer_ray.methods import scorer_of
from citer_ray.mlflow_tracker import make_tracker
from citer_ray.on_ray.collect import run_collection, summarise
from citer_ray.on_ray.evaluate import EvaluationPool, Routers, evaluation_pool
from citer_ray.on_ray.evaluation_stage import REPORT_FILES, EvaluationStage, method_of
from citer_ray.on_ray.fit_stage import fitted_router
from citer_ray.on_ray.session import check_resources, check_shared, ray_session
from citer_ray.policy import AlwaysSlm, Policy, Threshold
from citer_ray.preparation import Prepared, engine_spec, load_purpose, prepare
from citer_ray.provenance import write_provenance
from citer_ray.relabel import count_flips, write_citer_s
from citer_ray.report_schema import Report, RoundReport
from citer_ray.report_text import claims_table, terminal_table
from citer_ray.router_artifact import RouterMetadata, load_router, read_metadata, save_router
from citer_ray.stage_tables import labels_table, router_table
from citer_ray.tracking import (
    EVAL_AREA,
    FRONTIER,
    LABELS_FLIPS,
    LABELS_MEAN,
    LABELS_ROLLOUTS,
    LABELS_TOKENS_PER_SECOND,
    TRAIN_LOSS,
    VALIDATION_AREA,
    VALIDATION_LOSS,
    Tracker,
)
from citer_ray.workspace import round_name

logger = logging.getLogger(__name__)

# What labels depend on. Pools' sizes do not change them; thresholds are part of the round's policy.
_LABEL_SECTIONS = ("seed", "prompt", "engine", "collect")
_NOT_IN_LABELS = ("collect.slm", "collect.llm", "collect.rollouts", "collect.thresholds", "engine.torch_threads")


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A router's curve on the validation examples."""

    metadata: RouterMetadata
    area: float
    points: tuple[Point, ...]


class Experiment:
    """The stages of one run; made by `Experiment.start`."""

    def __init__(self, prepared: Prepared, tracker: Tracker, stack: ExitStack) -> None:
        self.prepared, self.tracker, self._stack = prepared, tracker, stack
        self.config: CiterConfig = prepared.config
        self.workspace = prepared.workspace
        self.console = Console()

    @classmethod
    @contextmanager
    def start(cls, config: CiterConfig, argv: Sequence[str]) -> Iterator[Experiment]:
        """Check everything that is cheap to check, record the run, then start or join Ray."""
        prepared = prepare(config)
        write_run_yaml(config, prepared.workspace.root)
        write_provenance(prepared.workspace.root, config, argv, {"seed": config.seed})
        with ExitStack() as stack:
            tracker = make_tracker(config)
            stack.push(lambda kind, *_: tracker.close("failed" if kind else "finished"))
            stack.enter_context(ray_session(config.ray))
            check_resources(config)
            check_shared(prepared.workspace.root)
            yield cls(prepared, tracker, stack)

    # -- inputs ----------------------------------------------------------------------------------------------------

    @cached_property
    def spec(self) -> EngineSpec:
        """How workers build engines."""
        return engine_spec(self.prepared)

    @cached_property
    def collect_examples(self) -> LoadedExamples:
        """What is labelled."""
        return load_purpose(self.prepared, "collect")

    @cached_property
    def validation_examples(self) -> LoadedExamples:
        """Where thresholds are chosen."""
        return load_purpose(self.prepared, "validation")

    @cached_property
    def test_examples(self) -> LoadedExamples:
        """What is reported."""
        return load_purpose(self.prepared, "test")

    @contextmanager
    def pool(self) -> Iterator[EvaluationPool]:
        """Workers with both models. They stay until the run ends, unless they would keep GPUs from other stages."""
        if self.config.evaluate.workers.num_gpus > 0:
            with evaluation_pool(self.spec) as pool:
                yield pool
        else:
            yield self._lasting_pool

    @cached_property
    def _lasting_pool(self) -> EvaluationPool:
        return self._stack.enter_context(evaluation_pool(self.spec))

    # -- labels ----------------------------------------------------------------------------------------------------

    def collect(self, number: int, router: Path | None = None) -> LabelManifest:
        """The labels of a round."""
        if number == 1:
            return self._collect(1, AlwaysSlm(), None)
        folder = router or self.workspace.router(round_name(number - 1))
        load_router(folder, slm_fingerprint=self.prepared.fingerprint.slm)
        return self._collect(number, Threshold("router", self.rollout_threshold(number)), folder)

    def rollout_threshold(self, number: int) -> float:
        """The rollout policy's threshold in a round from 2 on."""
        thresholds = self.config.collect.thresholds
        return thresholds[min(number - 2, len(thresholds) - 1)]

    def _collect(self, number: int, policy: Policy, router: Path | None) -> LabelManifest:
        previous = None
        if number > 1:
            previous = self.workspace.labels(round_name(1))
            LabelStore(previous).read_manifest()  # complete, or say so now
        return run_collection(
            self.prepared,
            self.spec,
            self.collect_examples,
            name=round_name(number),
            digest=self._labels_digest(number, policy, router),
            round=number,
            policy=policy,
            router=router,
            previous=previous,
        )

    def _labels_digest(self, number: int, policy: Policy | None, router: Path | None) -> str:
        """Digest of everything that a label set depends on."""
        parts = [
            config_digest(self.config, _LABEL_SECTIONS, exclude=_NOT_IN_LABELS),
            self.collect_examples.digest,
            self.prepared.fingerprint.model_dump(mode="json"),
            number,
            repr(policy),
            None if router is None else read_metadata(router).weights_sha256,
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def citer_s_labels(self) -> LabelManifest:
        """The CITER-S labels, from the first round's cases."""
        source = LabelStore(self.workspace.labels(round_name(1)))
        manifest = source.read_manifest()
        digest = self._labels_digest(1, None, None)
        target = LabelStore.open(self.workspace.labels(CITER_S), digest=digest)
        if not target.is_complete():
            write_citer_s(source, target, self.config.collect)
            summary = summarise(
                target,
                self.prepared,
                digest=digest,
                data_digest=manifest.data_digest,
                round=1,
                quarantined=manifest.quarantined,
                new_tokens=0,
                seconds=0.0,
            )
            target.write_manifest(summary)
        return target.read_manifest()

    # -- router ----------------------------------------------------------------------------------------------------

    def fit(self, name: str) -> Calibrated:
        """The router of a label set, with its calibration table."""
        if name == CITER_S:
            self.citer_s_labels()
        fitted = fitted_router(self.prepared, name, self.config.router, self.config.fit, self.pool)
        return self._calibrated(name, fitted)

    def _calibrated(self, name: str, metadata: RouterMetadata) -> Calibrated:
        """Decode the validation examples at thresholds that aim at the configured shares."""
        folder = self.workspace.router(name)
        method = method_of(name)
        routers = Routers({method: folder}, self.prepared.fingerprint.slm)
        examples = self.validation_examples.examples
        shares = self.config.evaluate.llm_shares
        scorer = scorer_of(method)
        with self.pool() as pool:
            scores = pool.knob_scores(routers, {method: Threshold(scorer, 0.0)}, examples)[method]
            settings = [*end_settings(), *threshold_settings(method, scorer, aim_thresholds(scores, shares))]
            stored = self.workspace.evaluation("validation")
            rows = pool.measure(f"{name}, validation", stored, routers, settings, examples)
        measured = points(rows, settings, [example.id for example in examples])
        table = CalibrationTable.fit((point.llm_share, float(point.knob or 0.0)) for point in measured[method])
        (slm,), (llm,) = measured[SLM], measured[LLM]
        curve = MethodCurve(method, tuple(measured[method]))
        frontier = Frontier(slm, llm, {method: curve}, resamples=1, seed=self.config.seed)
        # Served by default: the cheapest measured point within a point of the best accuracy on validation.
        best = max(point.accuracy for point in measured[method])
        chosen = min((p for p in measured[method] if p.accuracy >= best - 0.01), key=lambda point: point.llm_share)
        updated = metadata.model_copy(update={"calibration": table, "threshold": float(chosen.knob or 0.0)})
        router, _ = load_router(folder, slm_fingerprint=self.prepared.fingerprint.slm)
        return Calibrated(save_router(router, updated, folder), frontier.area(method).value, curve.points)

    # -- rounds ----------------------------------------------------------------------------------------------------

    def iterate(self) -> Report:
        """Rounds until `max_rounds`, or until the validation frontier stops improving; then the report."""
        _ = self.validation_examples, self.test_examples  # bad sources are said before anything is computed
        self.tracker.start_experiment(self.config)
        rounds: list[RoundReport] = []
        best = float("-inf")
        for number in range(1, self.config.iterate.max_rounds + 1):
            summary = self._round(number)
            rounds.append(summary)
            assert summary.validation_area is not None
            if number > 1 and summary.validation_area - best < self.config.iterate.min_area_gain:
                logger.info("round %d gained no area on the validation examples: stopping", number)
                break
            best = max(best, summary.validation_area)
        if self.config.iterate.citer_s:
            self.fit(CITER_S)
        with replacing(self.workspace.root / "rounds.json") as temporary:
            content = json.dumps([summary.model_dump(mode="json") for summary in rounds], indent=2)
            temporary.write_text(content + "\n", encoding="utf-8")
        report = self.evaluate()
        winner = max(rounds, key=lambda summary: summary.validation_area or 0.0)
        self._track_report(report, winner.round)
        return report

    def _round(self, number: int) -> RoundReport:
        name = round_name(number)
        threshold = None if number == 1 else self.rollout_threshold(number)
        self.tracker.start_round(number, {"rollout_threshold": threshold, **self.config.model_dump(mode="json")})
        manifest = self.collect(number)
        source = self.config.data.collect
        sources = source if isinstance(source, str) else " + ".join(source)
        self.tracker.log_dataset(manifest.data_digest, sources, manifest.examples)
        calibrated = self.fit(name)
        flips = None
        if number > 1:
            flips = count_flips(*(LabelStore(self.workspace.labels(round_name(n))) for n in (number - 1, number)))
        metrics = calibrated.metadata.metrics
        summary = RoundReport(
            round=number,
            method=citer_method(number),
            rollout_threshold=threshold,
            cases=manifest.cases,
            rollouts=manifest.rollouts,
            label_mean=manifest.slm_labels / manifest.labels if manifest.labels else None,
            label_flips=flips,
            fit={} if metrics is None else metrics.flat(),
            validation_area=calibrated.area,
        )
        self._track_round(summary, manifest, calibrated)
        return summary

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(self, routers: Sequence[Path] | None = None) -> Report:
        """Every configured method on the test examples; writes the report, its text, its pages and its plots."""
        validation, test = self.validation_examples.examples, self.test_examples.examples
        with self.pool() as pool:
            stage = EvaluationStage(self.prepared, pool, self.pool, lambda: self.collect_examples)
            return stage.run(validation=validation, test=test, routers=routers)

    def evaluate_and_track(self, routers: Sequence[Path] | None = None) -> Report:
        """`evaluate`, with its figures in MLflow under the round whose router was evaluated last."""
        self.tracker.start_experiment(self.config)
        report = self.evaluate(routers)
        rounds = citer_rounds(report.methods)
        if rounds:
            self.tracker.start_round(rounds[-1], {})
            self._track_evaluation(report, citer_method(rounds[-1]))
            self.tracker.end_round()
        else:
            self._track_files()
        return report

    # -- tracking --------------------------------------------------------------------------------------------------

    def _track_round(self, summary: RoundReport, manifest: LabelManifest, calibrated: Calibrated) -> None:
        metrics = {f"fit/{name}": value for name, value in summary.fit.items()}
        metrics |= {f"labels/{name}": float(count) for name, count in summary.cases.items()}
        metrics[LABELS_ROLLOUTS] = float(manifest.rollouts)
        metrics[LABELS_TOKENS_PER_SECOND] = manifest.tokens_per_second
        metrics[LABELS_MEAN] = summary.label_mean or 0.0
        metrics[LABELS_FLIPS] = float(summary.label_flips or 0)
        metrics[VALIDATION_AREA] = summary.validation_area or 0.0
        self.tracker.log_metrics(metrics)
        for epoch, (train, validation) in enumerate(calibrated.metadata.losses, start=1):
            self.tracker.log_metrics({TRAIN_LOSS: train, VALIDATION_LOSS: validation}, step=epoch)
        self.tracker.log_curve(FRONTIER, [_numbers(point) for point in calibrated.points])
        self.tracker.log_artifact(self.workspace.router(round_name(summary.round)) / "router.json")
        self.tracker.register_router(self.workspace.router(round_name(summary.round)), summary.round)
        self.tracker.end_round()

    def _track_report(self, report: Report, champion: int) -> None:
        self._track_files()
        self.tracker.promote(champion)

    def _track_evaluation(self, report: Report, method: str) -> None:
        """The evaluated router's own curve, and each method's area."""
        last = report.methods[method]
        self.tracker.log_metrics({f"{EVAL_AREA}/{name}": one.area for name, one in report.methods.items()})
        self.tracker.log_metrics({EVAL_AREA: last.area})
        self.tracker.log_curve("eval", [point.curve() for point in last.points])
        self._track_files()

    def _track_files(self) -> None:
        for name in REPORT_FILES:
            if (self.workspace.root / name).exists():
                self.tracker.log_artifact(self.workspace.root / name)

    # -- what users see --------------------------------------------------------------------------------------------

    def show_labels(self, number: int, manifest: LabelManifest) -> None:
        """Counts of a label set."""
        self.console.print(labels_table(number, manifest))
        self.console.print(f"labels: {self.workspace.labels(round_name(number))}", soft_wrap=True)

    def show_fit(self, name: str, calibrated: Calibrated) -> None:
        """A router's quality."""
        self.console.print(router_table(name, calibrated.metadata, calibrated.area))
        self.console.print(f"router: {self.workspace.router(name)}", soft_wrap=True)

    def show_report(self, report: Report) -> None:
        """The report's tables and where its files are."""
        self.console.print(terminal_table(report))
        self.console.print(claims_table(report))
        for name in REPORT_FILES:
            if (self.workspace.root / name).exists():
                self.console.print(f"wrote {self.workspace.root / name}", soft_wrap=True)


def _numbers(point: Point) -> dict[str, float]:
    """A validation point, for a tracker."""
    return {
        "threshold": float(point.knob or 0.0),
        "llm_share": point.llm_share,
        "accuracy": point.accuracy,
        "gigabytes": point.gigabytes,
        "flops": point.flops,
    }
