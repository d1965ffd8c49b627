"""The log, for a service: one object that makes, owns and closes every client.

    async with Bus(BusSettings(), Service.BUILDER) as bus:
        await bus.prepare()
        refs = await bus.send(Out("stages", session_id, event))

Promises: `send` returns when every record is acknowledged by all in-sync replicas and in order per key; a broker that
restarts is waited for, up to `delivery_timeout_s`; what a service may not write is a TypeError before anything is sent.
Knows the topic table and nothing of what the events mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self

from aiokafka import AIOKafkaProducer
from aiokafka.partitioner import murmur2

from polar.schemas.base import RecordRef
from polar.schemas.results import DeadLetter
from polar.schemas.topics import Service, topic
from polar.service.clock import Clock, SystemClock

from .blobs import BlobStore
from .clients import Clients, stop_admin, stop_producer
from .errors import BusError, RecordGone
from .lookup import Lookup
from .reader import Reader, Start
from .records import Encoded, Out, Record
from .settings import BusSettings
from .topics import check_topics, ensure_topics
from .transactional import Transactional, deliver, prepare

DEAD_INLINE = 64 * 1024
"""Bytes of a dead record that its letter holds itself; more is a claim."""
DEAD_KEY = 1024
"""Bytes of its key, and characters of a header's name: a foreign writer may have made them as long as a record."""


class Bus:
    """The one way to the log. Use as an async context manager; everything made by it is closed with it."""

    def __init__(self, settings: BusSettings, service: Service, *, clock: Clock | None = None) -> None:
        """`service`: who writes; the topic table says what it may."""
        self.settings = settings
        self.service = service
        self.clock: Clock = clock or SystemClock()
        self.clients = Clients(settings, str(service))
        """For this package's own modules."""
        self.blobs = BlobStore(settings.blob_url)
        self._producer: AIOKafkaProducer | None = None
        self._starting = asyncio.Lock()
        self._lookups = {kind: Lookup(self.clients, self.clock, committed=kind) for kind in (True, False)}
        self._owned: set[Reader | Transactional] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Makes sure that a broker answers.

        Raises:
            BrokerUnavailable: none does within `connect_timeout_s`; the message says what to do.
        """
        await stop_admin(await self.clients.admin())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes every client, readers and transactional writers included. Safe to call twice."""
        producer, self._producer = self._producer, None
        if producer is not None:
            self._retire(producer)
        owned, self._owned = self._owned, set()
        await asyncio.gather(
            *(one.close() for one in owned), *(one.close() for one in self._lookups.values()), *self._closing
        )

    async def prepare(self) -> None:
        """What a service does first: `ensure_topics`, where the setting `create_topics` has it, then `check_topics`."""
        if self.settings.create_topics:
            await self.ensure_topics()
        await self.check_topics()

    async def ensure_topics(self) -> None:
        """Makes the topics of the table that are missing. See `topics.ensure_topics`."""
        await ensure_topics(self.clients)

    async def check_topics(self) -> None:
        """Compares the topics with the table.

        Raises:
            TopicsWrong: names every topic, setting, what was found and what was wanted.
        """
        await check_topics(self.clients)

    def partitions(self, name: str) -> int:
        """How many partitions a topic (without prefix) has."""
        return self.settings.count(name)

    def partition_of(self, name: str, key: str) -> int:
        """The partition of a key: murmur2 of its UTF-8 bytes, as Java's default partitioner has it."""
        return int(murmur2(key.encode()) & 0x7FFFFFFF) % self.partitions(name)

    async def send(self, *outs: Out) -> list[RecordRef]:
        """Writes records and returns their places, in order, after ALL are acknowledged. Many at once cost little more
        than one. At least once: after an error some may be in the log, and sending again may double them.

        Raises:
            TypeError: this service does not write that topic, or not such values: a programming error.
            RecordTooLarge: before anything is sent.
            BrokerUnavailable: not acknowledged within `delivery_timeout_s`.
            BusError: refused; see `retryable`.
        """
        encoded = self._prepare(outs)
        producer = await self._started()
        try:
            return await self._deliver(producer, outs, encoded)
        except BusError:
            # its sequence numbers are out of step now; others that are under way with it end on their own
            if self._producer is producer:
                self._producer = None
                self._retire(producer)
            raise

    async def transactional(self, transactional_id: str) -> Transactional:
        """The writer with this id (the prefix is added): started, which has fenced its predecessor, and whose open
        transaction is over when this returns.

        Raises:
            BrokerUnavailable: no broker answers.
        """
        producer = await self.clients.producer(self.settings.full(transactional_id))
        made = Transactional(transactional_id, producer, self.settings, self._prepare, self._deliver)
        self._owned = {one for one in self._owned if not one.closed} | {made}
        return made

    async def reader(
        self,
        topics: Sequence[str],
        *,
        start: Start = "earliest",
        partitions: Mapping[str, Sequence[int]] | None = None,
        committed: bool = True,
    ) -> Reader:
        """A reader of `topics` (without prefix), all partitions unless `partitions` names some of a topic's.

        Raises:
            RecordGone: an offset in `start` is below the log's start.
            BrokerUnavailable: no broker answers.
        """
        chosen = {name: list((partitions or {}).get(name, range(self.partitions(name)))) for name in topics}
        made = Reader(self.clients, self.clock, chosen, committed=committed)
        await made.open(start)
        self._owned = {one for one in self._owned if not one.closed} | {made}
        return made

    async def lookup(self, ref: RecordRef, *, committed: bool = True) -> Record:
        """The record at `ref`. See `Lookup.get`.

        Raises:
            RecordGone: the log no longer has it, or never committed it.
            BusError: retryable: not readable within `lookup_timeout_s`.
        """
        return await self._lookups[committed].get(ref)

    async def lookup_many(self, refs: Sequence[RecordRef]) -> AsyncIterator[tuple[RecordRef, Record | RecordGone]]:
        """The records at `refs`, each with its place, in the log's order; many that stand close together cost little
        more than reading them in a row. One that the log no longer has comes as the error that says so.

        Raises:
            BusError: retryable: one is not readable within `lookup_timeout_s`.
        """
        async for found in self._lookups[True].get_many(refs):
            yield found

    async def dead_letter(self, record: Record, error: BaseException | str) -> RecordRef:
        """Writes a record that could not be processed to `dead`, and returns the letter's place."""
        (ref,) = await self.send(await self.dead_out(record, error))
        return ref

    async def dead_out(self, record: Record, error: BaseException | str) -> Out:
        """The dead letter of a record, to be sent in a transaction of the caller's; what is over 64 KiB is stored."""
        raw = record.raw or b""
        whole = None
        # where records may only be small, so must the letters about them
        inline = min(DEAD_INLINE, self.settings.max_record_bytes // 4)
        if len(raw) > inline:
            whole = await self.blobs.put(
                raw, record.headers.get("content-type", b"application/octet-stream")[:200].decode("latin-1")
            )
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        letter = DeadLetter(
            origin=record.ref,
            service=str(self.service),
            error=text[: min(4096, inline // 4)],
            key=None if record.key is None else record.key.encode()[:DEAD_KEY],
            value=raw[:inline],
            whole=whole,
            headers={name[:DEAD_KEY]: value[:1024] for name, value in list(record.headers.items())[:32]},
            at_ms=self.clock.now_ms(),
        )
        origin = f"{record.topic}/{record.partition}/{record.offset}"
        return Out("dead", origin, letter, source=record.ref)

    async def _started(self) -> AIOKafkaProducer:
        async with self._starting:
            if self._producer is None:
                self._producer = await self.clients.producer()
            return self._producer

    def _retire(self, producer: AIOKafkaProducer) -> None:
        """Closes it beside the work; `close` waits for the end of it."""
        task = asyncio.create_task(stop_producer(producer))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _prepare(self, outs: tuple[Out, ...]) -> list[Encoded]:
        return prepare(outs, self.service, self.settings)

    async def _deliver(self, producer: Any, outs: tuple[Out, ...], encoded: list[Encoded]) -> list[RecordRef]:
        for out in outs:
            if out.partition is not None and not 0 <= out.partition < self.partitions(topic(out.topic).name):
                raise ValueError(f"`{out.topic}` has no partition {out.partition}")
        return await deliver(
            producer,
            outs,
            encoded,
            settings=self.settings,
            partition_of=self.partition_of,
            now_ms=self.clock.now_ms(),
        )
