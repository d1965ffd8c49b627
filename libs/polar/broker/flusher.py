"""Group fsync: one sync of every file that changed, for all requests that wait for it.

Promises: when `flush` returns, everything appended and committed before the call is on disk; without `enabled` it
returns at once, because then the kernel's page cache is durable enough (SIGKILL, not power loss). Syncs run in a
worker thread. A failed sync is final: the state on disk is unknown, so `failed` is told and nothing is acknowledged.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from polar.broker.database import Database
from polar.broker.errors import StorageFailed
from polar.broker.log import PartitionLog

__all__ = ["Flusher"]


class Flusher:
    """Owns one task while there is something to sync."""

    def __init__(self, database: Database, failed: Callable[[BaseException], None], *, enabled: bool) -> None:
        self.enabled = enabled
        self._database = database
        self._failed = failed
        self._dirty: dict[PartitionLog, None] = {}
        self._next: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._latest_file: dict[Path, str] = {}

    def mark(self, log: PartitionLog) -> None:
        """`log` was appended to."""
        if self.enabled:
            self._dirty[log] = None

    async def flush(self) -> None:
        """Wait until everything marked or committed so far is on disk. Raises `StorageFailed`."""
        if self.enabled:
            await asyncio.shield(self._begin())

    def flush_soon(self) -> None:
        """Start a flush nobody waits for: what was written without acknowledgement has to be shown to readers too."""
        if self.enabled:
            self._begin()

    def _begin(self) -> asyncio.Future[None]:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        waiting = self._next
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return waiting

    async def close(self) -> None:
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while self._next is not None:
            done, self._next = self._next, None
            ends: list[tuple[PartitionLog, int]] = []
            paths: list[Path] = []
            for log in self._dirty:
                files, end = log.take_unsynced()
                paths += files
                ends.append((log, end))
            self._dirty.clear()
            if self._database.dirty:
                self._database.dirty = False
                paths.append(self._database.wal_path)
            try:
                await asyncio.to_thread(self._sync, paths)
            except OSError as error:
                failure = StorageFailed(f"fsync failed, so nothing more can be acknowledged: {error}")
                self._failed(failure)
                done.set_exception(failure)
                done.exception()  # retrieved: the waiters may be gone already
                return
            for log, end in ends:
                log.synced(end)
            done.set_result(None)

    def _sync(self, paths: list[Path]) -> None:
        for path in paths:
            try:
                _fsync(path)
            except FileNotFoundError:
                continue  # the topic or segment was deleted meanwhile
            if self._latest_file.get(path.parent) != path.name:
                # A new file is found again only once its directory is on disk as well.
                for directory in path.parents[:3]:
                    _fsync(directory)
                self._latest_file[path.parent] = path.name


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
