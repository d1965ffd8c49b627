"""Where the log begins and ends, and records undecoded: what an audit needs of the bus besides its readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, Self

from aiokafka import AIOKafkaConsumer, TopicPartition

from polar.bus import Bus, BusError, Reader, Record, RecordGone
from polar.bus.clients import stop_consumer
from polar.bus.errors import translated

from .views import BY_TOPIC

LEVELS: Final[tuple[tuple[str, ...], ...]] = (
    ("dead", "leases"),
    ("rewards", "results"),
    ("trajectories",),
    ("stages", "graded"),
    ("built",),
    ("completions",),
    ("tasks",),
)
"""Topics, derived ones before what they derive from. A lease ends after the session's result was read committed."""

BATCH: Final = 2_000
SETTLE_EVERY_S: Final = 0.05
SETTLE_SLACK_S: Final = 15.0
"""Beyond the time-out of transactions: Apache Kafka looks for those every ten seconds."""

Places = dict[tuple[str, int], int]
"""An offset by topic (without prefix) and partition."""


class Offsets:
    """Asks for the offsets of all topics of an audit. Use as an async context manager.

    With consumers of its own that never fetch (their partitions are paused): a broker answers the requests of a
    connection in order, so that one with a fetch waiting in it takes half a second.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        full = bus.settings.full
        self._all = {
            TopicPartition(full(topic), partition): (topic, partition)
            for topic in BY_TOPIC
            for partition in range(bus.partitions(topic))
        }
        self._stable: AIOKafkaConsumer | None = None
        self._written: AIOKafkaConsumer | None = None

    async def __aenter__(self) -> Self:
        try:
            self._stable = await self._asking(committed=True)
            self._written = await self._asking(committed=False)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        for one in (self._stable, self._written):
            if one is not None:
                await stop_consumer(one)

    async def _asking(self, *, committed: bool) -> AIOKafkaConsumer:
        consumer = await self._bus.clients.reading(committed=committed)
        # else aiokafka looks for the leaders of one unknown topic after the other, at 0.1 s each
        consumer.assign(list(self._all))
        for where in self._all:
            consumer.seek(where, 0)
        consumer.pause(*self._all)
        return consumer

    async def starts(self) -> Places:
        """The first offsets that the log has."""
        assert self._stable is not None
        return await self._ask(self._stable.beginning_offsets, "start")

    async def since(self, at_ms: int) -> Places:
        """The first offsets of records from `at_ms` on, ends where there are none; `leases` is read whole always."""
        assert self._stable is not None
        found = await self._stable_ends()
        with translated("asking for offsets by time"):
            async with asyncio.timeout(self._bus.settings.request_timeout_s):
                times: dict[TopicPartition, Any] = await self._stable.offsets_for_times(dict.fromkeys(self._all, at_ms))
        for where, place in self._all.items():
            if times.get(where) is not None:
                found[place] = times[where].offset
        return {where: offset for where, offset in found.items() if where[0] != "leases"}

    async def stable(self) -> Places:
        """Ends below which every transaction is over, each partition by itself."""
        return await self._stable_ends()

    async def settled_ends(self) -> Places:
        """Ends at which every transaction with a record below them is over, level by level.

        Raises:
            BusError: a transaction stays open for longer than any of Polar's may.
        """
        found: Places = {}
        assert self._written is not None
        for level in LEVELS:
            ends = await self._ask(self._written.end_offsets, "end")
            ends = {where: end for where, end in ends.items() if where[0] in level}
            await self._settle(ends)
            found |= ends
        return found

    async def _settle(self, ends: Places) -> None:
        patience = self._bus.settings.transaction_timeout_ms / 1000 + SETTLE_SLACK_S
        deadline = self._bus.clock.monotonic() + patience
        while True:
            now = await self._stable_ends()
            held = next((where for where, end in ends.items() if now[where] < end), None)
            if held is None:
                return
            if self._bus.clock.monotonic() > deadline:
                topic, partition = held
                raise BusError(
                    f"a transaction on partition {partition} of `{topic}` has been open for {patience:g} s, so the log "
                    "cannot be read to its end: find the writer that holds it, or try again later"
                )
            await self._bus.clock.sleep(SETTLE_EVERY_S)

    async def reader(self, topics: Sequence[str], start: Places) -> Reader:
        """An opened reader that leaves values undecoded; the caller closes it. Partitions that `start` lacks: from the
        first record."""
        bus = self._bus
        partitions = {topic: range(bus.partitions(topic)) for topic in topics}
        wanted = {where: offset for where, offset in start.items() if where[0] in topics}
        while True:
            reader = _Undecoded(bus.clients, bus.clock, partitions, committed=True)
            try:
                await reader.open(wanted)
            except RecordGone as gone:
                await reader.close()
                wanted[gone.topic, gone.partition] = _begins(gone)
            else:
                return reader

    async def batches(self, reader: Reader, ends: Mapping[tuple[str, int], int]) -> AsyncIterator[list[Record]]:
        """Records up to `ends`, and perhaps a few more. What retention takes meanwhile is skipped: ask for `starts`
        again afterwards.

        Raises:
            BusError: nothing has come for `delivery_timeout_s`.
        """
        clock, patience = self._bus.clock, self._bus.settings.delivery_timeout_s
        positions, since = reader.positions(), clock.monotonic()
        while not reader.reached(ends):
            try:
                records = await reader.poll(max_records=BATCH)
            except RecordGone as gone:
                reader.seek(gone.topic, gone.partition, _begins(gone))
                continue
            if records:
                yield records
            if reader.positions() != positions:
                positions, since = reader.positions(), clock.monotonic()
            elif clock.monotonic() - since > patience:
                raise BusError(f"reading stood still for {patience:g} s before the end of the log")

    async def _stable_ends(self) -> Places:
        assert self._stable is not None
        return await self._ask(self._stable.end_offsets, "end")

    async def _ask(self, ask: Any, which: str) -> Places:
        with translated(f"asking for the {which} of the log"):
            async with asyncio.timeout(self._bus.settings.request_timeout_s):
                found: dict[TopicPartition, int] = await ask(list(self._all))
        return {place: found[where] for where, place in self._all.items()}


def _begins(gone: RecordGone) -> int:
    """Where the log begins now; raises what does not say so."""
    if gone.log_start is None:
        raise gone
    return gone.log_start


class _Undecoded(Reader):
    """Leaves values as they are: decoding them whole would cost most of an audit's time."""

    async def _decoded(self, found: Mapping[Any, list[Any]]) -> list[Record]:
        return [
            Record(
                topic=self._names[where.topic],
                partition=one.partition,
                offset=one.offset,
                timestamp_ms=one.timestamp,
                key=None if one.key is None else one.key.decode("utf-8", "replace"),
                value=None,
                raw=one.value,
                headers={name: value or b"" for name, value in one.headers},
            )
            for where, messages in found.items()
            for one in messages
        ]
