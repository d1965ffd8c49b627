"""Nodes and the scheduler's ticks, as `nodes` has them: in memory, bounded, and written through to the view's file.

Pure but for `load` and `write`, which belong to the thread of the file.
"""

from __future__ import annotations

import sqlite3
from typing import Self

from polar.schemas import Event, NodeHeartbeat, Tick, decode, encode

from .entries import NodeEntry


class NodeBook:
    """One state; a draft of the next one is made for every transaction."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.nodes: dict[str, NodeEntry] = {}
        """By key, the longest silent first."""
        self.tick: Tick | None = None
        self.ticks = 0
        """Read so far, of all leaders."""
        self._changed: dict[str, int | None] = {}
        """Rows to write: the beat's offset, None where the row goes."""

    @classmethod
    def load(cls, db: sqlite3.Connection, limit: int) -> Self:
        """
        Raises:
            ValueError: a row is not readable.
        """
        made = cls(limit)
        for name, at_tick, beat in db.execute("SELECT name, at_tick, beat FROM nodes ORDER BY place"):
            event = decode(beat, (NodeHeartbeat, Tick))
            if isinstance(event, Tick):
                made.tick, made.ticks = event, at_tick
            else:
                assert isinstance(event, NodeHeartbeat)
                made.nodes[name] = NodeEntry(event, at_tick)
        return made

    def draft(self) -> NodeBook:
        made = NodeBook(self._limit)
        made.nodes, made.tick, made.ticks = dict(self.nodes), self.tick, self.ticks
        return made

    def apply(self, event: Event | None, key: str | None, offset: int) -> None:
        """Take one record; None is a tombstone."""
        match event:
            case Tick():
                self.tick = event
                self.ticks += 1
                self._changed[""] = offset
            case NodeHeartbeat():
                name = key or event.node_id
                self.nodes.pop(name, None)
                self.nodes[name] = NodeEntry(event, self.ticks)
                self._changed[name] = offset
                if len(self.nodes) > self._limit:
                    silent = next(iter(self.nodes))
                    del self.nodes[silent]
                    self._changed[silent] = None
            case None if key:
                self.nodes.pop(key, None)
                self._changed[key] = None
            case _:
                pass

    def write(self, db: sqlite3.Connection) -> None:
        """Write what has changed since `draft`."""
        for name, offset in self._changed.items():
            if offset is None:
                db.execute("DELETE FROM nodes WHERE name = ?", (name,))
                continue
            entry = self.nodes.get(name)
            event, at_tick = (entry.beat, entry.at_tick) if entry is not None else (self.tick, self.ticks)
            assert event is not None
            db.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?)", (name, offset, at_tick, encode(event)))
        self._changed.clear()
