"""The choice of the handoff token: the order of preference, and configured tokens that cannot serve."""

from __future__ import annotations

import pytest

from citer_ray.errors import PairError
from citer_ray.pair.handoff import Handoff, choose_handoff
from tests.unit.pair_checkpoints import SPECIALS, make_tokenizer


def choose(configured: str | int | None, specials: list[str], slm_vocab_size: int = 320) -> Handoff:
    """Choose for a tokenizer of 320 ids that holds `specials` from id 3 on; EOS is id 1."""
    tokenizer = make_tokenizer(specials=[*SPECIALS, *specials])
    return choose_handoff(configured, tokenizer, slm_vocab_size=slm_vocab_size, in_use={0, 1, 2})


def test_order_of_preference() -> None:
    """Configured, then `<|handoff|>`, then the last reserved id, then padding, then none with a reason."""
    reserved = ["<|reserved_special_token_0|>", "<|reserved_special_token_1|>"]
    assert choose("<|reserved_special_token_0|>", [*reserved, "<|handoff|>"]).token_id == 3
    assert choose(None, [*reserved, "<|handoff|>"], 384).token_id == 5
    assert choose(None, reserved, 384).token_id == 4
    assert choose(None, [], 384) == Handoff(320, None, "the SLM's logits have 64 ids beyond the tokenizer")
    none = choose(None, [])
    assert none.token_id is None
    assert "set pair.handoff_token" in none.reason


@pytest.mark.parametrize(
    "token", ["<unused42>", "<unused_7>", "<extra_id_3>", "[unused9]", "<SPECIAL_20>", "<|dummy_1|>", "<|extra_5|>"]
)
def test_reserved_ids_of_several_families(token: str) -> None:
    """Gemma, T5, BERT, Mistral, Phi and Qwen name free ids in their own ways."""
    assert choose(None, [token]) == Handoff(3, token, "the vocabulary reserves it")


def test_configured_ids() -> None:
    """An id beyond the tokenizer has no text; one inside has."""
    assert choose(350, [], 384) == Handoff(350, None, "configured")
    assert choose(3, ["<|spare|>"]) == Handoff(3, "<|spare|>", "configured")


@pytest.mark.parametrize(
    ("configured", "message"),
    [
        ("<|nope|>", "'<|nope|>' is not one token"),
        ("two words", "'two words' is not one token"),
        (320, "320 has no column .* end at id 319"),
        (-1, "-1 has no column"),
        (1, "1 is id 1, which prompts or responses contain"),
        ("<|eos|>", "is id 1, which prompts"),
    ],
)
def test_configured_tokens_that_cannot_serve(configured: str | int, message: str) -> None:
    """Unknown, without a column, or in use."""
    with pytest.raises(PairError, match=message.replace("|", r"\|")):
        choose(configured, [])


def test_a_reserved_id_without_a_column_is_passed_over() -> None:
    """The SLM's logits end before it."""
    assert choose(None, ["<|reserved_0|>"], slm_vocab_size=3).token_id is None
