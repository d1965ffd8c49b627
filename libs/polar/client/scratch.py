"""Scratch space on disk for commands that look over more records than memory should hold: one SQLite file.

A cache of the log and nothing else: the file has no name once it is open and is gone with the process. One thread does
everything that touches it; the event loop never waits on the disk.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from polar.bus import BusError

Result = TypeVar("Result")


class Scratch:
    """An async context manager around the file and its thread."""

    def __init__(self, folder: Path, schema: str) -> None:
        """
        Args:
            folder: where the file is made; made itself where missing.
            schema: SQL that makes the tables.
        """
        self._folder = folder
        self._schema = schema
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scratch")
        self._database: sqlite3.Connection | None = None

    async def __aenter__(self) -> Self:
        """Raises `BusError` where the file cannot be made."""
        await self.do(lambda _: None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    async def do(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """`work` with the database, in the thread; what it writes is there for the next.

        Raises:
            BusError: the file cannot be read or written.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._opened()))
        except (OSError, sqlite3.Error) as error:
            raise BusError(f"the scratch file in {self._folder} failed: {error}", retryable=False) from error

    def _opened(self) -> sqlite3.Connection:
        if self._database is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix="scratch-", suffix=".sqlite", dir=self._folder)
            os.close(handle)
            database = sqlite3.connect(name, isolation_level=None)
            database.execute("PRAGMA journal_mode=OFF")
            database.execute("PRAGMA synchronous=OFF")
            database.executescript(self._schema)
            os.unlink(name)  # the open file is the process's alone, and goes with it
            self._database = database
        return self._database

    def _close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()
