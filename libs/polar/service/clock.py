"""Time as an object that is passed in, so that tests own it.

`now_ms` is the wall clock, for what is written down; `monotonic` is for durations; `sleep` waits on the same clock.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds that never run backwards; only differences mean something."""
        ...

    async def sleep(self, s: float) -> None:
        """Waits `s` seconds of this clock."""
        ...


class SystemClock:
    """The machine's time."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, s: float) -> None:
        await asyncio.sleep(s)


class ManualClock:
    """Stands still until `advance` moves it; sleepers wake in the order of their times. For tests."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._elapsed = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_ms(self) -> int:
        return self._now_ms + round(self._elapsed * 1000)

    def monotonic(self) -> float:
        return self._elapsed

    @property
    def sleepers(self) -> int:
        """How many wait."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, s: float) -> None:
        if s <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._elapsed + s, next(self._order), future))
        await future

    async def advance(self, s: float) -> None:
        """Moves time on by `s` seconds, waking each sleeper at its time, also those that sleep again meanwhile."""
        target = self._elapsed + s
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= target:
            due, _, future = heapq.heappop(self._sleepers)
            self._elapsed = max(self._elapsed, due)
            if not future.done():
                future.set_result(None)
                await _settle()
        self._elapsed = target


async def _settle() -> None:
    """Lets tasks that are ready run on to their next wait; a few turns, since one may wake another."""
    for _ in range(10):
        await asyncio.sleep(0)
