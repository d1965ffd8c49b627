"""One record by its place on the log."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from itertools import groupby
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from polar.schemas.base import RecordRef
from polar.schemas.topics import topic
from polar.service.clock import Clock

from .clients import Clients, stop_consumer
from .errors import BusError, RecordGone, translated
from .records import Record, decode_record

TURN_S = 0.5
"""How long one look-up may hold the consumer while its record is not there yet."""
ROW = 500
"""Records that are looked at in one go."""


class Lookup:
    """Looks records up one after the other with a consumer of its own, kept between them."""

    def __init__(self, clients: Clients, clock: Clock, *, committed: bool) -> None:
        self._clients = clients
        self._clock = clock
        self._committed = committed
        self._lock = asyncio.Lock()
        self._consumer: AIOKafkaConsumer | None = None

    async def get(self, ref: RecordRef) -> Record:
        """The record at `ref`; waits up to `lookup_timeout_s` for one that is not committed yet, since the partitions
        of a transaction do not become readable at the same moment.

        Raises:
            RecordGone: the log no longer has it, or it was aborted or compacted away.
            BusError: retryable: not readable in time.
        """
        limit = self._clients.settings.lookup_timeout_s
        deadline = self._clock.monotonic() + limit
        while True:
            async with self._lock:
                try:
                    found = await self._turn(ref)
                except BaseException as error:
                    if not isinstance(error, RecordGone):
                        await self._drop()
                    raise
            if found is not None:
                return found
            if self._clock.monotonic() >= deadline:
                raise BusError(f"{_place(ref)} cannot be read: not committed within {limit:g} s")

    async def get_many(self, refs: Iterable[RecordRef]) -> AsyncIterator[tuple[RecordRef, Record | RecordGone]]:
        """The records at `refs` in the order of their partitions and offsets; see `Bus.lookup_many`."""
        wanted = sorted(set(refs), key=lambda ref: (ref.topic, ref.partition, ref.offset))
        for (name, partition), group in groupby(wanted, key=lambda ref: (ref.topic, ref.partition)):
            rest = deque(group)
            while rest:
                first = rest[0]
                row = await self._row(name, partition, first.offset, rest[-1].offset)
                near = {message.offset: message for message in row}
                # what one answer of the broker holds beyond the first is free
                while rest and (message := near.get(rest[0].offset)) is not None:
                    yield rest.popleft(), decode_record(topic(name), message)
                if rest and rest[0] is first:  # nothing came: wait for it, or learn why not
                    ref = rest.popleft()
                    try:
                        yield ref, await self.get(ref)
                    except RecordGone as gone:
                        yield ref, gone

    async def _row(self, name: str, partition: int, first: int, last: int) -> list[Any]:
        """Messages from `first` on, as many as come at once; none where that is below the log's start."""
        where = TopicPartition(self._clients.settings.full(name), partition)
        async with self._lock:
            try:
                if self._consumer is None:
                    self._consumer = await self._clients.reading(committed=self._committed, lookup=True)
                consumer = self._consumer
                with translated(f"looking up offsets {first} to {last} of partition {partition} of `{name}`"):
                    if consumer.assignment() != {where}:
                        consumer.assign([where])
                        consumer.seek(where, first)
                    elif await consumer.position(where) != first:
                        consumer.seek(where, first)
                    try:
                        async with asyncio.timeout(self._clients.settings.request_timeout_s):
                            most = min(last - first + 1, ROW)
                            found = await consumer.getmany(where, timeout_ms=round(TURN_S * 1000), max_records=most)
                    except OffsetOutOfRangeError:
                        return []
            except BaseException:
                await self._drop()
                raise
        messages: list[Any] = found.get(where, [])
        return messages

    async def close(self) -> None:
        async with self._lock:
            await self._drop()

    async def _drop(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await stop_consumer(consumer)

    async def _turn(self, ref: RecordRef) -> Record | None:
        """One try; None: there is nothing at the place yet."""
        if self._consumer is None:
            self._consumer = await self._clients.reading(committed=self._committed, lookup=True)
        consumer = self._consumer
        where = TopicPartition(self._clients.settings.full(ref.topic), ref.partition)
        with translated(f"looking up {_place(ref)}"):
            consumer.assign([where])
            consumer.seek(where, ref.offset)  # no await in between, see Reader._adopt
            try:
                async with asyncio.timeout(self._clients.settings.request_timeout_s):
                    found = await consumer.getmany(where, timeout_ms=round(TURN_S * 1000), max_records=1)
                    position = await consumer.position(where)
            except OffsetOutOfRangeError:
                start = (await consumer.beginning_offsets([where]))[where]
                if ref.offset >= start:
                    await self._clock.sleep(TURN_S / 10)
                    return None
                raise RecordGone(
                    f"{_place(ref)} is lost: the log starts at offset {start}",
                    topic=ref.topic,
                    partition=ref.partition,
                    offset=ref.offset,
                    log_start=start,
                ) from None
        messages = found.get(where, [])
        if messages and messages[0].offset == ref.offset:
            return decode_record(topic(ref.topic), messages[0])
        if messages or position > ref.offset:
            raise RecordGone(
                f"{_place(ref)} does not exist: its transaction was aborted, or a later record of its key replaced it",
                topic=ref.topic,
                partition=ref.partition,
                offset=ref.offset,
            )
        return None


def _place(ref: RecordRef) -> str:
    return f"offset {ref.offset} of partition {ref.partition} of `{ref.topic}`"
