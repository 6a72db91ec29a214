"""The benchmarks run, both ways of each give the same results, and the record says so. No time is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.harness import Comparison, Quotient, Run

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _keep_torch_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_short_run_compares_equal_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "record" / "benchmarks.json"
    assert main(["collect", "--short", "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    names = [one["name"] for one in record["results"]]
    assert names == ["embedded: scoring", "embedded: rollouts", "random 2x64: scoring", "random 2x64: rollouts"]
    for one in record["results"]:
        same, total = one["agreement"]
        assert same == total > 0, one["name"]
        assert one["verdict"] == "not judged" and one["target"] is None
        assert len(one["ours"]) == len(one["reference"]) == 1
        assert all(run["tokens"] > 0 for run in [*one["ours"], *one["reference"]])
        # More work than in the reference's part of it: what is compared are rates.
        assert one["ours"][0]["tokens"] > one["reference"][0]["tokens"]
    assert record["machine"]["torch_threads"] >= 1
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("suite", "parts"),
    [
        ("commands", ("quickstart", "evaluate")),
        ("scale", ("workers:", "gpus:", "memory:")),
        ("serving", ("embedded:", "bigger:", "paced:")),
        pytest.param("vllm", ("paced", "router head", "vLLM, embedded"), marks=pytest.mark.vllm),
    ],
)
def test_every_suite_runs_in_short(suite: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    """In a process of its own: suites set variables and start Ray or vLLM."""
    output = tmp_path / "benchmarks.json"
    command = [sys.executable, "-m", "benchmarks", suite, "--short", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(output.read_text())["results"]
    assert {one["verdict"] for one in results} == {"not judged"}
    for part in parts:
        assert any(part in one["name"] for one in results), (
            f"nothing about {part} in {[one['name'] for one in results]}"
        )


def test_verdict_is_on_the_median_of_the_turns() -> None:
    reference = (Run(10, 1.0, 1.0), Run(10, 2.0, 1.0), Run(10, 1.0, 1.0))
    ours = (Run(100, 1.0, 2.0), Run(100, 10.0, 2.0), Run(300, 1.0, 2.0))  # 10x, 2x, 30x
    one = Comparison("name", 10.0, ours, reference, (1, 1))
    assert one.ratio == pytest.approx(10) and one.verdict == "reached"
    assert one.cpu_ratio == pytest.approx(5)
    assert Comparison("name", 10.5, ours, reference, (1, 1)).verdict == "missed"


def test_impossible_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--threads", "0"])
    assert "at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["colect"])
    assert "no suite 'colect'" in capsys.readouterr().err


def test_quotients_are_judged_from_either_side() -> None:
    assert Quotient("factor", 1.1, 1.0, "s", target=1.15, at_most=True).verdict == "reached"
    assert Quotient("factor", 1.2, 1.0, "s", target=1.15, at_most=True).verdict == "missed"
    assert Quotient("part of the ideal", 0.9, 1.0, "", target=0.85).verdict == "reached"
    refused = Quotient("speculation: ngram", None, None, "tokens/s", target=1.0, note="refused: no drafts here")
    assert refused.verdict == "not judged" and refused.cells()[-1] == "refused: no drafts here"
    assert refused.as_json()["ratio"] is None
