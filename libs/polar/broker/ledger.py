"""What the database keeps beside the segment files of one partition.

Start offset, facts and index of sealed segments, a snapshot of producer states, aborted transactions and past
compactions. Promises: all of it except the start offset can be rebuilt from the segment files, so a stale or
missing row costs a scan at start-up and never a record.
"""

from dataclasses import dataclass
from uuid import UUID

from polar.broker.database import Database
from polar.broker.producers import AbortedTransaction

__all__ = ["LogLedger", "SegmentFacts"]

MAX_CLEANINGS = 16
"""Past compactions remembered per partition; older ones are merged into the next, which only delays tombstones."""


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """A segment file as it was when its row was written; it is trusted while size and mtime are the same."""

    size: int
    mtime_ns: int
    next_offset: int
    first_timestamp: int
    max_timestamp: int
    index: bytes


class LogLedger:
    """The rows of one partition."""

    def __init__(self, database: Database, topic_id: UUID, partition: int) -> None:
        self._database = database
        self._key = (topic_id.bytes, partition)

    def start_offset(self) -> int:
        rows = self._database.query("SELECT start_offset FROM logs WHERE topic_id=? AND part=?", self._key)
        return int(rows[0][0]) if rows else 0

    def set_start_offset(self, offset: int) -> None:
        self._set("start_offset", offset)

    def cleaned_to(self) -> int:
        """Offset below which the log has been compacted at least once."""
        rows = self._database.query("SELECT cleaned_to FROM logs WHERE topic_id=? AND part=?", self._key)
        return int(rows[0][0]) if rows else 0

    def producers(self) -> tuple[int, bytes | None]:
        """The saved producer states and the offset up to which they are complete."""
        rows = self._database.query("SELECT producers_at, producers FROM logs WHERE topic_id=? AND part=?", self._key)
        return (int(rows[0][0]), rows[0][1]) if rows else (0, None)

    def save_producers(self, offset: int, states: bytes) -> None:
        self._database.execute(
            "INSERT INTO logs (topic_id, part, producers_at, producers) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (topic_id, part) DO UPDATE "
            "SET producers_at=excluded.producers_at, producers=excluded.producers",
            (*self._key, offset, states),
        )

    def segment(self, file: str) -> SegmentFacts | None:
        rows = self._database.query(
            "SELECT size, mtime_ns, next_offset, first_timestamp, max_timestamp, idx FROM segments "
            "WHERE topic_id=? AND part=? AND file=?",
            (*self._key, file),
        )
        return SegmentFacts(*rows[0]) if rows else None

    def save_segment(self, file: str, facts: SegmentFacts) -> None:
        self._database.execute(
            "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *self._key,
                file,
                facts.size,
                facts.mtime_ns,
                facts.next_offset,
                facts.first_timestamp,
                facts.max_timestamp,
                facts.index,
            ),
        )

    def forget_segment(self, file: str) -> None:
        self._database.execute("DELETE FROM segments WHERE topic_id=? AND part=? AND file=?", (*self._key, file))

    def add_aborted(self, transaction: AbortedTransaction) -> None:
        self._database.execute(
            "INSERT OR IGNORE INTO aborted VALUES (?, ?, ?, ?, ?)",
            (*self._key, transaction.last_offset, transaction.first_offset, transaction.producer_id),
        )

    def aborted(self, start: int, end: int) -> list[AbortedTransaction]:
        """Aborted transactions with records or their marker in `[start, end)`."""
        rows = self._database.query(
            "SELECT producer_id, first_offset, last_offset FROM aborted "
            "WHERE topic_id=? AND part=? AND last_offset>=? AND first_offset<? ORDER BY first_offset",
            (*self._key, start, end),
        )
        return [AbortedTransaction(*row) for row in rows]

    def last_aborted(self) -> int:
        """Marker offset of the latest aborted transaction, -1 when there is none."""
        rows = self._database.query(
            "SELECT MAX(last_offset) FROM aborted WHERE topic_id=? AND part=?",
            self._key,
        )
        return -1 if rows[0][0] is None else int(rows[0][0])

    def forget_aborted(self, before: int) -> None:
        self._database.execute(
            "DELETE FROM aborted WHERE topic_id=? AND part=? AND last_offset<?", (*self._key, before)
        )

    def delete_horizon(self, before_ms: int) -> int:
        """Offset below which a compaction ended at or before `before_ms`: tombstones below it may go."""
        rows = self._database.query(
            "SELECT MAX(end_offset) FROM cleanings WHERE topic_id=? AND part=? AND at_ms<=?", (*self._key, before_ms)
        )
        return int(rows[0][0] or 0)

    def add_cleaning(self, end_offset: int, at_ms: int) -> None:
        """Note that everything below `end_offset` has been compacted."""
        with self._database.transaction():
            self._set("cleaned_to", end_offset)
            self._database.execute(
                "INSERT OR IGNORE INTO cleanings VALUES (?, ?, ?, ?)", (*self._key, end_offset, at_ms)
            )
            rows = self._database.query(
                "SELECT end_offset FROM cleanings WHERE topic_id=? AND part=? ORDER BY end_offset DESC", self._key
            )
            # Between the oldest and the latest, dropping one makes its tombstones wait for the next.
            for (offset,) in rows[MAX_CLEANINGS - 1 : -1]:
                self._database.execute(
                    "DELETE FROM cleanings WHERE topic_id=? AND part=? AND end_offset=?", (*self._key, offset)
                )

    def forget(self) -> None:
        """The partition is gone."""
        with self._database.transaction():
            for table in ("logs", "segments", "aborted", "cleanings"):
                self._database.execute(f"DELETE FROM {table} WHERE topic_id=? AND part=?", self._key)

    def _set(self, column: str, value: int) -> None:
        self._database.execute(
            f"INSERT INTO logs (topic_id, part, {column}) VALUES (?, ?, ?) "
            f"ON CONFLICT (topic_id, part) DO UPDATE SET {column}=excluded.{column}",
            (*self._key, value),
        )
