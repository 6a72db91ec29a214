"""From a request to the jobs of its choices: model, router, threshold, limits, sampling.

Everything that can be wrong with a request is found here, before anything is decoded.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from citer_ray.config_serve import ServeConfig
from citer_ray.cost import PairCost
from citer_ray.engine import Sampling
from citer_ray.serving.api_errors import ApiError
from citer_ray.serving.choices import Choice
from citer_ray.serving.jobs import Job, RouterRef
from citer_ray.serving.prompting import PromptEncoder
from citer_ray.serving.requests import ChatRequest, CompletionRequest
from citer_ray.serving.routers import RoutersInService
from citer_ray.serving.usage import Tally

MODELS = ("routed", "slm", "llm")
_WHOLE_INTERVAL_S = 0.2  # reports of a response that does not stream


@dataclass(frozen=True)
class ServedPair:
    """The pair as the ingress knows it.

    Attributes:
        tokenizer: of both models.
        encoder: prompts.
        end_ids: ids that end a response.
        max_model_len: tokens of prompt and response.
        cost: gigabytes of passes; None leaves them out of usage.
    """

    tokenizer: Any
    encoder: PromptEncoder
    end_ids: frozenset[int]
    max_model_len: int
    cost: PairCost | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that can be served.

    Attributes:
        key: of the response; the sessions of its choices derive from it.
        choices: in the order of their index.
        prompt_tokens: of all prompts, each counted once.
        router: version, or an empty string.
        threshold: of a routed request.
    """

    key: str
    model: str
    choices: list[Choice]
    prompt_tokens: int
    router: str
    threshold: float | None


def plan(
    request: ChatRequest | CompletionRequest, pair: ServedPair, config: ServeConfig, routers: RoutersInService
) -> Plan:
    """Jobs of a request.

    Raises:
        ApiError: the request cannot be served; its message says why.
    """
    key = secrets.token_hex(12)
    if request.model not in MODELS:
        raise ApiError(
            f"the model {request.model[:64]!r} does not exist; there are {', '.join(MODELS)}",
            status=404,
            param="model",
            code="model_not_found",
        )
    if request.model != "routed" and (request.threshold is not None or request.llm_share is not None):
        raise ApiError("threshold and llm_share belong to the model routed", param="model")
    router, threshold = _routing(request, config, routers, key)
    prompts = [pair.encoder.chat(request)] if isinstance(request, ChatRequest) else pair.encoder.prompts(request)
    count = request.n or 1
    if len(prompts) * count > config.max_choices:
        raise ApiError(
            f"{len(prompts)} prompts times n {count} are more than the {config.max_choices} choices of one request",
            param="n",
        )
    seed = secrets.randbits(62) if request.seed is None else request.seed
    choices = []
    for index in range(len(prompts) * count):
        prompt_ids = prompts[index // count]
        job = Job(
            session=f"{key}-{index}",
            prompt_ids=prompt_ids,
            max_new_tokens=_limit(prompt_ids, request.limit, pair.max_model_len, config.default_max_tokens),
            sampling=_sampling(request, seed + index % count, len(prompt_ids)),
            model=request.model,
            router=router,
            threshold=threshold or 0.0,
            llm_tokens_per_visit=config.llm_tokens_per_visit,
            interval_s=config.stream_interval_ms / 1000 if request.stream else _WHOLE_INTERVAL_S,
        )
        choices.append(Choice(index, job, Tally(len(prompt_ids)), request.stops))
    return Plan(key, request.model, choices, sum(map(len, prompts)), router.version if router else "", threshold)


def _routing(
    request: ChatRequest | CompletionRequest, config: ServeConfig, routers: RoutersInService, key: str
) -> tuple[RouterRef | None, float | None]:
    if request.model != "routed":
        return None, None
    served = routers.choose(key)
    named = request.threshold
    if named is None and request.llm_share is None:
        named = config.threshold
    return served.ref, served.threshold_of(named, request.llm_share)


def _limit(prompt_ids: Sequence[int], asked: int | None, max_model_len: int, default: int) -> int:
    """Tokens that the response may have."""
    room = max_model_len - len(prompt_ids)
    if room < 1 or (asked or 1) > room:
        wanted = "" if asked is None else f" and {asked} in the completion"
        raise ApiError(
            f"this model's maximum context length is {max_model_len} tokens, but the request has {len(prompt_ids)} in "
            f"the prompt{wanted}: shorten the prompt or lower max_tokens",
            param="messages" if asked is None or room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    return min(default, room) if asked is None else asked


def _sampling(request: ChatRequest | CompletionRequest, seed: int, response_start: int) -> Sampling:
    temperature = 1.0 if request.temperature is None else request.temperature
    return Sampling(
        temperature=temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        seed=seed,
        ignore_eos=bool(request.ignore_eos),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        response_start=response_start,
    )
