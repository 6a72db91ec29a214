"""Autoscaling of the LLM on all of its turns in progress: those that go through Serve, and those on lanes.

Serve's own policy with one more number: Serve counts the calls that it routes, the LLM's replicas report the others
(`record_autoscaling_stats`). Delays, bounds and the start from zero replicas stay Serve's, whose controller gets the
function by value: it need not have this package.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

DIRECT_TURNS = "citer_direct_turns"


def replicas_for_turns(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Replicas that bring the turns in progress to `target_ongoing_requests` each, and no state."""
    if context.current_num_replicas == 0 or context.config is None:
        return context.target_num_replicas, {}
    direct = (context.aggregated_metrics or {}).get(DIRECT_TURNS, {})
    turns = context.total_num_requests + sum(direct.values())
    return turns / context.config.get_target_ongoing_requests(), {}
