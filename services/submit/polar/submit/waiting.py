"""Requests that wait for something the log will say, bounded in number and in time. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from polar.schemas import RecordRef, TaskAccepted, TaskRejected

from .entries import Answered, Change, Settled
from .view import View

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class TooManyWaiting(RuntimeError):
    """The bound on waiting requests is reached."""


class Waiters:
    def __init__(self, view: View, limit: int) -> None:
        self._view = view
        self._limit = limit
        self._waiting = 0
        self._answers: dict[RecordRef, set[asyncio.Future[TaskAccepted | TaskRejected]]] = {}
        self._tasks: dict[str, set[asyncio.Future[str]]] = {}

    def tell(self, change: Change) -> None:
        """Wake whoever waits for `change`."""
        match change:
            case Answered(answer):
                _wake(self._answers.pop(answer.answers, set()), answer)
            case Settled(task_id):
                _wake(self._tasks.pop(task_id, set()), task_id)

    async def answer(self, ref: RecordRef, timeout_s: float) -> TaskAccepted | TaskRejected | None:
        """What the scheduler says of the request at `ref`; None: nothing in time.

        Raises:
            TooManyWaiting: try again later.
        """
        # the view may be faster than the producer's acknowledgement
        found = self._view.answer(ref)
        if found is not None:
            return found
        with self._place(self._answers, ref) as future:
            return await _in_time(future, timeout_s)

    async def settled(self, task_id: str, timeout_s: float) -> None:
        """Wait until the task has ended, or `timeout_s` is over.

        Raises:
            TooManyWaiting: try again later.
        """
        with self._place(self._tasks, task_id) as future:
            # asked only now: what is told meanwhile is not missed
            if not await self._view.settled(task_id):
                await _in_time(future, timeout_s)

    def reserve(self) -> None:
        """
        Raises:
            TooManyWaiting: nobody could wait now; asked before something is published.
        """
        if self._waiting >= self._limit:
            raise TooManyWaiting(f"{self._limit} requests are waiting already")

    @contextmanager
    def _place(self, waiting: dict[K, set[asyncio.Future[T]]], key: K) -> Iterator[asyncio.Future[T]]:
        self.reserve()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting.setdefault(key, set()).add(future)
        self._waiting += 1
        try:
            yield future
        finally:
            self._waiting -= 1
            left = waiting.get(key)
            if left is not None:
                left.discard(future)
                if not left:
                    del waiting[key]


async def _in_time(future: asyncio.Future[T], timeout_s: float) -> T | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await future
    except TimeoutError:
        return None


def _wake(futures: set[asyncio.Future[T]], value: T) -> None:
    for future in futures:
        if not future.done():
            future.set_result(value)
