"""What is asked of the view's file. Each function is one look at one connection, on a thread that may wait."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable

from polar.schemas import SessionResult, Stage, TaskAccepted, TaskRejected, TaskResult, decode

from .book import SESSION_FIELDS, session_of
from .entries import Selected, SessionEntry, TaskEntry, TaskFilter
from .fold import SessionRow

_FIELDS = ", ".join(f"s.{name}" for name in SESSION_FIELDS.split(", "))


def task(db: sqlite3.Connection, task_id: str) -> TaskEntry | None:
    """A task with its sessions, in sample order; None: nothing is known of it."""
    found = db.execute("SELECT settled, results FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    if found is None:
        return None
    entry = TaskEntry(task_id, settled=bool(found[0]), results=found[1])
    _read_events(db, entry)
    query = (
        f"SELECT {_FIELDS}, r.value FROM sessions s LEFT JOIN results r USING (task_id, session_id) "
        "WHERE s.task_id = ? AND (s.member OR ?) ORDER BY s.sample IS NULL, s.sample, s.session_id"
    )
    for *fields, value in db.execute(query, (task_id, entry.accepted is None)):
        session = _session(session_of(task_id, tuple(fields)), value)
        entry.sessions[session.session_id] = session
    return entry


def _read_events(db: sqlite3.Connection, entry: TaskEntry) -> None:
    for (value,) in db.execute("SELECT value FROM task_events WHERE task_id = ?", (entry.task_id,)):
        event = decode(value, (TaskAccepted, TaskResult))
        if isinstance(event, TaskAccepted):
            entry.accepted = event
        else:
            assert isinstance(event, TaskResult)
            entry.result = event


def _session(row: SessionRow, value: bytes | None) -> SessionEntry:
    """The session's reports and its result put together: where it has one, that is what counts."""
    entry = SessionEntry(
        row.session_id, row.task_id, row.sample, row.stage, row.attempt, row.node, row.at_ms, row.failure, row.outcome
    )
    if value is not None:
        result = decode(value, (SessionResult,))
        assert isinstance(result, SessionResult)
        entry.result, entry.stage = result, Stage.FINISHED
        entry.attempt, entry.at_ms, entry.sample = result.attempt, result.at_ms, result.sample
        entry.node = result.node_id or row.node
        entry.outcome, entry.failure = result.outcome, result.error or result.outcome.failure
    return entry


def rejected(db: sqlite3.Connection, task_id: str) -> TaskRejected | None:
    """The last rejection of a task id."""
    found = db.execute("SELECT value FROM rejected WHERE task_id = ?", (task_id,)).fetchone()
    if found is None:
        return None
    event = decode(found[0], (TaskRejected,))
    assert isinstance(event, TaskRejected)
    return event


def settled(db: sqlite3.Connection, task_id: str) -> bool:
    """Whether a task has ended."""
    return db.execute("SELECT 1 FROM tasks WHERE task_id = ? AND settled", (task_id,)).fetchone() is not None


def select(db: sqlite3.Connection, wanted: TaskFilter) -> Selected:
    """The newest tasks that fit, newest first, without their sessions."""
    where, values = ["status IS NOT NULL"], list[str | int]()
    for column, sign, value in (
        ("status", "=", wanted.status),
        ("harness", "=", wanted.harness),
        ("since_ms", ">=", wanted.since_ms),
    ):
        if value is not None:
            where.append(f"{column} {sign} ?")
            values.append(value)
    query = (
        f"SELECT task_id, settled, results FROM tasks WHERE {' AND '.join(where)} "
        "ORDER BY since_ms DESC, task_id DESC LIMIT ?"
    )
    found = db.execute(query, (*values, wanted.limit + 1)).fetchall()
    entries = []
    for task_id, is_settled, results in found[: wanted.limit]:
        entry = TaskEntry(task_id, settled=bool(is_settled), results=results)
        _read_events(db, entry)
        entry.mean_reward = _mean_reward(db, entry)
        entries.append(entry)
    return Selected(entries, len(found) > wanted.limit)


def _mean_reward(db: sqlite3.Connection, entry: TaskEntry) -> float | None:
    query = "SELECT reward FROM sessions WHERE task_id = ? AND reward IS NOT NULL AND (member OR ?)"
    rewards = [value for (value,) in db.execute(query, (entry.task_id, entry.accepted is None))]
    return math.fsum(rewards) / len(rewards) if rewards else None


def statuses(db: sqlite3.Connection, limit: int) -> dict[str, str]:
    """Status by task id, of the newest `limit` tasks, oldest first."""
    query = "SELECT task_id, status FROM tasks WHERE status IS NOT NULL ORDER BY since_ms DESC, task_id DESC LIMIT ?"
    return dict(reversed(db.execute(query, (limit,)).fetchall()))


def ended_since(db: sqlite3.Connection, at_ms: int, limit: int) -> list[str]:
    """Tasks that ended then or later, oldest first; the newest `limit`."""
    query = "SELECT task_id FROM tasks WHERE settled = 1 AND ended_ms >= ? ORDER BY ended_ms DESC, task_id DESC LIMIT ?"
    return [task_id for (task_id,) in reversed(db.execute(query, (at_ms, limit)).fetchall())]


def everything(db: sqlite3.Connection) -> Iterable[str]:
    """Every task that is known, by id."""
    return [name for (name,) in db.execute("SELECT task_id FROM tasks WHERE status IS NOT NULL ORDER BY task_id")]
