"""The rows of one transaction of the view's file: read when first asked for, changed in memory, written at its end.

A batch of the log asks for the same task and session again and again; each is read and written once. Called on the
thread that owns the connection, inside a transaction of the caller's, who forgets the book when that fails.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from polar.schemas import (
    Failure,
    Outcome,
    SessionResult,
    Stage,
    TaskAccepted,
    TaskRejected,
    TaskResult,
    encode,
)

from .fold import SessionRow, TaskRow

SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE offsets (
    topic TEXT, part INTEGER, next INTEGER NOT NULL, anchor INTEGER, mark TEXT, PRIMARY KEY (topic, part)
) WITHOUT ROWID;
CREATE TABLE tasks (
    task_id TEXT PRIMARY KEY, source TEXT, repeat INTEGER, accepted_ms INTEGER, harness TEXT, ended_ms INTEGER,
    outcome TEXT, expected INTEGER, total INTEGER, results INTEGER, settled INTEGER, heard_ms INTEGER,
    status TEXT, since_ms INTEGER
) WITHOUT ROWID;
CREATE INDEX tasks_by_time ON tasks (since_ms, task_id) WHERE status IS NOT NULL;
CREATE INDEX tasks_by_status ON tasks (status, since_ms, task_id) WHERE status IS NOT NULL;
CREATE INDEX tasks_settled ON tasks (ended_ms, task_id) WHERE settled = 1;
CREATE INDEX tasks_unsettled ON tasks (ended_ms) WHERE settled = 0 AND ended_ms IS NOT NULL;
CREATE INDEX tasks_unknown ON tasks (heard_ms, task_id) WHERE status IS NULL;
CREATE TABLE task_events (task_id TEXT, kind TEXT, value BLOB NOT NULL, PRIMARY KEY (task_id, kind));
CREATE TABLE sessions (
    task_id TEXT, session_id TEXT, member INTEGER, sample INTEGER, stage TEXT, attempt INTEGER, node TEXT,
    at_ms INTEGER, failure BLOB, outcome BLOB, reward REAL, has_result INTEGER, over INTEGER,
    PRIMARY KEY (task_id, session_id)
) WITHOUT ROWID;
CREATE TABLE results (task_id TEXT, session_id TEXT, value BLOB NOT NULL, PRIMARY KEY (task_id, session_id));
CREATE TABLE rejected (task_id TEXT PRIMARY KEY, at_ms INTEGER, value BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX rejected_by_time ON rejected (at_ms, task_id);
CREATE TABLE forgotten (task_id TEXT PRIMARY KEY, source TEXT, ended_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX forgotten_by_time ON forgotten (ended_ms);
CREATE TABLE nodes (name TEXT PRIMARY KEY, place INTEGER, at_tick INTEGER, beat BLOB NOT NULL) WITHOUT ROWID;
"""
TASK_FIELDS = "source, repeat, accepted_ms, harness, ended_ms, outcome, expected, total, results, settled, heard_ms"
SESSION_FIELDS = "session_id, member, sample, stage, attempt, node, at_ms, failure, outcome, reward, has_result, over"
_TASK_MARKS = ", ".join("?" * 14)
_SESSION_MARKS = ", ".join("?" * 13)

_failure = msgspec.msgpack.Decoder(Failure)
_outcome = msgspec.msgpack.Decoder(Outcome)


class Deltas:
    """What a transaction adds to the counts kept in memory."""

    def __init__(self) -> None:
        self.flight: Counter[Stage] = Counter()
        self.tasks = 0
        self.sessions = 0
        self.settled_tasks = 0
        self.settled_sessions = 0


class Book:
    """Implements `fold.Rows` on a connection."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._tasks: dict[str, tuple[TaskRow, tuple[Any, ...] | None]] = {}
        """With how it was written before."""
        self._sessions: dict[str, dict[str, tuple[SessionRow, tuple[Any, ...] | None]]] = {}
        self._whole: set[str] = set()
        """Tasks all of whose sessions have been read."""
        self.deltas = Deltas()
        self.dropped = 0

    def task(self, task_id: str) -> TaskRow | None:
        held = self._tasks.get(task_id)
        if held is not None:
            return held[0]
        found = self._db.execute(f"SELECT {TASK_FIELDS} FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
        if found is None:
            return None
        source, repeat, accepted_ms, harness, ended_ms, outcome, expected, total, results, settled, heard_ms = found
        row = TaskRow(
            task_id, source, bool(repeat), accepted_ms, harness, ended_ms, outcome, expected, total, results,
            bool(settled), heard_ms,
        )  # fmt: skip
        self._tasks[task_id] = (row, _task_values(row))
        return row

    def new_task(self, task_id: str) -> TaskRow:
        row = TaskRow(task_id)
        self._tasks[task_id] = (row, None)
        self._whole.add(task_id)
        return row

    def session(self, task_id: str, session_id: str) -> SessionRow | None:
        held = self._sessions.get(task_id, {}).get(session_id)
        if held is not None:
            return held[0]
        if task_id in self._whole:
            return None
        found = self._db.execute(
            f"SELECT {SESSION_FIELDS} FROM sessions WHERE task_id = ? AND session_id = ?", (task_id, session_id)
        ).fetchone()
        return None if found is None else self._hold(session_of(task_id, found))

    def new_session(self, task_id: str, session_id: str) -> SessionRow:
        row = SessionRow(task_id, session_id)
        self._sessions.setdefault(task_id, {})[session_id] = (row, None)
        return row

    def sessions(self, task_id: str) -> Iterable[SessionRow]:
        held = self._sessions.setdefault(task_id, {})
        if task_id not in self._whole:
            self._whole.add(task_id)
            for found in self._db.execute(f"SELECT {SESSION_FIELDS} FROM sessions WHERE task_id = ?", (task_id,)):
                if found[0] not in held:
                    self._hold(session_of(task_id, found))
        return [row for row, _ in held.values()]

    def drop_session(self, session: SessionRow) -> None:
        row, before = self._sessions[session.task_id].pop(session.session_id)
        self._whole.add(session.task_id)  # only called after `sessions`; what was dropped is not to be read again
        if before is not None:
            self._count_session(before, None)
        for table in ("sessions", "results"):
            self._db.execute(f"DELETE FROM {table} WHERE task_id = ? AND session_id = ?", (row.task_id, row.session_id))

    def forgotten(self, task_id: str) -> tuple[str | None, int] | None:
        found = self._db.execute("SELECT source, ended_ms FROM forgotten WHERE task_id = ?", (task_id,)).fetchone()
        return None if found is None else (found[0], found[1])

    def remember_again(self, task_id: str) -> None:
        self._db.execute("DELETE FROM forgotten WHERE task_id = ?", (task_id,))

    def put_accepted(self, event: TaskAccepted) -> None:
        # the sessions' own rows have their ids, and there may be thousands
        self._put_event(event.task_id, "accepted", msgspec.structs.replace(event, sessions=[]))

    def put_task_result(self, task_id: str, event: TaskResult | None) -> None:
        if event is None:
            self._db.execute("DELETE FROM task_events WHERE task_id = ? AND kind = 'result'", (task_id,))
        else:
            self._put_event(task_id, "result", event)

    def _put_event(self, task_id: str, kind: str, event: TaskAccepted | TaskResult) -> None:
        self._db.execute("INSERT OR REPLACE INTO task_events VALUES (?, ?, ?)", (task_id, kind, encode(event)))

    def put_session_result(self, event: SessionResult) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO results VALUES (?, ?, ?)", (event.task_id, event.session_id, encode(event))
        )

    def put_rejected(self, task_id: str, event: TaskRejected) -> None:
        self._db.execute("INSERT OR REPLACE INTO rejected VALUES (?, ?, ?)", (task_id, event.at_ms, encode(event)))

    def drop_task(self, task_id: str) -> None:
        """Forget a task and all its rows. Only in a book that holds nothing of it."""
        row = self.task(task_id)
        assert row is not None
        values = _task_values(row)
        for session in self.sessions(task_id):
            self._count_session(_session_values(session), None)
        for table in ("sessions", "results", "task_events", "tasks"):
            self._db.execute(f"DELETE FROM {table} WHERE task_id = ?", (task_id,))
        self._count_task(values, None)
        del self._tasks[task_id], self._sessions[task_id]
        self._whole.discard(task_id)

    def flush(self) -> None:
        """Write what has changed."""
        tasks = []
        for row, before in self._tasks.values():
            values = _task_values(row)
            if values != before:
                self._count_task(before, values)
                tasks.append(values)
        self._db.executemany(f"INSERT OR REPLACE INTO tasks VALUES ({_TASK_MARKS})", tasks)
        sessions = []
        for session, before in self._held():
            values = _session_values(session)
            if values != before:
                self._count_session(before, values)
                sessions.append(values)
        self._db.executemany(f"INSERT OR REPLACE INTO sessions VALUES ({_SESSION_MARKS})", sessions)
        self._tasks.clear()
        self._sessions.clear()
        self._whole.clear()

    def _hold(self, row: SessionRow) -> SessionRow:
        self._sessions.setdefault(row.task_id, {})[row.session_id] = (row, _session_values(row))
        return row

    def _held(self) -> Iterator[tuple[SessionRow, tuple[Any, ...] | None]]:
        for of_task in self._sessions.values():
            yield from of_task.values()

    def _count_task(self, before: tuple[Any, ...] | None, after: tuple[Any, ...] | None) -> None:
        for values, sign in ((before, -1), (after, 1)):
            if values is not None:
                self.deltas.tasks += sign
                if values[10]:
                    self.deltas.settled_tasks += sign
                    self.deltas.settled_sessions += sign * int(values[8])

    def _count_session(self, before: tuple[Any, ...] | None, after: tuple[Any, ...] | None) -> None:
        for values, sign in ((before, -1), (after, 1)):
            if values is not None:
                self.deltas.sessions += sign
                _, _, member, _, stage, *_, has_result, over = values
                if member and not has_result and not over and stage != Stage.FINISHED:
                    self.deltas.flight[Stage(stage)] += sign


def _task_values(row: TaskRow) -> tuple[Any, ...]:
    return (
        row.task_id, row.source, row.repeat, row.accepted_ms, row.harness, row.ended_ms, row.outcome, row.expected,
        row.total, row.results, row.settled, row.heard_ms, row.status, row.since_ms,
    )  # fmt: skip


def _session_values(row: SessionRow) -> tuple[Any, ...]:
    return (
        row.task_id, row.session_id, row.member, row.sample, str(row.stage), row.attempt, row.node, row.at_ms,
        None if row.failure is None else msgspec.msgpack.encode(row.failure),
        None if row.outcome is None else msgspec.msgpack.encode(row.outcome),
        row.reward, row.has_result, row.over,
    )  # fmt: skip


def session_of(task_id: str, found: tuple[Any, ...]) -> SessionRow:
    """A row of `SESSION_FIELDS`."""
    session_id, member, sample, stage, attempt, node, at_ms, failure, outcome, reward, has_result, over = found
    return SessionRow(
        task_id, session_id, bool(member), sample, Stage(stage), attempt, node, at_ms,
        None if failure is None else _failure.decode(failure),
        None if outcome is None else _outcome.decode(outcome),
        reward, bool(has_result), bool(over),
    )  # fmt: skip
