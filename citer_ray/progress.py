"""Progress of long work on stderr: done, total, tokens per second, time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


class Advance(Protocol):
    """Report finished work: steps, and tokens among them."""

    def __call__(self, steps: int = 1, *, tokens: int = 0) -> None: ...


@contextmanager
def progress(description: str, total: int, unit: str) -> Iterator[Advance]:
    """A progress bar on stderr (one line at the end where stderr is no terminal).

    Args:
        description: what is going on.
        total: steps in all.
        unit: name of a step, in the plural.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=6),  # all of it fits into 80 columns
        MofNCompleteColumn(),
        TextColumn(unit),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total, rate="", left="left")
        written = 0

        def advance(steps: int = 1, *, tokens: int = 0) -> None:
            nonlocal written
            written += tokens
            elapsed = bar.tasks[0].elapsed or 0.0
            rate = f"{written / elapsed:,.0f} tok/s" if written and elapsed > 0 else ""
            left = "" if bar.tasks[0].completed + steps >= total else "left"
            bar.update(task, advance=steps, rate=rate, left=left)

        yield advance
