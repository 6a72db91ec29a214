"""Word tables of the template families: items, money and travel.

A family gives the nouns, verbs and questions of a problem; the arithmetic and the general shape of the
written-out steps are shared, so that a small model learns them once and a router can be trained with one
family held out. Fed by nothing; read by ``problems`` (questions) and ``wording`` (solutions).
"""

from __future__ import annotations

from dataclasses import dataclass

GIRLS = ("Mia", "Anna", "Lucy", "Emma", "Nora", "Zoe", "Ivy", "Ruth")
BOYS = ("Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Omar", "Finn")


@dataclass(frozen=True)
class Change:
    """A verb that raises or lowers the quantity, and the question sentence that uses it."""

    verb: str
    sentence: str


@dataclass(frozen=True)
class Family:
    """The words of one template family.

    Placeholders: ``{name}`` ``{friend}`` ``{p}`` (she/he) ``{unit}`` ``{other}`` (another unit) ``{group}``
    ``{x}`` ``{y}`` ``{n}`` (a number). A change's sentence starts with ``{p}``.
    """

    name: str
    units: tuple[str, ...]
    groups: tuple[str, ...]
    openings: tuple[str, ...]
    group_opening: str
    gains: tuple[Change, ...]
    losses: tuple[Change, ...]
    scaling: str
    decision: str
    distractors: tuple[str, ...]
    questions: tuple[str, ...]
    start_verb: str
    state_verbs: tuple[str, str]


ITEMS = Family(
    name="items",
    units=(
        "apples", "books", "coins", "cards", "shells", "stamps",
        "pens", "marbles", "cookies", "stickers", "beads", "plums",
    ),
    groups=("bags", "boxes", "jars", "packs"),
    openings=(
        "{name} has {n} {unit}.",
        "{name} owns {n} {unit}.",
        "There are {n} {unit} in the room of {name}.",
    ),
    group_opening="{name} has {x} {group} with {y} {unit} each.",
    gains=(
        Change("buys", "{p} buys {n} more."),
        Change("finds", "{p} finds {n} more {unit}."),
        Change("gets", "{p} gets {n} {unit} from {friend}."),
        Change("wins", "{p} wins {n} more in a game."),
    ),
    losses=(
        Change("gives", "{p} gives {n} {unit} to {friend}."),
        Change("loses", "{p} loses {n}."),
        Change("sells", "{p} sells {n} {unit}."),
        Change("uses", "{p} uses {n} of them."),
    ),
    scaling="Then {p} {verb} the number of {unit}.",
    decision="Then {p} may swap for {n} {unit} and takes the larger.",
    distractors=("{friend} has {n} {unit}.", "{friend} owns {n} {other}.", "{name} also has {n} {other}."),
    questions=("How many {unit} does {name} have now?", "How many {unit} does {p} have in the end?"),
    start_verb="has",
    state_verbs=("has", "owns"),
)  # fmt: skip

MONEY = Family(
    name="money",
    units=("dollars", "euros", "pounds", "francs", "pesos", "crowns"),
    groups=("hours", "shifts", "jobs", "weeks"),
    openings=(
        "{name} carries {n} {unit}.",
        "{name} keeps {n} {unit} at the bank.",
        "The purse of {name} holds {n} {unit}.",
    ),
    group_opening="{name} works {x} {group} for {y} {unit} each.",
    gains=(
        Change("earns", "{p} earns {n} more."),
        Change("receives", "{p} receives {n} {unit} from {friend}."),
        Change("collects", "{p} collects {n} more {unit}."),
        Change("borrows", "{p} borrows {n} at the bank."),
    ),
    losses=(
        Change("spends", "{p} spends {n} {unit} on lunch."),
        Change("pays", "{p} pays {n} for a hat."),
        Change("lends", "{p} lends {n} {unit} to {friend}."),
        Change("donates", "{p} donates {n}."),
    ),
    scaling="Then {p} {verb} the money in a bet.",
    decision="Then a bank offers {n} {unit} instead and {p} accepts the higher sum.",
    distractors=(
        "{friend} carries {n} {unit}.",
        "A lamp costs {n} {unit}.",
        "{name} also keeps {n} {other}.",
    ),
    questions=(
        "How much money does {name} have left?",
        "How many {unit} are in the purse of {name} in the end?",
    ),
    start_verb="carries",
    state_verbs=("carries", "keeps"),
)

TRAVEL = Family(
    name="travel",
    units=("miles", "yards", "meters", "blocks", "leagues", "laps"),
    groups=("days", "rides", "walks", "trips"),
    openings=(
        "{name} plans a path of {n} {unit}.",
        "{name} walks {n} {unit}.",
        "The tour of {name} is {n} {unit} long.",
    ),
    group_opening="{name} goes {x} {group} over {y} {unit} each.",
    gains=(
        Change("rides", "{p} rides {n} more."),
        Change("hikes", "{p} hikes {n} more {unit} around a lake."),
        Change("runs", "{p} runs {n} {unit} with {friend}."),
        Change("adds", "{p} adds {n} on the way to {friend}."),
    ),
    losses=(
        Change("skips", "{p} skips {n} {unit}."),
        Change("saves", "{p} saves {n} by a bridge."),
        Change("cuts", "{p} cuts {n} {unit} in the rain."),
        Change("drops", "{p} drops {n}."),
    ),
    scaling="Then {p} {verb} the whole path.",
    decision="Then {p} sees another road of {n} {unit} and picks the longer.",
    distractors=(
        "{friend} walks {n} {unit}.",
        "The house of {friend} is {n} {unit} away.",
        "A map shows {n} {other}.",
    ),
    questions=("How far does {name} go now?", "How many {unit} long is the tour of {name} in the end?"),
    start_verb="walks",
    state_verbs=("covers", "walks"),
)

FAMILY_TABLE: dict[str, Family] = {family.name: family for family in (ITEMS, MONEY, TRAVEL)}
FAMILIES: tuple[str, ...] = tuple(FAMILY_TABLE)
