"""The cost model against hand-worked numbers, real classes, and counted bytes of real tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from citer_ray.config import ModelConfig
from citer_ray.cost import ModelCost, PairCost, ResponseCost, RouterCost, autoregressive_passes
from citer_ray.errors import PairError
from citer_ray.model_shape import DecoderShape
from citer_ray.pair.models import load_model

KIB = 1024


def config(
    kind: str, vocab: int, hidden: int, layers: int, heads: tuple[int, int], width: int, **more: Any
) -> dict[str, Any]:
    """Return a published config's keys; `heads` are query heads and key-value heads."""
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": width,
        "torch_dtype": "bfloat16",
        **more,
    }


PUBLISHED = {
    "Qwen2-1.5B": config("qwen2", 151936, 1536, 28, (12, 2), 8960, tie_word_embeddings=True),
    "Qwen2-72B": config("qwen2", 152064, 8192, 80, (64, 8), 29568),
    "Llama-3.1-8B": config("llama", 128256, 4096, 32, (32, 8), 14336),
    "Llama-3.1-70B": config("llama", 128256, 8192, 80, (64, 8), 28672),
    "Qwen2.5-0.5B": config("qwen2", 151936, 896, 24, (14, 2), 4864, tie_word_embeddings=True),
    "Qwen3-0.6B": config("qwen3", 151936, 1024, 28, (16, 8), 3072, head_dim=128, tie_word_embeddings=True),
    "Qwen3-8B": config("qwen3", 151936, 4096, 36, (32, 8), 12288, head_dim=128),
    "Qwen3-32B": config("qwen3", 151936, 5120, 64, (64, 8), 25600, head_dim=128),
}


@pytest.mark.parametrize(
    ("name", "params_billion", "pass_gigabytes", "kv_kib"),
    [
        ("Qwen2-1.5B", 1.544, 3.09, 28),
        ("Qwen2-72B", 72.71, 142.9, 320),
        ("Llama-3.1-8B", 8.03, 15.0, 128),
        ("Llama-3.1-70B", 70.55, 139.0, 320),
        ("Qwen2.5-0.5B", 0.494, 0.99, 12),
        ("Qwen3-0.6B", 0.596, 1.19, 112),
        ("Qwen3-8B", 8.19, 15.1, 144),
        ("Qwen3-32B", 32.76, 64.0, 256),
    ],
)
def test_published_sizes(name: str, params_billion: float, pass_gigabytes: float, kv_kib: int) -> None:
    """Parameters as printed on the model cards; the rest worked out from the configs by hand."""
    cost = ModelCost.from_config(PUBLISHED[name])
    assert cost.shape.total_params / 1e9 == pytest.approx(params_billion, rel=1e-3)
    assert cost.weight_bytes / 1e9 == pytest.approx(pass_gigabytes, rel=5e-3)
    assert cost.kv_bytes_per_token == kv_kib * KIB


def test_parts_of_a_pass_worked_by_hand() -> None:
    """Every parameter of a two-layer model, counted with a pencil."""
    cost = ModelCost.from_config(config("qwen2", 100, 16, 2, (4, 2), 32, torch_dtype="float32"))
    # attention: q and o 16x16, k and v 16x8; biases 16 + 8 + 8; two norms of 16; MLP 3x16x32
    layer = 2 * 256 + 2 * 128 + 32 + 32 + 1536
    assert cost.shape.active_params == 2 * layer + 16 + 1600
    assert cost.shape.total_params == 2 * layer + 16 + 3200
    kv = 2 * 2 * 2 * 4 * 4  # layers, keys and values, heads, head size, bytes
    assert cost.kv_bytes_per_token == kv
    assert cost.pass_bytes(3, 7) == 4 * (2 * layer + 16 + 1600) + 10 * kv
    attention = 4 * 2 * 4 * 4 * 3 * (7 + 1.5)
    assert cost.pass_flops(3, 7) == 2 * (2 * layer + 16 + 1600) * 3 + attention


@pytest.mark.parametrize(("dtype_bytes", "kv_bytes", "expected_kv"), [(0.5, None, 2), (4.0, None, 4), (2.0, 1.0, 1)])
def test_weights_and_cache_have_their_own_width(dtype_bytes: float, kv_bytes: float | None, expected_kv: float) -> None:
    """Four-bit weights halve twice; their cache stays at two bytes unless told otherwise."""
    cost = ModelCost.from_config(PUBLISHED["Llama-3.1-8B"], dtype_bytes, kv_bytes)
    assert cost.weight_bytes == cost.shape.active_params * dtype_bytes
    assert cost.kv_bytes_per_token == 32 * 2 * 8 * 128 * expected_kv


def routed_passes(prompt: int, length: int, visits: int) -> list[tuple[int, int]]:
    """Return the LLM's passes for `visits` evenly spread visits, the last one at the last token."""
    ends = [round((k + 1) * length / visits) for k in range(visits)]
    seen, passes = 0, []
    for end in ends:
        passes.append((prompt + end - seen, seen))
        seen = prompt + end
    return passes


QWEN2 = PairCost(ModelCost.from_config(PUBLISHED["Qwen2-1.5B"]), ModelCost.from_config(PUBLISHED["Qwen2-72B"]))


def test_one_model_alone_follows_the_closed_form() -> None:
    """`n * W + K * (m * n + n * (n - 1) / 2)` for prompt m and response n."""
    m, n = 150, 60
    expected = n * QWEN2.llm.weight_bytes + QWEN2.llm.kv_bytes_per_token * (m * n + n * (n - 1) / 2)
    cost = QWEN2.response(llm_passes=autoregressive_passes(m, n))
    assert cost.num_bytes == expected
    assert cost.gigabytes == pytest.approx(8579, abs=0.5)
    assert (cost.slm_passes, cost.llm_passes, cost.passes) == (0, 60, 60)
    assert QWEN2.response(autoregressive_passes(m, n)).gigabytes == pytest.approx(186, abs=0.5)


@pytest.mark.parametrize(("visits", "gigabytes", "ratio"), [(3, 614, 0.072), (12, 1901, 0.222), (30, 4475, 0.522)])
def test_routed_responses_of_the_qwen2_pair(visits: int, gigabytes: float, ratio: float) -> None:
    """Prompt 150, response 60, LLM shares of 5, 20 and 50 %: bytes fall with the visits."""
    alone = QWEN2.response(llm_passes=autoregressive_passes(150, 60))
    routed = QWEN2.response(autoregressive_passes(150, 60), routed_passes(150, 60, visits))
    assert routed.gigabytes == pytest.approx(gigabytes, abs=0.6)
    assert routed.gigabytes / alone.gigabytes == pytest.approx(ratio, abs=6e-4)


LLAMA = PairCost(ModelCost.from_config(PUBLISHED["Llama-3.1-8B"]), ModelCost.from_config(PUBLISHED["Llama-3.1-70B"]))


def test_a_response_of_the_llama_pair_worked_by_hand() -> None:
    """Prompt 150, response 60, 12 visits.

    70B reads 69.503e9 weights of 2 bytes a pass and 320 KiB of cache a token: 60 * 139.006 + 327680 * 10770 / 1e9.
    8B reads 7.5049e9 weights and 128 KiB. 12 visits end at tokens 5, 10, ..., 60: 12 * 139.006 + 327680 * 2190 / 1e9.
    """
    assert LLAMA.llm.weight_bytes == 2 * (70_553_706_496 - 128_256 * 8192)
    assert LLAMA.slm.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4096)
    llm = LLAMA.response(llm_passes=autoregressive_passes(150, 60))
    slm = LLAMA.response(autoregressive_passes(150, 60))
    routed = LLAMA.response(autoregressive_passes(150, 60), routed_passes(150, 60, 12))
    assert llm.gigabytes == pytest.approx(8340.36 + 3.53, abs=0.1)
    assert slm.gigabytes == pytest.approx(900.59 + 1.41, abs=0.1)
    assert routed.gigabytes == pytest.approx(slm.gigabytes + 1668.07 + 0.72, abs=0.1)
    # About the share and the ratio of the weights: 0.2 + 0.108, where the Qwen2 pair has 0.2 + 0.022.
    assert routed.gigabytes / llm.gigabytes == pytest.approx(0.308, abs=1e-3)
    # 2 FLOPs a weight and token, over 150 + 59 tokens, and the attention's 2 % of it.
    assert llm.flops == pytest.approx(2 * 69.503e9 * 209, rel=0.02)


@pytest.mark.parametrize("role", ["slm", "llm"])
def test_bytes_of_the_embedded_models_are_counted(role: str) -> None:
    """Each tensor that a pass of the shipped models multiplies with, and their real caches."""
    model = load_model(ModelConfig(path=f"embedded:{role}"))
    cost = ModelCost.from_config(model.config, dtype_bytes=4.0)
    head = model.get_output_embeddings().weight
    touched = {id(head): head.nbytes}
    for module in model.modules():
        if not isinstance(module, torch.nn.Embedding):
            touched |= {id(one): one.nbytes for one in module.parameters(recurse=False)}
    assert cost.weight_bytes == sum(touched.values())
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(9)[None], past_key_values=cache, use_cache=True)
    in_cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert cost.pass_bytes(9, 0) == sum(touched.values()) + in_cache


def test_a_share_of_one_third_lies_between_whole_visits() -> None:
    """0.33 * 60 = 19.8 visits: 3 017 GB, between those of 19 and 20 visits."""
    low, high = (QWEN2.response(autoregressive_passes(150, 60), routed_passes(150, 60, n)).gigabytes for n in (19, 20))
    assert low + 0.8 * (high - low) == pytest.approx(3017, abs=1)


def test_flops_hardly_fall_with_the_share() -> None:
    """A visit computes every token that the SLM wrote, so arithmetic stays near that of the LLM alone."""
    alone = QWEN2.response(llm_passes=autoregressive_passes(150, 60)).flops
    for visits in (3, 12, 30):
        routed = QWEN2.response((), routed_passes(150, 60, visits)).flops
        assert routed == pytest.approx(alone, rel=0.01)


def test_router_of_qwen2() -> None:
    """1536 -> 3072 -> 1536 -> 1 has 9.4 M parameters, 19 MB in two bytes each."""
    router = RouterCost.from_widths(1536, (2.0, 1.0), dtype_bytes=2.0)
    assert router.params == 1537 * 3072 + 3073 * 1536 + 1537 + 4 * 3072
    assert router.params / 1e6 == pytest.approx(9.45, abs=0.02)
    assert router.decision_bytes / 1e6 == pytest.approx(19, abs=0.2)
    pair = PairCost(QWEN2.slm, QWEN2.llm, router)
    slm = autoregressive_passes(10, 5)
    with_router, without = pair.response(slm, decisions=5), QWEN2.response(slm)
    assert with_router.num_bytes - without.num_bytes == pytest.approx(5 * router.decision_bytes)
    assert with_router.flops - without.flops == pytest.approx(5 * 2 * router.params)
    assert with_router.decisions == 5


def test_router_without_batch_norm_and_hidden_layers() -> None:
    """A linear router has one weight per hidden dimension and a bias."""
    assert RouterCost.from_widths(8, (), batch_norm=False).params == 9
    assert RouterCost.from_widths(8, (0.5,), batch_norm=False).params == 9 * 4 + 5


def test_costs_add() -> None:
    """A sum over responses is what an evaluation reports."""
    one = QWEN2.response([(5, 0)], [(6, 0), (2, 6)])
    total = sum([one, one], ResponseCost())
    assert total == ResponseCost(2 * one.num_bytes, 2 * one.flops, 2, 4, 0)


def test_bad_traces_are_refused() -> None:
    """A pass over nothing, a negative cache, and decisions without a router are bugs of the caller."""
    with pytest.raises(ValueError, match="at least one new token"):
        QWEN2.slm.pass_bytes(0, 3)
    with pytest.raises(ValueError, match="no fewer than 0"):
        QWEN2.slm.pass_flops(1, -1)
    with pytest.raises(ValueError, match="no router"):
        QWEN2.response([(1, 0)], decisions=1)
    assert QWEN2.response() == ResponseCost()
    assert autoregressive_passes(4, 0) == []


SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 16,
    "pad_token_id": 0,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen2", {"head_dim": 8}),
        (
            "qwen2_moe",
            {**MOE, "head_dim": 8, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
        ),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3_moe", {**MOE, "mlp_only_layers": [0, 2]}),
        ("gemma", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("phi3", {"head_dim": 8}),
        ("granite", {"head_dim": 8}),
        ("smollm3", {"head_dim": 8}),
    ],
)
def test_parameters_equal_the_real_class(kind: str, extra: dict[str, Any]) -> None:
    """Instantiated without memory, every listed family has exactly the parameters that the config gives."""
    real_config = AutoConfig.for_model(kind, **{**SMALL, **extra})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(real_config)
    shape = DecoderShape.from_config(real_config)
    assert shape.total_params == sum(p.numel() for p in model.parameters())
    assert shape.num_layers == 4


def test_mixture_charges_the_experts_that_are_touched() -> None:
    """One token reads its own experts; a long chunk reads all of them and no more."""
    moe = ModelCost.from_config(AutoConfig.for_model("mixtral", **SMALL, num_local_experts=4), 2.0)
    expert = 4 * 3 * 32 * 48 * 2.0  # layers, matrices, and two bytes each
    one, many = moe.pass_bytes(1, 0), moe.pass_bytes(1000, 0)
    assert one == pytest.approx(moe.weight_bytes + moe.kv_bytes_per_token)
    assert many - 999 * moe.kv_bytes_per_token - one == pytest.approx(2 * expert)
    assert moe.pass_flops(1, 0) == pytest.approx(2 * moe.shape.active_params, rel=0.01)


def test_sliding_windows_bound_the_context() -> None:
    """Gemma's window layers read the last `sliding_window` cached tokens, the others all of them."""
    kinds = ["sliding_attention", "full_attention"] * 2
    real = AutoConfig.for_model("gemma2", **SMALL, sliding_window=10, layer_types=kinds)
    cost = ModelCost.from_config(real, 2.0)
    layer = 2 * 2 * 16 * 2
    assert cost.pass_bytes(1, 100) - cost.weight_bytes == 2 * layer * 101 + 2 * layer * 11
    unused = DecoderShape.from_config({**PUBLISHED["Qwen2-1.5B"], "sliding_window": 4096, "use_sliding_window": False})
    assert (unused.full_layers, unused.window_layers) == (28, 0)
    mistral = DecoderShape.from_config(config("mistral", 100, 16, 2, (4, 2), 32, sliding_window=64))
    assert (mistral.full_layers, mistral.window_layers, mistral.window) == (0, 2, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"intermediate_size": None}, "lacks intermediate_size"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
def test_other_architectures_are_refused(change: dict[str, Any], message: str) -> None:
    """Wrong numbers would be worse than none."""
    with pytest.raises(PairError, match=message):
        ModelCost.from_config({**PUBLISHED["Llama-3.1-8B"], **change})


def test_unknown_families_warn_and_text_configs_are_found(caplog: pytest.LogCaptureFixture) -> None:
    """A family that nobody counted is priced like Llama and says so; a text config is found inside."""
    nested = {"model_type": "any_vl", "text_config": PUBLISHED["Qwen3-8B"]}
    assert DecoderShape.from_config(nested) == DecoderShape.from_config(PUBLISHED["Qwen3-8B"])
    assert not caplog.records
    DecoderShape.from_config({**PUBLISHED["Llama-3.1-8B"], "model_type": "newcomer"})
    assert "newcomer" in caplog.text


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_equal_those_of_real_tensors(tied: bool) -> None:
    """The weights that a pass multiplies with, and the tensors of a real KV cache, byte by byte."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied)).eval()
    cost = ModelCost.from_config(model.config, dtype_bytes=4.0)
    touched: set[torch.nn.Parameter] = set()
    for module in model.modules():
        # A pass looks up rows of an embedding; it does not read the table.
        if not isinstance(module, torch.nn.Embedding):
            touched.update(module.parameters(recurse=False))
    assert cost.weight_bytes == sum(p.nbytes for p in touched)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(11)[None], past_key_values=cache, use_cache=True)
    in_cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert cost.kv_bytes_per_token * 11 == in_cache
    assert cost.pass_bytes(11, 0) == cost.weight_bytes + in_cache


def test_flops_equal_those_that_torch_counts() -> None:
    """Two passes of a real model under torch's counter; norms and rotary embeddings are the difference."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="eager")).eval()
    cost, cache = ModelCost.from_config(model.config), DynamicCache(config=model.config)
    measured = []
    for ids in (torch.arange(40)[None], torch.tensor([[3]])):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
        measured.append(counter.get_total_flops())
    # The eager prompt pass multiplies the masked half too, which the model does not charge.
    masked = 4 * 4 * 4 * 16 * 40 * 20
    assert cost.pass_flops(40, 0) == pytest.approx(measured[0] - masked, rel=0.02)
    assert cost.pass_flops(1, 40) == pytest.approx(measured[1], rel=0.02)
