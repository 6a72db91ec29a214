"""vLLM's entry point (group `vllm.general_plugins`): registers the routed model classes in every vLLM process.

vLLM calls `register` in the frontend, the engine core and each worker, in any order and more than once. It only hands
over names; the classes are made when a model is loaded.
"""

from __future__ import annotations

from citer_ray.engines.vllm_architectures import ARCHITECTURES, routed_name


def register() -> None:
    """Make vLLM know the routed version of every architecture in `ARCHITECTURES`."""
    from vllm import ModelRegistry

    for architecture in ARCHITECTURES:
        name = routed_name(architecture)
        ModelRegistry.register_model(name, f"citer_ray.engines.vllm_routed:{name}")
