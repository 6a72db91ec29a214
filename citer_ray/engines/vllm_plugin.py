"""vLLM's entry point (group `vllm.general_plugins`): registers our model classes in every vLLM process.

vLLM calls `register` in the frontend, the engine core and each worker, in any order and more than once. It
only hands over names; a class is made when a model is loaded.
"""

from __future__ import annotations

from citer_ray.engines.vllm_architectures import ARCHITECTURES, ROUTED, SCORED


def register() -> None:
    """Make vLLM know the routed and the scored version of every architecture in `ARCHITECTURES`."""
    from vllm import ModelRegistry

    for architecture in ARCHITECTURES:
        for prefix, module in ((ROUTED, "vllm_routed"), (SCORED, "vllm_scored")):
            name = prefix + architecture
            ModelRegistry.register_model(name, f"citer_ray.engines.{module}:{name}")
