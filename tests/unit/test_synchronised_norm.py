"""Several workers compute what one computes: batch norm, its gradients, and a whole fit, on gloo in two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import nn

from citer_ray.config import FitConfig, RouterConfig
from citer_ray.label_store import LabelStore
from citer_ray.synchronised_norm import SynchronisedBatchNorm
from citer_ray.training import FitState, RouterFit, best_router
from citer_ray.training_data import stored_data
from citer_ray.training_plan import make_plan
from tests.planted_labels import write_planted_labels

WORKERS = 2
WIDTH = 5
CONFIG = FitConfig(batch_size=50, max_epochs=4, patience=4, learning_rate=3e-3, validation_fraction=0.25)


def batch() -> torch.Tensor:
    """Rows with a mean that is larger than their deviation; float32 sums in another order still agree to 1e-3."""
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(0)) + 3.0


def new_norm() -> SynchronisedBatchNorm:
    norm = SynchronisedBatchNorm(WIDTH)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, WIDTH))
        norm.bias.copy_(torch.linspace(-1.0, 1.0, WIDTH))
    return norm


def normed(norm: nn.BatchNorm1d, rows: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output, gradients of a loss that depends on every row, and statistics."""
    rows = rows.clone().requires_grad_()
    output = norm(rows)
    (output * target).square().sum().backward()
    assert rows.grad is not None
    assert norm.weight.grad is not None
    assert norm.bias.grad is not None
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return {
        "output": output.detach(),
        "input_gradient": rows.grad,
        "weight_gradient": norm.weight.grad,
        "bias_gradient": norm.bias.grad,
        "mean": norm.running_mean,
        "variance": norm.running_var,
    }


def run_fit(folder: Path, rank: int, workers: int) -> tuple[RouterFit, FitState]:
    store = LabelStore(folder)
    plan = make_plan(store, validation_fraction=0.25, window_positions=250, seed=0)
    fit = RouterFit(stored_data(store, plan, rank=rank, workers=workers), CONFIG, seed=0)
    return fit, fit.run(fit.start(RouterConfig()))


def work(rank: int, folder: str, splits: list[slice]) -> None:
    """One worker: the norm on its rows of the batch, then a fit on its shard."""
    path = Path(folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path / 'rendezvous'}", rank=rank, world_size=WORKERS)
    target = torch.arange(12.0)[:, None]
    results: dict[str, Any] = {}
    for index, rows in enumerate((splits[rank], slice(0, 12) if rank == 0 else slice(0, 0))):
        part = normed(new_norm(), batch()[rows], target[rows])
        results |= {f"norm-{index}.{name}": tensor.contiguous() for name, tensor in part.items()}
    fit, state = run_fit(path / "labels", rank, WORKERS)
    results |= {f"router.{name}": tensor for name, tensor in best_router(state).state_dict().items()}
    results["losses"] = torch.tensor([[r.train_loss, r.validation_loss] for r in state.history])
    scored = fit.scored_validation(best_router(state))
    results["number"], results["logit"] = torch.from_numpy(scored.number_B), torch.from_numpy(scored.logit_B)
    save_file(results, path / f"worker-{rank}.safetensors")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("workers")
    write_planted_labels(folder / "labels")
    mp.spawn(work, args=(str(folder), [slice(0, 7), slice(7, 12)]), nprocs=WORKERS)  # type: ignore[no-untyped-call]
    loaded = [load_file(folder / f"worker-{rank}.safetensors") for rank in range(WORKERS)]
    _, state = run_fit(folder / "labels", 0, 1)
    loaded.append({f"router.{name}": tensor for name, tensor in best_router(state).state_dict().items()})
    loaded[-1]["losses"] = torch.tensor([[r.train_loss, r.validation_loss] for r in state.history])
    return loaded


@pytest.mark.parametrize("split", [0, 1], ids=["uneven", "one worker without rows"])
def test_statistics_and_gradients_are_those_of_the_whole_batch(
    results: list[dict[str, torch.Tensor]], split: int
) -> None:
    norm = nn.BatchNorm1d(WIDTH)
    norm.load_state_dict(new_norm().state_dict())
    expected = normed(norm, batch(), torch.arange(12.0)[:, None])
    parts = [{name: part[f"norm-{split}.{name}"] for name in expected} for part in results[:WORKERS]]
    for name in ("output", "input_gradient"):
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), expected[name], rtol=1e-3, atol=1e-2)
    for name in ("weight_gradient", "bias_gradient"):
        torch.testing.assert_close(sum(part[name] for part in parts), expected[name], rtol=1e-3, atol=1e-2)
    for part in parts:
        for name in ("mean", "variance"):
            torch.testing.assert_close(part[name], expected[name], rtol=1e-5, atol=1e-5)


def test_two_workers_fit_the_router_that_one_fits(results: list[dict[str, torch.Tensor]]) -> None:
    *workers, alone = results
    for worker in workers:
        torch.testing.assert_close(worker["losses"], alone["losses"], rtol=1e-4, atol=1e-5)
        for name, tensor in alone.items():
            if name in ("router.hidden_layers.0.bias", "router.norm.running_mean"):
                # The bias before batch norm has no gradient but rounding, which Adam turns into steps of full size;
                # the running mean takes it off again, so neither changes the router's output.
                continue
            # float32 sums in another order, over some 40 steps
            torch.testing.assert_close(worker[name], tensor, rtol=1e-3, atol=1e-3)


def test_all_workers_have_the_scores_of_all_positions(results: list[dict[str, torch.Tensor]]) -> None:
    first, second = results[:WORKERS]
    assert torch.equal(first["number"], torch.arange(len(first["number"])))
    assert torch.equal(first["logit"], second["logit"])


def test_alone_it_is_the_usual_batch_norm() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    norm.load_state_dict(new_norm().state_dict())
    target = torch.arange(12.0)[:, None]
    found, expected = normed(new_norm(), batch(), target), normed(norm, batch(), target)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert np.isfinite(found["output"].numpy()).all()
