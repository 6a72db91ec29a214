"""Engines on the embedded pair, started once for all tests of this folder and stopped with its last test.

Both vocabularies are padded, to different sizes and with large random weights: unmasked, those ids would win most of
the time. The references are `TransformersEngine`s on the weights as they are shipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from citer_ray.config import ModelConfig, PairConfig
from citer_ray.engines.hf import TransformersEngine
from citer_ray.engines.scorers import RouterScorer
from citer_ray.engines.vllm_engine import VLLMEngine
from citer_ray.examples import load_examples
from citer_ray.pair.check import PairInfo, check_pair
from citer_ray.pair.models import load_model, load_tokenizer
from citer_ray.prompts import PromptFormat
from citer_ray.router_artifact import load_router
from tests.conftest import EOS_ID
from tests.integration.vllm.settings import LLM_OPTIONS, MAX_MODEL_LEN, OPTIONS, PADDING, make_router


@pytest.fixture(scope="package")
def slm_model() -> PreTrainedModel:
    return load_model(ModelConfig(path="embedded:slm"))


@pytest.fixture(scope="package")
def llm_model() -> PreTrainedModel:
    return load_model(ModelConfig(path="embedded:llm"))


@pytest.fixture(scope="package")
def model(slm_model: PreTrainedModel) -> PreTrainedModel:
    """The model behind `engine`, for the conformance suite."""
    return slm_model


@pytest.fixture(scope="package")
def info() -> PairInfo:
    return check_pair(PairConfig(slm=ModelConfig(path="embedded:slm"), llm=ModelConfig(path="embedded:llm")))


@pytest.fixture(scope="package")
def shared(info: PairInfo) -> int:
    """Ids that both models know."""
    return info.shared_vocab_size


@pytest.fixture(scope="package")
def handoff_id(info: PairInfo) -> int:
    assert info.handoff_token_id is not None
    return info.handoff_token_id


@pytest.fixture(scope="package")
def problem_prompts() -> list[list[int]]:
    """The prompts of 200 embedded problems."""
    tokenizer, prompt = (
        load_tokenizer(ModelConfig(path="embedded:slm")),
        PromptFormat(math="{question}\n", bos="always"),
    )
    return [prompt.encode_prompt(one, tokenizer) for one in load_examples("embedded:test", limit=200).examples]


def padded(role: str, shared: int, rows: int, folder: Path) -> str:
    """A copy of an embedded checkpoint with further rows in its vocabulary."""
    model = load_model(ModelConfig(path=f"embedded:{role}"))
    model.resize_token_embeddings(model.config.vocab_size + rows, mean_resizing=False)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        noise = torch.randn(len(head) - shared, head.shape[1], generator=torch.Generator().manual_seed(0))
        head[shared:] = 4 * float(head[:shared].std()) * noise
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="package")
def slm_folder(shared: int, tmp_path_factory: pytest.TempPathFactory) -> str:
    return padded("slm", shared, PADDING[0], tmp_path_factory.mktemp("slm"))


@pytest.fixture(scope="package")
def llm_folder(shared: int, tmp_path_factory: pytest.TempPathFactory) -> str:
    return padded("llm", shared, PADDING[1], tmp_path_factory.mktemp("llm"))


@pytest.fixture(scope="package")
def router(slm_model: PreTrainedModel, handoff_id: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_router(tmp_path_factory.mktemp("router"), int(slm_model.config.hidden_size), handoff_id)


@pytest.fixture(scope="package")
def engine(slm_folder: str, router: Path, shared: int) -> Iterator[VLLMEngine]:
    """The SLM with its router."""
    engine = VLLMEngine(
        slm_folder,
        shared_vocab_size=shared,
        eos_token_ids=[EOS_ID],
        router=router,
        slm_fingerprint="slm",
        options=OPTIONS,
    )
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="package")
def llm_engine(llm_folder: str, handoff_id: int, shared: int) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(
        llm_folder,
        shared_vocab_size=shared,
        eos_token_ids=[EOS_ID],
        handoff_token_id=handoff_id,
        # vLLM's own count of what its passes compute.
        options=replace(LLM_OPTIONS, extra={"enable_logging_iteration_details": True}),
    )
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="package")
def reference(slm_model: PreTrainedModel, router: Path, handoff_id: int, shared: int) -> TransformersEngine:
    """The same weights and router in the exact engine."""
    scorer = RouterScorer(load_router(router, slm_fingerprint="slm")[0])
    return TransformersEngine(
        slm_model,
        shared_vocab_size=shared,
        eos_token_ids=[EOS_ID],
        max_model_len=MAX_MODEL_LEN,
        scorers={"router": scorer},
        masked_ids=[handoff_id],
    )


@pytest.fixture(scope="package")
def reference_llm(llm_model: PreTrainedModel, handoff_id: int, shared: int) -> TransformersEngine:
    return TransformersEngine(
        llm_model,
        shared_vocab_size=shared,
        eos_token_ids=[EOS_ID],
        max_model_len=MAX_MODEL_LEN,
        masked_ids=[handoff_id],
    )
