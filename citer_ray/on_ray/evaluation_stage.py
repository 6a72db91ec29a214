"""The evaluation stage: every configured method over its own knob on the test examples, then the report.

`Experiment.evaluate` runs it with a pool of workers. Thresholds come from the validation examples alone; what is
reported is decoded on the test examples. Routers of other methods are fitted first, where they are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from citer_ray.break_even import BreakEven
from citer_ray.engines.build import engine_kind
from citer_ray.errors import DataError
from citer_ray.evaluation import (
    THRESHOLD_ABOVE_ONE,
    THRESHOLD_ZERO,
    Setting,
    end_check_settings,
    points,
    same_responses,
)
from citer_ray.examples import Example, LoadedExamples
from citer_ray.frontier import CITER_S, LLM, SLM, Frontier, MethodCurve, citer_method, citer_rounds
from citer_ray.learned import LearnedPage
from citer_ray.method_names import CITER, SPECULATIVE
from citer_ray.methods import SPECULATING, TRAINED, chosen_methods, fixed_settings, scorer_of, sweep_of
from citer_ray.on_ray.baselines import Baselines
from citer_ray.on_ray.evaluate import EvaluationPool, Routers
from citer_ray.on_ray.evaluation_worker import pair_cost
from citer_ray.on_ray.fit_stage import PoolMaker
from citer_ray.pass_times import PassTimes
from citer_ray.plotting import plot_frontier
from citer_ray.plotting_costs import plot_break_even, plot_cost
from citer_ray.policy import Threshold
from citer_ray.preparation import Prepared, engine_spec
from citer_ray.report import build_report, write_report
from citer_ray.report_pages import write_learned_page, write_report_page
from citer_ray.report_schema import Report, RoundReport
from citer_ray.router_artifact import read_metadata
from citer_ray.speculation_report import speculation_report, timed_report

REPORT_FILES = (
    "report.md",
    "report.json",
    "report.html",
    "learned.html",
    "frontier.png",
    "frontier_share.png",
    "frontier_gb.png",
    "frontier_latency.png",
    "speculation.png",
)


class EvaluationStage:
    """One evaluation.

    Args:
        prepared: the run.
        pool: workers with both models.
        pool_maker: the same, for stages that ask for workers only if they need them.
        collect_examples: what routers of other methods are fitted on; asked only if there are any.
    """

    def __init__(
        self,
        prepared: Prepared,
        pool: EvaluationPool,
        pool_maker: PoolMaker,
        collect_examples: Callable[[], LoadedExamples],
    ) -> None:
        self._prepared, self._pool = prepared, pool
        self._pool_maker, self._collect_examples = pool_maker, collect_examples
        self._config = prepared.config.evaluate
        self._methods = chosen_methods(self._config.methods)
        self._not_run: dict[str, str] = {}
        if engine_kind("llm", prepared.config) != "transformers":
            refused = [name for name in self._methods if name in SPECULATING]
            self._methods = tuple(name for name in self._methods if name not in refused)
            reason = "needs the LLM's whole distributions, which only engine.kind: transformers shows"
            self._not_run |= dict.fromkeys(refused, reason)

    def run(
        self, *, validation: Sequence[Example], test: Sequence[Example], routers: Sequence[Path] | None = None
    ) -> Report:
        """Decode the test examples under every configured method; write the report, its text, pages and plots.

        Args:
            validation: where thresholds are chosen.
            test: what is reported.
            routers: folders of routers; None takes all of the run's own.
        """
        found = Routers(self._routers(routers), self._prepared.fingerprint.slm)
        settings = self._settings(found, validation)
        rows = self._pool.measure("test", self._prepared.workspace.evaluation("test"), found, settings, test)
        times, timed = self._times(found, settings, test)
        measured = points(rows, settings, [example.id for example in test], times)
        (slm,), (llm,) = measured.pop(SLM), measured.pop(LLM)
        exactness = _exactness(rows, settings)
        measured = {
            name: curve for name, curve in measured.items() if name not in (THRESHOLD_ZERO, THRESHOLD_ABOVE_ONE)
        }
        frontier = Frontier(
            slm,
            llm,
            {name: MethodCurve(name, tuple(curve)) for name, curve in measured.items()},
            resamples=self._config.bootstrap_samples,
            seed=self._prepared.config.seed,
        )
        typical = self._typical_response(rows, settings)
        report = build_report(
            frontier,
            pair=_pair_summary(self._prepared),
            rounds=_rounds(self._prepared, found.folders),
            exactness=exactness,
            notes=_notes(len(validation)),
            not_run=self._not_run,
            pass_times=times,
            timed=timed_report(timed, settings, times) if times else [],
            speculation=speculation_report(frontier, rows, settings, typical),
        )
        self._write(report, frontier, typical, found, settings, test)
        return report

    # -- routers and settings --------------------------------------------------------------------------------------

    def _routers(self, given: Sequence[Path] | None) -> dict[str, Path]:
        """Folders of the routers of the chosen methods, by method name."""
        paths = given
        if paths is None:
            paths = [path.parent for path in sorted(self._prepared.workspace.router("x").parent.glob("*/router.json"))]
        there = {method_of(path.name): path for path in paths}
        folders = {name: path for name, path in there.items() if self._wants(name) and name not in TRAINED}
        if CITER in self._methods and not citer_rounds(folders):
            self._not_run[citer_method(1)] = "no router of a round: run citer iterate, or citer collect and citer fit"
        if CITER_S in self._methods and CITER_S not in folders:
            self._not_run[CITER_S] = "no router: citer fit --labels citer_s fits it, and so does citer iterate"
        wanted = [name for name in TRAINED if name in self._methods]
        if wanted:
            baselines = Baselines(self._prepared, self._pool, self._pool_maker, self._collect_examples())
            fitted, missing = baselines.routers(wanted)
            folders |= fitted
            self._not_run |= missing
        return folders

    def _wants(self, name: str) -> bool:
        return (CITER if citer_rounds([name]) else name) in self._methods

    def _settings(self, routers: Routers, validation: Sequence[Example]) -> list[Setting]:
        """All points of all methods; what has scores gets its thresholds from the validation examples."""
        settings = fixed_settings(self._methods, self._config, self._prepared.config.seed)
        names = [name for name in self._methods if name not in (CITER, CITER_S, *TRAINED)]
        sweeps = [sweep for name in (*names, *routers.folders) if (sweep := sweep_of(name, self._config))]
        scores = self._pool.knob_scores(routers, {sweep.method: sweep.probe for sweep in sweeps}, validation)
        for sweep in sweeps:
            found = sweep.settings(scores[sweep.method])
            settings += found
            if not found:
                self._not_run[sweep.method] = "nothing to decide: no validation response had a score"
        rounds = citer_rounds(routers.folders)
        if rounds or CITER_S in routers.folders:
            settings += end_check_settings(scorer_of(citer_method(rounds[-1]) if rounds else CITER_S))
        return settings

    # -- measuring -------------------------------------------------------------------------------------------------

    def _times(
        self, routers: Routers, settings: Sequence[Setting], test: Sequence[Example]
    ) -> tuple[PassTimes | None, list[dict[str, Any]]]:
        """What passes take, from a few responses decoded alone with the middle setting of every method."""
        if self._config.timed_examples == 0:
            return None, []
        chosen = _middle_settings(settings)
        rows = self._pool.timed(routers, [settings[at] for at in chosen], test[: self._config.timed_examples])
        rows = [{**row, "setting": chosen[row["setting"]]} for row in rows]
        return PassTimes.fit(rows), rows

    def _typical_response(self, rows: pa.Table, settings: Sequence[Setting]) -> BreakEven:
        """The pair's prices at the mean lengths of the LLM's own responses."""
        (llm,) = [at for at, setting in enumerate(settings) if setting.method == LLM]
        own = rows.filter(pa.compute.equal(rows["setting"], llm)).to_pandas()
        tokens = float(own["tokens"].mean())
        # The first pass reads the prompt, each later one a token.
        prompt = float((own["llm_read"] - own["llm_passes"] + 1).mean())
        return BreakEven(pair_cost(engine_spec(self._prepared)), prompt, tokens)

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(
        self,
        report: Report,
        frontier: Frontier,
        typical: BreakEven,
        routers: Routers,
        settings: Sequence[Setting],
        test: Sequence[Example],
    ) -> None:
        root = self._prepared.workspace.root
        write_report(report, root)
        plot_frontier(report, root / "frontier.png")
        plot_cost(report, frontier, "llm_share", root / "frontier_share.png")
        plot_cost(report, frontier, "gigabytes", root / "frontier_gb.png")
        if report.pass_times is not None:
            plot_cost(report, frontier, "seconds", root / "frontier_latency.png")
        if report.speculation is not None:
            plot_break_even(report.speculation, typical, root / "speculation.png")
        write_report_page(report, root / "report.html")
        page = self._learned(routers, settings, test)
        if page is not None:
            write_learned_page(page, root / "learned.html")

    def _learned(self, routers: Routers, settings: Sequence[Setting], test: Sequence[Example]) -> LearnedPage | None:
        """What the last round's router does on the test examples, at the middle of its thresholds."""
        rounds = citer_rounds(routers.folders)
        if not rounds or self._config.shown_examples == 0:
            return None
        method = citer_method(rounds[-1])
        own = [setting.policy for setting in settings if setting.method == method]
        policy = own[len(own) // 2]
        assert isinstance(policy, Threshold)
        metrics = read_metadata(routers.folders[method]).metrics
        return LearnedPage.build(
            method,
            policy.threshold,
            self._pool.shown(routers, policy, test),
            shown=self._config.shown_examples,
            reliability=() if metrics is None else metrics.reliability,
        )


def _middle_settings(settings: Sequence[Setting]) -> list[int]:
    """One setting of each method: the middle one."""
    by_method: dict[str, list[int]] = {}
    for at, setting in enumerate(settings):
        if setting.method not in (THRESHOLD_ZERO, THRESHOLD_ABOVE_ONE):
            by_method.setdefault(setting.method, []).append(at)
    return [numbers[len(numbers) // 2] for numbers in by_method.values()]


def _exactness(rows: pa.Table, settings: Sequence[Setting]) -> dict[str, tuple[int, int]]:
    """How many responses of settings that must be exact equal the SLM's or the LLM's own."""
    compared = ((SLM, THRESHOLD_ZERO, SLM), (LLM, THRESHOLD_ABOVE_ONE, LLM), (SPECULATIVE, SPECULATIVE, LLM))
    there = {setting.method for setting in settings}
    return {key: same_responses(rows, settings, name, other) for key, name, other in compared if name in there}


def _rounds(prepared: Prepared, folders: Mapping[str, Path]) -> list[RoundReport]:
    """What the rounds of this run did, if it was an iteration."""
    path = prepared.workspace.root / "rounds.json"
    if not path.exists():
        return []
    rounds = [RoundReport.model_validate(values) for values in json.loads(path.read_text(encoding="utf-8"))]
    return [summary for summary in rounds if summary.method in folders]


def _pair_summary(prepared: Prepared) -> dict[str, Any]:
    return {
        "slm": prepared.config.pair.slm.path,
        "llm": prepared.config.pair.llm.path,
        "fingerprint": prepared.fingerprint.model_dump(mode="json"),
    }


def _notes(num_validation: int) -> list[str]:
    return [
        f"Knobs aim at quantiles of each method's own scores on {num_validation} validation examples; the reported "
        "examples took no part in choosing.",
        "Responses are greedy, cut at the first EOS before grading; a response without an answer is wrong.",
        "Bytes and FLOPs follow the cost model at batch size 1 with KV caches kept between turns. FLOPs hardly "
        "fall with the LLM share: a visit computes every token that the SLM wrote since the last one.",
        "Cascades are charged for the SLM's answer also where the LLM's replaces it; speculation for every draft.",
    ]


def method_of(name: str) -> str:
    """The method's name in reports of the router called `name` (`round-2` -> `citer_round_2`)."""
    if name == CITER_S or name in TRAINED:
        return name
    number = name.removeprefix("round-")
    if not number.isdecimal():
        known = ", ".join(["round-K", CITER_S, *TRAINED])
        raise DataError(f"a router's folder is called one of {known}, got {name!r}; rename it")
    return citer_method(int(number))
