"""Sessions of every kind, and reading and writing the log, for tests that build again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete
from msgspec.structs import replace

from polar.builder import Entry
from polar.builder.rebuild_select import Selection
from polar.builder.rebuilding import Left, Rebuilder, Rebuilt
from polar.bus import Bus, Out, Record
from polar.bus.clients import stop_admin
from polar.schemas import (
    AttemptFenced,
    BuilderSpec,
    CompletionCaptured,
    Event,
    FailureKind,
    SessionClosed,
    SessionFinal,
    SessionOpened,
)
from polar.service.clock import SystemClock
from tests.builder.toy import Session, say, user

MEMORY = 3_000
"""Bytes of calls: little, so that the scratch file is used."""


class At(SystemClock):
    """A clock whose time is told: what is written has that time stamp."""

    def __init__(self, now_ms: int) -> None:
        self.ms = now_ms

    def now_ms(self) -> int:
        return self.ms


def played(name: str, calls: int, seed: int, **more: Any) -> Session:
    """A linear session, not closed yet."""
    session = Session(seed=seed, session_id=name, **more)
    chance = random.Random(seed)
    messages = [user("ab" * 5)]
    for _ in range(calls):
        reply = say("abc", chance)
        session.call(messages, reply)
        messages = [*messages, reply.message, user("d")]
    return session


def of_every_kind() -> list[Session]:
    """Closed and final: plain ones, and ones with everything that can go wrong."""
    chance = random.Random(11)
    plain = played("plain", 4, 1)
    deltas = played("deltas", 5, 2, delta=True)
    own = played("own-builder", 3, 3, builder=BuilderSpec(strategy="per_request", config={"train_greedy": True}))

    fenced = played("fenced", 3, 4, delta=True)
    stale = fenced.start()  # of attempt 1, and it ends after attempt 2 has begun
    attempt = fenced.attempt
    fenced.fence()
    again = say("cab", chance)
    fenced.call([user("aha")], again)
    fenced.attempt = attempt
    fenced.capture(stale, [user("bad")], say("ab", chance))
    fenced.call([user("dead")], say("ab", chance))
    fenced.attempt = attempt + 1
    fenced.call([user("aha"), again.message, user("b")], say("bca", chance))

    late = played("late", 2, 5)
    waiting = late.start()
    unfinished = played("unfinished", 2, 6)
    unfinished.start()
    failing = played("failing", 2, 7)
    failing.fail(failing.start())
    failing.fail(failing.start(), FailureKind.CANCELLED)
    silent = Session(seed=8, session_id="silent")
    rejected = played("config-wrong", 1, 9, builder=BuilderSpec(config={"no_such": 1}))

    sessions = [plain, deltas, own, fenced, late, unfinished, failing, silent, rejected]
    for session in sessions:
        session.close()
    late.call([user("ach")], say("ab", chance))
    late.capture(waiting, [user("bach")], say("ab", chance))
    late.call([user("cache")], say("ab", chance))
    for session in sessions:
        session.final()
    late.call([user("edge")], say("ab", chance))
    return sessions


def mixed(sessions: Iterable[Session], seed: int = 5) -> Iterator[Entry]:
    """The sessions' records, interleaved at random."""
    chance = random.Random(seed)
    queues = [list(session.records) for session in sessions]
    while queues:
        queue = chance.choice(queues)
        yield queue.pop(0)
        queues = [one for one in queues if one]


def of_task(entries: Iterable[Entry], task: str, group: str | None = None, **opened: Any) -> list[Entry]:
    """The same records as a session of `task`; `opened`: further fields of `SessionOpened`."""
    named = {"task_id": task, "group_id": group or task}
    found = []
    for ref, event in entries:
        if isinstance(event, SessionOpened):
            event = replace(event, **named, **opened)
        elif isinstance(event, CompletionCaptured):
            event = replace(event, **named)
        found.append(Entry(ref, event))
    return found


def at(entries: Iterable[Entry], ms: int) -> list[Entry]:
    """The same records, those of the scheduler told at `ms`."""
    told = SessionOpened | AttemptFenced | SessionClosed | SessionFinal
    return [Entry(ref, replace(event, at_ms=ms) if isinstance(event, told) else event) for ref, event in entries]


async def write(bus: Bus, entries: Iterable[Entry]) -> list[Entry]:
    """Writes records in order; as they stand on the log."""
    entries = list(entries)
    refs = await bus.send(*(Out("completions", session_of(one.event), one.event) for one in entries))
    return [Entry(ref, entry.event) for ref, entry in zip(refs, entries, strict=True)]


def session_of(event: Event) -> str:
    return str(event.session_id)  # type: ignore[attr-defined]


async def committed(bus: Bus, topic: str) -> list[Record]:
    """All that a reader of `topic` sees now."""
    reader = await bus.reader([topic])
    try:
        return [record async for record in reader.to_end()]
    finally:
        await reader.close()


async def again(
    bus: Bus, folder: Path, selection: Selection | None = None, **more: Any
) -> tuple[dict[str, Rebuilt], Left]:
    """Sessions built again, in the order in which they came, and what is left."""
    found: dict[str, Rebuilt] = {}
    more = {"memory_bytes": MEMORY, **more}
    async with Rebuilder(bus, selection or Selection(), folder=folder, **more) as rebuilder:
        await rebuilder.find()
        async with aclosing(rebuilder.trajectories()) as trajectories:
            async for one in trajectories:
                assert one.trajectory.session_id not in found, "built twice"
                found[one.trajectory.session_id] = one
        return found, await rebuilder.left()


async def forget(bus: Bus, topic: str, before: dict[int, int]) -> None:
    """Deletes the records of some partitions below an offset, as retention does."""
    admin = await bus.clients.admin()
    try:
        full = bus.settings.full(topic)
        await admin.delete_records(
            {TopicPartition(full, one): RecordsToDelete(before_offset=offset) for one, offset in before.items()}
        )
    finally:
        await stop_admin(admin)


def leftovers(folder: Path) -> list[Path]:
    """Scratch files."""
    return list(folder.glob("*.sqlite"))


def names(sessions: Sequence[Session]) -> set[str]:
    return {one.session_id for one in sessions}
