"""Importing a GGUF file: a checkpoint folder that transformers and vLLM load, for users who have local models only.

Weights are dequantized; nothing is gained in memory, and the model computes what the quantized one would in exact
arithmetic. Fed by `citer pair import-gguf`; the folder is read by whatever takes a `ModelConfig`. transformers does the
conversion; this module checks the file first, and mends what a conversion from metadata alone leaves out: how digits
are split, whether texts begin with BOS, tokens that the model has no rows for, and further ids that end a turn.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from citer_ray.errors import PairError
from citer_ray.pair.models import context_length, refuse_existing, save_checkpoint

_log = logging.getLogger(__name__)

_MAGIC = b"GGUF"
_STAGED = "model.gguf"
_NUM_TOKENS = "num_tokens"
_SPECIAL_IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
# Pre-tokenizers (`tokenizer.ggml.pre`) that split every digit off and then split as GPT-2 does. transformers has no
# entry for them and would keep numbers whole, which parts spaces from digits in another way than in training.
_SINGLE_DIGITS = frozenset(("smollm", "starcoder", "refact", "command-r"))
_PLAIN_GPT2 = frozenset(("gpt-2", "gpt2", "default"))
# Ids that end a turn besides the EOS id.
_TURN_ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def import_gguf(
    gguf_file: Path, output_dir: Path, dtype: Literal["float32", "bfloat16", "float16"] = "float32"
) -> None:
    """Turn a GGUF file into a checkpoint folder: config, safetensors, tokenizer, chat template, generation config.

    Args:
        gguf_file: the file; of a split model, merge the parts first.
        output_dir: the folder to write; must not exist.
        dtype: dtype of the written weights. float32 holds the dequantized numbers exactly.

    Raises:
        PairError: no such file, not GGUF, damaged, one part of several, an architecture or tokenizer that
            transformers cannot convert, or `output_dir` exists.
    """
    refuse_existing(output_dir)
    metadata = _read_metadata(gguf_file)
    # A folder of its own: a config.json or tokenizer.json that lies beside the file would be mixed in.
    with tempfile.TemporaryDirectory() as staging:
        (Path(staging) / _STAGED).symlink_to(gguf_file.resolve())
        tokenizer = _convert_tokenizer(gguf_file, staging, metadata)
        model = _convert_model(gguf_file, staging, getattr(torch, dtype))
        tokenizer.model_max_length = context_length(model.config)
        model.config._name_or_path = ""
        _add_turn_ends(model, metadata)
        save_checkpoint(model, tokenizer, output_dir)


def _read_metadata(gguf_file: Path) -> dict[str, Any]:
    """Read the scalar metadata and the number of tokens, and refuse files that cannot be imported."""
    if not gguf_file.is_file():
        raise PairError(f"there is no file {gguf_file}")
    with gguf_file.open("rb") as stream:
        magic = stream.read(len(_MAGIC))
    if magic != _MAGIC:
        raise PairError(f"{gguf_file} is not a GGUF file: it begins with {magic!r}, not {_MAGIC!r}")
    try:
        fields = GGUFReader(gguf_file).fields
        # Arrays (the vocabulary) are read by transformers; here they would only cost time.
        metadata = {name: field.contents() for name, field in fields.items() if len(field.types) == 1}
    except (ValueError, KeyError, IndexError) as error:
        raise PairError(f"{gguf_file} is damaged or was cut off ({error}); copy or download it again") from error
    if int(metadata.get("split.count", 0)) > 1:
        raise PairError(
            f"{gguf_file} is one of {metadata['split.count']} parts; merge them first with "
            "`llama-gguf-split --merge FIRST_PART WHOLE_FILE`"
        )
    if "tokenizer.ggml.tokens" not in fields:
        raise PairError(f"{gguf_file} holds no vocabulary, so it is no language model (or an adapter of one)")
    return {**metadata, _NUM_TOKENS: len(fields["tokenizer.ggml.tokens"].data)}


def _convert_tokenizer(gguf_file: Path, staging: str, metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    try:
        converted: Any = AutoTokenizer.from_pretrained(staging, gguf_file=_STAGED)
    except (ValueError, KeyError) as error:
        raise PairError(f"transformers cannot convert the tokenizer of {gguf_file}: {error}") from error
    backend = _without_foreign_tokens(converted.backend_tokenizer, metadata[_NUM_TOKENS])
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        _mend_splitting(backend, str(metadata.get("tokenizer.ggml.pre", "default")))
    specials = {name: backend.id_to_token(int(metadata[key])) for name, key in _SPECIAL_IDS.items() if key in metadata}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **specials)
    tokenizer.chat_template = converted.chat_template
    # Where the file does not say, sentencepiece models begin with BOS and byte-level ones do not.
    _mend_bos(tokenizer, bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")))
    return tokenizer


def _without_foreign_tokens(backend: Tokenizer, num_tokens: int) -> Tokenizer:
    """Take out tokens that the tokenizer's class added (GPT-2's `<|endoftext|>`): no row of the model is theirs."""
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < num_tokens]
    if state["model"].get("unk_token") is not None and state["model"]["unk_token"] not in state["model"]["vocab"]:
        state["model"]["unk_token"] = None
    return Tokenizer.from_str(json.dumps(state))


def _mend_splitting(backend: Tokenizer, name: str) -> None:
    """Split text before merging as the named pre-tokenizer does."""
    if name in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif name not in _PLAIN_GPT2 and json.loads(backend.to_str())["pre_tokenizer"]["type"] == "ByteLevel":
        _log.warning(
            "the pre-tokenizer %r is unknown and replaced by GPT-2's: numbers, spaces and non-English text may be "
            "split otherwise than in training; take the tokenizer of the original model if you can",
            name,
        )


def _mend_bos(tokenizer: PreTrainedTokenizerBase, add_bos: bool) -> None:
    """Make texts begin with BOS, or not."""
    bos = tokenizer.bos_token
    if bos is None or (tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id) == add_bos:
        return
    backend: Any = tokenizer.backend_tokenizer
    start = f"{bos} " if add_bos else ""
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start}$A",
        pair=f"{start}$A {start}$B",
        special_tokens=[(bos, tokenizer.bos_token_id)] if add_bos else [],
    )


def _convert_model(gguf_file: Path, staging: str, dtype: torch.dtype) -> PreTrainedModel:
    try:
        result: Any = AutoModelForCausalLM.from_pretrained(
            staging,
            gguf_file=_STAGED,
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
            output_loading_info=True,
        )
    except (ValueError, KeyError, NotImplementedError) as error:
        raise PairError(f"transformers cannot convert {gguf_file}: {error}") from error
    model, report = result
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise PairError(f"{gguf_file} lacks {len(missing)} tensors that its architecture needs, first {missing[0]}")
    return cast(PreTrainedModel, model)


def _add_turn_ends(model: PreTrainedModel, metadata: Mapping[str, Any]) -> None:
    """Put all ids that end a turn into the generation config (chat models of Llama 3 and others have several)."""
    generation: Any = model.generation_config
    eos = generation.eos_token_id
    ids: list[int] = list(eos) if isinstance(eos, Iterable) else [eos] if eos is not None else []
    ids += [int(metadata[key]) for key in _TURN_ENDS if key in metadata and int(metadata[key]) not in ids]
    generation.eos_token_id = ids if len(ids) > 1 else next(iter(ids), None)
