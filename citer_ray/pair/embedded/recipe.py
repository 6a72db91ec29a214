"""Typed training recipes of the embedded pair; written to ``recipe.json`` beside the weights.

The defaults are the recipe of the shipped weights. Read by ``build`` (both models) and ``training`` (one
model).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from citer_ray.errors import ConfigError
from citer_ray.pair.embedded.families import FAMILIES

SMALLEST_HEAD = 32  # vLLM's CPU attention refuses 16


@dataclass(frozen=True)
class Stage:
    """One stretch of training with fresh optimizers: warm up linearly, then fall linearly to 0.

    ``rate`` scales both learning rates, ``adam_rate`` AdamW's alone in its place. ``stream`` seeds the stage's order of
    data; None derives it from the recipe's seed. ``drill_start`` -> ``drill_end`` is the share of rows that hold drills
    instead of problems, falling over the stage. ``decision_weight`` scales the extra loss on decision words.
    """

    steps: int
    rate: float = 1.0
    adam_rate: float | None = None
    stream: int | None = None
    warmup_steps: int = 50
    drill_start: float = 0.5
    drill_end: float = 0.1
    decision_weight: float = 0.0


@dataclass(frozen=True)
class ModelRecipe:
    """One model's shape and training; Muon trains the layers' matrices, AdamW the embedding and the norms."""

    hidden_size: int
    layers: int
    heads: int
    feed_forward: int
    stages: tuple[Stage, ...]
    batch_size: int = 24
    muon_lr: float = 0.02
    muon_weight_decay: float = 0.01
    muon_momentum: float = 0.95
    adam_lr: float = 3e-3
    adam_betas: tuple[float, float] = (0.9, 0.98)
    adam_weight_decay: float = 0.05
    clip_norm: float = 1.0
    init_range: float = 0.05

    @property
    def steps(self) -> int:
        """Optimizer steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def __post_init__(self) -> None:
        """Refuses shapes that no engine of the project could serve.

        Raises:
            ConfigError: The heads do not divide the hidden size, or are smaller than ``SMALLEST_HEAD``.
        """
        size, rest = divmod(self.hidden_size, self.heads)
        if rest or size < SMALLEST_HEAD:
            raise ConfigError(
                f"hidden_size {self.hidden_size} with {self.heads} heads: "
                f"give heads of {SMALLEST_HEAD} or more that divide it"
            )


@dataclass(frozen=True)
class PairRecipe:
    """Both models, their data and the seed; ``vocabulary_size`` is padded beyond the tokenizer's ids."""

    seed: int = 0
    families: tuple[str, ...] = FAMILIES
    examples: int = 96_000
    tokenizer_examples: int = 20_000
    context_length: int = 512
    vocabulary_size: int = 512
    slm: ModelRecipe = field(
        default_factory=lambda: ModelRecipe(
            hidden_size=64, layers=2, heads=2, feed_forward=128, stages=(Stage(steps=2000, stream=0),)
        )
    )
    llm: ModelRecipe = field(
        default_factory=lambda: ModelRecipe(
            hidden_size=128,
            layers=4,
            heads=4,
            feed_forward=256,
            stages=(
                Stage(steps=3000, stream=0, decision_weight=8.0),
                Stage(
                    steps=1200,
                    rate=0.75,
                    adam_rate=2 / 3,
                    stream=1,
                    drill_start=0.1,
                    drill_end=0.05,
                    decision_weight=15.0,
                ),
            ),
        )
    )

    def save(self, path: Path, **extra: Any) -> None:
        """Writes the recipe, and any measured extras, as JSON."""
        path.write_text(json.dumps({**asdict(self), **extra}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> PairRecipe:
        """Reads what ``save`` wrote; extras are ignored."""
        values = json.loads(path.read_text())
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        for role in ("slm", "llm"):
            model = dict(known[role])
            model["adam_betas"] = tuple(model["adam_betas"])
            model["stages"] = tuple(Stage(**stage) for stage in model["stages"])
            known[role] = ModelRecipe(**model)
        return cls(**{**known, "families": tuple(known["families"])})
