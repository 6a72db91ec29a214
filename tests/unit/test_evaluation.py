"""Measuring settings on examples: rows, costs, points, and the checks of a router's ends."""

from __future__ import annotations

import pytest

from citer_ray.cost import ModelCost, PairCost, RouterCost
from citer_ray.decoding import Pass
from citer_ray.engines.scripted import ScriptedEngine
from citer_ray.evaluation import (
    THRESHOLD_ABOVE_ONE,
    THRESHOLD_ZERO,
    Decoder,
    Setting,
    aim_thresholds,
    end_check_settings,
    end_settings,
    oracle_setting,
    points,
    random_settings,
    same_responses,
    single_passes,
    threshold_settings,
)
from citer_ray.examples import Example
from citer_ray.frontier import LLM, ORACLE, RANDOM, SLM
from citer_ray.methods import knob_scores
from citer_ray.pass_times import PassTimes
from citer_ray.policy import LLM_ONLY_THRESHOLD, Cascade, Speculative, Threshold, Writer
from citer_ray.prompts import PromptFormat
from tests.conftest import EOS_ID
from tests.unit.test_labelling import TOKENIZER, ids_of

CONFIG = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": False,
}


def scripted(text: str, score: float = 1.0) -> ScriptedEngine:
    """Writes `text` and EOS, whatever stands before; prompts have 2 ids."""
    written = [*ids_of(text), EOS_ID]
    return ScriptedEngine(lambda ids: written[min(len(ids) - 2, len(written) - 1)], lambda ids: score)


def decoder(slm: str, llm: str, score: float = 0.5) -> Decoder:
    cost = ModelCost.from_config(CONFIG, dtype_bytes=4)
    return Decoder(
        scripted(slm, score),
        scripted(llm),
        TOKENIZER,
        PromptFormat(math="{question}", bos="always"),
        frozenset([EOS_ID]),
        PairCost(cost, cost, RouterCost(10)),
        max_new_tokens=20,
        in_flight=8,
    )


EXAMPLES = [
    Example(id="a", prompt="q", answer="4", task="math"),
    Example(id="b", prompt="r", answer="5", task="math"),
]


async def test_rows_and_points() -> None:
    settings = [*end_settings(), oracle_setting(), *threshold_settings("citer_round_1", "router", [0.2, 0.9, 0.2])]
    rows = await decoder("x\\boxed{4}", "x\\boxed{5}").measure(settings, EXAMPLES)
    measured = points(rows, settings, ["b", "a"])
    assert rows.num_rows == 5 * 2
    assert measured[SLM][0].correct.tolist() == [False, True]  # in the order that was asked for
    assert measured[LLM][0].correct.tolist() == [True, False]
    assert measured[ORACLE][0].llm_share == pytest.approx(1 / 11)
    low, high = measured["citer_round_1"]
    assert (low.knob, high.knob) == (0.2, 0.9)
    assert (low.llm_share, high.llm_share) == (0.0, 1.0)
    assert low.tokens_per_answer == 11 and low.unanswered == 0
    # The same passes as the SLM alone, and the router's reads on top.
    assert low.gigabytes - measured[SLM][0].gigabytes == pytest.approx(11 * 10 * 4 / 1e9)


async def test_no_answer_is_wrong_and_counted_apart() -> None:
    settings = end_settings()
    measured = points(await decoder("nothing", "x\\boxed{5}").measure(settings, EXAMPLES), settings, ["a", "b"])
    assert measured[SLM][0].unanswered == 2 and measured[SLM][0].accuracy == 0
    assert measured[LLM][0].unanswered == 0


async def test_ends_of_a_routers_knob_are_compared_token_for_token() -> None:
    settings = [*end_settings(), *end_check_settings("router")]
    rows = await decoder("x4", "y5").measure(settings, EXAMPLES)
    assert same_responses(rows, settings, THRESHOLD_ZERO, SLM) == (2, 2)
    assert same_responses(rows, settings, THRESHOLD_ABOVE_ONE, LLM) == (2, 2)
    assert same_responses(rows, settings, THRESHOLD_ZERO, LLM) == (0, 2)


async def test_scores_come_from_the_slms_own_responses() -> None:
    probe = Threshold("router", 0.0)
    (traces,) = await decoder("x4", "y5", score=0.25).traces([probe], EXAMPLES)
    assert [knob_scores(trace, probe) for trace in traces] == [[0.25] * 3] * 2


async def test_a_cascade_is_charged_for_both_answers_and_a_query_router_for_one_decision() -> None:
    """The scripted log-probabilities are 0, so an answer's score is 1."""
    settings = [
        *end_settings(),
        Setting("cascade_sum", 1.1, Cascade("sum", 1.1)),
        Setting("routellm", 0.2, Threshold("prompt:router", 0.2, 20)),
        Setting("citer_round_1", 0.2, Threshold("router", 0.2)),
    ]
    rows = await decoder("x\\boxed{4}", "x\\boxed{5}").measure(settings, EXAMPLES)
    measured = points(rows, settings, ["a", "b"])
    (cascade,), (slm,), (llm,) = measured["cascade_sum"], measured[SLM], measured[LLM]
    assert cascade.llm_share == 1.0 and cascade.accuracy == llm.accuracy
    assert cascade.gigabytes == pytest.approx(slm.gigabytes + llm.gigabytes)
    assert cascade.passes == (11, 11) and slm.passes == (11, 0)
    # 10 parameters of 4 bytes: asked once a response by the query router, at each token by the token router.
    (query,), (token,) = measured["routellm"], measured["citer_round_1"]
    assert (token.gigabytes - slm.gigabytes) * 1e9 == pytest.approx(11 * 40)
    assert (query.gigabytes - slm.gigabytes) * 1e9 == pytest.approx(1 * 40)


async def test_speculation_counts_drafts() -> None:
    setting = Setting("speculative", 2.0, Speculative("exact", 2))
    rows = (await decoder("xy4", "xz4").measure([setting], EXAMPLES)).to_pylist()
    # x y | x z: x stands, y is replaced by z; then 4 and EOS stand.
    assert {(row["drafted"], row["judged"], row["accepted"], row["llm_passes"]) for row in rows} == {(4, 4, 3, 2)}


async def test_wall_times_are_priced_from_passes() -> None:
    settings = end_settings()
    rows = await decoder("x4", "y5").measure(settings, EXAMPLES)
    times = PassTimes(slm_pass=1, llm_pass=10, slm_token=0.1, llm_token=0.01, decision=5)
    measured = points(rows, settings, ["a", "b"], times)
    # 3 passes; the first one reads the 2 ids of the prompt.
    assert measured[SLM][0].mean_seconds == pytest.approx(3 * 1 + 1 * 0.1)
    assert measured[LLM][0].mean_seconds == pytest.approx(3 * 10 + 1 * 0.01)
    timed = await decoder("x4", "y5").timed(settings[0], EXAMPLES[0])
    assert timed["seconds"] > 0 and timed["slm_passes"] == 3


def test_passes_one_by_one() -> None:
    passes = [Pass(Writer.SLM, 3, 0, 3), Pass(Writer.LLM, 5, 0, 1), Pass(Writer.SLM, 1, 5, 2)]
    assert single_passes(passes, Writer.SLM) == [(3, 0), (1, 3), (1, 4), (1, 5), (1, 6)]
    assert single_passes(passes, Writer.LLM) == [(5, 0)]


def test_settings() -> None:
    assert [setting.knob for setting in random_settings([0.1, 0.5], 3)] == [0.1, 0.5]
    assert random_settings([0.1], 3)[0].method == RANDOM
    assert aim_thresholds([0.1, 0.2, 0.3, 0.4], [0.0, 0.5, 1.0]) == [0.0, 0.3, LLM_ONLY_THRESHOLD]
    first, second = Setting("m", 0.1, Threshold("router", 0.1)), Setting("m", 0.2, Threshold("router", 0.2))
    assert first.key() != second.key()
