"""The sessions that a rebuild has seen, on disk: millions of them cost no memory.

Knows where each session begins and closes, which are selected and which are built; nothing of calls or tokens.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from polar.client.scratch import Scratch

from .rebuild_select import Selection, Span, merged

_SCHEMA: Final = """
CREATE TABLE sessions (
    session TEXT PRIMARY KEY, partition INTEGER, opened INTEGER, closed INTEGER, closed_ms INTEGER, task TEXT,
    num_samples INTEGER, state INTEGER DEFAULT 0, reason TEXT
) WITHOUT ROWID;
CREATE INDEX openings ON sessions (partition, opened) WHERE state = 1;
"""
_COLUMNS: Final = "session, partition, opened, closed, closed_ms, task, num_samples"
_CHUNK: Final = 500
"""Of variables in one statement; SQLite takes 32,766 at most."""


class State(IntEnum):
    SEEN = 0
    CHOSEN = 1
    """Selected and not built (yet)."""
    BUILT = 2
    FAILED = 3


class Named(NamedTuple):
    """Sessions, with a few of their names."""

    total: int
    names: list[str]
    """In order; perhaps not all."""


class SessionIndex:
    """An async context manager: see `Scratch`. Every method may raise `BusError` where the disk fails."""

    def __init__(self, folder: Path) -> None:
        self._scratch = Scratch(folder, _SCHEMA)

    async def __aenter__(self) -> Self:
        await self._scratch.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._scratch.__aexit__(kind, error, trace)

    async def see(self, spans: Iterable[Span]) -> None:
        """Adds sightings, in whatever order."""
        news: dict[str, Span] = {}
        for span in spans:
            news[span.session] = merged(news[span.session], span) if span.session in news else span

        def work(database: sqlite3.Connection) -> None:
            database.execute("BEGIN")
            known = {one.session: one for one in _rows(database, news)}
            database.executemany(
                f"INSERT OR REPLACE INTO sessions ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                [merged(known[name], span) if name in known else span for name, span in news.items()],
            )
            database.execute("COMMIT")

        if news:
            await self._scratch.do(work)

    async def homeless(self, selection: Selection, partition: int) -> bool:
        """Whether a session that may be meant has been seen in the partition without its start."""

        def work(database: sqlite3.Connection) -> bool:
            rows = database.execute(
                f"SELECT {_COLUMNS} FROM sessions WHERE partition = ? AND opened IS NULL", (partition,)
            )
            return any(selection.homeless(Span(*row)) for row in rows)

        return await self._scratch.do(work)

    async def choose(self, selection: Selection) -> int:
        """Marks the sessions that are meant; returns how many."""

        def work(database: sqlite3.Connection) -> int:
            names = [
                row[0] for row in database.execute(f"SELECT {_COLUMNS} FROM sessions") if selection.wants(Span(*row))
            ]
            database.execute("BEGIN")
            database.executemany("UPDATE sessions SET state = 1 WHERE session = ?", ((name,) for name in names))
            database.execute("COMMIT")
            return len(names)

        return await self._scratch.do(work)

    async def strangers(self, selection: Selection) -> int:
        """Sessions in time that were not chosen since nothing tells their task any more."""

        def work(database: sqlite3.Connection) -> int:
            rows = database.execute(f"SELECT {_COLUMNS} FROM sessions WHERE opened IS NULL AND task IS NULL")
            return sum(selection.homeless(Span(*row)) for row in rows)

        return await self._scratch.do(work) if selection.tasks else 0

    async def chosen(self, names: Collection[str], *states: State) -> set[str]:
        """Those of `names` that are selected; with `states`: only those in one of them."""
        wanted = states or (State.CHOSEN, State.BUILT, State.FAILED)

        def work(database: sqlite3.Connection) -> set[str]:
            return _in(database, f"SELECT session FROM sessions WHERE state IN ({_marks(wanted)}) AND", wanted, names)

        return await self._scratch.do(work) if names else set()

    async def partitions(self) -> dict[int, int]:
        """Sessions to build, by partition that has some."""

        def work(database: sqlite3.Connection) -> dict[int, int]:
            return dict(
                database.execute(
                    "SELECT partition, COUNT(*) FROM sessions WHERE state = 1 AND opened IS NOT NULL GROUP BY partition"
                )
            )

        return await self._scratch.do(work)

    async def next_opening(self, partition: int, offset: int) -> int | None:
        """Where the next session to build begins, at `offset` or after it."""

        def work(database: sqlite3.Connection) -> int | None:
            query = "SELECT MIN(opened) FROM sessions WHERE state = 1 AND partition = ? AND opened >= ?"
            found: int | None = database.execute(query, (partition, offset)).fetchone()[0]
            return found

        return await self._scratch.do(work)

    async def mark(self, names: Collection[str], state: State, reason: str | None = None) -> None:
        def work(database: sqlite3.Connection) -> None:
            database.execute("BEGIN")
            database.executemany(
                "UPDATE sessions SET state = ?, reason = ? WHERE session = ?",
                ((int(state), reason, name) for name in names),
            )
            database.execute("COMMIT")

        if names:
            await self._scratch.do(work)

    async def first_close_ms(self) -> int | None:
        """When the first of the selected sessions was closed."""

        def work(database: sqlite3.Connection) -> int | None:
            found: int | None = database.execute("SELECT MIN(closed_ms) FROM sessions WHERE state > 0").fetchone()[0]
            return found

        return await self._scratch.do(work)

    async def lost(self, log_starts: dict[int, int], most: int) -> Named:
        """Selected sessions whose start the log no longer has; `log_starts`: by partition."""

        def work(database: sqlite3.Connection) -> Named:
            found: list[str] = []
            count = 0
            for name, partition, opened in database.execute(
                "SELECT session, partition, opened FROM sessions WHERE state = 1 ORDER BY session"
            ):
                if opened is None or opened < log_starts.get(partition, 0):
                    count += 1
                    if len(found) < most:
                        found.append(name)
            return Named(count, found)

        return await self._scratch.do(work)

    async def unfinished(self, log_starts: dict[int, int], most: int) -> Named:
        """Selected sessions whose start is there and whose closing record is not."""

        def work(database: sqlite3.Connection) -> Named:
            query = "SELECT session, partition, opened FROM sessions WHERE state = 1 AND opened >= 0 ORDER BY session"
            rows = database.execute(query)
            names = [name for name, partition, opened in rows if opened >= log_starts.get(partition, 0)]
            return Named(len(names), names[:most])

        return await self._scratch.do(work)

    async def failed(self, most: int) -> dict[str, str]:
        """Sessions that could not be built, with the reason."""

        def work(database: sqlite3.Connection) -> dict[str, str]:
            query = "SELECT session, reason FROM sessions WHERE state = 3 ORDER BY session LIMIT ?"
            return dict(database.execute(query, (most,)))

        return await self._scratch.do(work)

    async def unknown(self, selection: Selection) -> list[str]:
        """Sessions and tasks that were named and of which nothing has been seen; `task T: 3 of 4 sessions`, too."""

        def work(database: sqlite3.Connection) -> list[str]:
            seen = {one.session for one in _rows(database, selection.sessions)}
            missing = [f"session {name}" for name in sorted(selection.sessions - seen)]
            for task in sorted(selection.tasks):
                count, wanted = database.execute(
                    "SELECT COUNT(*), MAX(num_samples) FROM sessions WHERE task = ?", (task,)
                ).fetchone()
                if not count:
                    missing.append(f"task {task}")
                elif wanted is not None and count < wanted and not selection.by_time and not selection.sessions:
                    missing.append(f"{wanted - count} of the {wanted} sessions of task {task}")
            return missing

        return await self._scratch.do(work)


def _rows(database: sqlite3.Connection, names: Collection[str]) -> list[Span]:
    found: list[Span] = []
    listed = list(names)
    for start in range(0, len(listed), _CHUNK):
        chunk = listed[start : start + _CHUNK]
        query = f"SELECT {_COLUMNS} FROM sessions WHERE session IN ({_marks(chunk)})"
        found += [Span(*row) for row in database.execute(query, chunk)]
    return found


def _in(database: sqlite3.Connection, query: str, values: Collection[int], names: Collection[str]) -> set[str]:
    found: set[str] = set()
    listed = list(names)
    for start in range(0, len(listed), _CHUNK):
        chunk = listed[start : start + _CHUNK]
        found.update(row[0] for row in database.execute(f"{query} session IN ({_marks(chunk)})", [*values, *chunk]))
    return found


def _marks(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))
