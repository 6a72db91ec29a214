"""Loading one model: paths, tokenizers, configs, weights, end-of-sequence ids, and ways to be wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import PretrainedConfig

from citer_ray.config import ModelConfig
from citer_ray.errors import PairError
from citer_ray.pair import models
from tests.unit.pair_checkpoints import make_model, make_tokenizer, save


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A complete tiny checkpoint."""
    return save(tmp_path / "tiny", make_model(), make_tokenizer())


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make hub look-ups fail at once instead of trying the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_and_a_hub_name_resolve(checkpoint: Path) -> None:
    """A folder is checked; a hub name is passed on."""
    assert models.resolve_path(ModelConfig(path=str(checkpoint))) == str(checkpoint)
    assert models.resolve_path(ModelConfig(path="Qwen/Qwen2-1.5B-Instruct")) == "Qwen/Qwen2-1.5B-Instruct"
    assert models.resolve_path(ModelConfig(path="gpt2")) == "gpt2"


def test_embedded_models_resolve_to_the_shipped_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The role goes to the embedded pair, which is imported only then."""
    fake = ModuleType("citer_ray.pair.embedded")
    fake.embedded_weights = lambda role: tmp_path / role  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "citer_ray.pair.embedded", fake)
    assert models.resolve_path(ModelConfig(path="embedded:slm")) == str(tmp_path / "slm")
    assert models.resolve_path(ModelConfig(path="embedded:llm")) == str(tmp_path / "llm")
    with pytest.raises(PairError, match=r"embedded model 'mlm'.*embedded:slm and embedded:llm"):
        models.resolve_path(ModelConfig(path="embedded:mlm"))


def test_paths_that_are_no_checkpoint_say_what_is_missing(tmp_path: Path) -> None:
    """A missing folder, a folder without config.json, a GGUF file, and another file."""
    with pytest.raises(PairError, match=r"no folder /nowhere/model"):
        models.resolve_path(ModelConfig(path="/nowhere/model"))
    with pytest.raises(PairError, match=r"holds no config\.json"):
        models.resolve_path(ModelConfig(path=str(tmp_path)))
    (tmp_path / "a.gguf").touch()
    with pytest.raises(PairError, match="import-gguf"):
        models.resolve_path(ModelConfig(path=str(tmp_path / "a.gguf")))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(PairError, match="name its folder"):
        models.resolve_path(ModelConfig(path=str(tmp_path / "model.safetensors")))


def test_a_model_loads_exact_frozen_and_in_float32_on_a_cpu(checkpoint: Path) -> None:
    """A bfloat16 checkpoint becomes float32 under `auto` on a CPU, and keeps its dtype when asked."""
    source = make_model().to(torch.bfloat16)
    source.save_pretrained(checkpoint)
    loaded = models.load_model(ModelConfig(path=str(checkpoint), device="cpu"))
    assert loaded.dtype == torch.float32
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    for (name, ours), (_, theirs) in zip(loaded.named_parameters(), source.named_parameters(), strict=True):
        assert torch.equal(ours, theirs.float()), name
    narrow = models.load_model(ModelConfig(path=str(checkpoint), device="cpu", dtype="bfloat16"))
    assert narrow.dtype == torch.bfloat16


def test_pickled_weights_are_not_loaded(checkpoint: Path) -> None:
    """A checkpoint with `pytorch_model.bin` alone is refused: loading it could run code."""
    torch.save(make_model().state_dict(), checkpoint / "pytorch_model.bin")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(PairError, match=r"cannot load the weights of .*safetensors"):
        models.load_model(ModelConfig(path=str(checkpoint), device="cpu"))


def test_missing_and_misshapen_tensors_are_refused(checkpoint: Path) -> None:
    """No parameter is ever left at random values."""
    edit_config(checkpoint, num_hidden_layers=3)
    with pytest.raises(PairError, match=r"lacks 9 tensors .* model\.layers\.2\."):
        models.load_model(ModelConfig(path=str(checkpoint), device="cpu"))
    edit_config(checkpoint, num_hidden_layers=2, hidden_size=64)
    with pytest.raises(PairError, match="of the shapes that config"):
        models.load_model(ModelConfig(path=str(checkpoint), device="cpu"))


def test_a_cut_off_weight_file_is_refused(checkpoint: Path) -> None:
    """An interrupted download is named with its folder."""
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(PairError, match="cannot load the weights of"):
        models.load_model(ModelConfig(path=str(checkpoint), device="cpu"))


def test_configs_that_cannot_be_read(checkpoint: Path) -> None:
    """Broken JSON and an architecture that transformers does not know."""
    edit_config(checkpoint, model_type="newcomer")
    with pytest.raises(PairError, match=r"newcomer.*knows the architecture"):
        models.load_hf_config(ModelConfig(path=str(checkpoint)))
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(PairError, match="not a valid JSON"):
        models.load_hf_config(ModelConfig(path=str(checkpoint)))


def test_a_checkpoint_without_tokenizer_says_how_to_add_one(tmp_path: Path) -> None:
    """Weights alone are not enough."""
    folder = save(tmp_path / "bare", make_model())
    with pytest.raises(PairError, match=r"cannot load the tokenizer of .*save_pretrained"):
        models.load_tokenizer(ModelConfig(path=str(folder)))


@pytest.mark.usefixtures("offline")
def test_a_name_that_is_neither_folder_nor_on_the_hub() -> None:
    """A relative folder that was misspelt looks like a hub name; the message says both."""
    with pytest.raises(PairError, match=r"cannot load the config of runs/slm: .*There is no such folder"):
        models.load_hf_config(ModelConfig(path="runs/slm"))


def test_eos_ids_are_the_union_of_all_three_places(checkpoint: Path) -> None:
    """Config 1, tokenizer 1, generation config 7 and 8."""
    assert models.eos_token_ids(ModelConfig(path=str(checkpoint))) == {1}
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert models.eos_token_ids(ModelConfig(path=str(checkpoint))) == {1, 7, 8}
    (checkpoint / "generation_config.json").unlink()
    edit_config(checkpoint, eos_token_id=None)
    assert models.eos_token_ids(ModelConfig(path=str(checkpoint))) == {1}


def test_context_length_can_be_shortened_only(checkpoint: Path) -> None:
    """The model's own, an override, and the two errors."""
    hf_config = models.load_hf_config(ModelConfig(path=str(checkpoint)))
    assert models.context_length(hf_config) == 128
    assert models.context_length(hf_config, 100) == 100
    with pytest.raises(PairError, match="129 is more than the 128"):
        models.context_length(hf_config, 129)
    with pytest.raises(PairError, match="set max_model_len"):
        models.context_length(PretrainedConfig())
    assert models.context_length(PretrainedConfig(), 64) == 64


def test_devices() -> None:
    """Unknown names and devices that are not here are refused before weights are read."""
    assert models.resolve_device(ModelConfig(path="x", device="cpu")) == torch.device("cpu")
    with pytest.raises(PairError, match="'gpu' is unknown"):
        models.resolve_device(ModelConfig(path="x", device="gpu"))
    with pytest.raises(PairError, match="'cuda:99' is not here"):
        models.resolve_device(ModelConfig(path="x", device="cuda:99"))


def test_a_saved_checkpoint_loads_and_never_overwrites(tmp_path: Path) -> None:
    """Written whole, readable by all who can read its config, and refused where something is."""
    source, target = make_model(seed=3), tmp_path / "deep" / "out"
    models.save_checkpoint(source, make_tokenizer(), target)
    loaded = models.load_model(ModelConfig(path=str(target), device="cpu"))
    assert torch.equal(loaded.lm_head.weight, source.lm_head.weight)
    assert models.load_tokenizer(ModelConfig(path=str(target))).chat_template
    assert (target / "model.safetensors").stat().st_mode == (target / "config.json").stat().st_mode
    with pytest.raises(PairError, match="exists; remove it"):
        models.save_checkpoint(source, make_tokenizer(), target)


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk in the middle leaves no half checkpoint behind."""
    tokenizer = make_tokenizer()

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(type(tokenizer), "save_pretrained", fail)
    with pytest.raises(OSError, match="No space left"):
        models.save_checkpoint(make_model(), tokenizer, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
