"""The embedded pair's tokenizer: whole words of the problems, one token a digit, any other text byte by byte.

``build_tokenizer`` derives the vocabulary from generated problems; ``build`` saves it beside both models'
weights. ``<|handoff|>`` is reserved for the router's signal inside an engine: no text without that literal
produces it. A chat of one user message renders to the plain prompt format: BOS, the message and a newline.
"""

from __future__ import annotations

import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from citer_ray.pair.embedded.families import FAMILY_TABLE
from citer_ray.pair.embedded.problems import Problem
from citer_ray.pair.embedded.wording import KEEP_WORDS, SWAP_WORDS

PAD, BOS, EOS, UNK, HANDOFF = "<pad>", "<s>", "</s>", "<unk>", "<|handoff|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, UNK, HANDOFF)
PAD_ID, BOS_ID, EOS_ID, UNK_ID, HANDOFF_ID = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)

# Pieces: a digit, an opened box, a word, another visible character (with its space before), a whitespace.
_PIECE = r" ?[0-9]| ?\\boxed\{| ?[A-Za-z]+| ?[^\sA-Za-z0-9]|\s"
_BYTE_SCORE, _WORD_SCORE = -10.0, -1.0  # a whole word always beats its bytes


def build_tokenizer(problems: list[Problem], max_length: int) -> PreTrainedTokenizerFast:
    """Makes the tokenizer whose vocabulary is the bytes and every piece of the given problems.

    Args:
        problems: Source of the words; a few thousand of every family hold all of them.
        max_length: The models' context length in tokens.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = _template_pieces()
    for problem in problems:
        pieces.update(re.findall(_PIECE, f"{problem.question}\n{problem.solution}"))
    words = sorted({byte_level.pre_tokenize_str(piece)[0][0] for piece in pieces} - set(alphabet))
    vocabulary = [(token, 0.0) for token in SPECIAL_TOKENS]
    vocabulary += [(byte, _BYTE_SCORE) for byte in alphabet]
    vocabulary += [(word, _WORD_SCORE) for word in words]

    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=UNK_ID, byte_fallback=False))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_PIECE), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        additional_special_tokens=[HANDOFF],
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _template_pieces() -> set[str]:
    """Pieces that a sample might miss: the families' words, the decision words, spaced digits."""
    pieces = {f" {digit}" for digit in range(10)}
    pieces |= {f" {word}" for word in SWAP_WORDS + KEEP_WORDS}
    for family in FAMILY_TABLE.values():
        pieces |= {f" {word}" for word in family.units + family.groups + family.state_verbs}
        pieces |= {f" {change.verb}" for change in family.gains + family.losses}
    return pieces
