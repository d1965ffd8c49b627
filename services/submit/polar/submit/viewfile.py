"""The view's SQLite file: rows of tasks, sessions and nodes, and how far the log has been read, in one transaction.

A cache of the log and nothing else: a file that is missing, broken, of another version or of other topics is thrown
away (`ViewFile.start_over`), and the log is read again. `synchronous=NORMAL` loses nothing when a process is killed; it
may lose the last transactions when the machine fails, offsets and rows alike, and those records are then read again.

Everything here blocks and belongs to one thread; `view.py` has the threads.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import structlog

from polar.bus.records import Record, decode_record
from polar.schemas import RecordRef, Stage
from polar.schemas.topics import DAY, topic

from .book import SCHEMA, Book, Deltas
from .entries import TOPICS, Applied, Change, Place, ViewLimits
from .fold import Fold
from .nodebook import NodeBook
from .viewlock import ViewBroken, ViewUnusable

VERSION = 1
BUSY_SECONDS = 30.0
LATE_MS = 60_000
"""Results of a task that has ended which are not here this long after, by the scheduler's ticks, are not coming."""
LOG_MS = max(topic(name).retention_ms or 0 for name in TOPICS) + DAY
"""After this the log holds nothing of an ended task any more."""
DROP_AT_ONCE = 256

log = structlog.get_logger("polar.submit.view")


class Anchor(NamedTuple):
    """The last record of a partition that was read, to recognize the partition by."""

    offset: int
    mark: str


def files_fault(error: Exception) -> bool:
    """Whether it is the file that failed, and not what was to be written: full, locked, or corrupt."""
    return isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError


def mark_of(message: Any) -> str:
    """What tells a record from another one at the same offset of another topic."""
    return f"{message.timestamp}/{crc32(message.value or b'')}"


class ViewFile:
    """The file, open for writing."""

    def __init__(self, path: Path, limits: ViewLimits, identity: str) -> None:
        """`identity`: of the topics (prefix, partitions); a file that was made for others is thrown away.

        Raises:
            ViewUnusable: no permission, no space.
        """
        self.path = path
        self.limits = limits
        self._identity = identity
        self.nodes = NodeBook(limits.max_nodes)
        self.next: dict[Place, int] = {}
        self.anchors: dict[Place, Anchor] = {}
        self._unproved: dict[Place, Anchor] = {}
        self.flight: Counter[Stage] = Counter()
        self.tasks = self.sessions = self.settled_tasks = self.settled_sessions = 0
        self.dropped = 0
        try:
            self._db = self._open()
        except sqlite3.OperationalError as error:
            raise ViewUnusable(
                f"cannot use {path} for the view ({error}): set POLAR_SUBMIT_VIEW_FILE or POLAR_STATE_DIR"
            ) from None
        except sqlite3.DatabaseError as error:
            self.start_over(str(error))
        else:
            reason = self._wrong()
            if reason is not None:
                self.start_over(reason)
            else:
                self._load()

    def close(self) -> None:
        self._db.close()

    # --- making it ---

    def start_over(self, reason: str) -> None:
        """Throw the file away and begin an empty one."""
        log.warning("the view is thrown away and rebuilt from the log", reason=reason, file=str(self.path))
        with contextlib.suppress(AttributeError):
            self._db.close()
        self._unlink()
        self._db = self._open()
        self._load()

    def _unlink(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.path}{suffix}")

    def connect(self) -> sqlite3.Connection:
        """A connection that only reads."""
        db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA query_only = ON")
        return db

    def _open(self) -> sqlite3.Connection:
        if not self.path.exists():
            self._unlink()  # what belonged to a file that somebody has deleted
        db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self.path.chmod(0o600)  # results hold what tasks were given as metadata
            fresh = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
            if fresh:
                db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            if fresh:
                with transaction(db):
                    for statement in SCHEMA.strip().split(";\n"):
                        db.execute(statement)
                    db.execute("INSERT INTO meta VALUES ('identity', ?)", (self._identity,))
                    db.execute(f"PRAGMA user_version = {VERSION}")
        except BaseException:
            db.close()
            raise
        return db

    def _wrong(self) -> str | None:
        """Why the file is not one to go on with."""
        try:
            found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if found != VERSION:
                return f"the file is of version {found}, this program's is {VERSION}"
            if (known := self._meta("identity")) != self._identity:
                return f"it was made for other topics: {known}, now {self._identity}"
            self._load()
        except sqlite3.OperationalError as error:
            return f"it has not the tables it should have: {error}"
        except sqlite3.DatabaseError as error:
            return str(error)
        except ValueError as error:
            return f"it holds what cannot be read: {error}"
        return None

    def _load(self) -> None:
        db = self._db
        self.next, self.anchors, self._unproved = {}, {}, {}
        for name, part, after, anchor, mark in db.execute("SELECT topic, part, next, anchor, mark FROM offsets"):
            self.next[name, part] = after
            if anchor is not None:
                self.anchors[name, part] = Anchor(anchor, mark)
        self.flight = Counter(
            {
                Stage(stage): count
                for stage, count in db.execute(
                    "SELECT stage, count(*) FROM sessions WHERE member AND NOT has_result AND NOT over "
                    "AND stage != ? GROUP BY stage",
                    (str(Stage.FINISHED),),
                )
            }
        )
        self.tasks = db.execute("SELECT count(*) FROM tasks").fetchone()[0]
        self.sessions = db.execute("SELECT count(*) FROM sessions").fetchone()[0]
        self.settled_tasks, self.settled_sessions = db.execute(
            "SELECT count(*), coalesce(sum(total), 0) FROM tasks WHERE settled = 1"
        ).fetchone()
        self.dropped = int(self._meta("dropped") or 0)
        self.nodes = NodeBook.load(db, self.limits.max_nodes)

    # --- the log ---

    def misfit(self, cluster: str | None, starts: Mapping[Place, int], ends: Mapping[Place, int]) -> str | None:
        """Why the log is not the one this file was made from; notes `cluster` where the file has none.

        `starts`, `ends`: of every partition. A quiet partition whose records have all expired is no misfit.
        """
        known = self._meta("cluster")
        if cluster is not None and known is None:
            with transaction(self._db):
                self._set_meta("cluster", cluster)
        elif cluster is not None and known != cluster:
            return f"it was made from another cluster: {known}, now {cluster}"
        for place, after in self.next.items():
            name = f"partition {place[1]} of `{place[0]}`"
            if ends[place] < after:
                return f"{name} ends at offset {ends[place]}, before offset {after}, which was next: it was made anew"
            if starts[place] > after:
                return (
                    f"{name} starts at offset {starts[place]}: offsets from {after} on were deleted before being read"
                )
        self._unproved = {place: one for place, one in self.anchors.items() if starts[place] <= one.offset}
        return None

    def apply(self, messages: Sequence[Any], names: Mapping[str, str]) -> Applied:
        """Take records, at or below those taken before as well: they change nothing.

        Args:
            messages: aiokafka's records, in order within each partition.
            names: topic without prefix, by its full name.

        Raises:
            ViewBroken: the log is not the one this file was made from.
            sqlite3.Error: the rest was not taken.
        """
        poison: list[tuple[RecordRef, str]] = []
        records: list[tuple[Record, str]] = []
        ahead = dict(self.next)
        for message in messages:
            place = (names[message.topic], message.partition)
            self._prove(place, message)
            if message.offset >= ahead.get(place, 0):
                ahead[place] = message.offset + 1
                records.append((decode_record(topic(place[0]), message), mark_of(message)))
        try:
            changes = self._take(records, poison)
        except Exception as failed:
            if files_fault(failed):
                raise
            changes = []
            for one in records:
                try:
                    changes += self._take([one], poison)
                except Exception as error:
                    if files_fault(error):
                        raise
                    poison.append((one[0].ref, f"{type(error).__name__}: {error}"))
                    self._take([], [], passed={(one[0].topic, one[0].partition): one[0].offset + 1})
        return Applied(changes, poison)

    def _prove(self, place: Place, message: Any) -> None:
        """Compare the record that was read last with the one that stands there now."""
        anchor = self._unproved.get(place)
        if anchor is None or message.offset < anchor.offset:
            return
        del self._unproved[place]
        gone = message.offset > anchor.offset and not topic(place[0]).compacted
        if gone or (message.offset == anchor.offset and mark_of(message) != anchor.mark):
            raise ViewBroken(
                f"offset {anchor.offset} of partition {place[1]} of `{place[0]}` is another record now: "
                "the topic was made anew"
            )

    def _take(
        self,
        records: Sequence[tuple[Record, str]],
        poison: list[tuple[RecordRef, str]],
        passed: Mapping[Place, int] | None = None,
    ) -> list[Change]:
        """One transaction."""
        after, anchors = dict(passed or {}), dict[Place, Anchor]()
        changes: list[Change] = []
        unread: list[tuple[RecordRef, str]] = []
        nodes = self.nodes.draft()
        with self._writing() as book:
            fold = Fold(book)
            for record, mark in records:
                place = (record.topic, record.partition)
                after[place], anchors[place] = record.offset + 1, Anchor(record.offset, mark)
                if record.error is not None:
                    unread.append((record.ref, str(record.error)))
                elif record.topic == "nodes":
                    nodes.apply(record.value, record.key, record.offset)
                else:
                    changes += fold.apply(record.value, record.ref)
            book.flush()
            nodes.write(self._db)
            for place, offset in after.items():
                anchor = anchors.get(place)
                self._db.execute(
                    "INSERT OR REPLACE INTO offsets VALUES (?, ?, ?, ?, ?)", (*place, offset, *(anchor or (None, None)))
                )
            self._shrink(book)
        self.nodes = nodes
        self.next.update(after)
        self.anchors.update(anchors)
        poison += unread
        return changes

    def passed(self, positions: Mapping[Place, int]) -> None:
        """The reader stands at `positions`: what lies between the last record and there was nothing to read."""
        moved = {place: to for place, to in positions.items() if to > self.next.get(place, -1)}
        if moved:
            with transaction(self._db):
                for place, to in moved.items():
                    self._db.execute(
                        "INSERT INTO offsets VALUES (?, ?, ?, NULL, NULL) "
                        "ON CONFLICT (topic, part) DO UPDATE SET next = excluded.next",
                        (*place, to),
                    )
            self.next.update(moved)

    def tidy(self, *, settle_all: bool) -> list[Change]:
        """At the log's end: settle what waits in vain, drop what is too old or too much.

        `settle_all`: the end is that of the start, so that what is not here by now is gone from the log.
        """
        now = self.nodes.tick.at_ms if self.nodes.tick is not None else 0
        changes: list[Change] = []
        query, until = "SELECT task_id FROM tasks WHERE settled = 0 AND ended_ms IS NOT NULL", now - LATE_MS
        waiting = self._db.execute(query if settle_all else f"{query} AND ended_ms < {until}").fetchall()
        old = now - self.limits.keep_ms
        with self._writing() as book:
            fold = Fold(book)
            for (task_id,) in waiting:
                task = book.task(task_id)
                assert task is not None
                changes += fold.settle(task)
            book.flush()
            self._drop(book, "settled = 1 AND ended_ms < ?", (old,), "ended_ms, task_id")
            self._drop(book, "status IS NULL AND heard_ms < ?", (old,), "heard_ms, task_id")
            self._db.execute("DELETE FROM forgotten WHERE ended_ms < ?", (now - LOG_MS,))
            self._shrink(book)
        self._db.execute("PRAGMA incremental_vacuum(256)").fetchall()
        return changes

    # --- limits ---

    def _shrink(self, book: Book) -> None:
        """Down to the limits. Which ended tasks stay is a matter of their endings alone, not of the order in which
        the log was read: the newest, down to a horizon that only rises."""
        limits = self.limits
        horizon = self._meta("horizon")
        settled = self.settled_tasks + book.deltas.settled_tasks
        sessions = self.settled_sessions + book.deltas.settled_sessions
        if horizon is not None:
            at, _, task_id = horizon.partition("/")
            self._drop(book, "settled = 1 AND (ended_ms, task_id) <= (?, ?)", (int(at), task_id), "ended_ms, task_id")
            settled = self.settled_tasks + book.deltas.settled_tasks
            sessions = self.settled_sessions + book.deltas.settled_sessions
        last: str | None = None
        while (settled > limits.max_tasks or sessions > limits.max_sessions) and settled > 1:
            query = "SELECT task_id, ended_ms, total FROM tasks WHERE settled = 1 ORDER BY ended_ms, task_id LIMIT ?"
            for task_id, ended_ms, total in self._db.execute(query, (DROP_AT_ONCE,)).fetchall():
                if (settled <= limits.max_tasks and sessions <= limits.max_sessions) or settled == 1:
                    break
                self._forget(book, task_id)
                settled, sessions, last = settled - 1, sessions - total, f"{ended_ms}/{task_id}"
        if last is not None:
            self._set_meta("horizon", last)
        self._db.execute(
            "DELETE FROM rejected WHERE task_id IN "
            "(SELECT task_id FROM rejected ORDER BY at_ms DESC, task_id DESC LIMIT -1 OFFSET ?)",
            (limits.max_answers,),
        )
        if self.bytes > limits.max_bytes:
            self._relieve(book)

    def _relieve(self, book: Book) -> None:
        """The file is too large: ended tasks go first, then what only keeps late reports away, then running tasks."""
        for where, order in (
            ("settled = 1", "ended_ms, task_id"),
            ("status IS NULL", "heard_ms, task_id"),
        ):
            if self._drop(book, where, (), order, limit=DROP_AT_ONCE):
                return
        query = "DELETE FROM forgotten WHERE task_id IN (SELECT task_id FROM forgotten ORDER BY ended_ms LIMIT 4096)"
        if self._db.execute(query).rowcount:
            return
        if gone := self._drop(book, "1", (), "since_ms, task_id", limit=1):
            log.warning("running tasks are dropped from the view; raise POLAR_SUBMIT_MAX_VIEW_BYTES", tasks=gone)

    def _drop(self, book: Book, where: str, values: tuple[Any, ...], order: str, limit: int = -1) -> int:
        query = f"SELECT task_id FROM tasks WHERE {where} ORDER BY {order} LIMIT {limit}"
        found = self._db.execute(query, values).fetchall()
        for (task_id,) in found:
            self._forget(book, task_id)
        return len(found)

    def _forget(self, book: Book, task_id: str) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO forgotten SELECT task_id, source, ended_ms FROM tasks "
            "WHERE task_id = ? AND ended_ms IS NOT NULL",
            (task_id,),
        )
        book.drop_task(task_id)
        book.dropped += 1

    @property
    def bytes(self) -> int:
        """Of the file, without what is free in it."""
        pages, free, size = (
            int(self._db.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    # --- helpers ---

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Book]:
        """A transaction with its book; the counts in memory move once it is committed."""
        book = Book(self._db)
        with transaction(self._db):
            yield book
            if book.dropped:
                self._set_meta("dropped", str(self.dropped + book.dropped))
        self._count(book.deltas)
        self.dropped += book.dropped

    def _count(self, deltas: Deltas) -> None:
        self.flight.update(deltas.flight)
        self.tasks += deltas.tasks
        self.sessions += deltas.sessions
        self.settled_tasks += deltas.settled_tasks
        self.settled_sessions += deltas.settled_sessions

    def _meta(self, name: str) -> str | None:
        found = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])

    def _set_meta(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))


@contextlib.contextmanager
def transaction(db: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Commits at the end of the block, rolls back where it raises."""
    db.execute(f"BEGIN {kind}")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
