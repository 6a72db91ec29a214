"""Where vLLM engines run: CPU cores that no other engine uses, or their part of a worker's GPUs.

Threads of two engines on one CPU core spin against each other, in one process or in several. So engines claim cores:
a claim is a locked file, which the operating system lets go of when the process ends. `build.py` asks here before it
starts an engine.
"""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO

from citer_ray.errors import ConfigError

_GPU_MEMORY = 0.9  # part of a GPU's memory that engines take, as vLLM's own default
_SMALLEST_SHARE = 0.2  # of one GPU, for either model: a KV cache needs room, too
_claims: list[IO[str]] = []  # open for as long as this process lives


@dataclass(frozen=True, slots=True)
class Placement:
    """What one engine may use.

    Attributes:
        cores: CPU cores, or None.
        devices: GPUs by the names of `CUDA_VISIBLE_DEVICES`, or None for all that the process sees.
        gpu_memory: part of each GPU's memory, or None for vLLM's default.
    """

    cores: tuple[int, ...] | None = None
    devices: tuple[str, ...] | None = None
    gpu_memory: float | None = None


def claim_cores(number: int, folder: Path | None = None) -> tuple[int, ...]:
    """Cores that the fewest other engines of this machine have claimed; held until this process ends.

    Args:
        number: how many; at most all that the process may use.
        folder: of the locked files; None takes one of the user's in the system's temporary folder.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"citer-cores-{getpass.getuser()}"
    folder.mkdir(exist_ok=True)
    cores = usable_cores()
    claimed: list[int] = []
    for layer in count():
        for core in cores:
            if len(claimed) == min(number, len(cores)):
                return tuple(sorted(claimed))
            # An engine never claims a core twice.
            if core not in claimed and _claim(folder / f"core-{core}.{layer}"):
                claimed.append(core)
    raise AssertionError("every layer has a free place at last")


def _claim(path: Path) -> bool:
    import fcntl

    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return False
    _claims.append(file)
    return True


def usable_cores() -> list[int]:
    """Cores that the operating system lets this process use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def split_evenly(cores: Sequence[int], slm_share: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The SLM's and the LLM's part of at least two cores; each gets one or more."""
    number = min(max(round(len(cores) * slm_share), 1), len(cores) - 1)
    return tuple(cores[:number]), tuple(cores[number:])


def visible_gpus(number: int) -> tuple[str, ...]:
    """Names of the GPUs that this process sees; `number` is how many torch counts."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return tuple(map(str, range(number)))
    return tuple(name.strip() for name in names.split(",") if name.strip())


def place_on_gpus(
    visible: Sequence[str],
    tensor_parallel_sizes: Sequence[int],
    weight_bytes: Sequence[float],
    num_gpus: float = 0.0,
) -> list[Placement]:
    """Part a worker's GPUs between its engines: GPUs of their own if there are enough, else shares of one.

    Args:
        visible: the worker's GPUs.
        tensor_parallel_sizes: GPUs that each engine needs.
        weight_bytes: of each engine; engines that share a GPU share its memory in this proportion.
        num_gpus: what Ray granted; below 1 other workers have a part of the same GPU.

    Raises:
        ConfigError: too few GPUs, and an engine spans several.
    """
    fraction = num_gpus if 0 < num_gpus < 1 else 1.0
    if len(visible) >= sum(tensor_parallel_sizes):
        placements, first = [], 0
        for size in tensor_parallel_sizes:
            memory = None if fraction == 1 else _GPU_MEMORY * fraction
            placements.append(Placement(devices=tuple(visible[first : first + size]), gpu_memory=memory))
            first += size
        return placements
    if not visible or max(tensor_parallel_sizes) > 1:
        raise ConfigError(
            f"the engines of one worker need {sum(tensor_parallel_sizes)} GPUs "
            f"({' + '.join(map(str, tensor_parallel_sizes))}), and it sees {len(visible)}; raise the pool's num_gpus, "
            "or lower engine.slm.tensor_parallel_size or engine.llm.tensor_parallel_size"
        )
    shares = [max(size / sum(weight_bytes), _SMALLEST_SHARE) for size in weight_bytes]
    return [
        Placement(devices=(visible[0],), gpu_memory=round(_GPU_MEMORY * fraction * share / sum(shares), 4))
        for share in shares
    ]
