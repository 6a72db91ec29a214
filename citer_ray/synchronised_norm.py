"""Batch norm whose training statistics are those of the whole batch, spread over data-parallel workers.

`torch.nn.SyncBatchNorm` does the same on GPUs only. Here it is two sums over the workers, so it runs on
gloo, too, and a worker may hold no row of a batch. With one worker it is `torch.nn.BatchNorm1d`; in eval
mode always.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn


def world_size() -> int:
    """Workers of the current process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _SumOverWorkers(torch.autograd.Function):
    """Sum a tensor over the workers; the gradient of a sum is the sum of the workers' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        total = grad_outputs[0].clone()
        dist.all_reduce(total)
        return total


def sum_over_workers(value: Tensor) -> Tensor:
    """Sum over the workers, differentiable; the value itself where there is one worker."""
    if world_size() == 1:
        return value
    return cast(Tensor, _SumOverWorkers.apply(value))  # type: ignore[no-untyped-call]


class SynchronisedBatchNorm(nn.BatchNorm1d):
    """`BatchNorm1d` over [B, W] with the statistics of all workers' rows. Same parameters and buffers."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise rows; in training, all workers must call it together, with 0 or more rows each.

        Raises:
            ValueError: training on fewer than 2 rows over all workers, which have no variance.
        """
        if not self.training or world_size() == 1:
            return super().forward(input)
        count, mean_W, variance_W = self._batch_statistics(input)
        self._track(count, mean_W.detach(), variance_W.detach())
        normed_BW = (input - mean_W) * torch.rsqrt(variance_W + self.eps)
        return normed_BW * self.weight + self.bias

    def _batch_statistics(self, input_BW: Tensor) -> tuple[float, Tensor, Tensor]:
        """Rows over all workers, their mean and their biased variance.

        Two sums one after the other: the variance from sums of squares would lose digits where the mean is
            large.
        """
        rows = input_BW.new_tensor([float(input_BW.shape[0])])
        total = sum_over_workers(torch.cat([input_BW.sum(dim=0), rows]))
        count = float(total[-1].detach())
        if count < 2:
            raise ValueError("batch norm needs at least 2 rows in a training batch")
        mean_W = total[:-1] / count
        variance_W = sum_over_workers(((input_BW - mean_W) ** 2).sum(dim=0)) / count
        return count, mean_W, variance_W

    def _track(self, count: float, mean_W: Tensor, variance_W: Tensor) -> None:
        """Move the running statistics, with the unbiased variance, as `BatchNorm1d` does."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean_W, self.momentum)
            self.running_var.lerp_(variance_W * (count / (count - 1)), self.momentum)
