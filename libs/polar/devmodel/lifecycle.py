"""What reinforcement learning asks of an engine between calls: pause, resume, abort, and the version of the weights.

Behaves as vLLM 0.32 with `VLLM_SERVER_DEV_MODE=1`: a pause in mode `abort` ends running calls with finish `abort` and
what they have, `wait` lets them end first, `keep` freezes them; new calls hang until `resume` (0.33 answers 503:
`refuse_when_paused`). One object per server, used from its event loop only.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from .errors import ApiError

PAUSE_MODES = ("abort", "wait", "keep")


class Abortable(Protocol):
    """A running call."""

    @property
    def id(self) -> str: ...

    def abort(self) -> None: ...


@dataclass(slots=True)
class Stats:
    """Counts of calls. Every started call ends as one of finished, aborted (its client left), failed."""

    started: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    running: int = 0
    most_running: int = 0


class Lifecycle:
    """Running calls, the pause state and the weights' version."""

    def __init__(self, *, version: str = "default", refuse_when_paused: bool = False) -> None:
        self.version = version
        self.healthy = True
        """What /health says."""
        self.stats = Stats()
        self._refuse = refuse_when_paused
        self._mode: str | None = None
        self._running: set[Abortable] = set()
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def paused(self) -> bool:
        return self._mode is not None

    async def admitted(self) -> None:
        """Wait until new calls may start. Raises `ApiError` 503 instead, where so configured."""
        if self.paused and self._refuse:
            raise ApiError("The server is paused.", status=503, type="ServiceUnavailableError")
        await self.until(lambda: not self.paused)

    async def flowing(self) -> None:
        """Wait while running calls are frozen."""
        if self._mode == "keep":
            await self.until(lambda: self._mode != "keep")

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition over this object's state (tests wait on `stats` so)."""
        while not holds():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def pause(self, mode: str) -> None:
        if mode not in PAUSE_MODES:
            raise ApiError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", param="mode")
        self._mode = mode
        if mode == "abort":
            self.abort()
        if mode != "keep":
            await self.until(lambda: not self._running)

    def resume(self) -> None:
        self._mode = None
        self._notify()

    def abort(self, ids: Iterable[str] | None = None) -> int:
        """End running calls (all, or those named) with finish `abort`; returns how many."""
        wanted = None if ids is None else set(ids)
        hit = [call for call in self._running if wanted is None or call.id in wanted]
        for call in hit:
            call.abort()
        return len(hit)

    def ended(self, outcome: str) -> None:
        """Count a call's ending: `finished`, `aborted` or `failed`."""
        setattr(self.stats, outcome, getattr(self.stats, outcome) + 1)
        self._notify()

    @contextmanager
    def tracking(self, call: Abortable) -> Iterator[None]:
        """Count `call` as running inside the block."""
        stats = self.stats
        self._running.add(call)
        stats.started += 1
        stats.running += 1
        stats.most_running = max(stats.most_running, stats.running)
        self._notify()
        try:
            yield
        finally:
            stats.running -= 1
            self._running.discard(call)
            self._notify()
