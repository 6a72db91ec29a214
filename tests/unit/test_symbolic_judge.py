"""The judge cannot hang its caller, from any thread, and survives what it cannot compute."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from citer_ray import symbolic_judge
from citer_ray.errors import CiterError
from citer_ray.symbolic_judge import SymbolicJudge

ENDLESS = "9^{9^{9}}"


@pytest.fixture(scope="module")
def judge() -> Iterator[SymbolicJudge]:
    judge = SymbolicJudge(cpu_seconds=1.0)
    yield judge
    judge.close()


def test_an_endless_comparison_is_unequal_and_the_next_one_works(judge: SymbolicJudge) -> None:
    assert judge.equal("x+1", "1+x")
    first = judge._process
    assert not judge.equal(ENDLESS, "3")
    assert judge.equal("x+1", "1+x")
    assert judge._process is not first


def test_worker_threads_share_one_child(judge: SymbolicJudge) -> None:
    pairs = [(f"x+{n}", f"{n + n % 2}+x") for n in range(12)]
    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(lambda pair: judge.equal(*pair), pairs))
    assert verdicts == [n % 2 == 0 for n in range(12)]


@pytest.mark.parametrize("text", ["\n", '"', "\u2028", "\\frac{", "}" * 50, "\x00", "é"])
def test_odd_text_is_unequal_and_harmless(judge: SymbolicJudge, text: str) -> None:
    assert not judge.equal(text, "3")
    assert judge.equal("3", "3")


def test_the_child_ends_with_its_pipe_and_is_replaced(judge: SymbolicJudge) -> None:
    assert judge.equal("3", "3")
    process = judge._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert judge.equal("3", "3")


def test_closing_twice_is_safe_and_ends_the_child(judge: SymbolicJudge) -> None:
    assert judge.equal("3", "3")
    process = judge._process
    assert process is not None
    judge.close()
    judge.close()
    assert process.returncode is not None


def test_a_child_that_cannot_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic_judge.sys, "executable", "/bin/false")
    with pytest.raises(CiterError, match="math-verify"):
        SymbolicJudge().equal("x", "y")


def test_a_forked_process_starts_its_own_child(judge: SymbolicJudge) -> None:
    assert judge.equal("3", "3")
    pid = os.fork()
    if pid == 0:
        ok = judge._process is None and judge.equal("x+1", "1+x")
        judge.close()
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert judge.equal("3", "3")
