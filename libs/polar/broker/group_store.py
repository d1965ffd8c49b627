"""Groups and committed offsets in the database.

Promises: an offset that was committed is read back until its topic or group is deleted; it never expires. Offsets of
an open transaction are kept apart and become the group's when the transaction commits.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from polar.broker.database import Database
from polar.broker.membership import SavedGroup

__all__ = ["CommittedOffset", "GroupStore"]


class CommittedOffset(NamedTuple):
    topic: str
    partition: int
    offset: int
    leader_epoch: int
    metadata: str


class GroupStore:
    """The rows of all groups. Saves made inside `Database.transaction` are committed together."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def groups(self) -> dict[str, SavedGroup | None]:
        """Every group that was saved or has offsets; None for one that has offsets only."""
        known: dict[str, SavedGroup | None] = {
            name: None for (name,) in self._database.query("SELECT DISTINCT group_id FROM offsets")
        }
        for name, state in self._database.query("SELECT id, state FROM groups"):
            known[name] = msgspec.msgpack.decode(state, type=SavedGroup)
        return known

    def group(self, name: str) -> SavedGroup | None:
        rows = self._database.query("SELECT state FROM groups WHERE id=?", (name,))
        return msgspec.msgpack.decode(rows[0][0], type=SavedGroup) if rows else None

    def has_offsets(self, group: str) -> bool:
        rows = self._database.query("SELECT EXISTS (SELECT 1 FROM offsets WHERE group_id=?)", (group,))
        return bool(rows[0][0])

    def save(self, group: str, state: SavedGroup) -> None:
        self._database.execute("INSERT OR REPLACE INTO groups VALUES (?, ?)", (group, msgspec.msgpack.encode(state)))

    def delete(self, group: str) -> None:
        with self._database.transaction():
            for table, column in (("groups", "id"), ("offsets", "group_id"), ("pending_offsets", "group_id")):
                self._database.execute(f"DELETE FROM {table} WHERE {column}=?", (group,))

    def commit(self, group: str, offsets: Iterable[CommittedOffset]) -> None:
        self._database.execute_many(
            "INSERT OR REPLACE INTO offsets VALUES (?, ?, ?, ?, ?, ?)", [(group, *row) for row in offsets]
        )

    def offset(self, group: str, topic: str, partition: int) -> CommittedOffset | None:
        rows = self._database.query(
            "SELECT topic, part, offset, leader_epoch, metadata FROM offsets WHERE group_id=? AND topic=? AND part=?",
            (group, topic, partition),
        )
        return CommittedOffset(*rows[0]) if rows else None

    def offsets(self, group: str) -> list[CommittedOffset]:
        rows = self._database.query(
            "SELECT topic, part, offset, leader_epoch, metadata FROM offsets WHERE group_id=?", (group,)
        )
        return [CommittedOffset(*row) for row in rows]

    def delete_offset(self, group: str, topic: str, partition: int) -> None:
        self._database.execute("DELETE FROM offsets WHERE group_id=? AND topic=? AND part=?", (group, topic, partition))

    # Offsets of open transactions

    def add_pending(self, transactional_id: str, group: str, offsets: Iterable[CommittedOffset]) -> None:
        self._database.execute_many(
            "INSERT OR REPLACE INTO pending_offsets VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(transactional_id, group, *row) for row in offsets],
        )

    def is_pending(self, group: str, topic: str, partition: int) -> bool:
        """Whether an open transaction would change this offset."""
        rows = self._database.query(
            "SELECT EXISTS (SELECT 1 FROM pending_offsets WHERE group_id=? AND topic=? AND part=?)",
            (group, topic, partition),
        )
        return bool(rows[0][0])

    def has_pending(self, group: str) -> bool:
        rows = self._database.query("SELECT EXISTS (SELECT 1 FROM pending_offsets WHERE group_id=?)", (group,))
        return bool(rows[0][0])

    def end_pending(self, transactional_id: str, *, commit: bool) -> None:
        """Make a transaction's offsets the groups' own, or drop them."""
        with self._database.transaction():
            if commit:
                self._database.execute(
                    "INSERT OR REPLACE INTO offsets SELECT group_id, topic, part, offset, leader_epoch, metadata "
                    "FROM pending_offsets WHERE transactional_id=?",
                    (transactional_id,),
                )
            self._database.execute("DELETE FROM pending_offsets WHERE transactional_id=?", (transactional_id,))
