"""The handoff token: the id whose column carries the router's score inside vLLM, and that stops the SLM's turn.

It must be an id that no prompt and no response ever contains. Fed by the pair check; read by the vLLM engine
alone, since the transformers engine stops without a token.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from citer_ray.errors import PairError
from citer_ray.pair.tokenizer_check import tokens_by_id

HANDOFF_TOKEN = "<|handoff|>"  # noqa: S105 - a token of a vocabulary, no secret
# How families name the ids that they keep free: Llama 3, Gemma, T5, BERT, Mistral, Phi, Qwen 1.
_RESERVED = re.compile(
    r"<\|reserved.*\|>|<unused_?\d+>|<extra_id_\d+>|\[unused\d+\]|<SPECIAL_\d+>|<\|dummy_\d+\|>|<\|extra_\d+\|>"
)


@dataclass(frozen=True, slots=True)
class Handoff:
    """The chosen id, its text (None for an id beyond the tokenizer), and why; no id is a reason, not an error."""

    token_id: int | None
    token: str | None
    reason: str


def choose_handoff(
    configured: str | int | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    slm_vocab_size: int,
    in_use: Collection[int],
) -> Handoff:
    """Pick the handoff token.

    In this order: the configured one; `<|handoff|>`; the last reserved id of the vocabulary (fine-tuning
    takes the first ones); the first padding id of the SLM's logits that the tokenizer does not know.

    Args:
        configured: `pair.handoff_token`, a token, an id, or None.
        tokenizer: the pair's tokenizer.
        slm_vocab_size: columns of the SLM's logits, padding included.
        in_use: ids that responses may contain by design, such as EOS ids.

    Raises:
        PairError: the configured token is unknown, has no column, or is in use.
    """
    tokens = tokens_by_id(tokenizer)
    if configured is not None:
        return _configured(configured, tokenizer, tokens, slm_vocab_size, in_use)
    ids = {token: index for index, token in tokens.items() if index < slm_vocab_size and index not in in_use}
    if HANDOFF_TOKEN in ids:
        return Handoff(ids[HANDOFF_TOKEN], HANDOFF_TOKEN, "the vocabulary holds it")
    reserved = [token for token in ids if _RESERVED.fullmatch(token)]
    if reserved:
        return Handoff(ids[reserved[-1]], reserved[-1], "the vocabulary reserves it")
    padding = max(tokens, default=-1) + 1
    if padding < slm_vocab_size:
        return Handoff(padding, None, f"the SLM's logits have {slm_vocab_size - padding} ids beyond the tokenizer")
    return Handoff(
        None,
        None,
        "the vocabulary has no reserved id and no padding; for vLLM, set pair.handoff_token to a token that no "
        "prompt or response contains",
    )


def _configured(
    configured: str | int,
    tokenizer: PreTrainedTokenizerBase,
    tokens: dict[int, str],
    slm_vocab_size: int,
    in_use: Collection[int],
) -> Handoff:
    where = f"pair.handoff_token {configured!r}"
    if isinstance(configured, str):
        found = tokenizer.get_vocab().get(configured)
        if found is None:
            raise PairError(f"{where} is not one token of the vocabulary; name one that is, or null to pick one")
        configured = int(found)
    if not 0 <= configured < slm_vocab_size:
        raise PairError(f"{where} has no column in the SLM's logits, which end at id {slm_vocab_size - 1}")
    if configured in in_use:
        raise PairError(f"{where} is id {configured}, which prompts or responses contain; name an unused one")
    return Handoff(configured, tokens.get(configured), "configured")
