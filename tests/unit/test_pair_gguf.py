"""Importing GGUF: tiny files written here as llama.cpp's converter writes them, and files that cannot be imported."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map, quants
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from citer_ray.config import ModelConfig
from citer_ray.errors import PairError
from citer_ray.pair.gguf import import_gguf
from citer_ray.pair.models import context_length, eos_token_ids, load_hf_config, load_model, load_tokenizer
from citer_ray.pair.tokenizer_check import first_difference, merge_rules, tokens_by_id
from tests.unit.pair_checkpoints import CHAT_TEMPLATE, CORPUS, SPECIALS, make_model, make_tokenizer

IDS = torch.arange(3, 15)[None]


def make_source() -> PreTrainedModel:
    """A model whose rows are whole Q8_0 blocks of 32."""
    return make_model(hidden_size=64, intermediate_size=96)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None,
    *,
    architecture: str = "llama",
    pre: str = "gpt-2",
    quantized: bool = False,
    skip: str = "nothing",
    extra: Callable[[GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a Llama model as a GGUF file: names, metadata, and the order of q and k rows that llama.cpp expects."""
    writer, config = GGUFWriter(path, architecture), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is not None:
        write_tokenizer(writer, tokenizer, pre)
    extra(writer)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        target = names.get_name(name, try_suffixes=(".weight",))
        data = for_llama_cpp(name, tensor, config)
        if skip in name:
            continue
        if quantized and data.ndim == 2:
            block = GGMLQuantizationType.Q8_0
            writer.add_tensor(target, quants.quantize(data, block), raw_dtype=block)
        else:
            writer.add_tensor(target, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, pre: str) -> None:
    """Write a byte-level BPE vocabulary with its merges, special ids and chat template."""
    tokens = list(tokens_by_id(tokenizer).values())
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if t in special else TokenType.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merge_rules(tokenizer)])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)


def for_llama_cpp(name: str, tensor: torch.Tensor, config: Any) -> np.ndarray:
    """Return a weight as float32; rows of q and k go from halves to pairs, as llama.cpp rotates neighbours."""
    data = tensor.detach().float().numpy()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((n for key, n in heads.items() if key in name), None)
    if count is None:
        return data
    halves = data.reshape(count, 2, data.shape[0] // count // 2, data.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(data.shape)


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Return a model's logits for a fixed input."""
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def imported(tmp_path: Path) -> ModelConfig:
    """Name the imported checkpoint."""
    return ModelConfig(path=str(tmp_path / "out"), device="cpu")


def test_an_unquantized_file_becomes_the_same_model(tmp_path: Path) -> None:
    """Logits, tokenizer, chat template, context and EOS are the source's."""
    source, tokenizer = make_source(), make_tokenizer()
    file = write_gguf(tmp_path / "model.gguf", source, tokenizer)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')  # of another model; must not be mixed in
    import_gguf(file, tmp_path / "out")
    model = load_model(imported(tmp_path))
    torch.testing.assert_close(logits(model), logits(source))
    ours = load_tokenizer(imported(tmp_path))
    assert first_difference(ours, tokenizer) is None
    assert ours.chat_template == CHAT_TEMPLATE
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "user: hi\nassistant: "
    assert ours.model_max_length == context_length(load_hf_config(imported(tmp_path))) == 128
    assert eos_token_ids(imported(tmp_path)) == {1}
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get("_name_or_path", "") == ""


def test_a_quantized_file_is_dequantized_exactly(tmp_path: Path) -> None:
    """The written float32 numbers are those that the quantization stands for; bfloat16 rounds them."""
    source = make_source()
    file = write_gguf(tmp_path / "model.gguf", source, make_tokenizer(), quantized=True)
    import_gguf(file, tmp_path / "out")
    weight = source.model.layers[1].mlp.down_proj.weight.detach().numpy()
    block = GGMLQuantizationType.Q8_0
    expected = torch.from_numpy(quants.dequantize(quants.quantize(weight, block), block))
    loaded = load_model(imported(tmp_path), dtype="auto").model.layers[1].mlp.down_proj.weight
    assert torch.equal(loaded, expected)
    assert not torch.equal(loaded, torch.from_numpy(weight))
    import_gguf(file, tmp_path / "narrow", dtype="bfloat16")
    narrow = load_model(ModelConfig(path=str(tmp_path / "narrow"), device="cpu"), dtype="auto")
    assert torch.equal(narrow.model.layers[1].mlp.down_proj.weight, expected.bfloat16())


def test_digits_are_split_as_in_training(tmp_path: Path) -> None:
    """SmolLM splits every digit off before anything else; spaces before numbers depend on it."""
    tokenizer = make_tokenizer(corpus=[*CORPUS, "12 12 12    a    b    12"])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    import_gguf(write_gguf(tmp_path / "model.gguf", make_source(), tokenizer, pre="smollm"), tmp_path / "out")
    assert first_difference(load_tokenizer(imported(tmp_path)), tokenizer) is None


def test_an_unknown_pre_tokenizer_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Text may be split otherwise than in training, and the user is told."""
    with caplog.at_level(logging.WARNING):
        import_gguf(write_gguf(tmp_path / "a.gguf", make_source(), make_tokenizer(), pre="newcomer"), tmp_path / "out")
    assert "'newcomer' is unknown" in caplog.text


def test_texts_begin_with_bos_where_the_file_says_so(tmp_path: Path) -> None:
    """Also after the checkpoint was written and loaded."""
    file = write_gguf(
        tmp_path / "model.gguf", make_source(), make_tokenizer(), extra=lambda writer: writer.add_add_bos_token(True)
    )
    import_gguf(file, tmp_path / "out")
    tokenizer = load_tokenizer(imported(tmp_path))
    assert tokenizer("Tom")["input_ids"] == [0, *make_tokenizer()("Tom")["input_ids"]]
    assert tokenizer("Tom", add_special_tokens=False) == make_tokenizer()("Tom")


def write_sentencepiece(writer: GGUFWriter) -> None:
    """Write a sentencepiece vocabulary as Llama 2 has it: scores instead of merges, and bytes for unknown text."""
    control = ["<unk>", "<s>", "</s>"]
    pieces = ["\u2581T", "om", "\u2581Tom", "\u2581", "T", "o", "m"]
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(pieces))])
    writer.add_token_types(
        [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
        + [TokenType.BYTE] * 256
        + [TokenType.NORMAL] * len(pieces)
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    """Merges are recovered from the scores, bytes stand for unknown text, and texts begin with BOS by default."""
    model = make_model(hidden_size=64, intermediate_size=96, vocab_size=266)
    import_gguf(write_gguf(tmp_path / "model.gguf", model, None, extra=write_sentencepiece), tmp_path / "out")
    tokenizer = load_tokenizer(imported(tmp_path))
    ids = tokenizer("Tom Tom!")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "\u2581Tom", "\u2581Tom", "<0x21>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Tom Tom!"
    assert len(tokenizer) == 266
    assert eos_token_ids(imported(tmp_path)) == {2}


def test_all_ids_that_end_a_turn_are_kept(tmp_path: Path) -> None:
    """Llama 3 ends a turn with another id than a text."""
    specials = [*SPECIALS, "<|eot|>"]
    file = write_gguf(
        tmp_path / "model.gguf",
        make_source(),
        make_tokenizer(specials=specials, additional_special_tokens=["<|eot|>"]),
        extra=lambda writer: writer.add_eot_token_id(3),
    )
    import_gguf(file, tmp_path / "out")
    assert eos_token_ids(imported(tmp_path)) == {1, 3}


def test_files_that_are_no_model(tmp_path: Path) -> None:
    """Missing, another format, cut off in the metadata, cut off in the weights."""
    whole = write_gguf(tmp_path / "whole.gguf", make_source(), make_tokenizer()).read_bytes()
    file = tmp_path / "model.gguf"
    with pytest.raises(PairError, match="there is no file"):
        import_gguf(file, tmp_path / "out")
    for content, message in (
        (b"", "is not a GGUF file: it begins with b''"),
        (b"PK\x03\x04 a zip", "is not a GGUF file"),
        (whole[:200], "is damaged or was cut off"),
        (whole[:-5000], "is damaged or was cut off"),
    ):
        file.write_bytes(content)
        with pytest.raises(PairError, match=message):
            import_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_converted(tmp_path: Path) -> None:
    """An unknown architecture, a part of a split model, a file without a tensor, and an existing folder."""
    source, tokenizer = make_source(), make_tokenizer()
    file = write_gguf(tmp_path / "a.gguf", source, tokenizer, architecture="rwkv6")
    with pytest.raises(PairError, match=r"transformers cannot convert .*rwkv6"):
        import_gguf(file, tmp_path / "out")
    file = write_gguf(tmp_path / "b.gguf", source, tokenizer, extra=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(PairError, match="one of 3 parts; merge them first"):
        import_gguf(file, tmp_path / "out")
    file = write_gguf(tmp_path / "c.gguf", source, tokenizer, skip="layers.1.mlp.down_proj")
    with pytest.raises(PairError, match=r"lacks 1 tensors .*model\.layers\.1\.mlp\.down_proj"):
        import_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(PairError, match="exists; remove it"):
        import_gguf(file, tmp_path / "out")


def test_a_file_without_vocabulary_is_refused(tmp_path: Path) -> None:
    """Adapters and vision encoders come as GGUF too."""
    writer = GGUFWriter(tmp_path / "adapter.gguf", "llama")
    writer.add_tensor("a", np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(PairError, match="holds no vocabulary"):
        import_gguf(tmp_path / "adapter.gguf", tmp_path / "out")
