"""Which replica a call goes to: the one that its session hashes to, or the next ones on the ring after a failure.

Serve's `ConsistentHashRouter` sends calls of one `session_id` to one replica. A replica that hangs stays on the ring
until its health check fails; so a retry must be able to name another one. `SESSION#2` is the second successor of
`SESSION`'s replica.
"""

from __future__ import annotations

from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

ROUTER_CLASS = "citer_ray.on_ray.serve_routing.SuccessorRouter"


def session_id(key: str, attempt: int) -> str:
    """The id of a session's calls after `attempt` failures."""
    return f"{key}#{attempt}"


class SuccessorRouter(ConsistentHashRouter):
    """See the module."""

    def _lookup_ranked_replicas(self, routing_key: str) -> list[Any]:
        key, _, attempt = routing_key.rpartition("#")
        if not key or not attempt.isdecimal():
            return list(super()._lookup_ranked_replicas(routing_key))
        fallbacks, self._num_fallback_replicas = self._num_fallback_replicas, len(self._replica_set_snapshot)
        try:
            ranked = list(super()._lookup_ranked_replicas(key))
        finally:
            self._num_fallback_replicas = fallbacks
        if not ranked:
            return []
        first = int(attempt) % len(ranked)
        return [*ranked[first:], *ranked[:first]][: 1 + fallbacks]
