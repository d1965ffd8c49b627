"""One input partition of a `PartitionWorker`: cursor, state, transactions, poison.

In this order, each time the partition is (re)opened: start its transactional producer, which ends or aborts what a
former owner has open and fences it; only then read the cursor, read committed, to the end; only then read the input,
from the cursor's `replay_from`. Records below the cursor's `next` rebuild the state and emit nothing; the others are
processed, and the cursor moves in the transaction of what they led to. On any error all of this starts anew, with a
fresh state.

Records that lead to no output need no transaction of their own: processing them again leads to no output again, so
their cursor may wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

import structlog

from polar.schemas.base import RecordRef
from polar.schemas.results import Cursor

from .bus import Bus
from .cursors import open_at_cursors
from .errors import BusError, Fenced, RecordGone
from .reader import Reader
from .records import Out, Record
from .transactional import Transaction, Transactional

TRIES = 2
"""A record is tried so often before it goes to `dead`: once could be a passing fault of the machine."""
OPEN_SHARE = 0.2
"""Of the transaction's time-out, after which a batch is cut short and committed."""
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 5.0

Send = Callable[..., Awaitable[list[RecordRef]]]
"""`await send(Out(…), …)`: within the batch's transaction, which the first send opens; the broker's offsets."""

_log = structlog.get_logger(__name__)


class Processor(Protocol):
    """The state of one input partition. Fresh whenever the partition is (re)opened.

    `process(r)` must leave the same state as `replay(r)`: which of the two a record goes through depends on where a
    crash fell. What `process` sends is a function of the records so far. It sees no tombstones and nothing that cannot
    be decoded.
    """

    def replay(self, record: Record) -> None:
        """Takes a record into the state; emits nothing."""
        ...

    async def process(self, record: Record, send: Send) -> None:
        """Takes a record into the state and sends what follows from it.

        Slow work goes before the first `send` of the record, off the loop. An exception other than a retryable
        `BusError` makes the record a suspect: it is tried once more with a fresh state, then goes to `dead`.
        """
        ...

    def replay_from(self, next_offset: int) -> int:
        """The oldest record still needed to rebuild the state, where `next_offset` is processed next; that, if none."""
        ...


@dataclass(slots=True)
class Progress:
    """Where a partition is. Offsets are of the input."""

    next: int | None = None
    """The next record to process; None: not open yet."""
    committed: int | None = None
    """The cursor's `next` on the log."""
    processed: int = 0
    replayed: int = 0
    dead: int = 0
    furthest: int = 0
    """The highest `next` so far."""
    opened: int = 0
    """How often the partition has been opened."""
    live: bool = False
    """Open, and its state rebuilt."""


class Poisoned(Exception):
    """A record could not be processed."""

    def __init__(self, record: Record, cause: Exception) -> None:
        super().__init__(f"offset {record.offset}: {cause!r}")
        self.record = record
        self.cause = cause


@dataclass(slots=True)
class _Failed:
    tries: int = 0
    error: Exception | str = ""


class PartitionTask:
    """Owns one partition while it runs. See the module."""

    def __init__(
        self,
        bus: Bus,
        topic: str,
        partition: int,
        service: str,
        make: Callable[[int], Processor],
        *,
        max_batch: int,
        cursor_every_s: float,
        accept_loss: bool,
    ) -> None:
        self._bus = bus
        self._topic = topic
        self._partition = partition
        self._make = make
        self._max_batch = max_batch
        self._cursor_every_s = cursor_every_s
        self._accept_loss = accept_loss
        self._id = f"{service}-{topic}-{partition}"
        self._cursor_key = f"{service}/{topic}/{partition}"
        self._open_s = bus.settings.transaction_timeout_ms / 1000 * OPEN_SHARE
        self._failures: dict[int, _Failed] = {}
        """Records that could not be processed, by offset, until they could or are dead."""
        self._unreplayable: set[int] = set()
        self._log = _log.bind(service=service, topic=topic, partition=partition)
        self.progress = Progress()

    async def run(self) -> None:
        """Works until cancelled; raises only what trying again cannot help."""
        wait_s = RETRY_FIRST_S
        while True:
            before = self.progress.processed
            try:
                await self._own()
            except Poisoned as poisoned:
                wait_s = RETRY_FIRST_S
                self._suspect(poisoned)
            except Fenced:
                # another worker has it, or will have: by the end of a session time-out the group has told us
                wait_s = RETRY_MOST_S
                self._log.info("fenced")
            except BusError as error:
                if not error.retryable and not (self._accept_loss and isinstance(error, RecordGone)):
                    raise
                wait_s = RETRY_FIRST_S if self.progress.processed > before else min(wait_s * 2, RETRY_MOST_S)
                self._log.warning("partition is opened again", reason=str(error), in_s=wait_s)
            finally:
                self.progress.live = False
            await self._bus.clock.sleep(wait_s)

    def _suspect(self, poisoned: Poisoned) -> None:
        offset = poisoned.record.offset
        if offset in self._unreplayable:
            self._log.warning("record left out of the state", offset=offset, error=repr(poisoned.cause))
            return
        failed = self._failures.setdefault(offset, _Failed())
        failed.tries += 1
        failed.error = poisoned.cause
        self._log.warning("record failed", offset=offset, tries=failed.tries, error=repr(poisoned.cause))

    async def _own(self) -> None:
        """Opens the partition and works on it until something fails."""
        async with AsyncExitStack() as stack:
            writer = await self._bus.transactional(self._id)
            stack.push_async_callback(writer.close)
            cursor = await self._read_cursor()
            place = (self._topic, self._partition)
            reader, moved = await open_at_cursors(
                self._bus,
                [self._topic],
                {} if cursor is None else {place: cursor},
                owner=self._id,
                accept_loss=self._accept_loss,
                partitions={self._topic: [self._partition]},
            )
            stack.push_async_callback(reader.close)
            if place in moved:
                # before the log grows: the lost cursor could look like a good one then
                cursor = moved[place]
                async with writer.transaction() as opened:
                    await opened.send(Out("cursors", self._cursor_key, cursor, partition=self._partition))
            await _Run(self, writer, reader).forever(cursor)

    async def _read_cursor(self) -> Cursor | None:
        reader = await self._bus.reader(["cursors"], partitions={"cursors": [self._partition]})
        found: Cursor | None = None
        try:
            async for record in reader.to_end():
                if record.key == self._cursor_key:
                    assert isinstance(record.value, Cursor)
                    found = record.value
        finally:
            await reader.close()
        return found


class _Run:
    """One opening of a partition: a fresh state, one producer, one reader."""

    def __init__(self, task: PartitionTask, writer: Transactional, reader: Reader) -> None:
        self._task = task
        self._bus = task._bus
        self._writer = writer
        self._reader = reader
        self._where = (task._topic, task._partition)
        self._state = task._make(task._partition)
        self._written_at = self._bus.clock.monotonic()

    async def forever(self, cursor: Cursor | None) -> None:
        progress = self._task.progress
        start = self._reader.positions()[self._where]
        progress.next = start if cursor is None else max(cursor.next, start)
        progress.committed = None if cursor is None else cursor.next
        progress.opened += 1
        await self._replay(progress.next)
        progress.live = True
        while True:
            records = await self._reader.poll(max_records=self._task._max_batch)
            fresh = [record for record in records if record.offset >= progress.next]
            for part in self._parts(fresh):
                await self._batch(part)
            # past markers and aborted records, so that a quiet partition's cursor does not fall behind the log's start
            progress.next = max(progress.next, self._reader.positions()[self._where])
            progress.furthest = max(progress.furthest, progress.next)
            await self._cursor_if_due()

    async def _replay(self, until: int) -> None:
        task = self._task
        while self._reader.positions()[self._where] < until:
            for record in await self._reader.poll(max_records=task._max_batch):
                if record.offset >= until:
                    self._reader.seek(*self._where, record.offset)
                    return
                if record.value is None or record.offset in task._unreplayable:
                    continue
                try:
                    self._state.replay(record)
                except Exception as error:
                    task._unreplayable.add(record.offset)
                    raise Poisoned(record, error) from error
                task.progress.replayed += 1

    def _parts(self, records: list[Record]) -> list[list[Record]]:
        """Batches; a suspect is one of its own, so that nothing else goes down with it."""
        parts: list[list[Record]] = []
        alone = True
        for record in records:
            suspect = record.offset in self._task._failures
            if suspect or alone:
                parts.append([record])
            else:
                parts[-1].append(record)
            alone = suspect
        return parts

    async def _batch(self, records: list[Record]) -> None:
        """Processes records and commits what they led to together with the cursor; cuts itself into several
        transactions where the work takes long."""
        rest = records
        while rest:
            rest = rest[await self._transaction(rest) :]

    async def _transaction(self, records: list[Record]) -> int:
        """As many of `records` as fit; their number."""
        task, clock = self._task, self._bus.clock
        failed = task._failures.get(records[0].offset)
        if failed is not None and failed.tries >= TRIES:
            await self._bury(records[0])
            return 1
        opened: list[Transaction] = []
        opened_at = 0.0
        done = 0
        async with AsyncExitStack() as stack:

            async def send(*outs: Out) -> list[RecordRef]:
                nonlocal opened_at
                if not opened:
                    opened.append(await stack.enter_async_context(self._writer.transaction()))
                    opened_at = clock.monotonic()
                return await opened[0].send(*outs)

            for record in records:
                await self._one(record, send)
                done += 1
                if opened and clock.monotonic() - opened_at > task._open_s:
                    break
            after = records[done - 1].offset + 1
            if opened:
                await send(self._cursor(after))
        # only now: the commit has returned
        self._went_to(after, committed=bool(opened))
        task.progress.processed += done
        for record in records[:done]:
            task._failures.pop(record.offset, None)
        return done

    async def _one(self, record: Record, send: Send) -> None:
        if record.value is None:
            reason = "it has no value" if record.error is None else str(record.error)
            await send(await self._bus.dead_out(record, f"not readable: {reason}"))
            self._task.progress.dead += 1
            return
        try:
            await self._state.process(record, send)
        except Exception as error:
            if isinstance(error, BusError) and (error.retryable or isinstance(error, Fenced)):
                raise
            raise Poisoned(record, error) from error

    async def _bury(self, record: Record) -> None:
        """Dead letter and cursor, then on. The state is as before the record: it was rebuilt since the last try."""
        task = self._task
        error = task._failures[record.offset].error
        after = record.offset + 1
        # what the state needs is decided before the record is taken in, which may raise half-way
        cursor = self._cursor(after, replay_from=self._state.replay_from(record.offset))
        async with self._writer.transaction() as opened:
            await opened.send(await self._bus.dead_out(record, error), cursor)
        self._went_to(after, committed=True)
        task.progress.dead += 1
        task._failures.pop(record.offset, None)
        task._log.error("record is dead", offset=record.offset, error=repr(error))
        try:
            self._state.replay(record)  # as any later opening will
        except Exception as failed:
            task._unreplayable.add(record.offset)
            raise Poisoned(record, failed) from failed

    async def _cursor_if_due(self) -> None:
        progress = self._task.progress
        assert progress.next is not None
        if progress.next == progress.committed:
            return
        if self._bus.clock.monotonic() - self._written_at < self._task._cursor_every_s:
            return
        async with self._writer.transaction() as opened:
            await opened.send(self._cursor(progress.next))
        self._went_to(progress.next, committed=True)

    def _cursor(self, after: int, replay_from: int | None = None) -> Out:
        oldest = self._state.replay_from(after) if replay_from is None else replay_from
        cursor = Cursor(next=after, replay_from=min(oldest, after), at_ms=self._bus.clock.now_ms())
        return Out("cursors", self._task._cursor_key, cursor, partition=self._task._partition)

    def _went_to(self, after: int, *, committed: bool) -> None:
        progress = self._task.progress
        progress.next, progress.furthest = after, max(progress.furthest, after)
        if committed:
            self._task.progress.committed = after
            self._written_at = self._bus.clock.monotonic()
