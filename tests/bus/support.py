"""Events and processors that the bus's tests send around."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete

from polar.bus import Bus, Out, Record, Send, Transactional
from polar.bus.clients import stop_admin
from polar.schemas import CallStarted, RecordRef, SessionFinal, Stage, StageChanged, Tick


def tick(number: int) -> Tick:
    return Tick(leader_id="leader", number=number, at_ms=0)


def call(number: int, session: str = "s") -> Out:
    """An input record for a worker over `completions`."""
    event = CallStarted(
        completion_id=f"{session}-{number}", session_id=session, attempt=1, call=number, dialect="test", at_ms=0
    )
    return Out("completions", session, event)


def final(session: str) -> Out:
    return Out("completions", session, SessionFinal(session_id=session, attempt=1, at_ms=0))


def report(session: str, number: int) -> Out:
    """An output record: `number` as the attempt."""
    return Out(
        "stages", session, StageChanged(session_id=session, task_id="t", attempt=number, stage=Stage.BUILT, at_ms=0)
    )


class Copier:
    """A report for each call; `poison` numbers raise."""

    def __init__(self, poison: frozenset[int] = frozenset(), seen: list[tuple[str, int]] | None = None) -> None:
        self._poison = poison
        self._seen = seen if seen is not None else []

    def replay(self, record: Record) -> None:
        assert isinstance(record.value, CallStarted)
        self._seen.append(("replay", record.value.call))

    async def process(self, record: Record, send: Send) -> None:
        assert isinstance(record.value, CallStarted)
        self._seen.append(("process", record.value.call))
        await send(report(record.value.session_id, record.value.call))
        if record.value.call in self._poison:
            raise ValueError(f"cannot digest {record.value.call}")

    def replay_from(self, next_offset: int) -> int:
        return next_offset


class Counter:
    """Counts a session's calls from its first one to its `SessionFinal`, and reports the count then: a state that a
    worker has to rebuild."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, int]] = {}

    def replay(self, record: Record) -> None:
        self._take(record)

    async def process(self, record: Record, send: Send) -> None:
        count = self._take(record)
        if count is not None:
            assert record.key is not None
            await send(report(record.key, count))

    def replay_from(self, next_offset: int) -> int:
        return min((first for first, _ in self._open.values()), default=next_offset)

    def _take(self, record: Record) -> int | None:
        assert record.key is not None
        if isinstance(record.value, SessionFinal):
            return self._open.pop(record.key)[1]
        first, count = self._open.get(record.key, (record.offset, 0))
        self._open[record.key] = (first, count + 1)
        return None


async def until(condition: Callable[[], Awaitable[bool]] | Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if await found if isinstance(found, Awaitable) else found:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {getattr(condition, '__name__', condition)}")
        await asyncio.sleep(0.02)


async def aborted(writer: Transactional, *outs: Out) -> list[RecordRef]:
    """Sends records in a transaction that is aborted; where they stand."""
    refs: list[RecordRef] = []
    with suppress(ZeroDivisionError):
        async with writer.transaction() as opened:
            refs += await opened.send(*outs)
            raise ZeroDivisionError
    return refs


async def delete_below(bus: Bus, topic: str, partition: int, offset: int) -> None:
    """Moves the start of a partition's log, as retention does."""
    admin = await bus.clients.admin()
    try:
        where = TopicPartition(bus.settings.full(topic), partition)
        await admin.delete_records({where: RecordsToDelete(before_offset=offset)})
    finally:
        await stop_admin(admin)
