"""The view's way to the log: one FastStream batch subscriber over `stages`, `results` and `nodes`.

No group, every partition, from the earliest record, committed records only. Nothing is ever acknowledged: the state
is in memory, so a start reads the log again, and a record that comes twice changes nothing (`View.apply`). What it
settles for itself, because FastStream's defaults do not fit (measured, see the notes in each place): the
acknowledgement policy, the decoder, the size of a record, and a reader that stays behind without a sign.

A record that cannot be read is counted, logged and passed over. It gets no dead letter here: the scheduler reads the
same topics and writes one, and this reader would write another at each start.
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

from polar.bus import Bus, BusSettings
from polar.bus.records import decode_record
from polar.schemas import RecordRef
from polar.schemas.topics import topic

from .metrics import SubmitMetrics
from .view import Change, View

TOPICS = ("stages", "results", "nodes")
RETRY_S = 1.0
"""Between a reader that failed and the next."""

log = structlog.get_logger("polar.submit.view")


class ViewFeed:
    """Keeps a `View` up with the log and tells `listeners` what changed, in order, on the event loop.

    `run` goes on until it is cancelled; no failure of the broker ends it. Listeners must not block and must not raise.
    """

    def __init__(
        self,
        bus: Bus,
        view: View,
        metrics: SubmitMetrics,
        listeners: Sequence[Callable[[Change], None]],
        *,
        batch_records: int,
    ) -> None:
        self._bus = bus
        self._view = view
        self._metrics = metrics
        self._listeners = listeners
        self._batch_records = batch_records
        self._taking = False
        self._topics = {bus.settings.full(name): topic(name) for name in TOPICS}
        self.ready = asyncio.Event()
        """Set once the log has been read up to where it ended when `run` began."""

    async def run(self) -> None:
        while True:
            try:
                await self._read()
                log.warning("the view's reader is behind and does not move; making a new one")
            except (KafkaError, OSError, TimeoutError) as error:
                log.warning("the view cannot read the log; trying again", error=f"{type(error).__name__}: {error}")
            self._metrics.view_restarts.inc()
            await self._bus.clock.sleep(RETRY_S)

    async def _read(self) -> None:
        """Read until the reader stalls; then its successor goes on where the view is."""
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
        places = [(full, number) for full, spec in self._topics.items() for number in range(settings.count(spec))]
        subscriber = broker.subscriber(
            partitions=[TopicPartition(full, number, declare=False) for full, number in places],
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
        try:
            await broker.start()
            consumer = subscriber.consumer
            assert consumer is not None
            for full, number in places:
                after = self._view.next_offset(self._topics[full].name, number)
                if after:
                    consumer.seek(Place(full, number), after)
            await self._watch(consumer, [Place(full, number) for full, number in places])
        finally:
            await broker.stop()

    async def _watch(self, consumer: AIOKafkaConsumer, places: list[Place]) -> None:
        """Say when the log's end is reached; return when the reader is behind and has not moved for too long."""
        clock = self._bus.clock
        before: dict[Place, int] = {}
        moved_at = clock.monotonic()
        goal = await consumer.end_offsets(places)
        while True:
            now = {place: await consumer.position(place) for place in places}
            behind = any(now[place] < goal[place] for place in places)
            # what a position has passed is in the handler at once (no await lies between) or applied
            if not behind and not self._taking:
                self._caught_up()
            if now != before or not behind:
                before, moved_at = now, clock.monotonic()
            elif clock.monotonic() - moved_at > self._bus.settings.stuck_after_s:
                return
            if self.ready.is_set():
                await clock.sleep(1.0)
                goal = await consumer.end_offsets(places)
            else:
                await clock.sleep(0.05)

    def _caught_up(self) -> None:
        if not self.ready.is_set():
            self._tell(self._view.caught_up())
            self.ready.set()
            log.info("the view has caught up", tasks=len(self._view.tasks), sessions=self._view.session_count)

    async def _parse(self, records: tuple[Any, ...]) -> KafkaMessage:
        self._taking = True
        return KafkaMessage(body=b"", raw_message=records, consumer=_NO_CONSUMER)

    async def _take(self, records: tuple[Any, ...]) -> None:
        """A batch. Never raises: FastStream would log it and go on behind the whole batch."""
        try:
            for message in records:
                self._apply(message)
        finally:
            self._taking = False
        # getmany returns without a pause while it has records; others must run as well
        await asyncio.sleep(0)

    def _apply(self, message: Any) -> None:
        spec = self._topics[message.topic]
        record = decode_record(spec, message)
        self._metrics.view_records.labels(spec.name).inc()
        try:
            if record.error is not None:
                raise record.error
            self._tell(self._view.apply(record.value, ref=record.ref, key=record.key))
        except Exception as error:  # noqa: BLE001 - one bad record must not stop the view of all others
            ref = RecordRef(topic=spec.name, partition=message.partition, offset=message.offset)
            self._view.apply(None, ref=ref, key=None)
            self._metrics.view_poison.labels(spec.name).inc()
            log.warning("a record was passed over", ref=f"{ref.topic}/{ref.partition}/{ref.offset}", error=str(error))

    def _tell(self, changes: list[Change]) -> None:
        for change in changes:
            for listener in self._listeners:
                listener(change)


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
