"""Checks that need no weights: every bad input is one line that names the fix."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from citer_ray.config import RouterConfig
from citer_ray.engines import vllm_launch
from citer_ray.engines.vllm_launch import Speculation, VLLMOptions, check, split_cores
from citer_ray.engines.vllm_settings import ModelSettings
from citer_ray.errors import CiterError, ConfigError
from citer_ray.fingerprint import PairFingerprint
from citer_ray.router import Router
from citer_ray.router_artifact import RouterMetadata, save_router


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    LlamaConfig(
        vocab_size=96, hidden_size=64, max_position_embeddings=128, architectures=["LlamaForCausalLM"]
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def router(tmp_path: Path) -> str:
    return str(save(tmp_path / "router", hidden_size=64))


def save(folder: Path, hidden_size: int) -> Path:
    config = RouterConfig(widths=(1.0,))
    router = Router(hidden_size, config, generator=torch.Generator().manual_seed(0))
    metadata = RouterMetadata(
        architecture=config,
        hidden_size=hidden_size,
        fingerprint=PairFingerprint(slm="ours", llm="theirs", tokenizer="both"),
        round=1,
    )
    save_router(router.eval(), metadata, folder)
    return folder


def refused(
    model: str,
    settings: ModelSettings,
    options: VLLMOptions | None = None,
    fingerprint: str | None = "ours",
) -> str:
    """The one line with which `check` refuses."""
    with pytest.raises(CiterError) as caught:
        check(model, settings, options or VLLMOptions(), fingerprint)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_fitting_model_is_named_by_its_architecture(model: str, router: str) -> None:
    settings = ModelSettings(96, (95,), 95, router)
    assert check(model, settings, VLLMOptions(max_model_len=128), "ours") == "LlamaForCausalLM"


def test_a_router_of_another_slm(model: str, router: str) -> None:
    message = refused(model, ModelSettings(96, (95,), 95, router), fingerprint="other")
    assert "fitted for the SLM ours" in message and "other" in message


def test_a_router_of_another_width(model: str, tmp_path: Path) -> None:
    wrong = str(save(tmp_path / "wide", hidden_size=65))
    assert "width 65" in refused(model, ModelSettings(96, (95,), 95, wrong))


def test_a_missing_router(model: str, tmp_path: Path) -> None:
    assert "missing" in refused(model, ModelSettings(96, (95,), 95, str(tmp_path / "none")))


def test_another_vocabulary(model: str) -> None:
    assert "has 96 ids" in refused(model, ModelSettings(97))


def test_a_router_without_a_handoff_id(model: str, router: str) -> None:
    assert "pair.handoff_token" in refused(model, ModelSettings(96, (), None, router))


@pytest.mark.parametrize("handoff", [-1, 96])
def test_a_handoff_id_outside_the_vocabulary(model: str, handoff: int) -> None:
    assert "0..95" in refused(model, ModelSettings(96, (), handoff))


def test_a_context_beyond_the_models(model: str) -> None:
    assert "takes 128" in refused(model, ModelSettings(96), VLLMOptions(max_model_len=129))


def test_an_architecture_without_a_routed_version(tmp_path: Path, router: str) -> None:
    folder = tmp_path / "gpt2"
    GPT2Config(vocab_size=96, n_embd=64, n_head=2, architectures=["GPT2LMHeadModel"]).save_pretrained(folder)
    assert "vllm_architectures.py" in refused(str(folder), ModelSettings(96, (95,), 95, router))
    assert check(str(folder), ModelSettings(96), VLLMOptions(), None) is None  # as the LLM it is welcome


def test_no_model(tmp_path: Path) -> None:
    assert "give a model folder or hub name" in refused(str(tmp_path / "nowhere"), ModelSettings(96))


def test_vllm_is_not_installed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_launch.importlib.util, "find_spec", lambda name: None)
    assert "citer-ray[cpu]" in refused(model, ModelSettings(96))


def test_the_plugin_is_not_installed(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = EntryPoint("other", "somewhere:register", "vllm.general_plugins")
    monkeypatch.setattr(vllm_launch, "entry_points", lambda group: [other])
    assert "pip install -e ." in refused(model, ModelSettings(96))


def test_the_plugin_is_switched_off(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "VLLM_PLUGINS" in refused(model, ModelSettings(96))


@pytest.mark.parametrize(
    ("cores", "share", "expected"),
    [
        ({0, 1}, 0.5, ((0,), (1,))),
        ({3, 5, 8, 9}, 0.25, ((3,), (5, 8, 9))),
        ({0, 1, 2, 3}, 0.0, ((0,), (1, 2, 3))),
        ({0, 1, 2, 3}, 1.0, ((0, 1, 2), (3,))),
    ],
)
def test_cores_are_split_without_overlap(
    cores: set[int], share: float, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores, raising=False)
    assert split_cores(share) == expected


def test_one_core_cannot_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4}, raising=False)
    with pytest.raises(ConfigError, match="two cores"):
        split_cores()


def test_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_BLOCKTIME", "7")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with vllm_launch._environment(VLLMOptions(cores=(2, 3))):
        assert os.environ["KMP_BLOCKTIME"] == "0"
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
        assert (os.environ["OMP_NUM_THREADS"], os.environ["OMP_PLACES"]) == ("2", "{2,3}")
    assert (os.environ["KMP_BLOCKTIME"], os.environ["OMP_NUM_THREADS"]) == ("7", "5")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ


def test_an_engine_routes_or_speculates(model: str, router: str) -> None:
    options = VLLMOptions(speculation=Speculation("ngram"))
    assert "route and speculate" in refused(model, ModelSettings(96, (95,), 95, router), options)


def test_a_draft_model_must_be_named(model: str) -> None:
    options = VLLMOptions(speculation=Speculation("draft_model"))
    assert "needs `model`" in refused(model, ModelSettings(96), options)
    named = VLLMOptions(speculation=Speculation("draft_model", "folder", 3))
    assert check(model, ModelSettings(96), named, None) == "LlamaForCausalLM"


def test_speculation_becomes_vllms_config() -> None:
    draft = {"method": "draft_model", "num_speculative_tokens": 3, "model": "folder"}
    assert Speculation("draft_model", "folder", 3).to_config() == draft
    ngram = Speculation("ngram", num_tokens=2).to_config()
    assert ngram["num_speculative_tokens"] == 2 and "model" not in ngram
