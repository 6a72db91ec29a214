"""From a request's messages or prompts to token ids, once; from here on only ids travel.

A chat goes through the tokenizer's own template, which writes BOS itself if the model wants one. BOS is added at most
once, as `prompts.PromptFormat` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from citer_ray.prompts import PromptFormat
from citer_ray.serving.api_errors import ApiError
from citer_ray.serving.requests import ChatRequest, CompletionRequest, Message


class PromptEncoder:
    """Prompts of one pair.

    Args:
        tokenizer: of the pair.
        prompt_format: whether BOS comes first.
        vocab_size: ids below it may be sent.
        reserved_ids: ids that may not (the handoff token).
    """

    def __init__(
        self, tokenizer: Any, prompt_format: PromptFormat, vocab_size: int, reserved_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._format = tokenizer, prompt_format
        self._vocab_size, self._reserved = vocab_size, frozenset(reserved_ids)

    def chat(self, request: ChatRequest) -> list[int]:
        """Ids of a chat, with the opening of the assistant's answer."""
        if not self._tokenizer.chat_template:
            raise ApiError("the pair's tokenizer has no chat template: use /v1/completions", code="no_chat_template")
        messages = [_as_dict(message) for message in request.messages]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError) as error:
            raise ApiError(f"the chat template refuses these messages: {error}", param="messages") from None
        return self._text(str(text), "messages", chat=True)

    def prompts(self, request: CompletionRequest) -> list[list[int]]:
        """Ids of every prompt of a completion."""
        if not request.prompts:
            raise ApiError("prompt: there is none in the list", param="prompt")
        return [
            self._text(prompt, "prompt", chat=False) if isinstance(prompt, str) else self._checked(prompt)
            for prompt in request.prompts
        ]

    def _text(self, text: str, param: str, *, chat: bool) -> list[int]:
        ids = self._format.encode_text(text, self._tokenizer, chat=chat)
        if not ids:
            raise ApiError(f"{param}: the prompt has no tokens", param=param)
        return ids

    def _checked(self, ids: Sequence[int]) -> list[int]:
        if not ids:
            raise ApiError("prompt: the prompt has no tokens", param="prompt")
        wrong = next((token for token in ids if token >= self._vocab_size or token in self._reserved), None)
        if wrong is not None:
            raise ApiError(
                f"prompt: token id {wrong} is not allowed; ids are below {self._vocab_size}, reserved ones excepted",
                param="prompt",
            )
        return list(ids)


def _as_dict(message: Message) -> dict[str, str]:
    values = {"role": message.role, "content": message.text}
    return values if message.name is None else values | {"name": message.name}
