"""Pruning: the pruned checkpoint computes what the source computes without those layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from citer_ray.config import ModelConfig, PairConfig
from citer_ray.errors import PairError
from citer_ray.pair.check import check_pair
from citer_ray.pair.models import load_hf_config, load_model
from citer_ray.pair.prune import middle_layers, prune_layers
from tests.unit.pair_checkpoints import make_model, make_tokenizer, save

IDS = torch.arange(3, 15)[None]


def logits_without(model: PreTrainedModel, dropped: list[int]) -> torch.Tensor:
    """Compute logits with some layers replaced by the identity, and no cache."""

    def skip(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])

    layers = model.get_decoder().layers
    hooks = [layers[index].register_forward_hook(skip, with_kwargs=True) for index in dropped]
    try:
        with torch.no_grad():
            return model(IDS, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
        ("gemma2", {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 3}),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1, 0, 1]}),
    ],
)
def test_pruned_models_skip_the_layers(kind: str, extra: dict[str, Any], tmp_path: Path) -> None:
    """Whatever belongs to a layer (its window, its rotary embedding) goes and stays with it."""
    source = make_model(kind, num_hidden_layers=6, **extra)
    save(tmp_path / "source", source, make_tokenizer())
    prune_layers(str(tmp_path / "source"), tmp_path / "pruned", drop=[1, 4])
    config = ModelConfig(path=str(tmp_path / "pruned"), device="cpu")
    pruned = load_model(config)
    assert load_hf_config(config).num_hidden_layers == 4
    with torch.no_grad():
        torch.testing.assert_close(pruned(IDS, use_cache=False).logits, logits_without(source, [1, 4]))


def test_a_pruned_model_decodes_with_its_cache_and_is_a_pair_with_its_source(tmp_path: Path) -> None:
    """Layers are numbered anew, so that each finds its own keys and values; the tokenizer comes along."""
    save(tmp_path / "source", make_model(num_hidden_layers=8).to(torch.bfloat16), make_tokenizer())
    prune_layers(str(tmp_path / "source"), tmp_path / "slm", keep=5)
    slm = ModelConfig(path=str(tmp_path / "slm"), device="cpu")
    assert load_model(slm, dtype="auto").dtype == torch.bfloat16
    pruned = load_model(slm)
    ids = IDS
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, pruned(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    cached = pruned.generate(IDS, max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=True)
    assert torch.equal(cached, ids)
    info = check_pair(PairConfig(slm=slm, llm=ModelConfig(path=str(tmp_path / "source"), device="cpu")))
    assert (info.slm.num_layers, info.llm.num_layers) == (5, 8)


def test_the_middle_goes_and_the_ends_stay() -> None:
    """By hand for 30 layers; over all sizes, the first two and the last are never chosen."""
    assert middle_layers(30, 3) == [13, 14, 15]
    assert middle_layers(30, 6) == [12, 13, 14, 15, 16, 17]
    assert middle_layers(4, 1) == [2]
    for layers in range(4, 20):
        for count in range(1, layers - 2):
            chosen = middle_layers(layers, count)
            assert len(chosen) == count == chosen[-1] - chosen[0] + 1
            assert chosen[0] >= 2
            assert chosen[-1] <= layers - 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either how many layers to keep or which ones"),
        ({"keep": 3, "drop": [2]}, "and not both"),
        ({"keep": 2}, "keep between 3 and 3"),
        ({"keep": 4}, "0 of 4 layers cannot be dropped"),
        ({"keep": 9}, "-5 of 4 layers"),
        ({"drop": [4]}, "no layer 4: the model has layers 0 to 3"),
        ({"drop": [-1]}, "no layer -1"),
        ({"drop": []}, "drop some and keep some"),
        ({"drop": [0, 1, 2, 3]}, "drop some and keep some"),
    ],
)
def test_impossible_choices_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Nothing is written then."""
    save(tmp_path / "source", make_model(num_hidden_layers=4), make_tokenizer())
    with pytest.raises(PairError, match=message):
        prune_layers(str(tmp_path / "source"), tmp_path / "pruned", **arguments)
    assert not (tmp_path / "pruned").exists()


def test_layers_whose_kind_follows_from_their_number_are_refused(tmp_path: Path) -> None:
    """Every second layer has experts: without layer 1, the config would describe experts in the wrong places."""
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2}
    source = make_model("qwen3_moe", num_hidden_layers=4, **moe)
    save(tmp_path / "source", source, make_tokenizer())
    with pytest.raises(PairError, match=r"cannot be pruned like this.*model\.layers\.1\.mlp"):
        prune_layers(str(tmp_path / "source"), tmp_path / "pruned", drop=[1])
    prune_layers(str(tmp_path / "source"), tmp_path / "pruned", drop=[1, 2])


def test_an_existing_folder_and_other_architectures_are_refused(tmp_path: Path) -> None:
    """Before the weights are read, and by name."""
    save(tmp_path / "source", make_model(num_hidden_layers=4), make_tokenizer())
    with pytest.raises(PairError, match="exists; remove it"):
        prune_layers(str(tmp_path / "source"), tmp_path / "source", keep=3)
    gpt2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "num_hidden_layers": 4, "hidden_size": 32}
    save(tmp_path / "gpt2", make_model("gpt2", **gpt2), make_tokenizer())
    with pytest.raises(PairError, match=r"GPT2LMHeadModel\) has no list of decoder layers"):
        prune_layers(str(tmp_path / "gpt2"), tmp_path / "pruned", keep=3)
