"""The catalogue of methods: names, sweeps, and which scores a knob is compared with."""

from __future__ import annotations

import pytest

from citer_ray.config import EvaluateConfig
from citer_ray.decoding import Trace
from citer_ray.errors import ConfigError
from citer_ray.method_names import (
    ALL_METHODS,
    CITER,
    COLLM,
    ENTROPY,
    LABELS,
    R2R,
    ROUTELLM,
    SPECULATIVE,
    method_label,
)
from citer_ray.methods import chosen_methods, fixed_settings, knob_scores, sweep_of
from citer_ray.policy import Cascade, Speculative, Threshold

CONFIG = EvaluateConfig(llm_shares=(0.1, 0.5), quantiles=(0.25, 0.5), draft_lengths=(1, 3))


def test_every_method_has_a_sweep_or_fixed_settings() -> None:
    fixed = {setting.method for setting in fixed_settings(ALL_METHODS, CONFIG, 0)}
    swept = {name for name in (*ALL_METHODS, "citer_round_2") if sweep_of(name, CONFIG)}
    assert fixed | swept | {CITER} == {*ALL_METHODS, "citer_round_2"}
    assert not fixed & swept


def test_choosing_methods() -> None:
    assert chosen_methods(["all"]) == ALL_METHODS
    assert chosen_methods(["citer", "slm"]) == ("slm", "citer")
    with pytest.raises(ConfigError, match=r"evaluate\.methods has nonsense; known are all, slm"):
        chosen_methods(["slm", "nonsense"])
    assert method_label("citer_round_2") == "CITER round 2"
    assert {method_label(name) for name in LABELS} == set(LABELS.values())


def test_thresholds_are_quantiles_of_the_methods_own_scores() -> None:
    sweep = sweep_of(ENTROPY, CONFIG)
    assert sweep is not None and sweep.probe == Threshold("certainty", 0.0)
    settings = sweep.settings([0.1 * number for number in range(10)])
    assert [setting.policy for setting in settings] == [Threshold("certainty", 0.1), Threshold("certainty", 0.5)]
    assert sweep.settings([]) == []
    for name in (COLLM, R2R):
        own = sweep_of(name, CONFIG)
        assert own is not None and own.policy(0.5) == Threshold(f"router:{name}", 0.5)


def test_a_query_router_hands_over_the_whole_answer() -> None:
    sweep = sweep_of(ROUTELLM, CONFIG)
    assert sweep is not None
    assert sweep.policy(0.3) == Threshold("prompt:router:routellm", 0.3, CONFIG.max_new_tokens)


@pytest.mark.parametrize(
    ("name", "rule", "knobs"),
    [
        ("faster_chow", "chow", [1 - 0.2, 1 - 0.4]),
        ("faster_diff", "diff", [-0.2, -0.4]),
        ("speculative_lossy", "typical", [0.2, 0.4]),
    ],
)
def test_rules_report_their_own_lenience(name: str, rule: str, knobs: list[float]) -> None:
    sweep = sweep_of(name, CONFIG)
    assert sweep is not None and sweep.probe == Speculative(rule, CONFIG.draft_length)  # type: ignore[arg-type]
    settings = sweep.settings([0.0, 0.2, 0.4, 0.6])
    assert [setting.knob for setting in settings] == pytest.approx(knobs, abs=0.01)


def test_the_knob_of_speculation_is_the_draft_length() -> None:
    settings = [one for one in fixed_settings([SPECULATIVE], CONFIG, 0) if one.method == SPECULATIVE]
    assert [(one.knob, one.policy) for one in settings] == [(1, Speculative("exact", 1)), (3, Speculative("exact", 3))]


def test_scores_that_a_knob_is_compared_with() -> None:
    trace = Trace(scores=[0.4, None, 0.9], answer_score=0.7)
    assert knob_scores(trace, Threshold("router", 0.0)) == [0.4, 0.9]
    assert knob_scores(trace, Threshold("prompt:router", 0.0)) == [0.4]
    assert knob_scores(trace, Cascade("sum", 0.0)) == [0.7]
    assert knob_scores(trace, Speculative("diff", 2)) == [0.4, 0.9]
