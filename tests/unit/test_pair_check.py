"""The pair check on real tiny checkpoints: pairs that fit, and each way of not fitting."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from citer_ray.config import ModelConfig, PairConfig
from citer_ray.errors import PairError
from citer_ray.pair import check as check_module
from citer_ray.pair.check import PairInfo, check_pair
from tests.unit.pair_checkpoints import CHAT_TEMPLATE, SPECIALS, make_model, make_tokenizer, save

MakePair = Callable[..., PairConfig]


@pytest.fixture
def make_pair(tmp_path: Path) -> MakePair:
    """Write an SLM and an LLM and return their config; tokenizers and config keys can be replaced."""

    def build(
        slm_tokenizer: PreTrainedTokenizerFast | None = None,
        llm_tokenizer: PreTrainedTokenizerFast | None = None,
        *,
        slm_keys: dict[str, Any] | None = None,
        llm_keys: dict[str, Any] | None = None,
        **pair_keys: Any,
    ) -> PairConfig:
        slm_tokenizer = slm_tokenizer or make_tokenizer()
        slm = make_model(**{"vocab_size": 320, "hidden_size": 32, **(slm_keys or {})})
        llm = make_model(**{"vocab_size": 320, "hidden_size": 64, **(llm_keys or {})})
        save(tmp_path / "slm", slm, slm_tokenizer)
        save(tmp_path / "llm", llm, llm_tokenizer or slm_tokenizer)
        return PairConfig(
            slm=ModelConfig(path=str(tmp_path / "slm"), device="cpu"),
            llm=ModelConfig(path=str(tmp_path / "llm"), device="cpu"),
            **pair_keys,
        )

    return build


def test_a_pair_with_padded_vocabularies_fits(make_pair: MakePair) -> None:
    """As Qwen2-1.5B and 72B: one tokenizer, logits padded to different sizes, ids shared below both."""
    tokenizer = make_tokenizer()
    known = len(tokenizer)
    info = check_pair(make_pair(tokenizer, slm_keys={"vocab_size": 384}, llm_keys={"vocab_size": 448}))
    assert info.shared_vocab_size == known == 320
    assert (info.slm.vocab_size, info.llm.vocab_size) == (384, 448)
    assert (info.slm.hidden_size, info.llm.hidden_size) == (32, 64)
    assert (info.bos_token_id, info.eos_token_ids) == (0, (1,))
    assert (info.handoff_token_id, info.handoff_token) == (320, None)
    assert "64 ids beyond the tokenizer" in info.handoff_reason
    assert info.chat_templates_equal
    assert info.warnings == ()


def test_the_check_loads_no_weights(make_pair: MakePair, tmp_path: Path) -> None:
    """It passes on weights that cannot be read: nothing looks into them."""
    pair = make_pair()
    (tmp_path / "llm" / "model.safetensors").write_bytes(b"")
    assert check_pair(pair).llm.num_layers == 2
    assert not hasattr(check_module, "load_model")


def test_the_result_survives_json(make_pair: MakePair) -> None:
    """It is stored with every artifact."""
    pair = make_pair(llm_tokenizer=make_tokenizer(chat_template="{{ messages }}"))
    info = check_pair(pair)
    assert PairInfo.from_json(json.loads(json.dumps(info.to_json()))) == info
    assert info.warnings == ("the chat templates differ; prompts are made with the SLM's",)
    assert not info.chat_templates_equal


def test_the_first_different_id_is_named(make_pair: MakePair) -> None:
    """Two tokenizers trained on different text: the first id at which they part, with both tokens."""
    other = make_tokenizer(corpus=["zzzz zzzz zzz zz qqqq qqq xyxyxy kkkk"] * 3)
    with pytest.raises(PairError, match=r"different tokenizers: id 259 is '.+' for the SLM and '.+' for the LLM"):
        check_pair(make_pair(llm_tokenizer=other))


def test_an_id_that_only_one_tokenizer_knows_is_named(make_pair: MakePair) -> None:
    """An added token at the end of one vocabulary."""
    longer = make_tokenizer()
    longer.add_tokens(["<think>"])
    with pytest.raises(PairError, match="id 320 is missing for the SLM and '<think>' for the LLM"):
        check_pair(make_pair(llm_tokenizer=longer, llm_keys={"vocab_size": 384}))


@pytest.mark.parametrize(("name", "token"), [("eos_token", "<|pad|>"), ("bos_token", "<|eos|>")])
def test_different_special_tokens_are_named(make_pair: MakePair, name: str, token: str) -> None:
    """The same vocabulary, but another token ends or begins a text."""
    with pytest.raises(PairError, match=rf"{name} is '<\|.os\|>' for the SLM and '{re.escape(token)}' for the LLM"):
        check_pair(make_pair(llm_tokenizer=make_tokenizer(**{name: token})))


SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def edited(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], source: PreTrainedTokenizerFast | None = None
) -> PreTrainedTokenizerFast:
    """Return the usual tokenizer, or `source`, after a change of its serialized form."""
    folder = tmp_path / "edited"
    (source or make_tokenizer()).save_pretrained(folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    return PreTrainedTokenizerFast.from_pretrained(folder)


def test_different_merges_are_named(make_pair: MakePair, tmp_path: Path) -> None:
    """The same vocabulary merged in another order."""

    def swap(data: dict[str, Any]) -> None:
        merges = data["model"]["merges"]
        merges[4], merges[5] = merges[5], merges[4]

    with pytest.raises(PairError, match=r"merge 4 is \(.+\) for the SLM and \(.+\) for the LLM"):
        check_pair(make_pair(llm_tokenizer=edited(tmp_path, swap)))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {**SPLIT, "add_prefix_space": True}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, SPLIT],
            }
        },
    ],
    ids=["nfkc", "lowercase", "prefix space", "digits"],
)
def test_different_treatment_of_text_is_found_by_probes(
    make_pair: MakePair, tmp_path: Path, change: dict[str, Any]
) -> None:
    """The same vocabulary and merges, but text is normalized or split in another way."""
    numbers = make_tokenizer(corpus=["12 12 12 112 112"])
    other = edited(tmp_path, lambda data: data.update(change), numbers)
    with pytest.raises(PairError, match=r"token \d+ of the text .* for the SLM and .* for the LLM"):
        check_pair(make_pair(numbers, other))


def test_an_added_bos_is_found(make_pair: MakePair, tmp_path: Path) -> None:
    """One tokenizer puts BOS before every text."""
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [0], "tokens": ["<|bos|>"]}},
    }
    other = edited(tmp_path, lambda data: data.update(post_processor=template))
    with pytest.raises(PairError, match=r"token 0 of the text .* with special tokens added"):
        check_pair(make_pair(llm_tokenizer=other))


def test_different_stripping_around_added_tokens_is_found(make_pair: MakePair, tmp_path: Path) -> None:
    """An added token that swallows the space before it."""

    def strip(data: dict[str, Any]) -> None:
        data["added_tokens"][2]["lstrip"] = True

    with pytest.raises(PairError, match=r"before <\|pad\|> after"):
        check_pair(make_pair(llm_tokenizer=edited(tmp_path, strip)))


def test_a_model_smaller_than_its_tokenizer_is_refused(make_pair: MakePair) -> None:
    """Weights and tokenizer of different models in one folder."""
    with pytest.raises(PairError, match=r"ids up to 319, but the LLM .* has logits for 300"):
        check_pair(make_pair(llm_keys={"vocab_size": 300}))


def test_missing_files_name_the_field(make_pair: MakePair, tmp_path: Path) -> None:
    """No folder, no tokenizer, no safetensors: each with its fix."""
    pair = make_pair()
    gone = pair.model_copy(update={"slm": ModelConfig(path=str(tmp_path / "gone"))})
    with pytest.raises(PairError, match=r"pair\.slm\.path: there is no folder"):
        check_pair(gone)
    weights = tmp_path / "llm" / "model.safetensors"
    weights.rename(tmp_path / "llm" / "pytorch_model.bin")
    with pytest.raises(PairError, match=r"pair\.llm\.path: .* holds no \*\.safetensors"):
        check_pair(pair)
    weights.touch()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "llm" / name).unlink()
    with pytest.raises(PairError, match="cannot load the tokenizer of"):
        check_pair(pair)


def test_contexts(make_pair: MakePair) -> None:
    """The pair's context is the shorter one, the configured limit applied."""
    info = check_pair(make_pair(llm_keys={"max_position_embeddings": 64}))
    assert (info.slm.context_length, info.llm.context_length, info.context_length) == (128, 64, 64)


def test_a_limit_beyond_the_model_is_refused(make_pair: MakePair) -> None:
    """`max_model_len` may not lengthen a context."""
    pair = make_pair()
    longer = pair.model_copy(update={"llm": pair.llm.model_copy(update={"max_model_len": 129})})
    with pytest.raises(PairError, match="max_model_len 129"):
        check_pair(longer)


def test_eos_ids_of_both_models_end_a_response(make_pair: MakePair, tmp_path: Path) -> None:
    """As chat models do, the LLM states a second id; ids beyond the tokenizer are not taken."""
    pair = make_pair(llm_keys={"vocab_size": 384})
    (tmp_path / "llm" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2, 383]}))
    info = check_pair(pair)
    assert info.eos_token_ids == (1, 2)
    assert info.warnings == ("EOS ids differ ([1] for the SLM, [1, 2] for the LLM); each of them ends a response",)


def test_a_pair_without_eos_is_refused(make_pair: MakePair) -> None:
    """Nothing would end a response."""
    tokenizer = make_tokenizer(eos_token=None)
    keys = {"eos_token_id": None}
    with pytest.raises(PairError, match="no response would end"):
        check_pair(make_pair(tokenizer, slm_keys=keys, llm_keys=keys))


def test_handoff_tokens_are_reserved_in_the_vocabulary_first(make_pair: MakePair) -> None:
    """`<|handoff|>` where there is one."""
    tokenizer = make_tokenizer(specials=[*SPECIALS, "<|handoff|>", "<|reserved_special_token_0|>"])
    info = check_pair(make_pair(tokenizer, slm_keys={"vocab_size": 384}))
    assert (info.handoff_token_id, info.handoff_token) == (3, "<|handoff|>")


def test_tokens_of_the_chat_template_are_no_handoff(make_pair: MakePair) -> None:
    """A token that every prompt contains cannot be configured."""
    tokenizer = make_tokenizer(specials=[*SPECIALS, "<|user|>"], chat_template=f"<|user|>{CHAT_TEMPLATE}")
    with pytest.raises(PairError, match=r"pair\.handoff_token '<\|user\|>' is id 3, which prompts"):
        check_pair(make_pair(tokenizer, handoff_token="<|user|>"))
