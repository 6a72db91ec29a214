"""The pair check: whether an SLM and an LLM can write one response together. Runs before any weights are loaded.

Fed by a `PairConfig`; the `PairInfo` that it returns goes to the engines (shared vocabulary, EOS ids,
context, handoff token), to the router (hidden size), and into the provenance of every artifact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from citer_ray.config import ModelConfig, PairConfig
from citer_ray.errors import PairError
from citer_ray.pair.handoff import choose_handoff
from citer_ray.pair.models import (
    context_length,
    eos_token_ids,
    load_hf_config,
    load_tokenizer,
    resolve_device,
    resolve_path,
)
from citer_ray.pair.tokenizer_check import first_difference, tokens_by_id


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of one model without its weights.

    Attributes:
        path: the configured path or hub name.
        revision: the configured revision.
        model_type: the architecture's name in transformers.
        vocab_size: columns of the logits, padding included.
        hidden_size: width of the hidden state.
        num_layers: decoder layers.
        context_length: longest context in tokens, the configured limit applied.
    """

    path: str
    revision: str | None
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    context_length: int


@dataclass(frozen=True, slots=True)
class PairInfo:
    """A pair that passed the check.

    Attributes:
        slm: the small model.
        llm: the large model.
        shared_vocab_size: ids below it are in the tokenizer; logits of both models are cut there.
        bos_token_id: the tokenizer's BOS id, or None.
        eos_token_ids: ids that end a response, of either model, ascending.
        chat_templates_equal: both tokenizers bring the same chat template (or none).
        handoff_token_id: id that stands for a handoff inside vLLM, or None.
        handoff_token: its text; None beyond the tokenizer.
        handoff_reason: why that id, or why none.
        warnings: what a person should look at.
    """

    slm: ModelInfo
    llm: ModelInfo
    shared_vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_templates_equal: bool
    handoff_token_id: int | None
    handoff_token: str | None
    handoff_reason: str
    warnings: tuple[str, ...] = ()

    @property
    def context_length(self) -> int:
        """Longest context that both models can hold, in tokens."""
        return min(self.slm.context_length, self.llm.context_length)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `json.dumps`."""
        return {**asdict(self), "eos_token_ids": list(self.eos_token_ids), "warnings": list(self.warnings)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PairInfo:
        """Build it again from `to_json`."""
        nested = {
            "slm": ModelInfo(**data["slm"]),
            "llm": ModelInfo(**data["llm"]),
            "eos_token_ids": tuple(data["eos_token_ids"]),
            "warnings": tuple(data["warnings"]),
        }
        return cls(**{**data, **nested})


def check_pair(pair: PairConfig) -> PairInfo:
    """Check that the models of a pair share a tokenizer, and collect what others need to know of them.

    Raises:
        PairError: a missing model, tokenizer or device, tokenizers that differ (the first difference is
        named),
            a vocabulary that a model does not cover, or no EOS token.
    """
    for role, model in (("slm", pair.slm), ("llm", pair.llm)):
        _check_files(role, model)
        resolve_device(model)
    slm, llm = _describe(pair.slm), _describe(pair.llm)
    tokenizer, llm_tokenizer = load_tokenizer(pair.slm), load_tokenizer(pair.llm)
    difference = first_difference(tokenizer, llm_tokenizer)
    if difference is not None:
        raise PairError(
            f"{slm.path} and {llm.path} have different tokenizers: {difference}. Routing passes token ids between "
            "the models, so choose two models of one family"
        )
    shared = max(tokens_by_id(tokenizer), default=-1) + 1
    _check_vocabulary(shared, slm, llm)
    eos, warnings = _eos_ids(eos_token_ids(pair.slm, tokenizer), eos_token_ids(pair.llm, llm_tokenizer), shared)
    templates_equal = tokenizer.chat_template == llm_tokenizer.chat_template
    if not templates_equal:
        warnings.append("the chat templates differ; prompts are made with the SLM's")
    handoff = choose_handoff(
        pair.handoff_token,
        tokenizer,
        slm_vocab_size=slm.vocab_size,
        in_use=eos | _prompt_ids(tokenizer),
    )
    return PairInfo(
        slm=slm,
        llm=llm,
        shared_vocab_size=shared,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=tuple(sorted(eos)),
        chat_templates_equal=templates_equal,
        handoff_token_id=handoff.token_id,
        handoff_token=handoff.token,
        handoff_reason=handoff.reason,
        warnings=tuple(warnings),
    )


def _check_files(role: str, model: ModelConfig) -> None:
    """Refuse what can be seen to be incomplete from the names of files alone."""
    try:
        folder = Path(resolve_path(model))
    except PairError as error:
        raise PairError(f"pair.{role}.path: {error}") from error
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise PairError(
            f"pair.{role}.path: {model.path} holds no *.safetensors; other weight formats can run code when they are "
            "loaded, so save the model again with `model.save_pretrained(FOLDER)`"
        )


def _describe(model: ModelConfig) -> ModelInfo:
    hf_config = load_hf_config(model)
    return ModelInfo(
        path=model.path,
        revision=model.revision,
        model_type=hf_config.model_type,
        vocab_size=int(hf_config.vocab_size),
        hidden_size=int(hf_config.hidden_size),
        num_layers=int(hf_config.num_hidden_layers),
        context_length=context_length(hf_config, model.max_model_len),
    )


def _check_vocabulary(shared: int, slm: ModelInfo, llm: ModelInfo) -> None:
    for role, model in (("SLM", slm), ("LLM", llm)):
        if shared > model.vocab_size:
            raise PairError(
                f"the tokenizer knows ids up to {shared - 1}, but the {role} {model.path} has logits for "
                f"{model.vocab_size} ids only; tokenizer and weights do not belong together"
            )


def _prompt_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that prompts contain by design: BOS, padding, and the added tokens of the chat template."""
    template = str(tokenizer.chat_template)
    ids = {index for token, index in tokenizer.get_added_vocab().items() if token in template}
    return frozenset(ids | {i for i in (tokenizer.bos_token_id, tokenizer.pad_token_id) if i is not None})


def _eos_ids(slm: frozenset[int], llm: frozenset[int], shared: int) -> tuple[frozenset[int], list[str]]:
    """Return the EOS ids of either model that the tokenizer knows, and warnings about them."""
    slm, llm = (frozenset(index for index in ids if index < shared) for ids in (slm, llm))
    if not slm | llm:
        raise PairError("neither model has an EOS token, so no response would end; set eos_token in the tokenizers")
    if slm == llm:
        return slm, []
    note = f"EOS ids differ ({sorted(slm)} for the SLM, {sorted(llm)} for the LLM); each of them ends a response"
    return slm | llm, [note]
