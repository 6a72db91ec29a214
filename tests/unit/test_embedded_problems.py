"""The generator of the embedded pair's word problems: determinism, splits, arithmetic, wording, decisions."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import get_args

import pytest

from citer_ray.errors import ConfigError
from citer_ray.pair.embedded.problems import FAMILIES, Problem, SplitName, generate, prompt_of, split
from citer_ray.pair.embedded.wording import KEEP_WORDS, SWAP_WORDS

# Written by hand, not taken from the generator: what each verb or phrase does to the quantity.
GAINS = ["buys", "finds", "gets", "wins", "earns", "receives", "collects", "borrows", "rides", "hikes", "runs", "adds"]
LOSSES = ["gives", "loses", "sells", "uses", "spends", "pays", "lends", "donates", "skips", "saves", "cuts", "drops"]
OPENING = re.compile(
    r"(has|owns|carries|plans a path of|walks|keeps) \d+ \w+( at the bank)?\.$"
    r"|^There are \d+ |^The purse of \w+ holds \d+ |^The tour of \w+ is \d+ "
)
GROUP = re.compile(r"(?:has|works|goes) (\d+) \w+ (?:with|for|over) (\d+) \w+ each\.$")
DECISION = re.compile(r"may swap for|offers|another road")


def answer_from_text(question: str) -> int:
    """Solves a question by reading its sentences, independently of the generator."""
    sentences = re.findall(r"[^.?]+[.?]", question)
    sentences = [sentence.strip() for sentence in sentences]
    group = GROUP.search(sentences[0])
    # The opening is the first sentence, always; a distractor comes after it.
    assert group or OPENING.search(sentences[0]), sentences[0]
    quantity = int(group[1]) * int(group[2]) if group else _number(sentences[0])
    for sentence in sentences[1:-1]:
        words = set(sentence.rstrip(".").split())
        if DECISION.search(sentence):
            quantity = max(quantity, _number(sentence))
        elif "doubles" in words:
            quantity *= 2
        elif "triples" in words:
            quantity *= 3
        elif words & set(GAINS):
            quantity += _number(sentence)
        elif words & set(LOSSES):
            quantity -= _number(sentence)
    return quantity


def _number(sentence: str) -> int:
    (number,) = re.findall(r"\d+", sentence)
    return int(number)


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return generate(3000, seed=11)


def test_same_seed_gives_the_same_problems_and_a_larger_count_appends() -> None:
    assert generate(40, seed=5) == generate(60, seed=5)[:40]
    assert generate(40, seed=5) != generate(40, seed=6)


def test_pinned_problem() -> None:
    """A change of the stream would silently part the shipped weights from the data that they were measured on."""
    first = split("test", 1)[0]
    assert first.id == "items-000000-c75f4897"
    assert first.question == (
        "There are 79 shells in the room of Anna. Jack has 93 shells. Later she loses 5. "
        "How many shells does Anna have now?"
    )
    assert first.solution == "The start is 79 shells. Next, 79 - 5 = 74 now. Answer: \\boxed{74}"
    assert (first.answer, first.steps, first.family) == (74, 1, "items")


def test_ids_and_questions_are_unique(problems: list[Problem]) -> None:
    assert len({problem.id for problem in problems}) == len(problems)
    assert len({problem.question for problem in problems}) == len(problems)
    assert all(re.fullmatch(rf"{p.family}-\d{{6}}-[0-9a-f]{{8}}", p.id) for p in problems)


def test_answers_follow_from_the_question_text(problems: list[Problem]) -> None:
    for problem in problems:
        assert answer_from_text(problem.question) == problem.answer, problem
        assert problem.solution.endswith(f"\\boxed{{{problem.answer}}}")


def test_equations_of_the_solutions_hold_and_chain(problems: list[Problem]) -> None:
    operators = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    seen = Counter[str]()
    for problem in problems:
        for a, sign, b, result in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", problem.solution):
            assert operators[sign](int(a), int(b)) == int(result), problem
            seen[sign] += 1
    assert set(seen) == set(operators)


def test_numbers_lie_between_1_and_99(problems: list[Problem]) -> None:
    numbers = {int(n) for p in problems for n in re.findall(r"\d+", p.question + p.solution)}
    assert min(numbers) >= 1
    assert max(numbers) <= 99


def test_wording_of_the_same_step_varies(problems: list[Problem]) -> None:
    shapes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for problem in problems:
        sentences = problem.solution.split(". ")
        shapes["opening"][re.sub(r"\d+|[A-Z]\w+ (?=walks|has|carries)", "#", sentences[0]).split()[0]] += 1
        shapes["closing"][sentences[-1].split("\\boxed")[0]] += 1
        for sentence in sentences[1:-1]:
            shapes["step"][sentence.split()[0]] += 1
    assert len(shapes["opening"]) >= 5
    assert len(shapes["closing"]) == 5
    assert {"After", "That", "Next,", "Adding", "Taking", "Multiplying", "Since"} <= set(shapes["step"])
    assert max(shapes["closing"].values()) < 0.3 * sum(shapes["closing"].values())


def test_decision_sentence_says_the_side_with_a_free_word(problems: list[Problem]) -> None:
    used = Counter[str]()
    for problem in problems:
        decisions = [s for s in re.findall(r"[^.?]+[.?]", problem.question) if DECISION.search(s)]
        worded = re.findall(r"(\w+) is better, so (\d+)", problem.solution)
        assert len(worded) == len(decisions)
        for (word, result), sentence in zip(worded, decisions, strict=True):
            assert word in SWAP_WORDS + KEEP_WORDS
            assert (word in SWAP_WORDS) == (int(result) == _number(sentence)), problem
            used[word] += 1
    assert set(used) == set(SWAP_WORDS + KEEP_WORDS)
    assert sum(used.values()) > 0.5 * len(problems)


def test_every_family_has_its_own_nouns_verbs_and_questions() -> None:
    units, verbs, questions = {}, {}, {}
    for family in FAMILIES:
        own = generate(1500, seed=3, families=[family])
        text = " ".join(problem.question for problem in own)
        assert {problem.family for problem in own} == {family}
        verbs[family] = set(GAINS + LOSSES) & set(text.split())
        units[family] = {m for p in own for m in re.findall(r"\d+ more (\w+)", p.question)}
        questions[family] = {re.sub(r"\b[A-Z][a-z]+\b", "#", p.question.split(". ")[-1]) for p in own}
    for one, other in [("items", "money"), ("items", "travel"), ("money", "travel")]:
        assert not verbs[one] & verbs[other]
        assert not (units[one] - {"in"}) & (units[other] - {"in"})
        assert not questions[one] & questions[other]
    assert all(len(own) == 8 for own in verbs.values())


def test_splits_are_disjoint_whatever_their_sizes() -> None:
    sizes = {"train": 6000, "collect": 1500, "validation": 700, "test": 900}
    owners = Counter(p.question for name, size in sizes.items() for p in split(name, size))  # type: ignore[arg-type]
    assert set(sizes) == set(get_args(SplitName))
    assert len(owners) == sum(sizes.values())


def test_split_is_deterministic_and_holds_out_a_family() -> None:
    assert split("collect", 20) == split("collect", 30)[:20]
    held_out = split("test", 50, families=("money",))
    assert {problem.family for problem in held_out} == {"money"}


def test_exclude_keeps_questions_out() -> None:
    first = generate(20, seed=8)
    banned = {problem.question for problem in first[:10]}
    rest = generate(20, seed=8, exclude=banned)
    assert not banned & {problem.question for problem in rest}
    assert [problem.question for problem in rest[:10]] == [problem.question for problem in first[10:]]


def test_one_question_has_one_reference_in_every_seed_and_position() -> None:
    known = {problem.question: problem.solution for problem in generate(400, seed=1, families=["items"])}
    skipped = next(iter(known))
    shifted = generate(400, seed=1, families=["items"], exclude=[skipped])
    shared = [problem for problem in shifted if problem.question in known]
    assert len(shared) >= 390
    assert all(known[problem.question] == problem.solution for problem in shared)


def test_prompt_is_the_question_and_a_newline(problems: list[Problem]) -> None:
    assert prompt_of(problems[0]) == problems[0].question + "\n"


@pytest.mark.parametrize("call", [
    lambda: generate(1, seed=0, families=["weather"]),
    lambda: generate(1, seed=0, families=[]),
    lambda: generate(-1, seed=0),
    lambda: split("dev", 1),  # type: ignore[arg-type]
])  # fmt: skip
def test_bad_arguments_are_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"use|negative"):
        call()
