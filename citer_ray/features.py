"""What a router reads at a position: the hidden state, the SLM's largest logits, its greedy token's embedding.

The same function makes the features that a router is fitted on (from stored hidden states) and those that it decides on
(from the state of a step), so that the two cannot differ. R2R's router reads all three (Fu et al., arXiv 2505.21600).
"""

from __future__ import annotations

import torch
from torch import Tensor

from citer_ray.config import RouterConfig

HIDDEN_ALONE = ("hidden",)


def feature_width(config: RouterConfig, hidden_size: int, vocab_size: int) -> int:
    """Width of what a router reads.

    Args:
        config: the router's shape.
        hidden_size: of the SLM.
        vocab_size: of its logits.
    """
    widths = {"hidden": hidden_size, "top_logits": min(config.top_logits, vocab_size), "token_embedding": hidden_size}
    return sum(widths[name] for name in config.features)


class FeatureReader:
    """Features of a router, [B, F].

    Args:
        config: the router's shape.
        embedding_VH: the SLM's input embedding.
    """

    def __init__(self, config: RouterConfig, embedding_VH: Tensor) -> None:
        self._names, self._top_logits = config.features, config.top_logits
        self._embedding_VH = embedding_VH.detach()

    @torch.inference_mode()
    def __call__(self, hidden_BH: Tensor, logits_BV: Tensor) -> Tensor:
        """Features in the configured order, float32.

        Args:
            hidden_BH: the last layer's output after the final norm.
            logits_BV: float32 next-token logits; ids that are never written have -inf.
        """
        return torch.cat([self._feature(name, hidden_BH, logits_BV).float() for name in self._names], dim=-1)

    def _feature(self, name: str, hidden_BH: Tensor, logits_BV: Tensor) -> Tensor:
        match name:
            case "hidden":
                return hidden_BH
            case "top_logits":
                return logits_BV.topk(min(self._top_logits, logits_BV.shape[1]), -1).values
            case _:
                return self._embedding_VH[logits_BV.argmax(-1)]
