"""The broker's SQLite database: everything that is not a record.

Promises: a committed statement survives SIGKILL of the process (write-ahead log, written before the commit
returns); with `Flusher` it also survives power loss, because the flusher syncs `wal_path`. Statements take
microseconds and run on the event loop's thread; checkpoints run elsewhere, over a connection of their own.
The tables belong to the modules named beside them.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from polar.broker.errors import BrokerError, StorageFailed

__all__ = ["Database"]

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
-- topics.py
CREATE TABLE topics (name TEXT PRIMARY KEY, id BLOB NOT NULL UNIQUE, partitions INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE topic_configs (
  topic_id BLOB NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (topic_id, name)) WITHOUT ROWID;
-- ledger.py
CREATE TABLE logs (
  topic_id BLOB NOT NULL, part INTEGER NOT NULL, start_offset INTEGER NOT NULL DEFAULT 0,
  cleaned_to INTEGER NOT NULL DEFAULT 0, producers_at INTEGER NOT NULL DEFAULT 0, producers BLOB,
  PRIMARY KEY (topic_id, part));
CREATE TABLE segments (
  topic_id BLOB NOT NULL, part INTEGER NOT NULL, file TEXT NOT NULL, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,
  next_offset INTEGER NOT NULL, first_timestamp INTEGER NOT NULL, max_timestamp INTEGER NOT NULL, idx BLOB NOT NULL,
  PRIMARY KEY (topic_id, part, file));
CREATE TABLE aborted (
  topic_id BLOB NOT NULL, part INTEGER NOT NULL, last_offset INTEGER NOT NULL, first_offset INTEGER NOT NULL,
  producer_id INTEGER NOT NULL, PRIMARY KEY (topic_id, part, last_offset)) WITHOUT ROWID;
CREATE TABLE cleanings (
  topic_id BLOB NOT NULL, part INTEGER NOT NULL, end_offset INTEGER NOT NULL, at_ms INTEGER NOT NULL,
  PRIMARY KEY (topic_id, part, end_offset)) WITHOUT ROWID;
-- group_store.py
CREATE TABLE groups (id TEXT PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE offsets (
  group_id TEXT NOT NULL, topic TEXT NOT NULL, part INTEGER NOT NULL, offset INTEGER NOT NULL,
  leader_epoch INTEGER NOT NULL, metadata TEXT NOT NULL, PRIMARY KEY (group_id, topic, part)) WITHOUT ROWID;
CREATE INDEX offsets_by_topic ON offsets (topic);
CREATE TABLE pending_offsets (
  transactional_id TEXT NOT NULL, group_id TEXT NOT NULL, topic TEXT NOT NULL, part INTEGER NOT NULL,
  offset INTEGER NOT NULL, leader_epoch INTEGER NOT NULL, metadata TEXT NOT NULL,
  PRIMARY KEY (transactional_id, group_id, topic, part)) WITHOUT ROWID;
CREATE INDEX pending_offsets_by_group ON pending_offsets (group_id);
-- transactions.py
CREATE TABLE transactions (id TEXT PRIMARY KEY, producer_id INTEGER NOT NULL, state BLOB NOT NULL);
"""


class Database:
    """One connection for the loop's thread.

    Raises `BrokerError` when the file cannot be opened, `StorageFailed` when it can no longer be written: memory
    and disk may then differ, so the broker has to stop and start from the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wal_path = path.with_name(path.name + "-wal")
        self.dirty = False
        """Whether something was committed since the flusher last synced the write-ahead log."""
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode=WAL")
            # Commits write without syncing (the flusher does that); checkpoints sync before they move pages.
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute("PRAGMA wal_autocheckpoint=0")
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._connection.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={SCHEMA_VERSION};COMMIT;")
            elif version != SCHEMA_VERSION:
                raise BrokerError(f"{path.name} has schema {version}, this broker writes {SCHEMA_VERSION}")
        except sqlite3.DatabaseError as error:
            raise BrokerError(
                f"{path} cannot be read ({error}). Restore it from a copy, or move the whole data directory away."
            ) from error

    def query(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        with _storage():
            return self._connection.execute(sql, parameters).fetchall()

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> None:
        with _storage():
            self._connection.execute(sql, parameters)
        self.dirty = True

    def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        with self.transaction(), _storage():
            self._connection.executemany(sql, rows)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements inside are committed together, or none. Joins a transaction that is already open."""
        if self._connection.in_transaction:
            yield
            return
        with _storage():
            self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with _storage():
                self._connection.execute("ROLLBACK")
            raise
        with _storage():
            self._connection.execute("COMMIT")
        self.dirty = True

    def get_meta(self, key: str) -> str | None:
        rows = self.query("SELECT value FROM meta WHERE key=?", (key,))
        return str(rows[0][0]) if rows else None

    def set_meta(self, key: str, value: str) -> None:
        self.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value=excluded.value", (key, value)
        )

    def checkpoint(self) -> None:
        """Move the write-ahead log into the database file, so that it stays small. For a worker thread."""
        with _storage(), closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        self._connection.close()


@contextmanager
def _storage() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StorageFailed(
            f"the database failed: {error}. Free space or repair the disk, then start again."
        ) from error
