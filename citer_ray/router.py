"""The router: an MLP from the SLM's hidden state to `p_slm`, how likely the SLM should write the next token.

Fed by the SLM's last hidden state after its final norm; fitted by `training.py`, kept by
`router_artifact.py`, and run inside the SLM's engine at every step. `policy.py` compares `p_slm` with the
threshold. Sizes are those of the released code of CITER (arXiv 2502.01976): H -> 2H with batch norm -> H ->
1, ReLU, dropout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from citer_ray.config import RouterConfig
from citer_ray.synchronised_norm import SynchronisedBatchNorm


class Router(nn.Module):
    """MLP from hidden_BH to a logit for each row; computes in float32 whatever the input's dtype.

    Attributes:
        hidden_size: H of the SLM.
        config: the architecture.
    """

    def __init__(self, hidden_size: int, config: RouterConfig, *, generator: torch.Generator | None = None) -> None:
        """Make a router with fresh weights, drawn from `generator` (the global one if None)."""
        super().__init__()
        self.hidden_size = hidden_size
        self.config = config
        widths = [max(1, round(multiple * hidden_size)) for multiple in config.widths]
        self.hidden_layers = nn.ModuleList(
            nn.utils.skip_init(nn.Linear, fan_in, fan_out)
            for fan_in, fan_out in zip([hidden_size, *widths], widths, strict=False)
        )
        self.norm = SynchronisedBatchNorm(widths[0]) if config.batch_norm and widths else None
        self.output = nn.utils.skip_init(nn.Linear, widths[-1] if widths else hidden_size, 1)
        self._draw_weights(generator)

    def _draw_weights(self, generator: torch.Generator | None) -> None:
        """The usual initialisation of linear layers: uniform in +-1/sqrt(fan in)."""
        for layer in [*self.hidden_layers, self.output]:
            assert isinstance(layer, nn.Linear)
            bound = 1 / math.sqrt(layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            nn.init.uniform_(layer.bias, -bound, bound, generator=generator)

    def forward(self, hidden_BH: Tensor, keep: Sequence[Tensor] | None = None) -> Tensor:
        """Logits of `p_slm`, float32 [B].

        Args:
            hidden_BH: any floating dtype.
            keep: in training, a dropout mask [B, W] for each hidden layer, as drawn by `draw_dropout`; None
                draws them from the global generator. Not used in eval mode.
        """
        x_BW = hidden_BH.to(self.output.weight.dtype)
        for index, layer in enumerate(self.hidden_layers):
            x_BW = layer(x_BW)
            if index == 0 and self.norm is not None:
                x_BW = self.norm(x_BW)
            x_BW = F.relu(x_BW)
            if keep is not None and self.training:
                x_BW = x_BW * keep[index]
            else:
                x_BW = F.dropout(x_BW, self.config.dropout, self.training)
        logit_B1: Tensor = self.output(x_BW)
        return logit_B1.squeeze(-1)

    def draw_dropout(self, rows: int, generator: torch.Generator) -> list[Tensor] | None:
        """Dropout masks for a batch of `rows`, scaled by 1 / (1 - dropout); None without dropout.

        Masks are drawn for the whole batch, and each worker takes its own rows of them: so the number of
            workers
        changes nothing. They lie on the generator's device.
        """
        if self.config.dropout == 0:
            return None
        kept = 1 - self.config.dropout
        masks = []
        for layer in self.hidden_layers:
            assert isinstance(layer, nn.Linear)
            mask = torch.empty(rows, layer.out_features, device=generator.device)
            masks.append(mask.bernoulli_(kept, generator=generator).div_(kept))
        return masks

    @torch.no_grad()
    def p_slm(self, hidden_BH: Tensor) -> Tensor:
        """Probability that the SLM should write the next token, float32 [B], in eval mode and without
        gradients.

        The sigmoid saturates: from a logit of about 17 on it is exactly 1.0 in float32, so that a threshold
            of 1.0
        does not mean "LLM only" (`policy.LLM_ONLY_THRESHOLD` does).
        """
        was_training = self.training
        if was_training:
            self.eval()
        try:
            return torch.sigmoid(self(hidden_BH).float())
        finally:
            if was_training:
                self.train()
