"""Measures checkpoints of the embedded pair: greedy accuracy per family, and the shares of the cases.

Fed by ``problems`` and saved weights; read by ``build`` (the model card's numbers) and by the test that
re-measures the shipped weights. An answer is the last ``\\boxed{N}`` before EOS, which is all this data
needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from citer_ray.pair.embedded.batches import encode_problems
from citer_ray.pair.embedded.problems import Problem, prompt_of
from citer_ray.pair.embedded.tokenizer import EOS_ID, PAD_ID

BATCH_SIZE = 128
MAX_NEW_TOKENS = 96  # references are at most about 80 tokens long
_BOXED = re.compile(r"\\boxed\{(\d+)\}")


@dataclass(frozen=True)
class Accuracy:
    """A share of right answers among ``count`` problems, with its binomial standard error."""

    value: float
    standard_error: float
    count: int

    @classmethod
    def of(cls, right: Sequence[bool]) -> Accuracy:
        """Counts the right ones; an empty sequence has accuracy NaN."""
        if not right:
            return cls(math.nan, math.nan, 0)
        value = sum(right) / len(right)
        return cls(value, math.sqrt(value * (1 - value) / len(right)), len(right))


@torch.inference_mode()
def greedy_responses(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    batch_size: int = BATCH_SIZE,
) -> list[str]:
    """Greedy responses up to EOS, in the order of ``prompts``."""
    responses = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for begin in range(0, len(order), batch_size):
        rows = order[begin : begin + batch_size]
        inputs = tokenizer([prompts[i] for i in rows], return_tensors="pt", padding=True, padding_side="left")
        output_BT = model.generate(  # type: ignore[misc]
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        )
        response_BT = output_BT[:, inputs["input_ids"].shape[1] :].tolist()
        for i, ids in zip(rows, response_BT, strict=True):
            end = ids.index(EOS_ID) if EOS_ID in ids else len(ids)
            responses[i] = str(tokenizer.decode(ids[:end]))
    return responses


def answer_of(response: str) -> int | None:
    """The last boxed number, or None."""
    numbers = _BOXED.findall(response)
    return int(numbers[-1]) if numbers else None


def accuracies(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]
) -> dict[str, Accuracy]:
    """Greedy accuracy on all problems (key ``all``) and on each family's."""
    responses = greedy_responses(model, tokenizer, [prompt_of(problem) for problem in problems])
    right = [answer_of(r) == p.answer for r, p in zip(responses, problems, strict=True)]
    families = sorted({problem.family for problem in problems})
    result = {"all": Accuracy.of(right)}
    for family in families:
        result[family] = Accuracy.of([ok for ok, p in zip(right, problems, strict=True) if p.family == family])
    return result


@torch.inference_mode()
def case_shares(
    slm: LlamaForCausalLM,
    llm: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
) -> dict[str, float]:
    """Shares of the cases (arXiv 2502.01976) over all reference positions, EOS included, teacher-forced."""
    data = encode_problems(list(problems), tokenizer)
    counts = {"slm_correct": 0, "llm_correct": 0, "both_wrong": 0}
    for begin in range(0, len(problems), BATCH_SIZE):
        rows = slice(begin, begin + BATCH_SIZE)
        ids_BT = torch.from_numpy(data.ids_NT[rows])
        position_T = torch.arange(1, ids_BT.shape[1])
        start_B1, end_B1 = (torch.from_numpy(bound[rows, None]) for bound in (data.start_N, data.end_N))
        reference_BT = (position_T >= start_B1) & (position_T < end_B1)
        wanted_N = ids_BT[:, 1:][reference_BT]
        slm_N, llm_N = ((model(ids_BT[:, :-1]).logits.argmax(-1)[reference_BT] == wanted_N) for model in (slm, llm))
        counts["slm_correct"] += int(slm_N.sum())
        counts["llm_correct"] += int((~slm_N & llm_N).sum())
        counts["both_wrong"] += int((~slm_N & ~llm_N).sum())
    total = sum(counts.values())
    return {case: count / total for case, count in counts.items()}


def load_checkpoint(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Loads one model in float32 with its tokenizer, without network."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.eval()
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return model, tokenizer


def measure_pair(slm_folder: Path, llm_folder: Path, problems: Sequence[Problem]) -> dict[str, Any]:
    """The model card's numbers as JSON values: accuracy per family, parameters, and ``cases``."""
    slm, tokenizer = load_checkpoint(slm_folder)
    llm, _ = load_checkpoint(llm_folder)
    measured: dict[str, Any] = {"problems": len(problems)}
    for role, model in (("slm", slm), ("llm", llm)):
        by_family = accuracies(model, tokenizer, problems)
        measured[role] = {family: asdict(accuracy) for family, accuracy in by_family.items()}
        measured[f"{role}_parameters"] = sum(p.numel() for p in model.parameters())
    measured["cases"] = case_shares(slm, llm, tokenizer, problems)
    return measured
