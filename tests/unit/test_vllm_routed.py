"""The router head inside a vLLM model, and the classes that carry it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from citer_ray.config import RouterConfig
from citer_ray.engines import vllm_routed, vllm_scored
from citer_ray.engines.vllm_architectures import ARCHITECTURES, ROUTED, SCORED, stock_name
from citer_ray.engines.vllm_routed import RoutedMixin, RouterHead
from citer_ray.engines.vllm_score_column import decode_scores
from citer_ray.engines.vllm_settings import CONFIG_KEY, ModelSettings
from citer_ray.fingerprint import PairFingerprint
from citer_ray.router import Router
from citer_ray.router_artifact import RouterMetadata, save_router

HIDDEN, VOCAB, SHARED, HANDOFF = 16, 12, 10, 11


@pytest.fixture
def router(tmp_path: Path) -> tuple[Router, str]:
    config = RouterConfig()
    router = Router(HIDDEN, config, generator=torch.Generator().manual_seed(0)).eval()
    fingerprint = PairFingerprint(slm="slm", llm="llm", tokenizer="tokenizer")
    metadata = RouterMetadata(architecture=config, hidden_size=HIDDEN, fingerprint=fingerprint, round=1)
    save_router(router, metadata, tmp_path)
    return router, str(tmp_path)


def rows(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden_BH = torch.randn(5, HIDDEN, generator=generator).to(dtype)
    return hidden_BH, torch.randn(5, VOCAB, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_adds_the_score_and_masks(router: tuple[Router, str], dtype: torch.dtype) -> None:
    head = RouterHead(ModelSettings(SHARED, (3, HANDOFF), HANDOFF, router[1]))
    hidden_BH, logits_BV = rows(dtype)
    result_BV = head.logits(hidden_BH, logits_BV.clone())
    assert result_BV.dtype == torch.float32
    free = [token for token in range(SHARED) if token != 3]
    assert torch.equal(result_BV[:, free], logits_BV[:, free].float())
    assert torch.all(result_BV[:, [3, SHARED]] == -math.inf)
    assert torch.equal(decode_scores(result_BV[:, HANDOFF]), router[0].p_slm(hidden_BH))


def test_a_router_reads_the_largest_writable_logits(tmp_path: Path) -> None:
    config = RouterConfig(features=("hidden", "top_logits"), top_logits=5)
    router = Router(HIDDEN + 5, config, generator=torch.Generator().manual_seed(0)).eval()
    fingerprint = PairFingerprint(slm="slm", llm="llm", tokenizer="tokenizer")
    metadata = RouterMetadata(architecture=config, hidden_size=HIDDEN + 5, fingerprint=fingerprint, round=1)
    save_router(router, metadata, tmp_path)
    hidden_BH, logits_BV = rows(torch.float32)
    logits_BV[:, [3, HANDOFF, SHARED]] = 50.0  # never written, so never read
    result_BV = RouterHead(ModelSettings(SHARED, (3, HANDOFF), HANDOFF, str(tmp_path))).logits(
        hidden_BH, logits_BV.clone()
    )
    writable = [token for token in range(SHARED) if token not in (3, HANDOFF)]
    features_BF = torch.cat([hidden_BH, logits_BV[:, writable].topk(5, -1).values], -1)
    assert torch.equal(decode_scores(result_BV[:, HANDOFF]), router.p_slm(features_BF))


def test_without_a_router_the_handoff_column_is_masked() -> None:
    hidden_BH, logits_BV = rows(torch.float32)
    result_BV = RouterHead(ModelSettings(SHARED, (HANDOFF,))).logits(hidden_BH, logits_BV)
    assert torch.all(result_BV[:, HANDOFF] == -math.inf)


def test_the_router_is_loaded_in_float32_whatever_the_default(router: tuple[Router, str]) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            head = RouterHead(ModelSettings(SHARED, (HANDOFF,), HANDOFF, router[1]))
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(before)
    hidden_BH, logits_BV = rows(torch.float32)
    column_B = head.logits(hidden_BH, logits_BV)[:, HANDOFF]
    assert torch.equal(decode_scores(column_B), router[0].p_slm(hidden_BH))


class Decoder:
    """What the mixin expects of a stock class; `rank` 1 gathers no logits."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        self.rank = vllm_config.rank

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return None if self.rank else torch.zeros(len(hidden_states), VOCAB)


class RoutedDecoder(RoutedMixin, Decoder):
    pass


def vllm_config(rank: int, settings: ModelSettings | None) -> Any:
    values = {} if settings is None else {CONFIG_KEY: settings.to_config()}
    return SimpleNamespace(rank=rank, model_config=SimpleNamespace(hf_config=SimpleNamespace(**values)))


def test_a_rank_without_logits_gives_none(router: tuple[Router, str]) -> None:
    settings = ModelSettings(SHARED, (HANDOFF,), HANDOFF, router[1])
    hidden_BH, _ = rows(torch.float32)
    assert RoutedDecoder(vllm_config=vllm_config(1, settings)).compute_logits(hidden_BH) is None
    assert RoutedDecoder(vllm_config=vllm_config(0, settings)).compute_logits(hidden_BH) is not None


def test_a_routed_class_is_not_for_others() -> None:
    with pytest.raises(ValueError, match="VLLMEngine"):
        RoutedDecoder(vllm_config=vllm_config(0, None))


def test_settings_travel_in_a_config() -> None:
    settings = ModelSettings(SHARED, (3, HANDOFF), HANDOFF, "folder")
    assert ModelSettings.from_config(SimpleNamespace(**{CONFIG_KEY: settings.to_config()})) == settings


def test_names() -> None:
    assert stock_name("CiterRoutedLlamaForCausalLM", ROUTED) == "LlamaForCausalLM"
    assert stock_name("LlamaForCausalLM", ROUTED) is None
    assert stock_name("CiterRoutedOther", ROUTED) is None
    for module in (vllm_routed, vllm_scored):
        with pytest.raises(AttributeError):
            module.CiterNothing  # noqa: B018


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_listed_architecture_has_both_classes(architecture: str) -> None:
    for module, prefix in ((vllm_routed, ROUTED), (vllm_scored, SCORED)):
        made = getattr(module, prefix + architecture)
        stock = made.__mro__[-1 - [one.__name__ for one in reversed(made.__mro__)].index(architecture)]
        assert issubclass(made, RoutedMixin) and callable(stock.compute_logits)
        assert made.compute_logits is RoutedMixin.compute_logits
