"""The sizing model against numbers worked out by hand, and how it answers to changes of the load."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from citer_ray.cost import ModelCost
from citer_ray.errors import ConfigError
from citer_ray.sizing import Gpu, Load, Plan, plan

ROOT = Path(__file__).parents[2]
PUBLISHED = json.loads((ROOT / "tests" / "unit" / "published_configs.json").read_text("utf-8"))
SLM = ModelCost.from_config(PUBLISHED["Qwen/Qwen2-1.5B-Instruct"]["config"])
LLM = ModelCost.from_config(PUBLISHED["Qwen/Qwen2-72B-Instruct"]["config"])
LOAD = Load(requests_per_s=2.0, prompt_tokens=300, new_tokens=200, llm_share=0.2)
H100 = Gpu(price=3.0)


def planned(load: Load = LOAD, gpu: Gpu = H100, **changes: Any) -> Plan:
    return plan(SLM, LLM, load, gpu, **({"slm_gpus": 1, "llm_gpus": 4, "rows": 128} | changes))


def test_a_light_load_worked_by_hand() -> None:
    made = planned()
    assert made.slm and made.llm
    assert (made.slm.replicas, made.llm.replicas, made.gpus) == (1, 1, 5)
    # weights over bandwidth: 142.9 GB / (4 * 3350 GB/s * 0.5); cache: 400 tokens of 320 KiB a row
    weights, cache = 142.9e9 / 6700e9, 400 * 320 * 1024 / 6700e9
    rate = 2 * 200 * 0.2
    batch = rate * weights / (1 - rate * cache)
    assert made.llm.batch == pytest.approx(batch, rel=5e-3)
    assert made.llm.pass_ms == pytest.approx(1000 * (weights + cache * batch), rel=5e-3)
    assert made.llm.sessions == pytest.approx(2 * 200 * made.token_ms / 1000)
    assert made.token_ms == pytest.approx(made.slm.pass_ms + 0.2 * made.llm.pass_ms)
    assert made.price_per_million_tokens == pytest.approx(5 * 3 / 3600 / 400 * 1e6)


def test_passes_in_progress_are_littles_law() -> None:
    made = planned(replace(LOAD, requests_per_s=10))
    assert made.llm
    assert made.llm.batch == pytest.approx(10 * 200 * 0.2 * made.llm.pass_ms / 1000 / made.llm.replicas)


def test_one_model_alone() -> None:
    alone, slm = planned(replace(LOAD, llm_share=1.0)), planned(replace(LOAD, llm_share=0.0))
    assert alone.slm is None and alone.llm and alone.token_ms == pytest.approx(alone.llm.pass_ms)
    assert slm.llm is None and slm.slm and slm.gpus == 1


def test_routing_is_faster_and_computes_no_less() -> None:
    heavy = replace(LOAD, requests_per_s=200)
    routed, alone = planned(heavy), planned(replace(heavy, llm_share=1.0))
    assert routed.token_ms < 0.5 * alone.token_ms
    assert routed.llm and alone.llm
    assert routed.llm.limit == "arithmetic"  # visits read what the SLM wrote
    assert routed.llm.replicas >= alone.llm.replicas


def test_memory_and_rows_set_replicas() -> None:
    heavy = replace(LOAD, requests_per_s=20, llm_share=1.0)
    tight = planned(heavy, rows=8)
    assert tight.llm and tight.llm.limit == "rows" and tight.llm.sessions <= 8
    small = planned(replace(heavy, prompt_tokens=8000), gpu=replace(H100, gigabytes=42), rows=1024)
    assert small.llm and small.llm.limit == "memory"


@pytest.mark.parametrize("requests", [1, 10, 100])
def test_replicas_follow_the_load(requests: float) -> None:
    one, two = (planned(replace(LOAD, requests_per_s=factor * requests)) for factor in (1, 2))
    assert one.gpus <= two.gpus <= 2 * one.gpus


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"the llm has 145 GB of weights and does not fit 1 GPU"):
        planned(llm_gpus=1)
    with pytest.raises(ConfigError, match="LLM share"):
        replace(LOAD, llm_share=1.5)
    with pytest.raises(ConfigError, match="more than"):
        planned(replace(LOAD, requests_per_s=1e7))


def test_the_command_prints_the_table_of_the_guide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/operations.md shows a command and its output: they belong together."""
    guide = (ROOT / "docs" / "operations.md").read_text("utf-8")
    block = guide[guide.index("python infra/sizing.py") :]
    command = block[: block.index("```")].replace("\\\n", " ").split()[2:]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["infra/sizing.py", *command])
    runpy.run_path(str(ROOT / "infra" / "sizing.py"), run_name="__main__")
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 4
    for line in table:
        assert line in guide, line
