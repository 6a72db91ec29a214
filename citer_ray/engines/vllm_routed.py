"""The router inside the SLM: a mixin that turns a stock vLLM decoder class into its routed version.

vLLM builds the class in its workers (`vllm_plugin.py` registers the name, `hf_overrides` selects it).
`compute_logits` gets exactly the hidden states that the sampler's logits come from, so `p_slm` costs one
small MLP per decoded position and no extra pass. Under tensor parallelism hidden states are replicated and
logits gathered: every rank runs the same router on the same rows. Under pipeline parallelism only the last
rank computes logits.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from citer_ray.engines.vllm_architectures import ARCHITECTURES, ROUTED, stock_name
from citer_ray.engines.vllm_score_column import encode_scores
from citer_ray.engines.vllm_settings import ModelSettings, unwritable_ids
from citer_ray.features import FeatureReader

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from citer_ray.router import Router


class RouterHead:
    """The router and the masks; a plain object, so that vLLM's weight handling passes it by.

    Args:
        settings: of the engine.
    """

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._masked = list(unwritable_ids(settings))
        self._router: Router | None = None
        self._device = torch.device("cpu")
        if settings.router is not None:
            self.use(_load_router(settings.router))

    def use(self, router: Router) -> None:
        """Score with this router, which reads no embedding (`vllm_launch.check`)."""
        self._router, self._features = router, FeatureReader(router.config, torch.empty(0))

    def logits(self, hidden_BH: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        """float32 [B, V]; unwritable ids at -inf, and the encoded score in the handoff column."""
        logits_BV = logits_BV.float()
        logits_BV[:, self._settings.shared_vocab_size :] = -torch.inf
        if self._masked:
            logits_BV[:, self._masked] = -torch.inf
        if self._router is not None:
            if self._device != hidden_BH.device:
                self._router, self._device = self._router.to(hidden_BH.device), hidden_BH.device
            # The router is float32 whatever the model's dtype: thresholds are compared at full precision.
            scores_B = self._router.p_slm(self._features(hidden_BH, logits_BV))
            logits_BV[:, self._settings.handoff_token_id] = encode_scores(scores_B)
        return logits_BV


def _load_router(folder: str) -> Router:
    """In float32 on the CPU, whatever default dtype and device vLLM has set while it builds a model."""
    from citer_ray.router_artifact import load_router

    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            # The engine checked the fingerprint before it started this process.
            return load_router(folder, slm_fingerprint=None)[0]
    finally:
        torch.set_default_dtype(dtype)


class RoutedMixin:
    """Adds a `RouterHead` to a stock decoder class; put it before that class."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        settings = ModelSettings.from_config(vllm_config.model_config.hf_config)
        if settings is None:
            raise ValueError(f"{type(self).__name__} is built by citer_ray's VLLMEngine; it cannot be loaded alone")
        self._router_head = RouterHead(settings)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits of [B, H] hidden states with the handoff column filled; None if this rank has none."""
        logits_BV = super().compute_logits(hidden_states)  # type: ignore[misc]
        return None if logits_BV is None else self._router_head.logits(hidden_states, logits_BV)


def __getattr__(name: str) -> Any:
    """Make `CiterRouted<Architecture>` on first use, so that only one of vLLM's model files is imported."""
    stock = stock_name(name, ROUTED)
    if stock is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"vllm.model_executor.models.{ARCHITECTURES[stock]}")
    routed = type(name, (RoutedMixin, getattr(module, stock)), {"__module__": __name__})
    globals()[name] = routed
    return routed
