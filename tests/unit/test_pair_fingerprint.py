"""Fingerprints: equal for equal models however they are stored, different for any difference that matters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from citer_ray.config import ModelConfig, PairConfig
from citer_ray.errors import PairError
from citer_ray.fingerprint import PairFingerprint
from citer_ray.pair import fingerprint as module
from citer_ray.pair.fingerprint import fingerprint, pair_fingerprint, tokenizer_fingerprint
from tests.unit.pair_checkpoints import make_model, make_tokenizer, save


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny checkpoint."""
    return save(tmp_path / "tiny", make_model(), make_tokenizer())


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def nudge(folder: Path, name: str, index: int) -> None:
    """Change one number of one tensor."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[index] += 1.0
    save_file(tensors, folder / "model.safetensors")


def test_it_is_a_function_of_the_content(checkpoint: Path, tmp_path: Path) -> None:
    """A copy elsewhere, other shards, another dtype note and another release give the same 32 digits."""
    first = fingerprint(checkpoint)
    assert len(first) == 32
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    edit_config(copy, transformers_version="9.9.9", use_cache=False, _name_or_path="elsewhere")
    assert fingerprint(str(copy)) == first
    sharded = tmp_path / "sharded"
    make_model().save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert fingerprint(sharded) == first


def test_it_does_not_change_between_releases(tmp_path: Path) -> None:
    """A golden value: files of fixed content. A change here makes all stored labels and routers unusable."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4}))
    save_file({"a.weight": torch.arange(8, dtype=torch.float32)}, tmp_path / "model.safetensors")
    assert fingerprint(tmp_path) == "2985254b185f3844a70bca37c9aefac0"


@pytest.mark.parametrize("whole_below", [1 << 30, 0], ids=["read whole", "sampled"])
def test_another_number_anywhere_gives_another_fingerprint(
    checkpoint: Path, whole_below: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, a middle and the last number of a tensor; tensors below 32 KiB are read whole in either way."""
    monkeypatch.setattr(module, "WHOLE_BELOW_BYTES", whole_below)
    seen = {fingerprint(checkpoint)}
    for index in (0, 500, -1):
        nudge(checkpoint, "model.layers.1.mlp.up_proj.weight", index)
        seen.add(fingerprint(checkpoint))
    assert len(seen) == 4


def test_large_tensors_are_sampled_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large checkpoint, ranges are read; a change over the whole tensor shows, one between ranges does not."""
    monkeypatch.setattr(module, "WHOLE_BELOW_BYTES", 0)
    (tmp_path / "config.json").write_text("{}")
    weights = torch.zeros(100_000)
    seen = []
    for change in (None, 0, -1, 2_000, slice(None)):
        if change is not None:
            weights[change] += 1
        save_file({"w": weights}, tmp_path / "model.safetensors")
        seen.append(fingerprint(tmp_path))
    original, first, last, between, everywhere = seen
    assert len({original, first, last, everywhere}) == 4
    assert between == last


def test_config_names_shapes_and_dtypes_count(checkpoint: Path) -> None:
    """What the weights mean is part of the model."""
    seen = {fingerprint(checkpoint)}
    edit_config(checkpoint, rms_norm_eps=1e-3)
    seen.add(fingerprint(checkpoint))
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    norm = tensors.pop("model.norm.weight")
    for changed in ({"other.weight": norm}, {"model.norm.weight": norm[None]}, {"model.norm.weight": norm.int()}):
        save_file({**tensors, **changed}, path)
        seen.add(fingerprint(checkpoint))
    assert len(seen) == 5


def test_a_pair(checkpoint: Path, tmp_path: Path) -> None:
    """Both models and the tokenizer that they share."""
    llm = save(tmp_path / "llm", make_model(seed=1), make_tokenizer())
    pair = PairConfig(slm=ModelConfig(path=str(checkpoint)), llm=ModelConfig(path=str(llm)))
    found = pair_fingerprint(pair)
    assert found.slm == fingerprint(checkpoint)
    assert found.llm == fingerprint(llm) != found.slm
    assert found == PairFingerprint(slm=found.slm, llm=found.llm, tokenizer=tokenizer_fingerprint(make_tokenizer()))


def test_tokenizers() -> None:
    """Vocabulary, special tokens and chat template count; loading it again does not."""
    base = tokenizer_fingerprint(make_tokenizer())
    assert tokenizer_fingerprint(make_tokenizer()) == base
    others = [
        make_tokenizer(chat_template="{{ messages }}"),
        make_tokenizer(eos_token="<|pad|>"),
        make_tokenizer(corpus=["quite other text, quite other merges"]),
    ]
    assert len({base, *map(tokenizer_fingerprint, others)}) == 4


def test_a_hub_name_is_read_from_the_cache(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's layout: refs, and snapshots by commit. Nothing is downloaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(PairError, match=r"neither a folder nor in the hub cache.*hf download org/tiny"):
        fingerprint("org/tiny")
    repo, commit = tmp_path / "cache" / "models--org--tiny", "0" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    shutil.copytree(checkpoint, repo / "snapshots" / commit)
    assert fingerprint("org/tiny") == fingerprint("org/tiny", commit) == fingerprint(checkpoint)
    with pytest.raises(PairError, match="hub cache"):
        fingerprint("org/tiny", "other-branch")


def test_files_that_cannot_be_read(checkpoint: Path, tmp_path: Path) -> None:
    """Cut off, damaged, incomplete, absent: each is named."""
    weights = checkpoint / "model.safetensors"
    content = weights.read_bytes()
    for broken, message in (
        (content[:-1], "ends before its last tensor"),
        (content[:100], "header of .* is damaged"),
        (b"abc", "no safetensors file"),
        (b"<html> not found </html>", "no safetensors file"),
    ):
        weights.write_bytes(broken)
        with pytest.raises(PairError, match=message):
            fingerprint(checkpoint)
    weights.unlink()
    with pytest.raises(PairError, match="nothing to take a fingerprint of"):
        fingerprint(checkpoint)
    with pytest.raises(PairError, match=r"cannot read .*config\.json"):
        fingerprint(tmp_path)
    make_model().save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    min((tmp_path / "sharded").glob("*.safetensors")).unlink()
    with pytest.raises(PairError, match=r"lacks 1 of \d+ weight files, first model-00001"):
        fingerprint(tmp_path / "sharded")
