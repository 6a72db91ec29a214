"""Engines from the configuration: what vLLM could not run is refused in one line before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GPT2Config

from citer_ray.config import CiterConfig
from citer_ray.config_loading import load_config
from citer_ray.engines import build, vllm_launch, vllm_placement
from citer_ray.engines.build import EngineSpec, check_engines
from citer_ray.engines.vllm_placement import Placement
from citer_ray.errors import CiterError

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"


def make_spec(*overrides: str) -> EngineSpec:
    config: CiterConfig = load_config(SMOKE, ["engine.kind=vllm", *overrides])
    return EngineSpec(config, 491, frozenset([2]), 512, 4, "slm")


def refused(spec: EngineSpec) -> str:
    with pytest.raises(CiterError) as caught:
        check_engines(spec)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_embedded_pair_fits() -> None:
    check_engines(make_spec())
    check_engines(replace(make_spec("engine.kind=transformers"), handoff_token_id=None))


def test_a_pair_without_a_handoff_token() -> None:
    assert "set pair.handoff_token" in refused(replace(make_spec(), handoff_token_id=None))


def test_a_vocabulary_that_a_model_lacks() -> None:
    assert "has 512 ids" in refused(replace(make_spec(), shared_vocab_size=513))


def test_a_context_beyond_the_models() -> None:
    assert "lower it" in refused(make_spec("pair.llm.max_model_len=513"))


def test_an_slm_without_a_routed_version(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=512, n_embd=64, n_head=2, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path)
    assert "engine.kind: transformers" in refused(make_spec(f"pair.slm.path={tmp_path}"))
    check_engines(make_spec(f"pair.llm.path={tmp_path}"))


def test_vllm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_launch.importlib.util, "find_spec", lambda name: None)
    assert "citer-ray[gpu]" in refused(make_spec())


@pytest.mark.parametrize(
    ("num_cpus", "expected"),
    [(0.5, ((2,), (3,))), (2.0, ((2,), (3,))), (4.0, ((2,), (3, 6, 7)))],
)
def test_both_engines_of_a_worker_get_cores_of_their_own(
    num_cpus: float, expected: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    claimed: list[int] = []

    def claim(number: int) -> tuple[int, ...]:
        claimed.append(number)
        return (2, 3, 6, 7)[:number]

    monkeypatch.setattr(build, "claim_cores", claim)
    spec = make_spec(f"collect.rollouts.num_cpus={num_cpus}")
    placed = build._placements(["slm", "llm"], spec, spec.config.collect.rollouts)
    assert tuple(one.cores for one in placed) == expected


def test_one_core_is_shared_and_a_lone_engine_binds_to_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "claim_cores", lambda number: (5,))
    spec = make_spec()
    assert build._placements(["slm", "llm"], spec, None) == [Placement(cores=(5,))] * 2
    assert build._placements(["slm"], spec, spec.config.collect.slm) == [Placement(cores=(5,))]
    assert build._placements(["slm"], spec, None) == [Placement()]  # alone on the machine, as far as we know
    assert vllm_placement.usable_cores()
