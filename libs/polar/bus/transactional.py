"""Writing: records to the broker, and transactions around them.

`deliver` returns when every record is acknowledged. A `Transactional` is one transactional id: starting it ends or
aborts the predecessor's open transaction and fences it. A transaction is one begin and one commit around as many
records as the caller likes (27 ms on Apache Kafka, whatever it holds), and no work of the caller's runs for long in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import MessageSizeTooLargeError, RecordListTooLargeError

from polar.schemas.base import RecordRef
from polar.schemas.topics import Service

from .clients import stop_producer
from .errors import BrokerUnavailable, BusError, RecordTooLarge, translate, translated
from .records import Encoded, Out, encode_out
from .settings import BusSettings

ABORT_S = 5.0
"""How long an abort may take; after that the transaction's time-out or the id's next owner does it."""


def prepare(outs: tuple[Out, ...], service: Service, settings: BusSettings) -> list[Encoded]:
    """The bytes of every record; raises before anything is sent.

    Raises:
        TypeError: see `encode_out`.
        RecordTooLarge: one is over `max_record_bytes`.
    """
    found = []
    for out in outs:
        encoded = encode_out(out, service)
        if encoded.size > settings.max_record_bytes:
            name = type(out.value).__name__
            raise RecordTooLarge(
                f"a {name} for `{out.topic}` (key {out.key}) has {encoded.size} bytes, the limit is "
                f"{settings.max_record_bytes} (POLAR_KAFKA_MAX_RECORD_BYTES); put its large parts into a claim",
                topic=out.topic,
                size=encoded.size,
                limit=settings.max_record_bytes,
                out=out,
            )
        found.append(encoded)
    return found


async def deliver(
    producer: AIOKafkaProducer,
    outs: tuple[Out, ...],
    encoded: list[Encoded],
    *,
    settings: BusSettings,
    partition_of: Callable[[str, str], int],
    now_ms: int,
) -> list[RecordRef]:
    """Sends records and waits for all of their acknowledgements; one reference for each, in order.

    After an error the producer's sequence numbers are no longer in step with the broker's: make a new one.

    Raises:
        BrokerUnavailable: not acknowledged within `delivery_timeout_s`; some may be in the log.
        Fenced, RecordTooLarge, BusError: refused.
    """
    futures: list[asyncio.Future[Any]] = []
    try:
        with translated("sending"):
            async with asyncio.timeout(settings.delivery_timeout_s):
                for out, bytes_ in zip(outs, encoded, strict=True):
                    partition = out.partition
                    if partition is None:
                        assert out.key is not None  # `encode_out` has checked it
                        partition = partition_of(out.topic, out.key)
                    futures.append(
                        await producer.send(
                            settings.full(out.topic),
                            value=bytes_.value,
                            key=bytes_.key,
                            partition=partition,
                            timestamp_ms=now_ms,
                            headers=bytes_.headers,
                        )
                    )
                for future in futures:
                    # whole batches are done at once: few are still waited for, and those cost less one by one
                    if not future.done():
                        await asyncio.wait((future,))
    except BaseException:
        for future in futures:
            future.add_done_callback(_seen)  # those left behind must not warn that nobody looked
        raise
    return _placed(outs, futures, settings)


def _placed(outs: tuple[Out, ...], futures: list[asyncio.Future[Any]], settings: BusSettings) -> list[RecordRef]:
    """The places of delivered records; raises the first error of theirs, and has seen the others."""
    failed = {number: error for number, one in enumerate(futures) if (error := one.exception()) is not None}
    for number, error in failed.items():
        out = outs[number]
        if isinstance(error, MessageSizeTooLargeError | RecordListTooLargeError):
            raise RecordTooLarge(
                f"the broker refuses a record for `{out.topic}` as too large: max.message.bytes of the topic is below "
                "POLAR_KAFKA_MAX_RECORD_BYTES",
                topic=out.topic,
                size=0,
                limit=settings.max_record_bytes,
                out=out,
            )
        raise translate(error, f"sending to `{out.topic}`") from error
    refs = []
    for out, future in zip(outs, futures, strict=True):
        found = future.result()
        if found.offset < 0:
            raise BusError(f"a record for `{out.topic}` is in the log, but the broker no longer knows where")
        refs.append(RecordRef(topic=out.topic, partition=found.partition, offset=found.offset))
    return refs


def _seen(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


Deliver = Callable[[AIOKafkaProducer, tuple[Out, ...], list[Encoded]], Awaitable[list[RecordRef]]]
Prepare = Callable[[tuple[Out, ...]], list[Encoded]]


class Transaction:
    """An open transaction: what is sent in it becomes visible together, or never."""

    def __init__(self, producer: AIOKafkaProducer, prepare: Prepare, deliver: Deliver) -> None:
        self._producer = producer
        self._prepare = prepare
        self._deliver = deliver
        self._open = True
        self.failure: BusError | None = None
        """The first delivery that failed: the transaction can only be aborted."""

    async def send(self, *outs: Out) -> list[RecordRef]:
        """Sends within the transaction and waits for the broker's offsets, so that a later record may refer to them.

        Raises:
            TypeError, RecordTooLarge: before anything is sent; the transaction may go on.
            Fenced, BusError: the transaction is lost.
        """
        if not self._open:
            raise RuntimeError("the transaction is over")
        encoded = self._prepare(outs)
        try:
            return await self._deliver(self._producer, outs, encoded)
        except BusError as error:
            self.failure = self.failure or error
            raise

    def _end(self) -> None:
        self._open = False


class Transactional:
    """The only writer with its transactional id, until another one starts."""

    def __init__(
        self, name: str, producer: AIOKafkaProducer, settings: BusSettings, prepare: Prepare, deliver: Deliver
    ) -> None:
        self.name = name
        """The transactional id, without prefix."""
        self._producer = producer
        self._settings = settings
        self._prepare = prepare
        self._deliver = deliver
        self._busy = False
        self._lost: BusError | None = None
        self.closed = False

    @property
    def usable(self) -> bool:
        """False after an error of the log's: close it and make a new one."""
        return self._lost is None and not self.closed

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """A transaction: committed at the end of the block, aborted where the block raises.

        The block's own exception comes out as it is, and the next transaction may follow. Without a `send` nothing
        goes to the broker.

        Raises:
            Fenced: another writer with this id has started, or the transaction timed out (`transaction_timeout_ms`).
                Close this, stop owning what the id stands for.
            BusError: retryable: close this, make a new one and read the log again; where the commit itself failed,
                it may or may not have happened.
        """
        if self.closed or self._lost is not None:
            reason = "closed" if self._lost is None else f"lost ({self._lost})"
            raise BusError(f"transactional id {self.name} is {reason}: make a new one")
        if self._busy:
            raise RuntimeError(f"transactional id {self.name} has a transaction open already")
        self._busy = True
        opened = Transaction(self._producer, self._prepare, self._deliver)
        try:
            await self._guarded(self._producer.begin_transaction(), self._settings.delivery_timeout_s, "beginning")
            try:
                yield opened
                opened._end()
                if opened.failure is not None:
                    raise opened.failure
            except BaseException:
                opened._end()
                await self._abort(opened)
                raise
            await self._guarded(self._producer.commit_transaction(), self._settings.delivery_timeout_s, "committing")
        finally:
            self._busy = False

    async def close(self) -> None:
        """Stops the writer; an open transaction is aborted by its time-out or by the id's next owner."""
        if not self.closed:
            self.closed = True
            await stop_producer(self._producer)

    async def _abort(self, opened: Transaction) -> None:
        """Aborts, so that readers need not wait for the time-out; never raises, the block's error matters more."""
        self._lost = opened.failure
        try:
            await self._guarded(self._producer.abort_transaction(), ABORT_S, "aborting")
        except BusError as error:
            self._lost = self._lost or error

    async def _guarded(self, step: Awaitable[None], limit_s: float, doing: str) -> None:
        """One step of the transaction; whatever else than success comes of it ends this `Transactional`."""
        done = False
        try:
            with translated(f"{doing} a transaction of {self.name}"):
                async with asyncio.timeout(limit_s):
                    await step
            done = True
        except BusError as error:
            self._lost = self._lost or error
            raise
        finally:
            if not done and self._lost is None:  # cancelled half-way: what became of it is not known
                self._lost = BrokerUnavailable(f"{doing} a transaction of {self.name} was interrupted")
