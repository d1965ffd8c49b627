"""The captured calls of open sessions, until they are built: in memory up to a limit, in one SQLite file beyond it.

A cache and nothing else: all of it stands on the log, so the file has no name once it is open and is gone with the
process. One thread does everything that touches the file or builds; the event loop never waits on either.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from polar.bus import BusError
from polar.schemas import CompletionCaptured, decode, encode

Result = TypeVar("Result")
Key = tuple[int, str]
"""Scope and session."""

KEEP_SHARE: Final = 0.75
"""Of the limit, down to which memory is emptied: room for some records before the next write."""


@dataclass(slots=True)
class _Held:
    events: list[tuple[int, CompletionCaptured]] = field(default_factory=list)
    size: int = 0


class BodyStore:
    """Owns the memory, the file and the thread. Close it."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self._folder = folder
        self._limit = memory_bytes
        self._held: OrderedDict[Key, _Held] = OrderedDict()
        self._size = 0
        self._spilled: set[Key] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="builder")
        self._writes: list[Future[None]] = []
        self._database: sqlite3.Connection | None = None
        self._scopes = 0
        self._left: deque[int] = deque()
        """Scopes that nobody holds any more; filled by the garbage collector, in whatever thread."""
        self._closed = False

    @property
    def memory(self) -> int:
        """Bytes held in memory, as encoded."""
        return self._size

    @property
    def spilled(self) -> int:
        """Sessions that are in the file, wholly or in part."""
        return len(self._spilled)

    def scope(self) -> Bodies:
        """A place of its own for one opening of a partition; emptied when nobody holds it any more."""
        self._scopes += 1
        bodies = Bodies(self, self._scopes)
        weakref.finalize(bodies, self._left.append, self._scopes).atexit = False
        return bodies

    async def close(self) -> None:
        """Waits for the thread's work under way."""
        self._closed = True
        self._held.clear()
        self._spilled.clear()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close_database)
        self._thread.shutdown(wait=False)

    def put(self, key: Key, offset: int, event: CompletionCaptured, size: int) -> None:
        held = self._held.setdefault(key, _Held())
        self._held.move_to_end(key)
        held.events.append((offset, event))
        held.size += size
        self._size += size
        while self._left:
            self._drop_scope(self._left.popleft())
        if self._size > self._limit:
            self._spill()

    async def settle(self) -> None:
        """Waits until what is over the limit is in the file.

        Raises:
            BusError: retryable: the file cannot be written.
        """
        writes, self._writes = self._writes, []
        for write in writes:
            try:
                await asyncio.wrap_future(write)
            except (OSError, sqlite3.Error) as error:
                raise BusError(f"the builder's cache in {self._folder} cannot be written: {error}") from error

    async def use(self, key: Key, function: Callable[[Iterator[CompletionCaptured]], Result]) -> Result:
        """`function` of the session's calls in log order, in the thread."""
        held = self._held.get(key)
        recent = [event for _, event in held.events] if held is not None else []
        spilled = key in self._spilled

        def work() -> Result:
            return function(self._all(key, spilled, recent))

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def drop(self, key: Key) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._size -= held.size
        if key in self._spilled:
            self._spilled.discard(key)
            self._submit(lambda: self._delete(key))

    def _drop_scope(self, scope: int) -> None:
        for key in [key for key in [*self._held, *self._spilled] if key[0] == scope]:
            self.drop(key)

    def _spill(self) -> None:
        """Hands the sessions that have been quiet longest to the file."""
        rows: list[tuple[Key, list[tuple[int, CompletionCaptured]]]] = []
        while self._held and self._size > self._limit * KEEP_SHARE:
            key, held = self._held.popitem(last=False)
            self._size -= held.size
            self._spilled.add(key)
            rows.append((key, held.events))
        self._submit(lambda: self._write(rows))

    def _submit(self, work: Callable[[], None]) -> None:
        if self._closed:
            return  # the file is gone, and with it what was to be written or deleted
        pending = [one for one in self._writes if not one.done() or one.exception()]
        self._writes = [*pending, self._thread.submit(work)]

    # in the thread

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix="calls-", suffix=".sqlite", dir=self._folder)
            os.close(handle)
            database = sqlite3.connect(name, isolation_level=None)
            database.execute("PRAGMA journal_mode=OFF")
            database.execute("PRAGMA synchronous=OFF")
            database.execute("CREATE TABLE calls (scope INTEGER, session TEXT, offset INTEGER, value BLOB)")
            database.execute("CREATE INDEX place ON calls (scope, session, offset)")
            os.unlink(name)  # the open file is the process's alone, and goes with it
            self._database = database
        return self._database

    def _write(self, rows: list[tuple[Key, list[tuple[int, CompletionCaptured]]]]) -> None:
        self._open().executemany(
            "INSERT INTO calls VALUES (?, ?, ?, ?)",
            ((*key, offset, encode(event)) for key, events in rows for offset, event in events),
        )

    def _delete(self, key: Key) -> None:
        self._open().execute("DELETE FROM calls WHERE scope = ? AND session = ?", key)

    def _all(self, key: Key, spilled: bool, recent: list[CompletionCaptured]) -> Iterator[CompletionCaptured]:
        if spilled:
            rows = self._open().execute("SELECT value FROM calls WHERE scope = ? AND session = ? ORDER BY offset", key)
            for (value,) in rows:
                event = decode(value, (CompletionCaptured,))
                assert isinstance(event, CompletionCaptured)
                yield event
        yield from recent

    def _close_database(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()


class Bodies:
    """One scope of a `BodyStore`."""

    def __init__(self, store: BodyStore, scope: int) -> None:
        self._store = store
        self._scope = scope

    def put(self, session: str, offset: int, event: CompletionCaptured, size: int) -> None:
        """Keeps a call; `size`: bytes, as encoded."""
        self._store.put((self._scope, session), offset, event, size)

    async def settle(self) -> None:
        """See `BodyStore.settle`."""
        await self._store.settle()

    async def use(self, session: str, function: Callable[[Iterator[CompletionCaptured]], Result]) -> Result:
        """See `BodyStore.use`."""
        return await self._store.use((self._scope, session), function)

    def drop(self, session: str) -> None:
        self._store.drop((self._scope, session))
