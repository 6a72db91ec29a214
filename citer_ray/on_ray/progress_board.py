"""A mailbox between training workers and the driver: rank 0 posts what happened, the driver takes it.

An actor, because Ray Train's own callbacks run in its controller and the driver only waits. Imports nothing heavy, so
that its process starts at once.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.actor import ActorHandle


class ProgressBoard:
    """Messages in order; taking them empties the board."""

    def __init__(self) -> None:
        self._messages: list[Any] = []

    def post(self, message: Any) -> None:
        """Add a message."""
        self._messages.append(message)

    def take(self) -> list[Any]:
        """All messages since the last call."""
        messages, self._messages = self._messages, []
        return messages


def start_board() -> ActorHandle[ProgressBoard]:
    """Start a board that takes no CPU and ends with its handle."""
    actor_class: Any = ray.remote(ProgressBoard)
    board: ActorHandle[ProgressBoard] = actor_class.options(num_cpus=0).remote()
    return board
