"""From deltas to OpenAI's objects: chunks of a stream, or one whole response; chat or completions.

The types are those of the `openai` package; `citer` fields ride along as extras (docs/serving.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from citer_ray.cost import PairCost
from citer_ray.serving.choices import Choice, Delta, FinishReason, Token
from citer_ray.serving.planning import Plan


class Assembler:
    """Objects of one response.

    Args:
        plan: the request.
        chat: chat completions, or plain ones.
        trace: give every token's writer.
        logprobs: give every token's log-probability.
        include_usage: a stream ends with usage.
        cost: for gigabytes.
    """

    def __init__(
        self, plan: Plan, *, chat: bool, trace: bool, logprobs: bool, include_usage: bool, cost: PairCost | None
    ) -> None:
        self._plan, self._chat, self._trace, self._logprobs = plan, chat, trace, logprobs
        self._include_usage, self._cost = include_usage, cost
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{plan.key}"
        self._created = int(time.time())
        self._begun: set[int] = set()
        self._text_offset: dict[int, int] = {}

    def chunk(self, delta: Delta) -> str:
        """JSON of a chunk of a stream."""
        choice = self._choice(delta.index, delta.tokens, delta.finish_reason)
        if self._chat:
            content: dict[str, Any] = {} if delta.index in self._begun else {"role": "assistant"}
            self._begun.add(delta.index)
            if delta.tokens or "role" in content:
                content["content"] = delta.text
            choice["delta"] = content
        else:
            choice["text"] = delta.text
        values = self._envelope(".chunk" if self._chat else "") | {"choices": [choice]}
        if self._include_usage:
            values["usage"] = None
        return _json(ChatCompletionChunk if self._chat else Completion, values)

    def usage_chunk(self) -> str:
        """JSON of the last chunk: no choices, and usage."""
        values = self._envelope(".chunk" if self._chat else "") | {"choices": [], "usage": self.usage()}
        return _json(ChatCompletionChunk if self._chat else Completion, values)

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> str:
        """JSON of a response that was not streamed; `deltas` by choice."""
        choices = []
        for parts in deltas:
            tokens = [token for part in parts for token in part.tokens]
            choice = self._choice(parts[0].index, tokens, parts[-1].finish_reason)
            text = "".join(token.text for token in tokens)
            if self._chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choices.append(choice)
        values = self._envelope("") | {"choices": choices, "usage": self.usage()}
        return _json(ChatCompletion if self._chat else Completion, values)

    def usage(self) -> dict[str, Any]:
        """Usage of all choices."""
        choices = self._plan.choices
        completion = sum(len(choice.tally.writers) for choice in choices)
        values = {
            "prompt_tokens": self._plan.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._plan.prompt_tokens + completion,
            "citer": summary(choices, self._plan, self._cost),
        }
        return CompletionUsage.model_validate(values).model_dump(exclude_unset=True)

    def _envelope(self, suffix: str) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self._chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._plan.model}

    def _choice(self, index: int, tokens: Sequence[Token], reason: FinishReason | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self._logprobs:
            choice["logprobs"] = self._chat_logprobs(tokens) if self._chat else self._plain_logprobs(index, tokens)
        if self._trace:
            choice["citer"] = {
                "tokens": [
                    {"id": token.token_id, "text": token.text, "writer": token.writer.value, "p_slm": token.p_slm}
                    for token in tokens
                ]
            }
        return choice

    @staticmethod
    def _chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
        content = [
            {"token": token.text, "bytes": list(token.text.encode()), "logprob": token.logprob, "top_logprobs": []}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _plain_logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        offsets, offset = [], self._text_offset.get(index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        self._text_offset[index] = offset
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def summary(choices: Sequence[Choice], plan: Plan, cost: PairCost | None) -> dict[str, Any]:
    """The `citer` part of usage."""
    slm = sum(choice.tally.slm_tokens for choice in choices)
    llm = sum(choice.tally.llm_tokens for choice in choices)
    gigabytes = [] if cost is None else [choice.tally.gigabytes(cost) for choice in choices]
    return {
        "slm_tokens": slm,
        "llm_tokens": llm,
        "llm_share": llm / (slm + llm) if slm + llm else 0.0,
        "visits": sum(choice.tally.visits for choice in choices),
        "gigabytes": sum(moved for moved, _ in gigabytes) if gigabytes else None,
        "gigabytes_llm_only": sum(alone for _, alone in gigabytes) if gigabytes else None,
        "threshold": plan.threshold,
        "router": plan.router or None,
        "rebuilds": sum(choice.rebuilds for choice in choices),
        "degraded": any(choice.degraded for choice in choices),
    }


def _json(kind: type[BaseModel], values: dict[str, Any]) -> str:
    """Checked against OpenAI's type; only what was set is written."""
    return kind.model_validate(values).model_dump_json(exclude_unset=True)
