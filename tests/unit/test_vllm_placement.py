"""Cores that no other engine has, and GPUs of their own or shares of one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from citer_ray.engines import vllm_placement
from citer_ray.engines.vllm_placement import Placement, claim_cores, place_on_gpus, split_evenly, visible_gpus
from citer_ray.errors import ConfigError


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(vllm_placement, "usable_cores", lambda: [2, 3, 6, 7])
    monkeypatch.setattr(vllm_placement, "_claims", [])
    yield
    for file in vllm_placement._claims:
        file.close()


def test_engines_claim_cores_apart_and_share_only_when_all_are_taken(tmp_path: Path) -> None:
    assert claim_cores(1, tmp_path) == (2,)
    assert claim_cores(2, tmp_path) == (3, 6)
    assert claim_cores(2, tmp_path) == (2, 7)
    assert claim_cores(3, tmp_path) == (3, 6, 7)
    assert claim_cores(9, tmp_path) == (2, 3, 6, 7)


def test_claims_of_other_processes_count_until_they_end(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from citer_ray.engines import vllm_placement as p; p.usable_cores = lambda: [2, 3, 6, 7];"
        "print(p.claim_cores(2, pathlib.Path(sys.argv[1])), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "(2, 3)\n"
        assert claim_cores(2, tmp_path) == (6, 7)
        other.kill()
    assert claim_cores(2, tmp_path) == (2, 3)


@pytest.mark.parametrize(("cores", "share", "sizes"), [(2, 0.25, (1, 1)), (8, 0.25, (2, 6)), (4, 1.0, (3, 1))])
def test_each_model_gets_a_core(cores: int, share: float, sizes: tuple[int, int]) -> None:
    slm, llm = split_evenly(range(cores), share)
    assert (len(slm), len(llm)) == sizes
    assert (*slm, *llm) == tuple(range(cores))


def test_gpus_of_their_own() -> None:
    placed = place_on_gpus(["4", "5", "6"], [1, 2], [3e9, 30e9], num_gpus=3)
    assert placed == [Placement(devices=("4",)), Placement(devices=("5", "6"))]


def test_one_gpu_is_shared_by_weights_and_never_beyond_what_was_granted() -> None:
    whole = place_on_gpus(["0"], [1, 1], [1e9, 3e9], num_gpus=1)
    assert [one.devices for one in whole] == [("0",), ("0",)]
    assert [one.gpu_memory for one in whole] == pytest.approx([0.225, 0.675])
    lopsided = place_on_gpus(["0"], [1, 1], [1e9, 99e9], num_gpus=0.5)
    assert sum(one.gpu_memory or 0 for one in lopsided) == pytest.approx(0.45, abs=1e-3)
    assert (lopsided[0].gpu_memory or 0) > 0.05


def test_a_fraction_of_a_gpu_for_one_engine() -> None:
    assert place_on_gpus(["0"], [1], [1e9], num_gpus=0.5) == [Placement(devices=("0",), gpu_memory=0.45)]


@pytest.mark.parametrize("visible", [[], ["0"], ["0", "1"]])
def test_too_few_gpus_name_the_fix(visible: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"need 3 GPUs \(1 \+ 2\).*num_gpus"):
        place_on_gpus(visible, [1, 2], [1e9, 1e9])


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(2) == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-ab")
    assert visible_gpus(2) == ("3", "GPU-ab")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus(2) == ()
