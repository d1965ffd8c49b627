"""The view's way to the log: one FastStream batch subscriber over `stages`, `results` and `nodes`.

No group, every partition, committed records only, from the offsets that stand in the view's own file: nothing is
acknowledged to the broker. A batch is one transaction of that file, and `listeners` hear of it after the commit. What
this settles for itself, because FastStream's defaults do not fit (measured, see the notes in each place): the
acknowledgement policy, the decoder, the size of a record, and a reader that stays behind without a sign.

A record that cannot be read is counted, logged and passed over. It gets no dead letter here: the scheduler reads the
same topics and writes one, and this reader would write another for each replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as Place
from aiokafka.errors import KafkaError
from aiokafka.helpers import create_ssl_context
from faststream import AckPolicy
from faststream.kafka import KafkaBroker, KafkaMessage, TopicPartition
from faststream.security import BaseSecurity, SASLPlaintext, SASLScram256, SASLScram512

from polar.bus import Bus, BusError, BusSettings
from polar.bus.clients import stop_admin, stop_consumer
from polar.bus.errors import translated
from polar.bus.records import Record, decode_record
from polar.schemas import StageChanged, TaskAccepted, TaskRejected
from polar.schemas.topics import topic

from .entries import TOPICS, Change, Moved
from .metrics import SubmitMetrics
from .view import View
from .viewlock import ViewBroken, ViewUnusable

RETRY_S = 1.0
"""Between a reader that failed and the next."""

log = structlog.get_logger("polar.submit.view")


def identity_of(settings: BusSettings) -> str:
    """Of the topics a view is made of; offsets mean nothing where it is another one."""
    return " ".join(f"{settings.full(name)}*{settings.count(name)}" for name in TOPICS)


class ViewFeed:
    """Keeps a `View` up with the log and tells `listeners` what changed, in order, on the event loop.

    `run` goes on until it is cancelled; no failure of the broker or the file ends it. Listeners must not block.
    """

    def __init__(
        self,
        bus: Bus,
        view: View,
        metrics: SubmitMetrics,
        listeners: Sequence[Callable[[Change], None]],
        *,
        batch_records: int,
        events_kept: int = 0,
    ) -> None:
        """`events_kept`: reports that were applied by a former process and are told again, about, for watchers."""
        self._bus = bus
        self._view = view
        self._metrics = metrics
        self._listeners = listeners
        self._batch_records = batch_records
        self._tail = events_kept // bus.partitions("stages")
        self._taking = False
        self._failure: Exception | None = None
        self._applying: asyncio.Task[None] | None = None
        self._names = {bus.settings.full(name): name for name in TOPICS}
        self._places = [(name, number) for name in TOPICS for number in range(bus.partitions(name))]
        self._told: dict[int, int] = {}
        """The next offset of `stages` to tell, by partition."""
        self.ready = asyncio.Event()
        """Set once the log has been read up to where it ended when `run` began."""

    async def run(self) -> None:
        while True:
            try:
                await self._read()
                log.warning("the view's reader is behind and does not move; making a new one")
            except ViewBroken as error:
                if await self._start_over(str(error)):
                    continue
            except (KafkaError, BusError, OSError, TimeoutError, ViewUnusable) as error:
                log.warning("the view cannot follow the log; trying again", error=f"{type(error).__name__}: {error}")
            self._metrics.view_restarts.inc()
            await self._bus.clock.sleep(RETRY_S)

    async def _start_over(self, reason: str) -> bool:
        self._metrics.view_rebuilds.inc()
        self._told.clear()
        self.ready.clear()
        try:
            await self._view.start_over(reason)
        except (OSError, ViewUnusable) as error:
            log.error("the view's file cannot be made anew; trying again", error=str(error))
            return False
        return True

    async def _read(self) -> None:
        """Read until the reader stalls; then its successor goes on where the view is."""
        starts = await self._fit()
        settings = self._bus.settings
        broker = KafkaBroker(
            settings.bootstrap.split(","),
            client_id="polar-submit-view",
            request_timeout_ms=round(settings.request_timeout_s * 1000),
            security=security_of(settings),
            consumer_only=True,
            allow_auto_create_topics=False,
            apply_types=False,
            graceful_timeout=5.0,
            logger=_Log(),
            log_level=logging.DEBUG,
        )
        subscriber = broker.subscriber(
            partitions=[TopicPartition(settings.full(name), number, declare=False) for name, number in self._places],
            group_id=None,
            # MANUAL, and no acknowledgement: there is no group to commit for. The default acknowledges first by
            # auto-commit; ACK would call commit() and fail without a group.
            ack_policy=AckPolicy.MANUAL,
            batch=True,
            batch_timeout_ms=200,
            max_records=self._batch_records,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            # 1 MB by default: a larger record would still be read, but alone and slowly
            max_partition_fetch_bytes=settings.max_record_bytes,
            include_in_schema=False,
            no_reply=True,
            # FastStream's parser decodes every header as text and its decoder guesses JSON
            parser=self._parse,
            decoder=_raw,
        )
        subscriber(self._take)
        self._failure = None
        try:
            await broker.start()
            consumer = subscriber.consumer
            assert consumer is not None
            for (name, number), start in starts.items():
                consumer.seek(Place(settings.full(name), number), start)
            await self._watch(consumer)
        finally:
            await broker.stop()
            if self._applying is not None:
                await asyncio.wait([self._applying])

    async def _fit(self) -> dict[tuple[str, int], int]:
        """Where to begin, by topic and partition.

        Raises:
            ViewBroken: the view was made from another log than this one.
        """
        places = {Place(self._bus.settings.full(name), number): (name, number) for name, number in self._places}
        admin = await self._bus.clients.admin()
        try:
            with translated("asking which cluster this is"):
                cluster = (await admin.describe_cluster()).get("cluster_id")
        finally:
            await stop_admin(admin)
        consumer = await self._bus.clients.reading(committed=True)
        try:
            with translated("asking for the ends of the log"):
                starts = {places[one]: at for one, at in (await consumer.beginning_offsets(list(places))).items()}
                ends = {places[one]: at for one, at in (await consumer.end_offsets(list(places))).items()}
        finally:
            await stop_consumer(consumer)
        reason = await self._view.misfit(cluster, starts, ends)
        if reason is not None:
            raise ViewBroken(reason)
        found = {}
        for name, number in self._places:
            start = self._view.resume_at(name, number)
            if name == "stages" and number not in self._told:
                start = min(start, max(0, self._view.next_offset(name, number) - self._tail))
                self._told[number] = start
            found[name, number] = max(start, starts[name, number])
        return found

    async def _watch(self, consumer: AIOKafkaConsumer) -> None:
        """Say when the log's end is reached; return when the reader is behind and has not moved for too long."""
        clock = self._bus.clock
        places = {Place(self._bus.settings.full(name), number): (name, number) for name, number in self._places}
        before: dict[Place, int] = {}
        moved_at = clock.monotonic()
        goal = await self._ends(consumer, places)
        while True:
            now = {place: await consumer.position(place) for place in places}
            behind = any(now[place] < goal[place] for place in places)
            # what a position has passed is in the handler at once (no await lies between) or applied
            if self._failure is not None:
                raise self._failure
            if not behind and not self._taking:
                await self._at_end({places[place]: to for place, to in now.items()})
            if now != before or not behind:
                before, moved_at = now, clock.monotonic()
            elif self._taking:
                moved_at = clock.monotonic()  # a slow disk is no reason for another reader
            elif clock.monotonic() - moved_at > self._bus.settings.stuck_after_s:
                return
            if self.ready.is_set():
                await clock.sleep(1.0)
                goal = await self._ends(consumer, places)
            else:
                await clock.sleep(0.05)

    async def _ends(self, consumer: AIOKafkaConsumer, places: Mapping[Place, tuple[str, int]]) -> dict[Place, int]:
        """
        Raises:
            ViewBroken: the log has become shorter than what was read of it.
        """
        read = {place: self._view.next_offset(*named) for place, named in places.items()}
        ends: dict[Place, int] = await consumer.end_offsets(list(places))
        for place, after in read.items():
            if ends[place] < after:
                name, number = places[place]
                raise ViewBroken(f"partition {number} of `{name}` ends at offset {ends[place]}, was read to {after}")
        return ends

    async def _at_end(self, positions: Mapping[tuple[str, int], int]) -> None:
        await self._view.passed(positions)
        self._tell(await self._view.tidy())
        if not self.ready.is_set():
            self.ready.set()
            counts = self._view.counts
            log.info("the view has caught up", tasks=counts.tasks, sessions=counts.sessions, file=str(self._view.path))

    async def _parse(self, records: tuple[Any, ...]) -> KafkaMessage:
        self._taking = True
        return KafkaMessage(body=b"", raw_message=records, consumer=_NO_CONSUMER)

    async def _take(self, records: tuple[Any, ...]) -> None:
        """A batch. Never raises: FastStream would log it and go on behind the whole batch."""
        try:
            if self._failure is None:  # else a new reader takes these again
                self._applying = asyncio.create_task(self._apply(records))
                # what is committed must be told, also where the reader is being stopped
                await asyncio.shield(self._applying)
        except Exception as error:  # noqa: BLE001 - raised where the reader is watched
            self._failure = error
        finally:
            self._taking = False

    async def _apply(self, records: tuple[Any, ...]) -> None:
        before = {place: self._view.next_offset(*place) for place in self._places}
        applied = await self._view.apply(records, self._names)
        for one in records:
            name = self._names[one.topic]
            if one.offset >= before[name, one.partition]:
                self._metrics.view_records.labels(name).inc()
            elif name == "stages" and one.offset >= self._told[one.partition]:
                self._tell_again(decode_record(topic(name), one))
            if name == "stages":
                self._told[one.partition] = max(self._told[one.partition], one.offset + 1)
        for ref, reason in applied.poison:
            self._metrics.view_poison.labels(ref.topic).inc()
            log.warning("a record was passed over", ref=f"{ref.topic}/{ref.partition}/{ref.offset}", error=reason)
        self._tell(applied.changes)

    def _tell_again(self, record: Record) -> None:
        """For watchers that saw less of a former process than it had applied."""
        if isinstance(record.value, StageChanged | TaskAccepted | TaskRejected):
            self._tell([Moved(record.value, record.ref)])

    def _tell(self, changes: Sequence[Change]) -> None:
        for change in changes:
            for listener in self._listeners:
                try:
                    listener(change)
                except Exception as error:  # noqa: BLE001 - whoever listens must not stop the view
                    log.error("a listener of the view failed", error=f"{type(error).__name__}: {error}")


class _Log:
    """Takes FastStream's messages: what it calls a warning is of no use here, an error is ours to weigh."""

    def log(self, level: int, msg: Any, /, *, exc_info: Any = None, extra: Mapping[str, Any] | None = None) -> None:
        if level < logging.WARNING:
            return  # a line or two per batch
        told = f"{type(exc_info).__name__}: {exc_info}" if exc_info is not None else None
        (log.warning if level >= logging.ERROR else log.debug)(f"FastStream: {msg}", error=told)


class _NoConsumer:
    """Stands in a message for the consumer that FastStream would acknowledge to."""

    async def commit(self) -> None:
        raise RuntimeError("the view acknowledges nothing")

    def seek(self, partition: Place, offset: int) -> None:
        raise RuntimeError("the view acknowledges nothing")


_NO_CONSUMER = _NoConsumer()


async def _raw(message: KafkaMessage) -> Any:
    return message.raw_message


def security_of(settings: BusSettings) -> BaseSecurity | None:
    """FastStream's form of the bus's security settings."""
    protocol = settings.security_protocol
    if protocol == "PLAINTEXT":
        return None
    use_ssl = protocol.endswith("SSL")
    context = None
    if use_ssl:
        context = create_ssl_context(
            cafile=settings.ssl_cafile, certfile=settings.ssl_certfile, keyfile=settings.ssl_keyfile
        )
    if not protocol.startswith("SASL"):
        return BaseSecurity(ssl_context=context, use_ssl=use_ssl)
    assert settings.sasl_username is not None
    assert settings.sasl_password is not None
    kinds = {"PLAIN": SASLPlaintext, "SCRAM-SHA-256": SASLScram256, "SCRAM-SHA-512": SASLScram512}
    return kinds[settings.sasl_mechanism](
        username=settings.sasl_username,
        password=settings.sasl_password.get_secret_value(),
        ssl_context=context,
        use_ssl=use_ssl,
    )
