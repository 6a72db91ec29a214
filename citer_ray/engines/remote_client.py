"""Calls of an OpenAI-compatible server in vLLM's dialect: token ids in, token ids and log-probabilities out.

Fed by `remote.py`; the `openai` package does HTTP. Attempts, waiting and the meaning of errors are here: what may work
later is tried again and then raised as the engine's "away" error, what the server refuses is a `ConfigError` at once.
Neither messages nor logs hold the key.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai import APIConnectionError, APIResponseValidationError, APIStatusError, AsyncOpenAI, OpenAIError

from citer_ray.config_remote import RemoteConfig
from citer_ray.errors import ConfigError, RetryableError

logger = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]

_AWAY = frozenset((408, 429, 500, 502, 503, 504))
_LONGEST_WAIT_S = 30.0
_ID_PREFIX = "token_id:"  # how vLLM writes tokens with `return_tokens_as_token_ids`
_SHOWN = 300  # characters of a server's message


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens of one choice: ids, natural-log probabilities (None where the server has none), and the best tokens.

    `best` maps ids to log-probabilities at each position, or is None at the first of an echoed prompt.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    best: list[dict[int, float] | None]


class RemoteClient:
    """One model on one server.

    Args:
        config: where it is; `url` must be set.
        away: the class of the error when the server does not answer after all attempts.
        http_client: of `httpx`, for tests.
        sleep: how to wait between attempts.

    Attributes:
        num_calls: calls that were answered.
    """

    def __init__(
        self,
        config: RemoteConfig,
        *,
        away: type[RetryableError] = RetryableError,
        http_client: Any = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        assert config.url is not None, "the caller checks that there is a server"
        self._config, self._away, self._sleep = config, away, sleep
        self._client = AsyncOpenAI(
            base_url=config.url,
            api_key=os.environ.get(config.api_key_env) or "none",
            timeout=config.timeout_s,
            max_retries=0,  # attempts are counted here, and tests do not wait
            http_client=http_client,
        )
        self._model = config.model
        self._max_model_len: int | None = None
        self.num_calls = 0

    async def complete(self, prompt_ids: Sequence[int], max_tokens: int, **fields: Any) -> Written:
        """One completion.

        Args:
            prompt_ids: the whole context.
            max_tokens: 0 with `echo` writes nothing.
            fields: further fields of the body, vLLM's included.

        Raises:
            ConfigError: the server refuses the request, or answers without token ids.
            RetryableError: the server is away (the class that `away` names).
        """
        body: dict[str, Any] = {
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "logprobs": 1,
            "extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True, **fields},
        }
        model = await self.model()
        answer = await self._tried("choices", lambda: self._client.completions.create(model=model, **body))
        return self._read(answer.choices[0], bool(fields.get("echo")))

    async def model(self) -> str:
        """The model's name on the server."""
        if self._model is None:
            await self._look()
        assert self._model is not None
        return self._model

    async def max_model_len(self) -> int | None:
        """Longest context by the server's word, if it gives one (vLLM does)."""
        await self._look()
        return self._max_model_len

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    @property
    def _where(self) -> str:
        return f"the LLM's server {self._config.url}"

    async def _look(self) -> None:
        """Ask what the server has."""
        listed = (await self._tried("data", lambda: self._client.models.list())).data
        names = [model.id for model in listed]
        # vLLM lists adapters beside the model that they belong to.
        bases = [model.id for model in listed if not getattr(model, "parent", None)]
        if self._model is None and len(bases) != 1:
            raise ConfigError(f"{self._where} has the models {names}; set engine.remote.model to one of them")
        if self._model is not None and self._model not in names:
            raise ConfigError(f"{self._where} has no model {self._model!r}; it has {names}")
        self._model = self._model or bases[0]
        longest = next(getattr(model, "max_model_len", None) for model in listed if model.id == self._model)
        self._max_model_len = longest if isinstance(longest, int) else None

    async def _tried(self, part: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """The answer of the first attempt that gets one; `part` is what it must have."""
        for attempt in range(1, self._config.max_attempts + 1):
            try:
                answer = await call()
            except APIStatusError as error:
                if error.status_code not in _AWAY:
                    raise self._refusal(error) from None
                reason, wait = f"HTTP {error.status_code}", _retry_after(error.response.headers)
            except APIConnectionError as error:  # timeouts included
                reason, wait = f"{type(error).__name__}: {error.__cause__ or error}"[:_SHOWN], None
            except (APIResponseValidationError, OpenAIError, ValueError, AttributeError) as error:
                # AttributeError: where a list is asked for, the client takes a page that is no JSON for one.
                raise ConfigError(
                    f"{self._where} does not answer in JSON ({type(error).__name__}); check url"
                ) from None
            else:
                if getattr(answer, part, None) is None:
                    raise ConfigError(f"{self._where} answers without {part!r}, as no OpenAI server does; check url")
                self.num_calls += 1
                return answer
            if attempt < self._config.max_attempts:
                delay = self._config.backoff_s * 2 ** (attempt - 1) if wait is None else wait
                logger.info("%s: %s; attempt %d follows", self._where, reason, attempt + 1)
                await self._sleep(min(delay, _LONGEST_WAIT_S))
        raise self._away(f"{self._where} did not answer in {self._config.max_attempts} attempts; the last: {reason}")

    def _refusal(self, error: APIStatusError) -> ConfigError:
        variable = self._config.api_key_env
        if error.status_code in (401, 403):  # the server's message may quote the key
            return ConfigError(
                f"{self._where} refuses the key (HTTP {error.status_code}); set {variable} to a valid one"
            )
        return ConfigError(
            f"{self._where} refuses the request (HTTP {error.status_code}): {str(error.message)[:_SHOWN]}"
        )

    def _read(self, choice: Any, echoed: bool) -> Written:
        logprobs = choice.logprobs
        if logprobs is None or logprobs.tokens is None or logprobs.token_logprobs is None:
            raise ConfigError(f"{self._where} does not return logprobs, which routing needs; use one that does (vLLM)")
        named = [_token_id(token) for token in logprobs.tokens]
        given = None if echoed else getattr(choice, "token_ids", None)
        found: list[Any] = given if isinstance(given, list) else named
        ids = [token for token in found if isinstance(token, int)]
        if len(ids) != len(found) or len(ids) != len(logprobs.token_logprobs):
            raise ConfigError(
                f"{self._where} does not return token ids: it ignores return_token_ids and return_tokens_as_token_ids. "
                "Text alone cannot be routed; use a server with vLLM's extension"
            )
        best = [None if one is None else _best(one) for one in logprobs.top_logprobs or [None] * len(ids)]
        return Written(ids, list(logprobs.token_logprobs), best)


def _token_id(token: str) -> int | None:
    prefix, _, digits = token.partition(_ID_PREFIX)
    return int(digits) if not prefix and digits.isdecimal() else None


def _best(top: Mapping[str, float]) -> dict[int, float]:
    return {found: value for token, value in top.items() if (found := _token_id(token)) is not None}


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks for, if it does so in seconds."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
