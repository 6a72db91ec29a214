"""Seeded synthetic word problems with written-out steps: the data of the embedded pair.

``generate`` draws problems of the families in ``families`` and has ``wording`` write their solutions;
``split`` gives the four disjoint sets (train, collect, validation, test). Read by ``build`` (training),
``evaluate`` and the quickstart. A problem's split is a hash of its question, so that two splits never share a
question, whatever their sizes are. All numbers lie between 1 and 99.
"""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from citer_ray.errors import ConfigError
from citer_ray.pair.embedded.families import BOYS, FAMILIES, FAMILY_TABLE, GIRLS, Change, Family
from citer_ray.pair.embedded.wording import Kind, Operation, Scene, word_solution

__all__ = ["FAMILIES", "SPLITS", "Problem", "SplitName", "generate", "prompt_of", "split"]

LARGEST = 99
STEP_COUNTS, STEP_WEIGHTS = (1, 2, 3), (0.2, 0.45, 0.35)
P_DISTRACTOR = 0.3
P_GROUP_OPENING = 0.25
DECISION_REACH = 25  # an offer differs from the present quantity by at most this much
SCALINGS = (("doubles", 2), ("triples", 3))
CONNECTIVES = ("", "Then ", "Later ")

SplitName = Literal["train", "collect", "validation", "test"]


@dataclass(frozen=True)
class Split:
    """A split's random seed and its share of the hash buckets."""

    seed: int
    buckets: range


BUCKETS = 16
SPLITS: dict[SplitName, Split] = {
    "train": Split(seed=1, buckets=range(0, 10)),
    "collect": Split(seed=2, buckets=range(10, 12)),
    "validation": Split(seed=3, buckets=range(12, 14)),
    "test": Split(seed=4, buckets=range(14, 16)),
}


@dataclass(frozen=True)
class Problem:
    """A word problem: ``solution`` ends in ``\\boxed{answer}``; ``steps`` counts a product opening too."""

    id: str
    family: str
    question: str
    solution: str
    answer: int
    steps: int


def prompt_of(problem: Problem) -> str:
    """The plain prompt format, question and newline, as the chat template renders one user message."""
    return problem.question + "\n"


def generate(count: int, seed: int, families: Sequence[str] = FAMILIES, exclude: Iterable[str] = ()) -> list[Problem]:
    """Draws ``count`` problems with different questions.

    Args:
        count: How many.
        seed: Same seed and families, same problems; a larger count only appends.
        families: Names to draw from, with equal probability.
        exclude: Questions that must not appear.

    Raises:
        ConfigError: An unknown family, or none, or a negative count.
    """
    return _draw(count, seed, families, set(exclude), lambda question: True)


def split(name: SplitName, count: int, families: Sequence[str] = FAMILIES) -> list[Problem]:
    """The first ``count`` problems of a split; different splits never share a question.

    Raises:
        ConfigError: An unknown split or family.
    """
    if name not in SPLITS:
        raise ConfigError(f"unknown split {name!r}: use one of {', '.join(get_args(SplitName))}")
    chosen = SPLITS[name]
    return _draw(count, chosen.seed, families, set(), lambda question: _bucket(question) in chosen.buckets)


def _bucket(question: str) -> int:
    return hashlib.blake2b(question.encode(), digest_size=8).digest()[0] % BUCKETS


def _draw(
    count: int, seed: int, families: Sequence[str], seen: set[str], accept: Callable[[str], bool]
) -> list[Problem]:
    unknown = [family for family in families if family not in FAMILY_TABLE]
    if unknown or not families:
        raise ConfigError(f"unknown families {unknown}: use some of {', '.join(FAMILIES)}")
    if count < 0:
        raise ConfigError(f"count is {count}: it must not be negative")
    rng = random.Random(seed)  # data, no secrets
    problems: list[Problem] = []
    while len(problems) < count:
        scene, operations, question = _draw_question(FAMILY_TABLE[rng.choice(families)], rng)
        if question in seen or not accept(question):
            continue
        seen.add(question)
        problems.append(_problem(len(problems), scene, operations, question))
    return problems


def _problem(index: int, scene: Scene, operations: list[Operation], question: str) -> Problem:
    checksum = zlib.crc32(question.encode())
    wording_rng = random.Random(checksum)  # one question has one reference, in every split and seed
    return Problem(
        id=f"{scene.family.name}-{index:06d}-{checksum:08x}",
        family=scene.family.name,
        question=question,
        solution=word_solution(scene, operations, wording_rng),
        answer=operations[-1].after if operations else scene.start,
        steps=len(operations) + (scene.group is not None),
    )


def _draw_question(family: Family, rng: random.Random) -> tuple[Scene, list[Operation], str]:
    steps = rng.choices(STEP_COUNTS, STEP_WEIGHTS)[0]
    scene = _draw_scene(family, rng)
    todo = steps - (scene.group is not None)
    words = {"name": scene.name, "friend": scene.friend, "p": scene.pronoun, "unit": scene.unit}
    if scene.group is not None:
        count, group, size = scene.group
        sentences = [family.group_opening.format(**words, x=count, group=group, y=size)]
    else:
        sentences = [rng.choice(family.openings).format(**words, n=scene.start)]
    distractor_at = rng.randint(0, todo) if rng.random() < P_DISTRACTOR else -1
    operations: list[Operation] = []
    quantity = scene.start
    for i in range(todo + 1):
        if i == distractor_at:
            other = rng.choice([unit for unit in family.units if unit != scene.unit])
            template = rng.choice(family.distractors)
            sentences.append(template.format(**words, other=other, n=rng.randint(2, LARGEST)))
        if i < todo:
            operation, sentence = _draw_operation(family, quantity, words, rng)
            operations.append(operation)
            sentences.append(sentence)
            quantity = operation.after
    sentences.append(rng.choice(family.questions).format(**words))
    return scene, operations, " ".join(sentences)


def _draw_scene(family: Family, rng: random.Random) -> Scene:
    names, friends, pronoun = rng.choice(((GIRLS, BOYS, "she"), (BOYS, GIRLS, "he")))
    # The friend is of the other gender, so that "she" and "he" are never ambiguous.
    name, friend, unit = rng.choice(names), rng.choice(friends), rng.choice(family.units)
    if rng.random() < P_GROUP_OPENING:
        count, group, size = rng.randint(2, 9), rng.choice(family.groups), rng.randint(2, 9)
        return Scene(family, name, pronoun, friend, unit, count * size, (count, group, size))
    return Scene(family, name, pronoun, friend, unit, rng.randint(5, 79))


def _draw_operation(family: Family, quantity: int, words: dict[str, str], rng: random.Random) -> tuple[Operation, str]:
    kind = _draw_kind(quantity, rng)
    if kind == "?":
        low, high = max(2, quantity - DECISION_REACH), min(LARGEST, quantity + DECISION_REACH)
        offer = rng.choice([n for n in range(low, high + 1) if n != quantity])
        operation = Operation("?", "", offer, quantity, max(quantity, offer))
        return operation, family.decision.format(**words, n=offer)
    if kind == "*":
        verb, factor = rng.choice(SCALINGS)
        operation = Operation("*", verb, factor, quantity, quantity * factor)
        return operation, family.scaling.format(**words, verb=verb)
    change: Change
    if kind == "+":
        n, change = rng.randint(2, LARGEST - quantity), rng.choice(family.gains)
        operation = Operation("+", change.verb, n, quantity, quantity + n)
    else:
        n, change = rng.randint(2, quantity - 1), rng.choice(family.losses)
        operation = Operation("-", change.verb, n, quantity, quantity - n)
    sentence = rng.choice(CONNECTIVES) + change.sentence.format(**words, n=n)
    return operation, sentence[0].upper() + sentence[1:]


def _draw_kind(quantity: int, rng: random.Random) -> Kind:
    kinds: list[Kind] = ["?"] * 4
    if quantity <= LARGEST - 2:
        kinds += ["+"] * 4
    if quantity >= 3:
        kinds += ["-"] * 4
    if 2 <= quantity <= LARGEST // 3:
        kinds += ["*"]
    return rng.choice(kinds)
