"""Loading one model of the pair: its folder or hub name, tokenizer, config, weights and end-of-sequence ids.

Fed by a `ModelConfig`; read by the pair check, the engines, and the commands that make checkpoints. Weights
are read from safetensors alone, so that loading a checkpoint never runs pickled code, and a checkpoint that
lacks a tensor is refused: transformers would fill it with random numbers.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from citer_ray.config import ModelConfig
from citer_ray.errors import PairError

_EMBEDDED = "embedded:"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# The same number under the names that decoder families give it.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def resolve_path(model: ModelConfig) -> str:
    """Turn a config's path into what transformers loads: a folder, or a hub name as it is.

    Raises:
        PairError: an unknown embedded role, a folder that is missing or holds no checkpoint, or a GGUF file.
    """
    name = model.path
    if name.startswith(_EMBEDDED):
        return str(_embedded_folder(name.removeprefix(_EMBEDDED)))
    folder = Path(name).expanduser()
    if folder.is_file():
        advice = (
            "import it with `citer pair import-gguf FILE FOLDER`" if folder.suffix == ".gguf" else "name its folder"
        )
        raise PairError(f"{name} is a file, and a model is a folder or a hub name; {advice}")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise PairError(f"{name} holds no config.json, so it is no checkpoint; name the folder that holds it")
        return str(folder)
    if _HUB_NAME.fullmatch(name):
        return name
    raise PairError(f"there is no folder {name}, and it is no hub name (OWNER/NAME) either; check pair.*.path")


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer.

    Raises:
        PairError: the checkpoint brings none, or it cannot be read.
    """
    path = resolve_path(model)
    with _loading("the tokenizer", model):
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=model.revision or "main", trust_remote_code=model.trust_remote_code
        )
    return cast(PreTrainedTokenizerBase, tokenizer)


def load_hf_config(model: ModelConfig) -> PretrainedConfig:
    """Load a model's config; of a multimodal one, the part of its decoder.

    Raises:
        PairError: there is none, or transformers does not know the architecture.
    """
    path = resolve_path(model)
    with _loading("the config", model):
        hf_config = AutoConfig.from_pretrained(
            path, revision=model.revision or "main", trust_remote_code=model.trust_remote_code
        )
    return cast(PretrainedConfig, hf_config.get_text_config(decoder=True))


def load_model(model: ModelConfig, *, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
    """Load a model's weights, in evaluation mode and without gradients.

    Args:
        model: which one.
        dtype: instead of the config's dtype; `"auto"` is the checkpoint's own.

    Raises:
        PairError: no safetensors, missing or misshapen tensors, or an unknown device.
    """
    path, device = resolve_path(model), resolve_device(model)
    with _loading("the weights", model):
        result: Any = AutoModelForCausalLM.from_pretrained(
            path,
            revision=model.revision or "main",
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,
            dtype=resolve_dtype(model) if dtype is None else dtype,
            # Straight to the device: a large model need not fit into the host's memory first.
            device_map=None if device.type == "cpu" else {"": device},
            output_loading_info=True,
        )
    loaded, report = result
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise PairError(
            f"{model.path} lacks {len(missing)} tensors that its config.json asks for, first {missing[0]}; "
            "the checkpoint is incomplete, or its config belongs to another model"
        )
    return cast(PreTrainedModel, loaded.eval().requires_grad_(False))


def resolve_device(model: ModelConfig) -> torch.device:
    """Return the device that a config asks for; `auto` is CUDA if there is one.

    Raises:
        PairError: no such device here.
    """
    if model.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(model.device)
    except RuntimeError as error:
        raise PairError(f"device {model.device!r} is unknown; use auto, cpu, or one like cuda:0") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise PairError(f"device {model.device!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_dtype(model: ModelConfig) -> torch.dtype | str:
    """Return the dtype to load in; `auto` is the checkpoint's own on GPU and float32 on CPU."""
    if model.dtype != "auto":
        return cast(torch.dtype, getattr(torch, model.dtype))
    # CPUs add up bfloat16 slowly, and float32 makes greedy choices independent of how rows are batched.
    return torch.float32 if resolve_device(model).type == "cpu" else "auto"


def eos_token_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> frozenset[int]:
    """Return every id that ends a response: those of the generation config, the config and the tokenizer.

    Chat models often state several: Llama-3.1-Instruct ends a turn with one id and a text with another.

    Args:
        model: which one.
        tokenizer: its tokenizer, if it is loaded already.
    """
    found = [load_hf_config(model).eos_token_id, (tokenizer or load_tokenizer(model)).eos_token_id]
    generation = _generation_config(model)
    if generation is not None:
        found.append(generation.eos_token_id)
    ids: set[int] = set()
    for value in found:
        ids.update([value] if isinstance(value, int) else value or ())
    return frozenset(ids)


def context_length(hf_config: PretrainedConfig, override: int | None = None) -> int:
    """Return the longest context in tokens, prompt and response together.

    Args:
        hf_config: the decoder's config.
        override: the configured `max_model_len`; it may shorten the context, never lengthen it.

    Raises:
        PairError: the model states no length and none is configured, or it is longer than the model's.
    """
    stated = next((int(n) for key in _CONTEXT_KEYS if (n := getattr(hf_config, key, None))), None)
    if stated is None and override is None:
        raise PairError(f"model type {hf_config.model_type!r} states no context length; set max_model_len")
    if stated is not None and override is not None and override > stated:
        raise PairError(f"max_model_len {override} is more than the {stated} tokens that the model was made for")
    return cast(int, override or stated)


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output_dir: Path) -> None:
    """Write a loadable checkpoint; the folder appears complete or not at all.

    Raises:
        PairError: `output_dir` exists.
    """
    refuse_existing(output_dir)
    partial = output_dir.with_name(f".{output_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        model.save_pretrained(partial)
        # How this process reached its files is nothing that a reader of the checkpoint should inherit.
        for key in ("local_files_only", "is_local", "gguf_file"):
            tokenizer.init_kwargs.pop(key, None)
        tokenizer.save_pretrained(partial)
        # Weights are written for the owner alone; workers may run as somebody else.
        mode = (partial / "config.json").stat().st_mode
        for weights in partial.glob("*.safetensors"):
            weights.chmod(mode)
        partial.rename(output_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def refuse_existing(output_dir: Path) -> None:
    """Raise a `PairError` if something is in the way of a new checkpoint."""
    if output_dir.exists():
        raise PairError(f"{output_dir} exists; remove it or name another folder")


def _embedded_folder(role: str) -> Path:
    if role not in ("slm", "llm"):
        raise PairError(f"there is no embedded model {role!r}; the embedded pair is embedded:slm and embedded:llm")
    # Only here: most runs have a pair of their own.
    from citer_ray.pair.embedded import embedded_weights

    return embedded_weights(cast(Literal["slm", "llm"], role))


def _generation_config(model: ModelConfig) -> GenerationConfig | None:
    """Load the generation config, which a checkpoint may lack."""
    try:
        return GenerationConfig.from_pretrained(resolve_path(model), revision=model.revision or "main")
    except OSError:
        return None


@contextmanager
def _loading(what: str, model: ModelConfig) -> Iterator[None]:
    """Turn the errors of a `from_pretrained` call into a `PairError` that names the model and a way out."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise PairError(f"cannot load {what} of {model.path}: {reason} {_advice(what, model)}") from error


def _advice(what: str, model: ModelConfig) -> str:
    folder = Path(model.path).expanduser()
    if not model.path.startswith(_EMBEDDED) and not folder.is_dir():
        return "(There is no such folder, so it was taken as a hub name: check spelling, network and access.)"
    if what == "the tokenizer":
        return "(The folder must hold the tokenizer's files, as `tokenizer.save_pretrained` writes them.)"
    if what == "the weights":
        return "(The folder must hold all weights as *.safetensors, of the shapes that config.json states.)"
    return "(Check config.json, and whether this release of transformers knows the architecture.)"
