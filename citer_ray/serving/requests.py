"""Bodies of requests: which fields there are, their ranges, and what is refused.

Responses reuse the types of the `openai` package. Its request types are `TypedDict`s without ranges and with lazy
iterables, so the bodies are described here; fields keep OpenAI's names and meanings. Every optional field may be null.
Fields that change the answer and are not supported are refused, unless they hold their neutral value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from citer_ray.serving.api_errors import ApiError

_MAX_INT = 2**31 - 1
_MAX_SEED = 2**63 - 1
_MAX_STOPS = 16
_SHOWN_PROBLEMS = 3

Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Tokens = Annotated[int, Field(strict=True, ge=1, le=_MAX_INT)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=_MAX_INT)]
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2, allow_inf_nan=False)]
StopString = Annotated[str, Field(strict=True, min_length=1, max_length=256)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: Flag | None = None
    include_obfuscation: Flag | None = None  # accepted; nothing is obfuscated


class CiterOptions(_Body):
    """Our own options."""

    trace: Flag | None = None


class ContentPart(_Body):
    """One part of a message's content; only text."""

    type: Literal["text"]
    text: Text


class Message(_Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[ContentPart]
    name: Text | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _Generation(_Body):
    """What both kinds of requests share."""

    model: Annotated[str, Field(strict=True, max_length=256)]
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, le=_MAX_INT)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-_MAX_SEED, le=_MAX_SEED)] | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=128)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=_MAX_STOPS)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    ignore_eos: Flag | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    threshold: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    llm_share: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] | None = None
    citer: CiterOptions | None = None
    # Accepted, and without any effect on the answer.
    user: Text | None = None
    metadata: dict[str, Any] | None = None
    store: Flag | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    # Not supported: only neutral values pass.
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> _Generation:
        if self.threshold is not None and self.llm_share is not None:
            raise ValueError("threshold and llm_share exclude each other: give one of them")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def trace(self) -> bool:
        """Whether tokens come with their writers."""
        return bool(self.citer and self.citer.trace)


class _ResponseFormat(_Body):
    type: Literal["text"]


class ChatRequest(_Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Tokens | None = None
    logprobs: Flag | None = None
    top_logprobs: Literal[0] | None = None
    response_format: _ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Flag | None = None

    @property
    def limit(self) -> int | None:
        """Tokens of the response at most."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens come with log-probabilities."""
        return bool(self.logprobs)


class CompletionRequest(_Generation):
    """`POST /v1/completions`."""

    prompt: Text | list[Text] | list[TokenId] | list[list[TokenId]]
    logprobs: Literal[0] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def limit(self) -> int | None:
        """Tokens of the response at most."""
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens come with log-probabilities."""
        return self.logprobs is not None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One prompt or several, each a text or ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [list(self.prompt)]
        return self.prompt  # type: ignore[return-value]


Body = TypeVar("Body", bound=_Generation)


def parse(kind: type[Body], content: bytes) -> Body:
    """A request from a body of JSON.

    Raises:
        ApiError: it is no JSON object, or a field is unknown, missing, of another type or out of range.
    """
    try:
        values = from_json(content, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(f"the body must be a JSON object, not {type(values).__name__}", code="invalid_json")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
    raise ApiError(
        "; ".join(_sentence(problem) for problem in problems[:_SHOWN_PROBLEMS]),
        param=_field(problems[0]),
        code=problems[0]["type"],
    )


def _field(problem: Any) -> str | None:
    names = [str(part) for part in problem["loc"] if not str(part).startswith(("function-", "constrained-"))]
    return names[0][:64] if names else None


def _sentence(problem: Any) -> str:
    path = ".".join(str(part)[:64] for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"{path}: this field is unknown or not supported"
    return f"{path}: {message}" if path else message
