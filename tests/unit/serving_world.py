"""A served pair without models: ids are bytes, both models write the same text, and a rule says who writes when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
from openai import AsyncOpenAI

from citer_ray.calibration import CalibrationPoint, CalibrationTable
from citer_ray.config_serve import ServeConfig
from citer_ray.cost import ModelCost, PairCost, RouterCost
from citer_ray.engines.scripted import ScriptedEngine
from citer_ray.model_shape import DecoderShape
from citer_ray.prompts import PromptFormat
from citer_ray.serving.app import Service, build_app
from citer_ray.serving.jobs import RouterRef
from citer_ray.serving.local import LocalBackend
from citer_ray.serving.planning import ServedPair
from citer_ray.serving.prompting import PromptEncoder
from citer_ray.serving.responding import ResponseSettings
from citer_ray.serving.routers import RoutersInService, ServedRouter

EOS = 256
BOS = 257
HANDOFF = 258
VOCAB_SIZE = 260
CALIBRATION = CalibrationTable(
    points=(CalibrationPoint(llm_share=0.2, threshold=0.4), CalibrationPoint(llm_share=0.6, threshold=0.8))
)


class ByteTokenizer:
    """Bytes, and three special tokens without text; the chat template writes BOS and roles."""

    bos_token_id = BOS
    chat_template: str | None = "yes"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = [BOS] if add_special_tokens or text.startswith("<s>") else []
        return [*ids, *text.removeprefix("<s>").encode()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        turns = "".join(f"[{message['role']}]{message['content']}\n" for message in conversation)
        return f"<s>{turns}[assistant]"


def _shape() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }


def pair_cost() -> PairCost:
    """A small SLM and an LLM four times as deep."""
    slm, llm = DecoderShape.from_config(_shape()), DecoderShape.from_config(_shape() | {"num_hidden_layers": 8})
    return PairCost(ModelCost(slm, 4.0, 4.0), ModelCost(llm, 4.0, 4.0), RouterCost(1000))


class World:
    """An application over scripted engines.

    Args:
        text: what both models write, and then EOS.
        llm_writes: from the position in the response to whether the router prefers the LLM there.
        config: the section `serve`.
    """

    def __init__(
        self,
        text: str = "The answer is 42.",
        llm_writes: Callable[[int], bool] = lambda position: position % 5 == 3,
        config: ServeConfig | None = None,
        *,
        max_model_len: int = 300,
        settings: ResponseSettings | None = None,
        api_keys: tuple[str, ...] = (),
    ) -> None:
        self.content = text.encode()
        self.prompt_length = 0

        def next_token(ids: Sequence[int]) -> int:
            position = len(ids) - self.prompt_length
            return self.content[position] if position < len(self.content) else EOS

        def score_of(ids: Sequence[int]) -> float:
            return 0.3 if llm_writes(len(ids) - self.prompt_length) else 0.9

        self.slm = ScriptedEngine(next_token, score_of, eos_id=EOS, max_model_len=max_model_len)
        self.llm = ScriptedEngine(next_token, eos_id=EOS, max_model_len=max_model_len)
        tokenizer = ByteTokenizer()
        self.encoder = PromptEncoder(tokenizer, PromptFormat(bos="auto"), VOCAB_SIZE, [HANDOFF])
        pair = ServedPair(tokenizer, self.encoder, frozenset([EOS]), max_model_len, pair_cost())
        router = ServedRouter(RouterRef("r1", "nowhere"), 0.5, CALIBRATION)
        self.service = Service(
            config or ServeConfig(),
            pair,
            LocalBackend(self.slm, self.llm, settings),
            RoutersInService(router),
            api_keys,
        )
        self.app = build_app(self.service)

    def http(self) -> httpx.AsyncClient:
        """A client of the application."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")

    def openai(self, key: str = "none") -> AsyncOpenAI:
        """The official client, on the application."""
        return AsyncOpenAI(api_key=key, base_url="http://test/v1", http_client=self.http(), max_retries=0)

    def chat_prompt(self, content: str = "Hi") -> list[int]:
        """Ids of a chat with one message of the user; the scripted models answer this one."""
        ids = [BOS, *f"[user]{content}\n[assistant]".encode()]
        self.prompt_length = len(ids)
        return ids
