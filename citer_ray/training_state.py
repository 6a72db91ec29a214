"""A `FitState` as two files, so that training goes on after a kill: tensors as safetensors, numbers as JSON.

Ray Train's checkpoints hold them; no pickle. Saved and loaded between epochs only.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from citer_ray.config import FitConfig, RouterConfig
from citer_ray.training import EpochRecord, FitState, new_state

TENSORS_FILE = "state.safetensors"
NUMBERS_FILE = "state.json"


def save_state(state: FitState, folder: Path) -> None:
    """Write the state into an existing folder."""
    tensors = {f"router.{name}": tensor for name, tensor in state.router.state_dict().items()}
    tensors |= {f"best.{name}": tensor for name, tensor in (state.best_weights or {}).items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in state.optimizer.state_dict().items()}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, folder / TENSORS_FILE)
    numbers = {
        "hidden_size": state.router.hidden_size,
        "epoch": state.epoch,
        "best_loss": state.best_loss,
        "best_epoch": state.best_epoch,
        "stopped": state.stopped,
        "history": [asdict(record) for record in state.history],
    }
    # Python writes infinity as `Infinity` and reads it again; these files are for this program alone.
    (folder / NUMBERS_FILE).write_text(json.dumps(numbers), encoding="utf-8")


def load_state(folder: Path, router_config: RouterConfig, fit_config: FitConfig, device: torch.device) -> FitState:
    """Read what `save_state` wrote, for the same configuration."""
    numbers = json.loads((folder / NUMBERS_FILE).read_text(encoding="utf-8"))
    tensors = load_file(folder / TENSORS_FILE, device=str(device))
    state = new_state(numbers["hidden_size"], router_config, fit_config, 0, device)
    state.router.load_state_dict(_below(tensors, "router."))
    state.optimizer.load_state_dict(_below(tensors, "optimizer."))
    state.epoch = numbers["epoch"]
    state.best_weights = _below(tensors, "best.") or None
    state.best_loss = numbers["best_loss"]
    state.best_epoch = numbers["best_epoch"]
    state.stopped = numbers["stopped"]
    state.history = [EpochRecord(**record) for record in numbers["history"]]
    return state


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose name starts with `prefix`, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
