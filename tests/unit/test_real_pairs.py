"""The configurations of real pairs against what the models publish about themselves; no weights are downloaded.

`published_configs.json` holds what matters of each model's config.json, with its address. The parameters that follow
from it must be those on the model's card, which would show a number that was copied wrongly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from citer_ray.config import CiterConfig, ModelConfig
from citer_ray.config_loading import load_config
from citer_ray.cost import ModelCost
from citer_ray.engines.vllm_architectures import ARCHITECTURES

ROOT = Path(__file__).parents[2]
PUBLISHED: dict[str, Any] = json.loads((ROOT / "tests" / "unit" / "published_configs.json").read_text("utf-8"))
PAIRS = ("qwen2-1.5b-72b", "llama3.1-8b-70b", "qwen3-0.6b-32b", "smollm2-135m-1.7b")
GPU_GB = 80.0
# Ids that the tokenizer knows, special ones included (docs: the models' tokenizer.json).
TOKENIZER_IDS = {"qwen2": 151646, "qwen3": 151669}


def pair(name: str) -> tuple[CiterConfig, dict[str, Any], dict[str, Any]]:
    config = load_config(ROOT / "configs" / f"{name}.yaml", [])
    return config, PUBLISHED[config.pair.slm.path]["config"], PUBLISHED[config.pair.llm.path]["config"]


def weights_gb(model: ModelConfig) -> float:
    cost = ModelCost.from_config(PUBLISHED[model.path]["config"])
    return cost.shape.total_params * 2 / 1e9  # bfloat16


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_are_those_of_the_model(name: str) -> None:
    entry = PUBLISHED[name]
    assert entry["source"] == f"https://huggingface.co/{name}/blob/main/config.json"
    cost = ModelCost.from_config(entry["config"])
    assert cost.shape.total_params / 1e9 == pytest.approx(entry["billion_params"], rel=5e-3)
    config = AutoConfig.for_model(**entry["config"])  # a key that transformers does not know would stay as it is
    assert config.hidden_size == entry["config"]["hidden_size"]
    assert config.num_attention_heads % config.num_key_value_heads == 0


@pytest.mark.parametrize("name", PAIRS)
def test_context_and_vocabulary(name: str) -> None:
    config, slm, llm = pair(name)
    for model, published in ((config.pair.slm, slm), (config.pair.llm, llm)):
        assert model.max_model_len and model.max_model_len <= published["max_position_embeddings"]
        assert not model.trust_remote_code
    assert config.evaluate.max_new_tokens < config.pair.slm.max_model_len
    assert slm["model_type"] == llm["model_type"]  # one tokenizer
    known = TOKENIZER_IDS.get(slm["model_type"])
    if known is None:
        assert slm["vocab_size"] == llm["vocab_size"]
    else:  # both are padded beyond the tokenizer, so a free id is left for the handoff
        assert known < min(slm["vocab_size"], llm["vocab_size"])
        assert config.pair.handoff_token is None
    if name.startswith("smollm2"):  # no free id: it must be named
        assert config.pair.handoff_token is not None


@pytest.mark.parametrize("name", PAIRS)
def test_vllm_can_route_the_slm_and_split_the_llm(name: str) -> None:
    config, slm, llm = pair(name)
    assert slm["architectures"][0] in ARCHITECTURES
    for published, parallel in (
        (slm, config.engine.slm.tensor_parallel_size),
        (llm, config.engine.llm.tensor_parallel_size),
    ):
        assert published["num_attention_heads"] % parallel == 0
        assert published["num_key_value_heads"] % parallel == 0


@pytest.mark.parametrize("name", PAIRS)
def test_collection_fits_gpus_of_80_gb(name: str) -> None:
    config, *_ = pair(name)
    slm, llm = config.pair.slm, config.pair.llm
    sizes = {slm.path: config.engine.slm.tensor_parallel_size, llm.path: config.engine.llm.tensor_parallel_size}
    pools = [(config.collect.slm, [slm]), (config.collect.llm, [llm]), (config.collect.rollouts, [slm, llm])]
    if config.engine.kind == "vllm":  # each engine has whole GPUs of its own
        for pool, models in pools:
            assert pool.num_gpus == sum(sizes[model.path] for model in models)
            assert all(weights_gb(model) / sizes[model.path] < 0.9 * GPU_GB for model in models)
    else:  # pools share GPUs by fractions
        weights = sum(weights_gb(model) * pool.count for pool, models in pools for model in models)
        assert weights < 0.9 * GPU_GB * sum(pool.num_gpus * pool.count for pool, _ in pools)


@pytest.mark.parametrize("name", PAIRS)
def test_evaluation_fits_where_the_guide_says_so(name: str) -> None:
    """The SLM has a GPU of its own and the LLM those of its engine, or both share one."""
    config, *_ = pair(name)
    guide = (ROOT / "docs" / "real-pairs.md").read_text("utf-8")
    line = next(line for line in guide.splitlines() if line.startswith(f"| `{name}`"))
    workers, spread = config.evaluate.workers, config.engine.llm.tensor_parallel_size
    slm, llm = weights_gb(config.pair.slm), weights_gb(config.pair.llm)
    if workers.num_gpus <= 1:
        assert line.endswith("| on one GPU |") and slm + llm < 0.9 * GPU_GB
    else:
        assert line.endswith("| five: one, and four |") and config.engine.kind == "vllm"
        assert workers.num_gpus == 1 + spread == 5
        assert slm < 0.9 * GPU_GB and llm / spread < 0.9 * GPU_GB


@pytest.mark.parametrize(("name", "ratio"), [("qwen2-1.5b-72b", 46), ("llama3.1-8b-70b", 9.3)])
def test_what_the_configurations_say_about_bytes(name: str, ratio: float) -> None:
    _, slm, llm = pair(name)
    assert ModelCost.from_config(llm).weight_bytes / ModelCost.from_config(slm).weight_bytes == pytest.approx(
        ratio, rel=0.01
    )
