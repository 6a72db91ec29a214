"""The freely varying wording of a written-out solution.

``problems`` builds a ``Scene`` (who, what) and its operations; this module words the reference. Every
sentence has five paraphrases, chosen by a random stream of its own: at a sentence's first word no model can
know the reference's word, and most such words do not matter. The exception is the decision sentence, whose
first word is free (one of five) but also settles which of two numbers goes on: ``SWAP_WORDS`` or
``KEEP_WORDS``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from citer_ray.pair.embedded.families import Family

SWAP_WORDS = ("Changing", "Switching", "Trading", "Swapping", "Moving")
KEEP_WORDS = ("Keeping", "Holding", "Staying", "Remaining", "Waiting")

Kind = Literal["+", "-", "*", "?"]


@dataclass(frozen=True)
class Operation:
    """One change of the quantity: ``before`` becomes ``after`` by ``operand``; kind ``?`` is a decision."""

    kind: Kind
    verb: str
    operand: int
    before: int
    after: int


@dataclass(frozen=True)
class Scene:
    """Everything that a question and its solution speak of; ``group`` is None without a product opening."""

    family: Family
    name: str
    pronoun: str
    friend: str
    unit: str
    start: int
    group: tuple[int, str, int] | None = None


def word_solution(scene: Scene, operations: list[Operation], rng: random.Random) -> str:
    """Words the solution: an opening, one sentence an operation, and the boxed answer."""
    answer = operations[-1].after if operations else scene.start
    sentences = [_opening(scene, rng)]
    sentences += [_step(scene, operation, rng) for operation in operations]
    sentences.append(_closing(answer, rng))
    return " ".join(sentences)


def _opening(scene: Scene, rng: random.Random) -> str:
    verb, unit = scene.family.start_verb, scene.unit
    quantity, reason = f"{scene.start}", f"{scene.name} {verb} "
    if scene.group is not None:
        count, group, size = scene.group
        quantity = f"{count} * {size} = {scene.start}"
        reason = f"{scene.name} {verb} {count} {group} of {size}, so "
    return rng.choice((
        f"{reason}{quantity} {unit} at first.",
        f"At first {scene.name} {verb} {quantity} {unit}.",
        f"We start with {quantity} {unit}.",
        f"The start is {quantity} {unit}.",
        f"In the beginning there are {quantity} {unit}.",
    ))  # fmt: skip


def _step(scene: Scene, operation: Operation, rng: random.Random) -> str:
    tail = rng.choices((".", f" {scene.unit}.", " now."), (0.5, 0.25, 0.25))[0]
    if operation.kind == "?":
        words = SWAP_WORDS if operation.after == operation.operand else KEEP_WORDS
        return f"{rng.choice(words)} is better, so {operation.after}{tail}"
    p, n = scene.pronoun, operation.operand
    equation = f"{operation.before} {operation.kind} {n} = {operation.after}"
    act = f"{p} {operation.verb} {'it' if operation.kind == '*' else n}"
    verb = rng.choices(scene.family.state_verbs, (0.6, 0.4))[0]
    name_the_sum = {
        "+": f"Adding {n} gives",
        "-": f"Taking {n} away leaves",
        "*": f"Multiplying by {n} gives",
    }
    body = rng.choice((
        f"After {act}, {p} {verb} {equation}",
        f"That makes {equation}",
        f"Next, {equation}",
        f"{name_the_sum[operation.kind]} {equation}",
        f"Since {act}, we get {equation}",
    ))  # fmt: skip
    return body + tail


def _closing(answer: int, rng: random.Random) -> str:
    lead = rng.choice(("The answer is", "So the answer is", "In the end it is", "Thus we have", "Answer:"))
    return f"{lead} \\boxed{{{answer}}}"
