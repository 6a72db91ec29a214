"""Pruning: a smaller model of the same family, by leaving out decoder layers. No training, so it is for trying things.

Fed by `citer pair prune`; writes a checkpoint folder with the source's tokenizer, so that source and result are a pair.
Works for causal models whose decoder keeps its layers in a `layers` list.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from citer_ray.config import ModelConfig
from citer_ray.errors import PairError
from citer_ray.pair.models import load_model, load_tokenizer, refuse_existing, save_checkpoint

# The first layers turn tokens into features and the last one turns features into logits; neither can be spared.
_FIRST_KEPT = 2
_LAST_KEPT = 1


def prune_layers(
    source: str,
    output_dir: Path,
    *,
    keep: int | None = None,
    drop: Sequence[int] | None = None,
) -> None:
    """Write `source` without some of its decoder layers.

    Args:
        source: checkpoint folder, hub name, or embedded model.
        output_dir: the folder to write; must not exist.
        keep: how many layers stay; `middle_layers` chooses which are dropped. Give this or `drop`.
        drop: the layers to drop, counted from 0.

    Raises:
        PairError: both or none of `keep` and `drop`, layers that do not exist or may not go, a model without a list
            of layers or whose layers differ in kind, or `output_dir` exists.
    """
    refuse_existing(output_dir)
    config = ModelConfig(path=source, device="cpu")
    model = load_model(config, dtype="auto")
    layers = _decoder_layers(model, source)
    dropped = _chosen(len(layers), keep, drop)
    _remove(model, layers, dropped)
    _check_loadable(model, source)
    save_checkpoint(model, load_tokenizer(config), output_dir)


def middle_layers(num_layers: int, num_dropped: int) -> list[int]:
    """Choose a block of neighbouring layers around the middle; never the first two, never the last.

    Measured on SmolLM2-135M-Instruct (30 layers), perplexity on worked GSM8K problems, full model 7.2: without 3, 5 and
    6 layers 13.6, 14.8 and 18.5 for the middle block; 28, 1 872 and 3 033 for layers spread evenly over the last two
    thirds; 2 544 and beyond for the last ones. Each gap in the chain costs, and one long gap costs least.

    Raises:
        PairError: so many cannot be spared.
    """
    spare = num_layers - _FIRST_KEPT - _LAST_KEPT
    if not 0 < num_dropped <= spare:
        raise PairError(
            f"{num_dropped} of {num_layers} layers cannot be dropped: the first {_FIRST_KEPT} and the last stay, so "
            f"keep between {_FIRST_KEPT + _LAST_KEPT} and {num_layers - 1}"
        )
    start = min(max((num_layers - num_dropped) // 2, _FIRST_KEPT), num_layers - _LAST_KEPT - num_dropped)
    return list(range(start, start + num_dropped))


def _chosen(num_layers: int, keep: int | None, drop: Sequence[int] | None) -> list[int]:
    if (keep is None) == (drop is None):
        raise PairError("say either how many layers to keep or which ones to drop, and not both")
    if drop is None:
        return middle_layers(num_layers, num_layers - (keep or 0))
    dropped = sorted(set(drop))
    outside = [index for index in dropped if not 0 <= index < num_layers]
    if outside:
        raise PairError(f"there is no layer {outside[0]}: the model has layers 0 to {num_layers - 1}")
    if not 0 < len(dropped) < num_layers:
        raise PairError(f"{len(dropped)} of {num_layers} layers were to be dropped; drop some and keep some")
    return dropped


def _decoder_layers(model: PreTrainedModel, source: str) -> nn.ModuleList:
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise PairError(f"{source} ({type(model).__name__}) has no list of decoder layers that could be shortened")
    return layers


def _remove(model: PreTrainedModel, layers: nn.ModuleList, dropped: Sequence[int]) -> None:
    """Take layers out of a model, and make its config and the remaining layers' numbers fit."""
    count = len(layers)
    kept = [index for index in range(count) if index not in set(dropped)]
    layers_left = nn.ModuleList(layers[index] for index in kept)
    model.get_decoder().layers = layers_left
    for position, layer in enumerate(layers_left):
        for module in layer.modules():
            # Attention finds its place in the KV cache by this number.
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", position)  # noqa: B010 - modules type their attributes as tensors
    text_config = model.config.get_text_config(decoder=True)
    _shorten(text_config, kept, count)


def _shorten(config: PretrainedConfig, kept: Sequence[int], count: int) -> None:
    """Keep the entries of per-layer lists (`layer_types`, `no_rope_layers`, ...) that belong to kept layers."""
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == count:
            setattr(config, key, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)


def _check_loadable(model: PreTrainedModel, source: str) -> None:
    """Build the shortened config without memory: its parameters must be the ones that are left.

    They are not where a layer's kind follows from its number (every second layer has experts, say).
    """
    with torch.device("meta"):
        expected: Any = AutoModelForCausalLM.from_config(model.config)
    ours, theirs = ({n: p.shape for n, p in m.named_parameters()} for m in (model, expected))
    if ours != theirs:
        name = min(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        raise PairError(
            f"{source} cannot be pruned like this: without those layers its config describes another {name}"
        )
