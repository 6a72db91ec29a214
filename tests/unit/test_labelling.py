"""Labelling a chunk: cases of one pass, rollouts and their grading, against scripted models and naive loops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from citer_ray.config import CollectConfig
from citer_ray.engines.scripted import ScriptedEngine
from citer_ray.examples import Example
from citer_ray.label_rows import LabelRow
from citer_ray.label_transport import rows_from_bytes, rows_to_bytes
from citer_ray.labelling import Labeller
from citer_ray.labels import Case
from citer_ray.policy import AlwaysSlm, Policy, Threshold
from citer_ray.prompts import PromptFormat
from tests.conftest import EOS_ID
from tests.unit.test_hf import make_engine

S, L, B = Case.SLM_CORRECT, Case.LLM_CORRECT, Case.BOTH_WRONG


class CharTokenizer:
    """One id a character: 3 + its place in the alphabet; 2 is EOS, 1 is BOS."""

    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789 \\{}=.\n"
    bos_token_id, eos_token_id, chat_template = 1, EOS_ID, None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [3 + self.alphabet.index(char) for char in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(self.alphabet[i - 3] if 3 <= i < 3 + len(self.alphabet) else "" for i in ids)


TOKENIZER = CharTokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


EXAMPLE = Example(id="one", prompt="q", reference="x=4 \\boxed{4}", answer="4", task="math")


def labeller(policy: Policy = AlwaysSlm(), **settings: object) -> Labeller:  # noqa: B008
    return Labeller(
        TOKENIZER,
        PromptFormat(math="{question}", bos="always"),
        CollectConfig(max_new_tokens=40, **settings),  # type: ignore[arg-type]
        seed=0,
        eos_token_id=EOS_ID,
        eos_token_ids=frozenset([EOS_ID]),
        round=1,
        policy=policy,
    )


def model_that_says(**by_context: str) -> ScriptedEngine:
    """Continues the reference, except after the given texts, where it goes on with another one."""
    reference = [*ids_of(EXAMPLE.reference), EOS_ID]
    prompt = [1, *ids_of("q")]

    def rule(ids: Sequence[int]) -> int:
        written = TOKENIZER.decode(list(ids)[len(prompt) :], skip_special_tokens=True)
        for start, rest in by_context.items():
            start = start.replace("_", " ")
            whole = start + rest
            if written.startswith(start) and whole.startswith(written):
                return ids_of(whole[len(written)])[0] if len(written) < len(whole) else EOS_ID
        return reference[len(written)] if len(written) < len(reference) else EOS_ID

    return ScriptedEngine(rule)


async def label(make: Labeller, slm: ScriptedEngine, llm: ScriptedEngine) -> LabelRow:
    rows = await make.score_llm(llm, await make.score_slm(slm, [EXAMPLE], chunk=0))
    (row,) = await make.decide(slm, llm, rows, {"one": EXAMPLE})
    return row


async def test_one_pass_gives_tokens_and_cases() -> None:
    # The SLM is wrong about the first letter and the result; the LLM only about the first letter.
    slm, llm = model_that_says(**{"": "y=4 \\boxed{4}", "x=": "5 \\boxed{5}"}), model_that_says(**{"": "z=4"})
    row = await label(labeller(), slm, llm)
    assert list(row.prompt_ids) == [1, *ids_of("q")]
    assert list(row.reference_ids) == [*ids_of(EXAMPLE.reference), EOS_ID]
    assert [Case(case) for case in row.case] == [B, S, L, *[S] * 11]
    assert [token for token in row.llm_ids if token is not None] == [ids_of("z")[0], ids_of("4")[0]]
    # "y=4 \boxed{4}" ends right: the first letter does not matter, which only a rollout can tell.
    assert list(row.label) == [1, 1, 0, *[1] * 11]
    assert (row.rollouts, row.rollout_tokens) == (1, len("=4 \\boxed{4}") + 1)


@pytest.mark.parametrize(("ending", "expected"), [("y=5 \\boxed{5}", 0.0), ("y \\boxed{4}", 1.0), ("y=4", 0.0)])
async def test_a_rollout_is_graded_on_its_own_answer(ending: str, expected: float) -> None:
    row = await label(labeller(), model_that_says(**{"": ending}), model_that_says(**{"": "z"}))
    assert row.label[0] == expected


async def test_citer_s_takes_no_rollouts() -> None:
    row = await label(labeller(both_wrong="slm"), model_that_says(**{"": "y=5"}), model_that_says(**{"": "z"}))
    assert row.label[0] == 1 and row.rollouts == 0


@pytest.mark.parametrize(
    ("slm_ending", "llm_ending", "expected"),
    [("y \\boxed{5}", "z \\boxed{4}", 0.0), ("y \\boxed{4}", "z \\boxed{4}", 1.0), ("y \\boxed{5}", "z", 1.0)],
)
async def test_both_branches(slm_ending: str, llm_ending: str, expected: float) -> None:
    # Rollouts follow policy 0, so the SLM finishes both branches.
    slm = model_that_says(**{"": slm_ending, "z": llm_ending[1:]})
    row = await label(labeller(branches="both_wrong"), slm, model_that_says(**{"": "z"}))
    assert row.label[0] == expected and row.rollouts == 2


async def test_mismatches_also_decide_where_the_llm_is_right() -> None:
    slm = model_that_says(**{"x=": "5 \\boxed{4}"})  # wrong at one place, right in the end
    llm = model_that_says()
    assert (await label(labeller(), slm, llm)).label[2] == 0
    row = await label(labeller(branches="mismatches"), slm, llm)
    assert row.label[2] == 1 and row.rollouts == 2


async def test_without_the_shortcut_rollouts_decide_a_fraction_of_all_positions() -> None:
    slm, llm = model_that_says(), model_that_says()
    row = await label(labeller(shortcut=False, state_fraction=0.5), slm, llm)
    labelled = [value for value in row.label if value is not None]
    assert 0 < len(labelled) < len(row.label) and set(labelled) == {1.0}
    # The last position's token is EOS: its rollout is complete as it stands.
    assert row.rollouts == len(labelled)


async def test_rollouts_follow_the_given_policy() -> None:
    slm = model_that_says(**{"": "y=5 \\boxed{5}"})
    llm = model_that_says(**{"": "z", "y=": "4 \\boxed{4}", "y=4": " \\boxed{4}"})
    assert (await label(labeller(), slm, llm)).label[0] == 0
    routed = labeller(Threshold("router", 0.5))
    slm.score_of = lambda ids: 0.0  # everything after the first token is the LLM's
    assert (await label(routed, slm, llm)).label[0] == 1


async def test_rows_travel_as_bytes() -> None:
    row = await label(labeller(), model_that_says(), model_that_says())
    (back,) = rows_from_bytes(rows_to_bytes([row]))
    assert back.example_id == row.example_id and list(back.label) == list(row.label)
    assert list(back.llm_ids) == list(row.llm_ids)
    np.testing.assert_allclose(back.hidden, row.hidden, rtol=1e-3)


async def test_cases_equal_a_token_by_token_loop(tiny_slm: LlamaForCausalLM, tiny_llm: LlamaForCausalLM) -> None:
    examples = [
        Example(id=str(n), prompt=f"question {n}", reference=f"x={n * 7} so \\boxed{{{n}}}", answer=str(n), task="math")
        for n in range(8)
    ]
    make = labeller()
    slm, llm = make_engine(tiny_slm), make_engine(tiny_llm)
    rows = await make.score_llm(llm, await make.score_slm(slm, examples, chunk=3))
    for row in rows:
        for position, token in enumerate(row.reference_ids):
            ids = torch.tensor([[*row.prompt_ids, *row.reference_ids[:position]]])
            with torch.inference_mode():
                ours, theirs = (int(model(ids).logits[0, -1].argmax()) for model in (tiny_slm, tiny_llm))
            expected = S if ours == token else L if theirs == token else B
            assert (row.slm_ids[position], Case(row.case[position])) == (ours, expected)
        assert row.chunk == 3
