"""Reading without a group: exact positions, read committed, and no silent loss.

A `Reader` knows for each partition the next offset it will hand out. It survives broker restarts: a consumer that is
behind and does not move (aiokafka #1154) is replaced by a new one at the same positions. Positions come from the
consumer, not from the last record's offset plus one, since transaction markers and compaction leave gaps. A position
that the log no longer has is `RecordGone`, never a jump.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from polar.schemas.topics import TopicSpec
from polar.schemas.topics import topic as topic_row
from polar.service.clock import Clock

from .clients import Clients, stop_consumer
from .errors import BrokerUnavailable, BusError, RecordGone, translated
from .records import Record, decode_record

Start = Literal["earliest", "latest"] | int | Mapping[tuple[str, int], int]
"""`earliest`, `latest` (the end at the time of the call), milliseconds since the epoch (records from then on), or the
next offset by topic (without prefix) and partition; partitions that such a mapping lacks start at the earliest."""

DECODE_SLICE = 1024 * 1024
"""Bytes after which decoding lets the loop run (1 MiB takes a few ms)."""

_log = structlog.get_logger(__name__)


class Reader:
    """All or some partitions of some topics. Made by `Bus.reader`; one task at a time may read from it."""

    def __init__(
        self, clients: Clients, clock: Clock, partitions: Mapping[str, Sequence[int]], *, committed: bool
    ) -> None:
        """`partitions`: by topic without prefix."""
        self._clients = clients
        self._clock = clock
        self._committed = committed
        self._names = {clients.settings.full(name): name for name in partitions}
        self._all = [
            TopicPartition(clients.settings.full(name), number)
            for name, numbers in partitions.items()
            for number in numbers
        ]
        if not self._all:
            raise ValueError("a reader needs at least one partition")
        self._next: dict[TopicPartition, int] = {}
        self._loose: set[TopicPartition] = set()
        """Partitions that started at no offset of the caller's and have not moved yet: retention may overtake them."""
        self._pending: deque[Record] = deque()
        """Polled, but not handed out: `to_end` was left early."""
        self._consumer: AIOKafkaConsumer | None = None
        self._moved_at = 0.0
        self.closed = False
        self.replaced = 0
        """Consumers given up by the watchdog or after errors."""

    async def open(self, start: Start) -> None:
        """Connects and takes its positions.

        Raises:
            RecordGone: an offset of `start` is below the log's start.
            BrokerUnavailable: no broker answers.
        """
        consumer = await self._clients.reading(committed=self._committed)
        try:
            with translated("finding where to read from"):
                async with asyncio.timeout(self._clients.settings.request_timeout_s):
                    self._next = await self._resolve(consumer, start)
        except BaseException:
            await stop_consumer(consumer)
            raise
        self._adopt(consumer)

    async def poll(self, *, max_records: int = 500, timeout_s: float = 0.2) -> list[Record]:
        """The next records, in order within each partition; waits up to `timeout_s` for the first.

        Empty where there is nothing new, also while the broker is away: then it goes on when that is back.

        Raises:
            RecordGone: the log no longer has the next record; `seek` to go on elsewhere.
            BusError: not retryable, such as a missing permission.
        """
        if self.closed:
            raise RuntimeError("the reader is closed")
        if self._pending:
            return [self._pending.popleft() for _ in range(min(max_records, len(self._pending)))]
        try:
            consumer = await self._any_consumer()
            with translated("reading"):
                found = await consumer.getmany(timeout_ms=max(round(timeout_s * 1000), 1), max_records=max_records)
                moved = await self._note_positions(consumer)
        except BusError as error:
            gone = error.__cause__
            if isinstance(gone, OffsetOutOfRangeError):
                await self._out_of_range(gone)
            elif error.retryable:
                await self._give_up(str(error))
                await self._clock.sleep(timeout_s)
            else:
                raise
            return []
        if moved:
            self._moved_at = self._clock.monotonic()
        elif self._clock.monotonic() - self._moved_at > self._clients.settings.stuck_after_s:
            await self._watch()
        try:
            return await self._decoded(found)
        except asyncio.CancelledError:
            for where, messages in found.items():  # not handed out: the next poll gives them
                self.seek(self._names[where.topic], where.partition, messages[0].offset)
            raise

    async def caught_up(self) -> bool:
        """Whether everything up to the ends at this moment (committed: the last stable offsets) has been handed out.

        Raises:
            BrokerUnavailable: the ends cannot be asked for.
        """
        ends = await self._ends()
        return not self._pending and all(self._next[partition] >= end for partition, end in ends.items())

    async def ends(self) -> dict[tuple[str, int], int]:
        """The ends at this moment (committed: the last stable offsets), by topic (without prefix) and partition: a goal
        for `reached` that does not move while others write.

        Raises:
            BrokerUnavailable: the ends cannot be asked for.
        """
        return {(self._names[one.topic], one.partition): end for one, end in (await self._ends()).items()}

    def reached(self, ends: Mapping[tuple[str, int], int]) -> bool:
        """Whether everything below `ends` has been handed out."""
        positions = self.positions()
        return all(positions[where] >= end for where, end in ends.items())

    async def to_end(self) -> AsyncIterator[Record]:
        """Records up to the ends at the time of the call, and perhaps a few more. Leaving the loop early loses none.

        Raises:
            BrokerUnavailable: nothing has come for `delivery_timeout_s`.
        """
        ends = await self._ends()
        settings = self._clients.settings
        before, since = dict(self._next), self._clock.monotonic()
        while True:
            while self._pending:
                yield self._pending.popleft()
            if all(self._next[partition] >= end for partition, end in ends.items()):
                return
            self._pending.extend(await self.poll())
            if self._next != before:
                before, since = dict(self._next), self._clock.monotonic()
            elif self._clock.monotonic() - since > settings.delivery_timeout_s:
                raise BrokerUnavailable(f"reading stood still for {settings.delivery_timeout_s:g} s before the end")

    def positions(self) -> dict[tuple[str, int], int]:
        """The next offset to hand out, by topic (without prefix) and partition. Never below that of a record not yet
        handed out; it may lie in a gap of the log."""
        found = {(self._names[one.topic], one.partition): offset for one, offset in self._next.items()}
        for record in reversed(self._pending):
            found[record.topic, record.partition] = record.offset
        return found

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Hand out `offset` of a partition (topic without prefix) next.

        Raises:
            KeyError: not a partition of this reader.
        """
        where = TopicPartition(self._clients.settings.full(topic), partition)
        if where not in self._next:
            raise KeyError(f"partition {partition} of `{topic}` is not read here")
        self._next[where] = offset
        self._loose.discard(where)
        kept = [one for one in self._pending if (one.topic, one.partition) != (topic, partition)]
        self._pending = deque(kept)
        if self._consumer is not None:
            self._consumer.seek(where, offset)

    async def close(self) -> None:
        self.closed = True
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_consumer(consumer)

    def _adopt(self, consumer: AIOKafkaConsumer) -> None:
        """No await between the assignment and the seeks: the fetcher must not look for positions of its own."""
        consumer.assign(self._all)
        for partition, offset in self._next.items():
            consumer.seek(partition, offset)
        self._consumer = consumer
        self._moved_at = self._clock.monotonic()

    async def _resolve(self, consumer: AIOKafkaConsumer, start: Start) -> dict[TopicPartition, int]:
        starts: dict[TopicPartition, int] = await consumer.beginning_offsets(self._all)
        if start == "earliest":
            self._loose = set(self._all)
            return starts
        if start == "latest":
            ends: dict[TopicPartition, int] = await consumer.end_offsets(self._all)
            return ends
        if isinstance(start, int):
            times = await consumer.offsets_for_times(dict.fromkeys(self._all, start))
            ends = await consumer.end_offsets(self._all)
            self._loose = set(self._all)
            # None: nothing that young (yet)
            return {one: ends[one] if times[one] is None else times[one].offset for one in self._all}
        found: dict[TopicPartition, int] = {}
        for one in self._all:
            wanted = start.get((self._names[one.topic], one.partition))
            if wanted is None:
                self._loose.add(one)
                found[one] = starts[one]
            elif wanted < starts[one]:
                raise self._gone(one, wanted, starts[one])
            else:
                found[one] = wanted
        return found

    def _gone(self, where: TopicPartition, wanted: int, start: int) -> RecordGone:
        name = self._names[where.topic]
        return RecordGone(
            f"partition {where.partition} of `{name}` starts at offset {start}: offsets {wanted} to {start - 1}, "
            "which were still to be read, are lost (retention is shorter than the time away)",
            topic=name,
            partition=where.partition,
            offset=wanted,
            log_start=start,
        )

    async def _note_positions(self, consumer: AIOKafkaConsumer) -> bool:
        moved = False
        for partition in self._all:
            position = await consumer.position(partition)  # known since the seek: no request
            if position != self._next[partition]:
                self._next[partition] = position
                self._loose.discard(partition)
                moved = True
        return moved

    async def _out_of_range(self, error: OffsetOutOfRangeError) -> None:
        """The log does not have the next record: moves on where the caller named no offset, raises otherwise."""
        consumer = self._consumer
        assert consumer is not None
        lost: dict[TopicPartition, int] = error.args[0]
        with translated("asking for the start of the log"):
            starts = await consumer.beginning_offsets(list(lost))
        for partition, offset in lost.items():
            if self._next[partition] != offset:
                continue  # a seek came in between
            if partition in self._loose:
                self._next[partition] = starts[partition]
                consumer.seek(partition, starts[partition])
            elif offset < starts[partition]:
                raise self._gone(partition, offset, starts[partition])
            else:
                name = self._names[partition.topic]
                raise RecordGone(
                    f"partition {partition.partition} of `{name}` ends before offset {offset}, which was next: "
                    "its topic was made anew or its log was cut off",
                    topic=name,
                    partition=partition.partition,
                    offset=offset,
                    log_start=starts[partition],
                )

    async def _watch(self) -> None:
        """Nothing has moved for long. Behind, too: then the consumer is stuck, and a new one takes over."""
        self._moved_at = self._clock.monotonic()
        try:
            ends = await self._ends()
        except BusError as error:
            await self._give_up(str(error))
            return
        behind = {one: end - self._next[one] for one, end in ends.items() if end > self._next[one]}
        if behind:
            await self._give_up(f"no progress while {sum(behind.values())} records behind")

    async def _give_up(self, reason: str) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            self.replaced += 1
            _log.warning("reader gets a new consumer", topics=sorted(self._names.values()), reason=reason)
            await stop_consumer(consumer)

    async def _replace(self) -> None:
        self._adopt(await self._clients.reading(committed=self._committed))

    async def _ends(self) -> dict[TopicPartition, int]:
        consumer = await self._any_consumer()
        with translated("asking for the end of the log"):
            async with asyncio.timeout(self._clients.settings.request_timeout_s):
                found: dict[TopicPartition, int] = await consumer.end_offsets(self._all)
        return found

    async def _any_consumer(self) -> AIOKafkaConsumer:
        if self._consumer is None:
            await self._replace()
        return self._consumer

    async def _decoded(self, found: Mapping[TopicPartition, list[Any]]) -> list[Record]:
        records: list[Record] = []
        for where, messages in found.items():
            row = topic_row(self._names[where.topic])
            rest = messages
            while rest:
                done = _decode_slice(row, rest, records)
                if done == len(rest):
                    break
                rest = rest[done:]
                await asyncio.sleep(0)
        return records


def _decode_slice(row: TopicSpec, messages: list[Any], records: list[Record]) -> int:
    """Decodes up to `DECODE_SLICE` bytes of `messages` into `records`; how many it were.

    Without the collector of cycles: a batch of records is thousands of objects that all stay, and looking through them
    again and again while they are made takes longer than making them.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        size = done = 0
        for message in messages:
            records.append(decode_record(row, message))
            done += 1
            size += len(message.value or b"")
            if size > DECODE_SLICE:
                break
        return done
    finally:
        if collecting:
            gc.enable()
