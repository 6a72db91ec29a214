"""How many tokens a turn may write before there is something to report: the first alone, then as many as fit a time.

A turn returns when it ends, so a response that streams is decoded in short turns. The limit doubles while turns take
less than half of the interval, and halves when one takes longer than the interval: few turns a second, whatever the
model's speed. Turns can be cut anywhere without changing a token (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Callable

_LARGEST = 1024


class Pace:
    """Limits for the turns of one response.

    Args:
        interval_s: what a turn should take at most.
        clock: seconds.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
        self._interval_s, self._clock = interval_s, clock
        self._limit, self._began = 1, clock()

    def next_limit(self) -> int:
        """Tokens of the turn that begins now."""
        self._began = self._clock()
        return self._limit

    def ended(self, written: int) -> None:
        """A turn ended."""
        seconds = self._clock() - self._began
        if seconds > self._interval_s:
            self._limit = max(1, self._limit // 2)
        elif 2 * seconds < self._interval_s and written == self._limit:
            self._limit = min(_LARGEST, 2 * self._limit)
