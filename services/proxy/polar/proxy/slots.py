"""How many calls run at a time in this replica. It knows neither HTTP nor what a call is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .errors import Overloaded
from .metrics import Metrics


class Slots:
    """How many calls run at a time; a call has its slot until its end is on the log."""

    def __init__(self, limit: int, metrics: Metrics, retry_after: float) -> None:
        self.closed = "The proxy is starting; it reads back which sessions are closed."
        """Why nothing is taken; empty: open."""
        self.taken = 0
        self._limit = limit
        self._metrics = metrics
        self._retry_after = retry_after
        self._free = asyncio.Event()
        self._free.set()

    def take(self) -> Callable[[], None]:
        """A slot; returns what gives it back.

        Raises:
            Overloaded: all are taken, or none are given now.
        """
        if self.closed:
            raise Overloaded(self.closed, retry_after=self._retry_after)
        if self.taken >= self._limit:
            self._metrics.refused.labels("overloaded").inc()
            raise Overloaded("The proxy has as many calls as it may; try again.", retry_after=self._retry_after)
        self._count(1)
        return lambda: self._count(-1)

    def _count(self, change: int) -> None:
        self.taken += change
        self._metrics.running.set(self.taken)
        if self.taken:
            self._free.clear()
        else:
            self._free.set()

    async def all_free(self) -> None:
        await self._free.wait()
