"""What the log says of sessions that are built again: outcome, latest reward, and how their groups were decided.

A rebuilt trajectory gets what `polar.trajectories` has of its session, or `polar.graded` where that has not been
published yet, and over it the latest revision in `polar.rewards` whose grading succeeded. A group's `GroupClosed` goes
along once all its members have been built again, with their revised rewards. What is kept of the log stands on disk.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeVar

from msgspec.structs import replace

from polar.bus import Bus, Record
from polar.client.ranges import Stretch, bounds
from polar.client.scratch import Scratch
from polar.schemas import Event, Grade, GroupClosed, RewardRevised, SessionGraded, Trajectory, decode, encode

MARGIN_MS: Final = 3_600_000
"""By how much the finisher's clock may be behind the scheduler's: a trajectory comes after its session's close."""
PAGE: Final = 200
TOPICS: Final = ("trajectories", "graded", "rewards")

_SCHEMA: Final = """
CREATE TABLE graded (session TEXT PRIMARY KEY, value BLOB, source TEXT) WITHOUT ROWID;
CREATE TABLE revised (session TEXT PRIMARY KEY, revision INTEGER, value BLOB, source TEXT) WITHOUT ROWID;
CREATE TABLE built (session TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE groups (partition INTEGER, offset INTEGER, value BLOB, PRIMARY KEY (partition, offset)) WITHOUT ROWID;
"""

Chosen = Callable[[Collection[str]], Awaitable[set[str]]]
"""Those of some sessions that matter."""
Watch = Callable[[str, int, int], None]
EventT = TypeVar("EventT", bound=Event)


class Outcome(NamedTuple):
    """What is known of a session."""

    graded: SessionGraded
    """With the latest reward."""
    revision: int
    """0: never revised."""
    source: str
    """Where the reward stands: topic/partition/offset."""


class Closing(NamedTuple):
    """A decided group."""

    event: GroupClosed
    source: str
    missing: int
    """Members that were not built again."""


class Outcomes:
    """An async context manager; first `gather`, then `of` for each session, at last `groups`."""

    def __init__(self, bus: Bus, folder: Path, *, watch: Watch = lambda *_: None) -> None:
        self._bus = bus
        self._scratch = Scratch(folder, _SCHEMA)
        self._watch = watch

    async def __aenter__(self) -> Self:
        await self._scratch.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._scratch.__aexit__(kind, error, trace)

    async def gather(self, chosen: Chosen, since_ms: int | None) -> None:
        """Reads the topics from the time when the first of the sessions was closed; None: from their beginning."""
        since_ms = None if since_ms is None else since_ms - MARGIN_MS
        found = {topic: await bounds(self._bus, topic, since_ms=since_ms) for topic in TOPICS}
        total = sum(where.end - where.start for parts in found.values() for where in parts.values())
        done = 0
        for topic in TOPICS:
            for partition, (start, end) in found[topic].items():
                stretch = Stretch(self._bus, topic, partition, start, end)
                async with aclosing(stretch.batches()) as batches:
                    async for batch in batches:
                        await self._take(batch, chosen)
                        self._watch("reading rewards", done + stretch.position - start, total)
                done += end - start

    async def of(self, session: str) -> Outcome | None:
        """What is known of a session; None: it is not graded, or no longer on the log."""

        def work(database: sqlite3.Connection) -> tuple[tuple[bytes, str] | None, tuple[int, bytes, str] | None]:
            graded = database.execute("SELECT value, source FROM graded WHERE session = ?", (session,)).fetchone()
            query = "SELECT revision, value, source FROM revised WHERE session = ?"
            return graded, database.execute(query, (session,)).fetchone()

        row, revision = await self._scratch.do(work)
        if row is None:
            return None
        graded = _read(row[0], SessionGraded)
        if revision is None:
            return Outcome(graded, 0, row[1])
        number, value, source = revision
        return Outcome(revised(graded, _read(value, RewardRevised)), number, source)

    async def built(self, sessions: Collection[str]) -> None:
        """These have been built again."""

        def work(database: sqlite3.Connection) -> None:
            database.executemany("INSERT OR IGNORE INTO built VALUES (?)", ((one,) for one in sessions))

        await self._scratch.do(work)

    async def groups(self) -> AsyncGenerator[Closing]:
        """The groups that have a selected session, in log order, each with its members' latest rewards."""
        after = (-1, -1)
        while True:
            rows = await self._scratch.do(lambda database, after=after: _page(database, after))  # type: ignore[misc]
            if not rows:
                return
            for partition, offset, value in rows:
                after = (partition, offset)
                event = _read(value, GroupClosed)
                members = [one.session_id for one in event.members]
                have, rewards = await self._scratch.do(
                    lambda database, members=members: (_built(database, members), _rewards(database, members))  # type: ignore[misc]
                )
                event = replace(
                    event,
                    members=[
                        replace(one, reward=rewards[one.session_id]) if one.session_id in rewards else one
                        for one in event.members
                    ],
                )
                yield Closing(event, f"trajectories/{partition}/{offset}", len(set(members) - have))

    async def _take(self, batch: list[Record], chosen: Chosen) -> None:
        names = {name for record in batch for name in _sessions(record.value)}
        wanted = await chosen(names)
        kept = [record for record in batch if not wanted.isdisjoint(_sessions(record.value))]
        if kept:
            await self._scratch.do(lambda database: _keep(database, kept))


def graded_of(trajectory: Trajectory) -> SessionGraded:
    """The grade that made a published trajectory what it is, but for what only concerns its building.

    `finished(built, graded_of(published))` is `published` again, where `built` is what it was finished from.
    """
    trace_rewards = {
        trace.trace_id: trace.reward
        for trace in trajectory.traces
        if trace.reward is not None and (not trace.trainable or trace.reward != trajectory.reward)
    }
    return SessionGraded(
        session_id=trajectory.session_id,
        attempt=trajectory.attempt,
        task_id=trajectory.task_id,
        group_id=trajectory.group_id,
        outcome=trajectory.outcome,
        built=trajectory.closing,  # not known, and not needed
        grade=Grade(
            reward=trajectory.reward,
            rewards=trajectory.rewards,
            trace_rewards=trace_rewards,
            report=trajectory.report,
        ),
        evaluator=trajectory.evaluator,
        evaluator_version=trajectory.evaluator_version,
        artifacts=trajectory.artifacts,
        timing_ms=trajectory.timing_ms,
        at_ms=0,
    )


def revised(graded: SessionGraded, revision: RewardRevised) -> SessionGraded:
    """A grade as a later one has it."""
    return replace(
        graded,
        grade=Grade(
            reward=revision.reward,
            rewards=revision.rewards,
            trace_rewards=revision.trace_rewards,
            report=revision.report,
        ),
        evaluator=revision.evaluator,
        evaluator_version=revision.evaluator_version,
    )


def _sessions(event: Event | None) -> list[str]:
    """The sessions that a record tells something of."""
    match event:
        case Trajectory():
            return [event.session_id]
        case SessionGraded() if event.revision == 0:
            return [event.session_id]
        case RewardRevised() if event.failure is None:
            return [event.session_id]
        case GroupClosed():
            return [one.session_id for one in event.members]
    return []


def _keep(database: sqlite3.Connection, records: list[Record]) -> None:
    database.execute("BEGIN")
    for record in records:
        event = record.value
        source = f"{record.topic}/{record.partition}/{record.offset}"
        match event:
            case Trajectory() | SessionGraded():
                # `trajectories` is read first, and its first record of a session is the one that counts
                graded = graded_of(event) if isinstance(event, Trajectory) else event
                row = (event.session_id, encode(graded), source)
                database.execute("INSERT OR IGNORE INTO graded VALUES (?, ?, ?)", row)
            case RewardRevised():
                query = "SELECT 1 FROM revised WHERE session = ? AND revision > ?"
                if database.execute(query, (event.session_id, event.revision)).fetchone() is None:
                    new = (event.session_id, event.revision, encode(event), source)
                    database.execute("INSERT OR REPLACE INTO revised VALUES (?, ?, ?, ?)", new)
            case GroupClosed():
                place = (record.partition, record.offset, encode(event))
                database.execute("INSERT OR REPLACE INTO groups VALUES (?, ?, ?)", place)
    database.execute("COMMIT")


def _page(database: sqlite3.Connection, after: tuple[int, int]) -> list[tuple[int, int, bytes]]:
    query = "SELECT partition, offset, value FROM groups WHERE (partition, offset) > (?, ?) ORDER BY 1, 2 LIMIT ?"
    return database.execute(query, (*after, PAGE)).fetchall()


def _built(database: sqlite3.Connection, members: list[str]) -> set[str]:
    query = "SELECT 1 FROM built WHERE session = ?"
    return {one for one in members if database.execute(query, (one,)).fetchone() is not None}


def _rewards(database: sqlite3.Connection, members: list[str]) -> dict[str, float | None]:
    """Revised rewards, by session that has one."""
    found: dict[str, float | None] = {}
    for one in members:
        row = database.execute("SELECT value FROM revised WHERE session = ?", (one,)).fetchone()
        if row is not None:
            found[one] = _read(row[0], RewardRevised).reward
    return found


def _read(value: bytes, kind: type[EventT]) -> EventT:
    event = decode(value, (kind,))
    assert isinstance(event, kind)
    return event
