"""Calls to replicas that may die, hang or be restarted: time limits, and which failures another replica can mend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from citer_ray.errors import RetryableError
from citer_ray.serving.api_errors import ApiError


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed on another replica."""
    if isinstance(error, RayTaskError):
        return isinstance(error, RetryableError) or isinstance(error.cause, RetryableError | RayActorError)
    if isinstance(error, grpc.RpcError):
        return True
    return isinstance(
        error,
        TimeoutError
        | RayError
        | RetryableError
        | ReplicaUnavailableError
        | DeploymentUnavailableError
        | TaskCancelledError,
    )


async def call(response: Any, timeout_s: float) -> Any:
    """The result of a `DeploymentResponse`; the call is cancelled if that takes too long or is cancelled itself.

    Raises:
        TimeoutError: no answer in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await response
    except BaseException:
        response.cancel()
        raise


async def reports(responses: Any, silence_s: float) -> AsyncGenerator[Any, None]:
    """Items of a `DeploymentResponseGenerator`; it is cancelled if it is silent for too long, or not read to its end.

    Raises:
        TimeoutError: no item in time.
    """
    try:
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    item = await anext(responses)
            except StopAsyncIteration:
                return
            yield item
    except BaseException:
        responses.cancel()
        raise


def overload(error: BackPressureError, retry_after_s: float) -> ApiError:
    """Serve's refusal as an answer to the client."""
    return ApiError(
        "too many requests are waiting; try again later",
        status=error.status_code,
        code="overloaded",
        retry_after_s=error.retry_after_s or retry_after_s,
    )
