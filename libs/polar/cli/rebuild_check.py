"""`polar rebuild --check`: whether building again gives what stands in `polar.built`, byte for byte."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
from msgspec.structs import replace

from polar.bus import Bus, RecordGone
from polar.client.ranges import Stretch, bounds
from polar.client.scratch import Scratch
from polar.schemas import RecordRef, Trajectory, encode

EXPLAINED: Final = 50
"""Differences that are looked into: each costs a look-up."""

_SCHEMA: Final = """
CREATE TABLE built (session TEXT, partition INTEGER, offset INTEGER, sha256 BLOB, source TEXT,
    PRIMARY KEY (session, partition, offset)) WITHOUT ROWID;
"""

Chosen = Callable[[Collection[str]], Awaitable[set[str]]]


class Finding(StrEnum):
    SAME = "same"
    DIFFERS = "differs"
    MISSING = "missing"
    """`polar.built` should have it and does not."""
    EXPIRED = "expired"
    """`polar.built` no longer has records of that age."""


class BuiltThere:
    """What `polar.built` holds of some sessions: places and digests. An async context manager; first `gather`."""

    def __init__(self, bus: Bus, folder: Path, *, watch: Callable[[str, int, int], None] = lambda *_: None) -> None:
        self._bus = bus
        self._scratch = Scratch(folder, _SCHEMA)
        self._watch = watch
        self._explained = 0
        self._oldest_ms: dict[int, int] = {}
        """Time stamp of the first record kept, by partition that has lost some."""

    async def __aenter__(self) -> Self:
        await self._scratch.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._scratch.__aexit__(kind, error, trace)

    async def gather(self, chosen: Chosen) -> None:
        """Reads `built` from its beginning; `chosen` gives those of some sessions that matter."""
        found = await bounds(self._bus, "built")
        total = sum(where.end - where.start for where in found.values())
        done = 0
        for partition, (start, end) in found.items():
            stretch = Stretch(self._bus, "built", partition, start, end)
            if start and start == end:
                self._oldest_ms[partition] = self._bus.clock.now_ms()
            async with aclosing(stretch.batches()) as batches:
                async for batch in batches:
                    if (start or stretch.gone) and batch:
                        self._oldest_ms.setdefault(partition, batch[0].timestamp_ms)
                    wanted = await chosen({one.key for one in batch if one.key is not None})
                    rows = [
                        (
                            one.key,
                            one.partition,
                            one.offset,
                            hashlib.sha256(one.raw or b"").digest(),
                            one.headers.get("source", b"").decode(errors="replace"),
                        )
                        for one in batch
                        if one.key in wanted
                    ]
                    await self._scratch.do(lambda database, rows=rows: _keep(database, rows))  # type: ignore[misc]
                    self._watch("reading polar.built", done + stretch.position - start, total)
            done += end - start

    async def compare(self, trajectory: Trajectory, value: bytes, closed_ms: int) -> tuple[Finding, str]:
        """What is to be said of a session built again, and of the difference.

        Args:
            trajectory, value: as built again.
            closed_ms: the closing record's time stamp, or the close's time.

        Raises:
            BusError: the log cannot be read.
        """
        session = trajectory.session_id
        query = "SELECT partition, offset, sha256, source FROM built WHERE session = ?"
        rows = await self._scratch.do(lambda database: database.execute(query, (session,)).fetchall())
        if not rows:
            partition = self._bus.partition_of("built", session)
            oldest = self._oldest_ms.get(partition)
            if oldest is not None and closed_ms <= oldest:
                return Finding.EXPIRED, ""
            return Finding.MISSING, "no record in `built`"
        digest = hashlib.sha256(value).digest()
        closing = trajectory.closing
        source = f"{closing.topic}/{closing.partition}/{closing.offset}"
        for partition, offset, sha256, there in rows:
            if sha256 != digest:
                ref = RecordRef(topic="built", partition=partition, offset=offset)
                self._explained += 1
                if self._explained > EXPLAINED:
                    return Finding.DIFFERS, f"see offset {offset} of partition {partition} of `built`"
                return Finding.DIFFERS, await self._difference(ref, trajectory)
            if there != source:
                return Finding.DIFFERS, f"built from {there or 'an unnamed record'} there, from {source} now"
        if len(rows) > 1:
            return Finding.DIFFERS, f"{len(rows)} records in `built`"
        return Finding.SAME, ""

    async def _difference(self, ref: RecordRef, again: Trajectory) -> str:
        try:
            there = (await self._bus.lookup(ref)).value
        except RecordGone:
            return "another trajectory (gone meanwhile)"
        if not isinstance(there, Trajectory):
            return "what stands in `built` cannot be read"
        names = differing(there, again)
        if there.builder_version != again.builder_version:
            return f"builder version {there.builder_version} there, {again.builder_version} here; {', '.join(names)}"
        return f"in {', '.join(names)}" if names else "in its bytes only"


def differing(one: Trajectory, other: Trajectory) -> list[str]:
    """The fields in which two trajectories differ."""
    names = [field.name for field in msgspec.structs.fields(Trajectory)]
    # compared as they are encoded: NaN is equal to itself there
    return [name for name in names if encode(replace(one, **{name: getattr(other, name)})) != encode(one)]


def _keep(database: sqlite3.Connection, rows: list[tuple[str | None, int, int, bytes, str]]) -> None:
    database.execute("BEGIN")
    database.executemany("INSERT OR REPLACE INTO built VALUES (?, ?, ?, ?, ?)", rows)
    database.execute("COMMIT")
