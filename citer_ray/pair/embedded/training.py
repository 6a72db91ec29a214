"""Trains one model of the embedded pair; ``build`` starts it once per model as a process of its own.

``python -m citer_ray.pair.embedded.training RECIPE.json ROLE FOLDER`` reads the tokenizer from FOLDER, writes
the checkpoint there, and one JSON line per ``REPORT_EVERY`` steps to standard output. Muon (Jordan et al.
2024) on the layers' matrices learns this task several times faster than AdamW alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from citer_ray.errors import ConfigError
from citer_ray.pair.embedded.batches import Drills, EncodedProblems, encode_problems, row_batches
from citer_ray.pair.embedded.problems import split
from citer_ray.pair.embedded.recipe import ModelRecipe, PairRecipe, Stage
from citer_ray.pair.embedded.tokenizer import BOS_ID, EOS_ID, PAD_ID
from citer_ray.pair.embedded.wording import KEEP_WORDS, SWAP_WORDS

REPORT_EVERY = 20
Role = Literal["slm", "llm"]


@dataclass(frozen=True)
class Progress:
    """Means over the last steps: the loss, and the shares of right greedy tokens and decisions in problems."""

    step: int
    loss: float
    token_accuracy: float
    decision_accuracy: float


def new_model(recipe: PairRecipe, role: Role) -> LlamaForCausalLM:
    """A model with fresh weights, a function of the recipe's seed alone."""
    shape: ModelRecipe = getattr(recipe, role)
    config = LlamaConfig(
        vocab_size=recipe.vocabulary_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=recipe.context_length,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        initializer_range=shape.init_range,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(config)


def train_model(
    recipe: PairRecipe, role: Role, tokenizer: PreTrainedTokenizerFast, report: Callable[[Progress], None]
) -> LlamaForCausalLM:
    """Trains one model on the split ``train``; the same recipe gives the same weights on one machine."""
    data = encode_problems(split("train", recipe.examples, recipe.families), tokenizer)
    model = new_model(recipe, role)
    for index in range(len(getattr(recipe, role).stages)):
        train_stage(model, recipe, role, index, tokenizer, data, report)
    model.eval()
    return model


def train_stage(
    model: LlamaForCausalLM,
    recipe: PairRecipe,
    role: Role,
    index: int,
    tokenizer: PreTrainedTokenizerFast,
    data: EncodedProblems,
    report: Callable[[Progress], None],
) -> None:
    """Trains ``model`` in place through one stage of its recipe, on a random stream of the stage's own."""
    shape: ModelRecipe = getattr(recipe, role)
    stage, done = shape.stages[index], sum(stage.steps for stage in shape.stages[:index])
    rng = np.random.default_rng([recipe.seed, index] if stage.stream is None else stage.stream)
    optimizers = _optimizers(model, shape)
    sides = DecisionSides(tokenizer, recipe.vocabulary_size)
    batches = _batches(data, shape.batch_size, stage, Drills(tokenizer, rng), rng)
    recent: list[tuple[float, float, float]] = []
    for step in range(stage.steps):
        ids_BT, learn_BT, drill_rows = next(batches)
        _set_rates(optimizers, stage, step)
        hidden_BTH = model.model(ids_BT[:, :-1]).last_hidden_state
        logits_NV = model.lm_head(hidden_BTH[learn_BT[:, 1:]])
        wanted_N = ids_BT[:, 1:][learn_BT[:, 1:]]
        loss = F.cross_entropy(logits_NV, wanted_N)
        decision_loss = sides.loss(logits_NV, wanted_N)
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss + stage.decision_weight * decision_loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), shape.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
        in_problem_N = learn_BT[:, 1:].nonzero()[:, 0] >= drill_rows
        logits_MV, wanted_M = logits_NV.detach()[in_problem_N], wanted_N[in_problem_N]
        right = (logits_MV.argmax(-1) == wanted_M).float().mean().item()
        recent.append((loss.item(), right, sides.accuracy(logits_MV, wanted_M)))
        if len(recent) == REPORT_EVERY or step + 1 == stage.steps:
            report(Progress(done + step + 1, *(float(mean) for mean in np.nanmean(recent, axis=0))))
            recent.clear()


class DecisionSides:
    """An extra loss on decision words: the probability of the right side, whichever of its words says it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocabulary_size: int) -> None:
        self._sides_2V = torch.zeros(2, vocabulary_size, dtype=torch.bool)
        for side, words in enumerate((SWAP_WORDS, KEEP_WORDS)):
            self._sides_2V[side, tokenizer.convert_tokens_to_ids([f"Ġ{word}" for word in words])] = True

    def loss(self, logits_NV: Tensor, wanted_N: Tensor) -> Tensor:
        """The decisions' summed loss per position of the batch."""
        sides_D2, wanted_D = self._decisions(logits_NV, wanted_N)
        return F.nll_loss(sides_D2, wanted_D, reduction="sum") / len(wanted_N)

    def accuracy(self, logits_NV: Tensor, wanted_N: Tensor) -> float:
        """The share of decisions whose right side is the more probable one; NaN without a decision."""
        sides_D2, wanted_D = self._decisions(logits_NV, wanted_N)
        return (sides_D2.argmax(-1) == wanted_D).float().mean().item()

    def _decisions(self, logits_NV: Tensor, wanted_N: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of both sides at the positions of decision words, and the wanted side."""
        is_side_2N = self._sides_2V[:, wanted_N]
        chosen_N = is_side_2N.any(0)
        log_probs_DV = logits_NV[chosen_N].log_softmax(-1)
        sides_D2 = torch.stack([log_probs_DV[:, side].logsumexp(-1) for side in self._sides_2V], dim=-1)
        return sides_D2, is_side_2N[1, chosen_N].long()


def _batches(
    data: EncodedProblems, batch_size: int, stage: Stage, drills: Drills, rng: np.random.Generator
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yields ``ids_BT``, the mask of tokens to learn (solutions with EOS, results of drills), and how many of the
    first rows are drills.
    """
    for step, rows in enumerate(row_batches(data, batch_size, rng)):
        length = int(data.end_N[rows].max())
        ids_BT = data.ids_NT[rows, :length]
        position_T = np.arange(length)
        learn_BT = (position_T >= data.start_N[rows, None]) & (position_T < data.end_N[rows, None])
        share = stage.drill_start + (stage.drill_end - stage.drill_start) * step / stage.steps
        drill_rows = round(share * batch_size)
        for i in range(drill_rows):
            ids_BT[i], learn_BT[i] = drills.row(length)
        yield torch.from_numpy(ids_BT), torch.from_numpy(learn_BT), drill_rows


def _optimizers(model: LlamaForCausalLM, shape: ModelRecipe) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    embeddings = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." not in name]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    muon = torch.optim.Muon(
        matrices, lr=shape.muon_lr, weight_decay=shape.muon_weight_decay, momentum=shape.muon_momentum
    )
    adam = torch.optim.AdamW(
        [
            {"params": embeddings, "weight_decay": shape.adam_weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=shape.adam_lr,
        betas=shape.adam_betas,
    )
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adam]


def _set_rates(optimizers: list[torch.optim.Optimizer], stage: Stage, step: int) -> None:
    warm = min(1.0, (step + 1) / stage.warmup_steps)
    left = 1 - max(0, step - stage.warmup_steps) / max(1, stage.steps - stage.warmup_steps)
    for optimizer in optimizers:
        is_adam = isinstance(optimizer, torch.optim.AdamW)
        rate = stage.rate if stage.adam_rate is None or not is_adam else stage.adam_rate
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * rate * warm * left


def main(arguments: list[str]) -> None:
    """The process that ``build`` starts: recipe file, role, and the folder with the tokenizer."""
    recipe_path, role_name, folder = arguments
    roles: dict[str, Role] = {"slm": "slm", "llm": "llm"}
    if role_name not in roles:
        raise ConfigError(f"unknown role {role_name!r}: use slm or llm")
    torch.set_num_threads(1)

    def report(progress: Progress) -> None:
        sys.stdout.write(json.dumps(asdict(progress)) + "\n")
        sys.stdout.flush()

    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    model = train_model(PairRecipe.load(Path(recipe_path)), roles[role_name], tokenizer, report)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
