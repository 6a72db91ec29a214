"""Stand-ins for Serve's handles, and a pair whose tokens and scores follow from the ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any


class FakeResponse:
    """An awaitable that can be cancelled, as a `DeploymentResponse`."""

    def __init__(self, work: Any) -> None:
        self._task = asyncio.ensure_future(work)

    def __await__(self) -> Any:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()


class FakeMethod:
    """A method of a handle."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *args: Any) -> FakeResponse:
        return FakeResponse(self._function(*args))


def token_of(ids: Sequence[int]) -> int:
    return 10 + sum(ids) % 50


def score_of(ids: Sequence[int]) -> float:
    return 0.1 if sum(ids) % 3 == 0 else 0.9
