"""The node's books: one SQLite file that says what this node has, written before each step.

    meta     boot id, the machine's own boot id, the offset up to which assignments have been read
    rows     one per attempt on this node (`machine.Row`), with the assignment as it came
    outbox   reports not acknowledged by the broker yet, in order

A step and its reports are one transaction, so a report is never forgotten and never invented. The file is a cache of
the log: when it is lost or the machine has rebooted, the node gets a new boot id and starts with empty books, and the
scheduler queues again what the old boot had.

Two processes (`--stage init`, `--stage run`) share the file; `FileLock` keeps out a second one of the same half.

Why not aiosqlite: it awaits each statement, so a caller that is cancelled can leave a transaction half open, and two
callers can interleave in one. Here a transaction is one function on one thread. `synchronous=NORMAL` loses nothing
when a process is killed; it may when the machine fails, and then the boot id changes anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import msgspec

from polar.schemas import SessionAssigned, Stage, decode, encode
from polar.schemas.topics import topic

from .errors import NodeInUse
from .machine import Half, Message, Row, Step

T = TypeVar("T")

VERSION = 1
BUSY_SECONDS = 30.0  # the other half's transactions take milliseconds; a stalled disk takes longer
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rows (
    assignment_id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    stage TEXT NOT NULL,
    row BLOB NOT NULL,
    event BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS rows_by_session ON rows (session_id, attempt);
CREATE TABLE IF NOT EXISTS outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    assignment_id TEXT NOT NULL,
    writer TEXT NOT NULL,
    topic TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL
);
"""

_row = msgspec.msgpack.Decoder(Row)


def machine_boot() -> str:
    """The kernel's boot id, which changes with each boot; empty where there is none to read."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class Pending(NamedTuple):
    """A report that waits for its acknowledgement."""

    number: int
    message: Message


class FileLock:
    """One process per half of a node, for as long as the process lives."""

    def __init__(self, folder: Path, half: Half, node: str) -> None:
        self._handles: list[int] = []
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in (Half.INIT, Half.RUN) if half is Half.ALL else (half,):
            handle = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._handles.append(handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise NodeInUse(
                    f"another gateway process ({name}) already runs node {node!r} in {folder}: stop it, or give this "
                    "one another POLAR_GATEWAY_NODE_ID"
                ) from None

    def close(self) -> None:
        for handle in self._handles:
            os.close(handle)
        self._handles.clear()


class Books:
    """The state file, open. Every method is one transaction; none is undone by a cancelled caller."""

    def __init__(self, thread: ThreadPoolExecutor, database: sqlite3.Connection, boot_id: str, writer: str) -> None:
        self._thread = thread
        self._db = database
        self._writer = writer
        self.boot_id = boot_id
        self.reports = asyncio.Event()
        """Set when the outbox has grown."""

    @classmethod
    async def open(cls, path: Path, *, new_id: Callable[[], str], machine: str) -> Self:
        """Open or make the file. `new_id` gives a fresh boot id where one is needed; `machine`: `machine_boot()`.

        A file that is not readable is put aside (`<name>.broken`) and counts as lost.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="gateway-books")
        loop = asyncio.get_running_loop()
        try:
            database, boot = await loop.run_in_executor(thread, _open, path, new_id, machine)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(thread, database, boot, new_id())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish what has begun, and close the file."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown(wait=False)

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def transaction() -> T:
            with _transaction(self._db):
                return work(self._db)

        return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)

    # assignments

    async def read_to(self) -> int | None:
        """The next offset of the node's partition of `assignments` to read; None: nothing read under this boot id."""
        found = await self._do(lambda db: _meta(db, "read_to"))
        return None if found is None else int(found)

    async def set_read_to(self, offset: int) -> None:
        await self._do(lambda db: _set_meta(db, "read_to", str(offset)))

    async def assign(self, row: Row, event: SessionAssigned) -> bool:
        """Put a new assignment on the books; False where it is on them already."""
        data = encode(event)

        def work(db: sqlite3.Connection) -> bool:
            cursor = db.execute(
                "INSERT OR IGNORE INTO rows VALUES (?, ?, ?, ?, ?, ?)",
                (row.assignment_id, row.session_id, row.attempt, row.stage, msgspec.msgpack.encode(row), data),
            )
            return cursor.rowcount == 1

        return await self._do(work)

    # rows

    async def step(self, assignment_id: str, decide: Callable[[Row], Step | None]) -> Step | None:
        """Apply a function of `machine` to the row as it is now, and write what it says, reports included.

        None where there is no such row, or where the function says None.
        """

        def work(db: sqlite3.Connection) -> Step | None:
            row = _find(db, assignment_id)
            step = None if row is None else decide(row)
            if step is not None:
                self._write(db, step)
            return step

        step = await self._do(work)
        if step is not None and step.messages:
            self.reports.set()
        return step

    def _write(self, db: sqlite3.Connection, step: Step) -> None:
        row = step.row
        db.execute(
            "UPDATE rows SET stage = ?, row = ? WHERE assignment_id = ?",
            (row.stage, msgspec.msgpack.encode(row), row.assignment_id),
        )
        # reports that the other half could not send yet go first, whoever sends them: order per session
        db.execute("UPDATE outbox SET writer = ? WHERE assignment_id = ?", (self._writer, row.assignment_id))
        db.executemany(
            "INSERT INTO outbox (assignment_id, writer, topic, key, value) VALUES (?, ?, ?, ?, ?)",
            [(row.assignment_id, self._writer, one.topic, one.key, encode(one.value)) for one in step.messages],
        )

    async def row(self, assignment_id: str) -> Row | None:
        return await self._do(lambda db: _find(db, assignment_id))

    async def event(self, assignment_id: str) -> SessionAssigned | None:
        """The assignment as it came."""

        def work(db: sqlite3.Connection) -> bytes | None:
            found = db.execute("SELECT event FROM rows WHERE assignment_id = ?", (assignment_id,)).fetchone()
            return None if found is None else bytes(found[0])

        data = await self._do(work)
        if data is None:
            return None
        event = decode(data, (SessionAssigned,))
        assert isinstance(event, SessionAssigned)
        return event

    async def of_session(self, session_id: str, attempt: int) -> Row | None:
        """The attempt's row."""

        def work(db: sqlite3.Connection) -> Row | None:
            query = "SELECT row FROM rows WHERE session_id = ? AND attempt = ?"
            found = db.execute(query, (session_id, attempt)).fetchone()
            return None if found is None else _row.decode(found[0])

        return await self._do(work)

    async def rows(self, *stages: Stage) -> list[Row]:
        """All rows, or those in `stages`; oldest first."""

        def work(db: sqlite3.Connection) -> list[Row]:
            marks = ", ".join("?" * len(stages))
            where = f" WHERE stage IN ({marks})" if stages else ""
            return [_row.decode(data) for (data,) in db.execute(f"SELECT row FROM rows{where}", stages)]

        found = await self._do(work)
        return sorted(found, key=lambda row: (row.ready_ms or row.assigned_ms, row.assignment_id))

    async def count(self) -> dict[Stage, int]:
        """Rows by stage."""

        def work(db: sqlite3.Connection) -> dict[Stage, int]:
            return {Stage(stage): n for stage, n in db.execute("SELECT stage, count(*) FROM rows GROUP BY stage")}

        return await self._do(work)

    async def remove(self, assignment_id: str) -> None:
        """The box is gone and released: the row goes, too. Its reports, if any wait, stay."""
        await self._do(lambda db: db.execute("DELETE FROM rows WHERE assignment_id = ?", (assignment_id,)))

    # outbox

    async def adopt(self) -> None:
        """Take over all reports that wait: their writers may be dead. Sent twice does no harm, unsent does."""
        await self._do(lambda db: db.execute("UPDATE outbox SET writer = ?", (self._writer,)))
        self.reports.set()

    async def pending(self, limit: int) -> list[Pending]:
        """The oldest reports that this process has to send."""
        query = "SELECT number, topic, key, value FROM outbox WHERE writer = ? ORDER BY number LIMIT ?"
        found = await self._do(lambda db: db.execute(query, (self._writer, limit)).fetchall())
        return [
            Pending(number, Message(name, key, decode(value, topic(name).values))) for number, name, key, value in found
        ]

    async def sent(self, numbers: Sequence[int]) -> None:
        """The broker has acknowledged these."""
        await self._do(
            lambda db: db.executemany("DELETE FROM outbox WHERE number = ?", [(number,) for number in numbers])
        )


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _open(path: Path, new_id: Callable[[], str], machine: str) -> tuple[sqlite3.Connection, str]:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # SQLite's busy timeout does not cover the switch to WAL, and two halves may start at once
    turn = os.open(f"{path}.opening", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)
        return _opened(path, new_id, machine)
    except sqlite3.OperationalError:
        raise  # no permission, no space, locked for too long: a person's business
    except sqlite3.DatabaseError:
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{path}.broken{suffix}")
        return _opened(path, new_id, machine)
    finally:
        os.close(turn)


def _opened(path: Path, new_id: Callable[[], str], machine: str) -> tuple[sqlite3.Connection, str]:
    db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        path.chmod(0o600)  # assignments hold what tasks put into their environment
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        with _transaction(db):
            for statement in _SCHEMA.split(";\n"):
                db.execute(statement)
            found = int(db.execute("PRAGMA user_version").fetchone()[0])
            if found not in (0, VERSION) or _meta(db, "machine") not in (None, machine):
                for table in ("meta", "rows", "outbox"):
                    db.execute(f"DELETE FROM {table}")
            db.execute(f"PRAGMA user_version = {VERSION}")
            _set_meta(db, "machine", machine)
            boot = _meta(db, "boot")
            if boot is None:
                boot = new_id()
                _set_meta(db, "boot", boot)
    except BaseException:
        db.close()
        raise
    return db, boot


def _meta(db: sqlite3.Connection, name: str) -> str | None:
    found = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return None if found is None else str(found[0])


def _set_meta(db: sqlite3.Connection, name: str, value: str) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))


def _find(db: sqlite3.Connection, assignment_id: str) -> Row | None:
    found = db.execute("SELECT row FROM rows WHERE assignment_id = ?", (assignment_id,)).fetchone()
    return None if found is None else _row.decode(found[0])
