"""A stage's slots: at most so many attempts at once, in the order in which they came; the rest waits.

A worker is never cancelled to stop one attempt: it is told by its `Stop`, ends what it started, and reports. Only the
end of the pool cancels workers, and returns when they are gone.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from enum import StrEnum
from typing import Any, TypeVar

from polar.service.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")


class Why(StrEnum):
    REVOKED = "revoked"
    """The scheduler wants the attempt to end."""
    DRAIN = "drain"
    """The node shuts down; another attempt may run elsewhere."""


class Stopped(Exception):
    """What the worker was doing has been stopped and is over."""

    def __init__(self, why: Why, reason: str) -> None:
        super().__init__(reason)
        self.why = why
        self.reason = reason


class Stop:
    """A wish to end one attempt; the first one counts."""

    def __init__(self) -> None:
        self._said = asyncio.Event()
        self._what: Stopped | None = None

    def set(self, why: Why, reason: str) -> None:
        if self._what is None:
            self._what = Stopped(why, reason)
            self._said.set()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; where the stop comes first, `work` is cancelled, awaited, and Stopped raised."""
        task = asyncio.ensure_future(work)
        said = asyncio.ensure_future(self._said.wait())
        try:
            await asyncio.wait({task, said}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            for one in (task, said):
                one.cancel()
            await asyncio.gather(task, said, return_exceptions=True)
        assert self._what is not None  # what was awaited
        raise self._what


class Pool:
    """`work(assignment_id, stop)` for each added id. `failed` is told of a worker's unforeseen exception.

    `room(running)`: whether one more may start now, besides the slots; asked again at each `wake`.
    """

    def __init__(
        self,
        name: str,
        slots: int,
        work: Callable[[str, Stop], Awaitable[None]],
        failed: Callable[[str, Exception], Awaitable[None]],
        room: Callable[[int], Awaitable[bool]] | None = None,
    ) -> None:
        self._name = name
        self._slots = slots
        self._work = work
        self._failed = failed
        self._room = room
        self._waiting: deque[str] = deque()
        self._running: dict[str, Stop] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._paused = False

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, assignment_id: str) -> None:
        """Let an attempt have its turn; one that waits or runs is not added again."""
        if assignment_id not in self._running and assignment_id not in self._waiting:
            self._waiting.append(assignment_id)
            self._wake.set()

    def stop(self, assignment_id: str, why: Why, reason: str) -> None:
        """Tell the attempt's worker to end it; nothing where none works on it."""
        if assignment_id in self._running:
            self._running[assignment_id].set(why, reason)

    def stop_all(self, why: Why, reason: str) -> None:
        for stop in self._running.values():
            stop.set(why, reason)

    def pause(self) -> None:
        """Start no further attempt."""
        self._paused = True

    def wake(self) -> None:
        """Look again whether one may start."""
        self._wake.set()

    async def idle(self) -> None:
        """Return when no worker works."""
        await self._idle.wait()

    async def run(self) -> None:
        """Give the slots away until cancelled; then cancel the workers and wait for them."""
        async with asyncio.TaskGroup() as workers:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting and await self._may_start():
                    assignment_id = self._waiting.popleft()
                    stop = self._running[assignment_id] = Stop()
                    self._idle.clear()
                    workers.create_task(self._one(assignment_id, stop), name=f"{self._name} {assignment_id}")

    async def _may_start(self) -> bool:
        if self._paused or len(self._running) >= self._slots:
            return False
        allowed = self._room is None or await self._room(len(self._running))
        return allowed and bool(self._waiting) and not self._paused

    async def _one(self, assignment_id: str, stop: Stop) -> None:
        try:
            await self._work(assignment_id, stop)
        except Exception as error:  # noqa: BLE001 - one attempt's trouble must not end the others
            trace = await asyncio.to_thread(traceback.format_exception, error)  # reads source files
            log.error("unforeseen failure", pool=self._name, assignment=assignment_id, exception="".join(trace))
            await self._failed(assignment_id, error)
        finally:
            del self._running[assignment_id]
            if not self._running:
                self._idle.set()
            self._wake.set()
