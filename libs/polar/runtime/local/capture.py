"""The output of a command: the end of each stream in memory, all of it, up to a limit, in a log file.

In the log the two streams are mixed as they come, by whole lines (of up to 64 KiB).
"""

from __future__ import annotations

import asyncio
import os
from collections import deque

CHUNK = 65536


class Tail:
    """The last `limit` bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self.truncated = False

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size > self._limit:
            self.truncated = True
            first = self._chunks.popleft()
            over = self._size - self._limit
            if len(first) > over:
                self._chunks.appendleft(first[over:])
                self._size -= over
            else:
                self._size -= len(first)

    def value(self) -> bytes:
        return b"".join(self._chunks)


class Log:
    """An open log file that takes at most `limit` bytes; a full disk ends the log, not the command."""

    def __init__(self, handle: int, limit: int) -> None:
        self._handle = handle
        self._left = limit
        self._lock = asyncio.Lock()
        self.truncated = False

    async def write(self, chunk: bytes) -> None:
        async with self._lock:
            if len(chunk) > self._left:
                self.truncated = True
                chunk = chunk[: self._left]
            if not chunk:
                return
            self._left -= len(chunk)
            try:
                await asyncio.to_thread(_write, self._handle, chunk)
            except OSError:
                self.truncated = True
                self._left = 0

    async def close(self) -> None:
        await asyncio.to_thread(os.close, self._handle)


def _write(handle: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(handle, view) :]


class Capture:
    """Reads both streams of a process until they end. Owns its two tasks; `finish` ends them."""

    def __init__(self, process: asyncio.subprocess.Process, limit: int, log: Log | None) -> None:
        self.stdout = Tail(limit)
        self.stderr = Tail(limit)
        self._log = log
        self._tasks = [
            asyncio.create_task(self._pump(stream, tail))
            for stream, tail in ((process.stdout, self.stdout), (process.stderr, self.stderr))
            if stream is not None
        ]

    @property
    def truncated(self) -> bool:
        return self.stdout.truncated or self.stderr.truncated

    async def _pump(self, stream: asyncio.StreamReader, tail: Tail) -> None:
        pending = b""  # the start of a line, kept back so that the other stream does not cut it in the log
        while chunk := await stream.read(CHUNK):
            tail.add(chunk)
            if self._log is None:
                continue
            whole, newline, rest = chunk.rpartition(b"\n")
            if newline or len(pending) + len(rest) > CHUNK:
                await self._log.write(pending + whole + newline)
                pending = b""
            pending += rest
        if self._log is not None:
            await self._log.write(pending)

    async def finish(self, grace: float) -> bool:
        """Read what is left; False where somebody still held a stream open after `grace` seconds, and it was cut."""
        _, late = await asyncio.wait(self._tasks, timeout=grace)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if late:
            self.stdout.truncated = True
        return not late
