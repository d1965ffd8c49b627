"""Facts sorted outside of memory: one SQLite file without a name to find it by, gone with the process.

Rows are appended as they come and sorted once when they are read, by SQLite's external merge sort, so memory stays at
its cache (`CACHE_MIB`) plus one group, however many there are. A row takes about 150 bytes of disk, and about as much
again while it is sorted, in the folder that TMPDIR names. Used from one thread at a time.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final, NamedTuple

from .facts import Fact, Placed, decode, encode
from .report import Place

CACHE_MIB: Final = 64
FETCH: Final = 2_000
"""Rows taken from SQLite at once."""


class Row(NamedTuple):
    """A fact to keep: what it is about, and where it stands."""

    key: str
    topic: str
    partition: int
    offset: int
    fact: Fact


class Store:
    def __init__(self, topics: Iterable[str]) -> None:
        """`topics`: all there will be, in the order in which a group's facts are to be sorted."""
        self._topics = list(topics)
        self._number = {topic: number for number, topic in enumerate(self._topics)}
        file, path = tempfile.mkstemp(prefix="polar-audit-", suffix=".sqlite")
        os.close(file)
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            for pragma in (
                "journal_mode = OFF",
                "synchronous = OFF",
                "locking_mode = EXCLUSIVE",
                "temp_store = FILE",
                f"cache_size = {-CACHE_MIB * 1024}",
            ):
                self._db.execute(f"PRAGMA {pragma}").fetchall()
            self._db.execute("CREATE TABLE facts (key TEXT, topic INT, part INT, place INT, fact BLOB)")
            self._db.execute("CREATE TABLE sums (key TEXT, topic INT, part INT, place INT, fact BLOB)")
            self._db.execute("BEGIN")
        finally:
            # open it stays, and nobody has to tidy up after a kill
            os.unlink(path)
        self._indexed = False

    def add(self, rows: Iterable[Row], table: str = "facts") -> None:
        self._db.executemany(
            f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?)",
            [(row.key, self._number[row.topic], row.partition, row.offset, encode(row.fact)) for row in rows],
        )

    def groups(self, table: str = "facts") -> Iterator[tuple[str, list[Placed]]]:
        """Each key with its facts, in the order of topics, partitions and offsets."""
        cursor = self._db.cursor()
        cursor.arraysize = FETCH
        cursor.execute(f"SELECT key, topic, part, place, fact FROM {table} ORDER BY key, topic, part, place")
        topics = self._topics

        def rows() -> Iterator[tuple[str, int, int, int, bytes]]:
            while found := cursor.fetchmany():
                yield from found

        for key, group in groupby(rows(), key=lambda row: row[0]):
            yield (
                key,
                [
                    Placed(Place(topics[topic], partition, offset), decode(fact))
                    for _, topic, partition, offset, fact in group
                ],
            )

    def at(self, place: Place) -> tuple[str, Fact] | None:
        """What stands at a place of the log: key and fact."""
        if not self._indexed:
            # wanted for offences only, so a clean audit never pays for it
            self._db.execute("CREATE INDEX places ON facts (topic, part, place)")
            self._indexed = True
        number = self._number.get(place.topic)
        row = self._db.execute(
            "SELECT key, fact FROM facts WHERE topic = ? AND part = ? AND place = ? ORDER BY instr(key, '/') LIMIT 1",
            (number, place.partition, place.offset),
        ).fetchone()
        return None if row is None else (row[0], decode(row[1]))

    def count(self) -> int:
        (number,) = self._db.execute("SELECT count(*) FROM facts").fetchone()
        return int(number)

    def close(self) -> None:
        self._db.close()
