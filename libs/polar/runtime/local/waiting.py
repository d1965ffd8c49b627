"""Small asyncio helpers on file handles and tasks that the standard library lacks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any


async def _ready(add: Callable[..., object], remove: Callable[[int], object], fd: int) -> None:
    done = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not done.done():
            done.set_result(None)

    add(fd, wake)
    try:
        await done
    finally:
        remove(fd)


async def readable(fd: int) -> None:
    """Return when `fd` can be read; for a pidfd: when the process is dead."""
    loop = asyncio.get_running_loop()
    await _ready(loop.add_reader, loop.remove_reader, fd)


async def writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    await _ready(loop.add_writer, loop.remove_writer, fd)


class Held:
    """A process that can be waited for and killed without fear of hitting another one of the same id.

    Needed beside asyncio's `Process.wait`, which up to Python 3.12 also waits until nobody holds the process's pipes.
    """

    def __init__(self, pid: int) -> None:
        """Take hold of `pid`, which must just have been seen alive or been started; it may have ended since."""
        try:
            self._handle: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._handle = None

    def kill(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    async def dead(self) -> None:
        """Return when the process has ended."""
        if self._handle is not None:
            await readable(self._handle)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


async def read_until(fd: int, end: bytes, limit: int = 65536) -> bytes:
    """Bytes of a non-blocking handle up to the first `end`, its end or `limit`; empty `end` means to its end."""
    data = b""
    while len(data) < limit and not (end and end in data):
        try:
            chunk = os.read(fd, 4096)
        except BlockingIOError:
            await readable(fd)
            continue
        if not chunk:
            break
        data += chunk
    return data


async def write_all(fd: int, data: bytes) -> None:
    """Write to a non-blocking pipe; returns early, and quietly, when nobody reads it any more."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            await writable(fd)
        except BrokenPipeError:
            return


async def until_done(task: asyncio.Task[Any]) -> None:
    """Wait for a task whatever happens to the waiter; the waiter's cancellation is raised when the task is done.

    The task's own outcome is looked at, so that it is not reported as forgotten, and left where it is.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled():
        task.exception()
    if cancelled is not None:
        raise cancelled
