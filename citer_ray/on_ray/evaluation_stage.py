"""The evaluation stage: every configured method over its own knob on the test examples, then the report.

`Experiment.evaluate` calls this with a pool of workers. Thresholds come from the validation examples alone; what is
reported is decoded on the test examples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from citer_ray.errors import ConfigError, DataError
from citer_ray.evaluation import (
    THRESHOLD_ABOVE_ONE,
    THRESHOLD_ZERO,
    Setting,
    aim_thresholds,
    end_check_settings,
    end_settings,
    oracle_setting,
    points,
    random_settings,
    same_responses,
    scorer_of,
    threshold_settings,
)
from citer_ray.examples import Example
from citer_ray.frontier import (
    CITER_S,
    CONFIDENCE,
    LLM,
    ORACLE,
    RANDOM,
    SLM,
    Frontier,
    MethodCurve,
    citer_method,
)
from citer_ray.on_ray.evaluate import EvaluationPool, Routers
from citer_ray.plotting import plot_frontier
from citer_ray.preparation import Prepared
from citer_ray.report import build_report, write_report
from citer_ray.report_schema import Report, RoundReport


def evaluate_methods(
    prepared: Prepared,
    pool: EvaluationPool,
    *,
    validation: Sequence[Example],
    test: Sequence[Example],
    routers: Sequence[Path] | None = None,
) -> Report:
    """Decode the test examples under every configured method; write the report, its text and its plot.

    Args:
        prepared: the run.
        pool: workers with both models.
        validation: where thresholds are chosen.
        test: what is reported.
        routers: folders of routers; None takes all of the run's own.
    """
    config, workspace = prepared.config, prepared.workspace
    folders = _routers(prepared, routers)
    found = Routers(folders, prepared.fingerprint.slm)
    settings = _settings(prepared, pool, folders, validation)
    rows = pool.measure("test", workspace.evaluation("test"), found, settings, test)
    measured = points(rows, settings, [example.id for example in test])
    (slm,), (llm,) = measured.pop(SLM), measured.pop(LLM)
    exactness: dict[str, tuple[int, int]] = {}
    if measured.pop(THRESHOLD_ZERO, None) and measured.pop(THRESHOLD_ABOVE_ONE, None):
        exactness = {
            SLM: same_responses(rows, settings, THRESHOLD_ZERO, SLM),
            LLM: same_responses(rows, settings, THRESHOLD_ABOVE_ONE, LLM),
        }
    frontier = Frontier(
        slm,
        llm,
        {name: MethodCurve(name, tuple(curve)) for name, curve in measured.items()},
        resamples=config.evaluate.bootstrap_samples,
        seed=config.seed,
    )
    report = build_report(
        frontier,
        pair=_pair_summary(prepared),
        rounds=_rounds(prepared, folders),
        exactness=exactness,
        notes=_notes(len(validation)),
    )
    write_report(report, workspace.root)
    plot_frontier(report, workspace.root / "frontier.png")
    return report


def _routers(prepared: Prepared, given: Sequence[Path] | None) -> dict[str, Path]:
    """Folders of routers by method name."""
    if given is not None:
        return {method_of(folder.name): folder for folder in given}
    folders = sorted(prepared.workspace.router("x").parent.glob("*/router.json"))
    return {method_of(path.parent.name): path.parent for path in folders}


def _settings(
    prepared: Prepared, pool: EvaluationPool, folders: Mapping[str, Path], validation: Sequence[Example]
) -> list[Setting]:
    """All points of all configured methods; thresholds come from the validation examples."""
    evaluate = prepared.config.evaluate
    methods, shares = evaluate.methods, evaluate.llm_shares
    known = {SLM, LLM, RANDOM, CONFIDENCE, CITER_S, "citer", ORACLE}
    if unknown := sorted(set(methods) - known):
        raise ConfigError(f"evaluate.methods has {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    settings = end_settings()
    if ORACLE in methods:
        settings.append(oracle_setting())
    if RANDOM in methods:
        settings += random_settings(shares, prepared.config.seed)
    scored = [CONFIDENCE] if CONFIDENCE in methods else []
    scored += [m for m in folders if (CITER_S if m == CITER_S else "citer") in methods]
    routers = Routers(folders, prepared.fingerprint.slm)
    scores = pool.slm_scores(routers, [scorer_of(m) for m in scored], validation)
    for method in scored:
        thresholds = aim_thresholds(scores[scorer_of(method)], shares)
        settings += threshold_settings(method, scorer_of(method), thresholds)
    if folders:
        settings += end_check_settings(scorer_of(max(folders)))
    return settings


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
        f"Thresholds aim at LLM shares by quantiles of each method's scores on "
        f"{num_validation} validation examples; the reported examples took no part in choosing.",
        "Responses are greedy, cut at the first EOS before grading; a response without an answer is wrong.",
        "Bytes and FLOPs follow the cost model at batch size 1 with KV caches kept between turns. FLOPs hardly "
        "fall with the LLM share: a visit computes every token that the SLM wrote since the last one.",
    ]


def method_of(name: str) -> str:
    """The method's name in reports of the router called `name` (`round-2` -> `citer_round_2`)."""
    if name == CITER_S:
        return name
    number = name.removeprefix("round-")
    if not number.isdecimal():
        raise DataError(f"a router's folder is called round-K or {CITER_S}, got {name!r}; rename it")
    return citer_method(int(number))
