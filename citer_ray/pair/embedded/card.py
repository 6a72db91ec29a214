"""The model card of an embedded pair, written from its recipe and its measured numbers alone.

Fed by ``build`` (and, for numbers measured anew, by ``evaluate.measure_pair``); read by people.
"""

from __future__ import annotations

from typing import Any

_CARD = """\
# Embedded pair: model card

Two Llama-architecture models with one tokenizer, trained from scratch on synthetic word problems, for trying
and testing token-level routing without a download. They can do nothing else.

## Data

Seeded, generated word problems (`citer_ray/pair/embedded/problems.py`) of the families {families}: one to
three steps with numbers from 1 to 99, a distractor in some, written-out steps and a final `\\boxed{{N}}`. The
wording of a solution varies freely (five paraphrases a sentence), and the free first word of a decision
sentence also settles the answer. Training: {examples} problems of the split `train`; measured on {problems}
problems of the split `test`. The hash of a question decides its split, so that no question is in two. The loss
covers the solution and EOS only; drills (bare sums and decisions) fill a falling share of each batch's rows.

## Models and recipe

Seed {seed}. Muon on the layers' matrices, AdamW on the rest; linear warm-up, then linear to 0; float32. All
settings are in `recipe.json`. Hardware: {hardware}; one thread a model.{note}

{shapes}

## Greedy accuracy on held-out problems (value ± standard error)

| family | SLM | LLM | n |
| --- | --- | --- | --- |
{rows}

Cases at the reference's positions, EOS included (greedy tokens, teacher-forced):
slm_correct {slm_correct:.1%}, llm_correct {llm_correct:.1%}, both_wrong {both_wrong:.1%}.

## Use

Prompt: BOS, the question, a newline; the chat template makes the same of one user message. `<|handoff|>` is
reserved. `citer pair build` makes such a pair again; the same seed gives the same weights only on the same
machine and library versions.
"""

_SHAPE_COLUMNS = ("hidden_size", "layers", "heads", "feed_forward", "batch_size")
_STAGE_COLUMNS = ("steps", "rate", "decision_weight")


def model_card(recipe: dict[str, Any], measured: dict[str, Any]) -> str:
    """Renders the card of a ``PairRecipe`` (as a dict) and of what ``measured.json`` holds."""
    rows = [
        f"| {family} | {_number(measured['slm'][family])} | {_number(llm)} | {llm['count']} |"
        for family, llm in measured["llm"].items()
    ]
    return _CARD.format(
        families=", ".join(recipe["families"]),
        examples=recipe["examples"],
        problems=measured["problems"],
        seed=recipe["seed"],
        shapes=_shape_table(recipe, measured),
        hardware=measured["training"]["hardware"],
        note=f" {measured['training']['note']}" if "note" in measured["training"] else "",
        rows="\n".join(rows),
        **measured["cases"],
    )


def _shape_table(recipe: dict[str, Any], measured: dict[str, Any]) -> str:
    names = [name.replace("_", " ") for name in _SHAPE_COLUMNS + _STAGE_COLUMNS]
    lines = [["", "parameters", *names, "seconds"], ["---"] * (len(names) + 3)]
    for role in ("slm", "llm"):
        settings = [str(recipe[role][name]) for name in _SHAPE_COLUMNS]
        settings += [" then ".join(f"{stage[name]:g}" for stage in recipe[role]["stages"]) for name in _STAGE_COLUMNS]
        parameters, seconds = measured[f"{role}_parameters"], measured["training"]["seconds"][role]
        lines.append([role.upper(), f"{parameters:,}", *settings, f"{seconds:.0f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(accuracy: dict[str, float]) -> str:
    return f"{accuracy['value']:.1%} ± {accuracy['standard_error']:.1%}"
