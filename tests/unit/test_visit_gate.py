"""Visits are let in together: after the pass before, when most sessions wait, or when a pass's time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from citer_ray.engines.visit_gate import VisitGate


def patient_gate(sessions: Callable[[], int]) -> VisitGate:
    """A gate whose clock never opens it."""
    gate = VisitGate(1e6, sessions)
    gate._pass_seconds = 1.0
    return gate


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Visits:
    """Visits that stay inside until they are told to leave."""

    def __init__(self, gate: VisitGate) -> None:
        self.gate, self.inside, self.tasks = gate, list[str](), dict[str, asyncio.Task[None]]()
        self._ends: dict[str, asyncio.Event] = {}

    async def arrive(self, *names: str) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._visit(name))
        await settle()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await settle()

    async def _visit(self, name: str) -> None:
        async with self.gate.turn(1):
            self.inside.append(name)
            await self._ends[name].wait()
            self.inside.remove(name)


async def test_without_a_hold_every_visit_starts_at_once() -> None:
    visits = Visits(VisitGate(0, lambda: 8))
    await visits.arrive("a", "b")
    assert sorted(visits.inside) == ["a", "b"]
    await visits.leave("a", "b")


async def test_visits_during_a_pass_share_the_next_one() -> None:
    gate = patient_gate(lambda: 4)
    visits = Visits(gate)
    await visits.arrive("a", "b")
    assert visits.inside == []
    await visits.arrive("c")  # three of four
    assert sorted(visits.inside) == ["a", "b", "c"]
    await visits.arrive("d")
    await visits.leave("a", "b")
    await visits.arrive("e", "f")
    assert visits.inside == ["c"]
    await visits.leave("c")
    assert sorted(visits.inside) == ["d", "e", "f"]
    await visits.leave("d", "e", "f")


async def test_a_lone_visit_waits_no_longer_than_a_pass() -> None:
    visits = Visits(VisitGate(1.0, lambda: 100))
    await visits.arrive("a")  # no pass was measured yet
    assert visits.inside == ["a"]
    await visits.leave("a")  # it took next to no time, and so does the wait
    await visits.arrive("b")
    async with asyncio.timeout(30):
        while visits.inside != ["b"]:
            await asyncio.sleep(0)
    await visits.leave("b")


async def test_sessions_that_close_are_not_waited_for() -> None:
    sessions = 4
    gate = patient_gate(lambda: sessions)
    visits = Visits(gate)
    await visits.arrive("a", "b")
    assert visits.inside == []
    sessions = 2
    gate.look()
    await settle()
    assert sorted(visits.inside) == ["a", "b"]
    await visits.leave("a", "b")


async def test_long_turns_pass_by() -> None:
    gate = patient_gate(lambda: 100)
    async with gate.turn(100):
        pass


@pytest.mark.parametrize("let_in", [False, True])
async def test_cancelled_visits_leave_the_gate(let_in: bool) -> None:
    gate = patient_gate(lambda: 2)
    visits = Visits(gate)
    await visits.arrive("a")
    if let_in:
        gate._let_in()  # and cancelled before it could start
    visits.tasks["a"].cancel()
    await settle()
    await visits.arrive("b", "c")
    assert sorted(visits.inside) == ["b", "c"]
    await visits.leave("b", "c")
