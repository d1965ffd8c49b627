"""The one factory of aiokafka clients, with safe defaults, and the careful way to start and to stop them.

aiokafka's own defaults lose data (acks=1, auto-commit, `latest`, 1 MB); here every client has the settings that do not,
and all sizes come from `max_record_bytes`. Nothing else in Polar makes a client.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import KafkaConnectionError, KafkaError
from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential

from .errors import BrokerUnavailable, translate
from .settings import BusSettings

BATCH_BYTES = 256 * 1024
"""One batch per partition is in flight at a time, so a small batch (aiokafka's 16 KiB) bounds the rate."""
LOOKUP_FETCH_BYTES = 64 * 1024
"""A broker answers with at least one whole batch however large (KIP-74): looking one record up costs no more."""
FETCH_BYTES = 32 * 1024 * 1024
"""Of all partitions in one answer."""
STOP_S = 3.0
"""How long a client may take to say goodbye."""

Client = TypeVar("Client")

_log = structlog.get_logger(__name__)


class Clients:
    """Makes clients for one set of settings. Must be used inside a running loop."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        """`name`: of the process, for the broker's logs and quotas."""
        self.settings = settings
        self._common: dict[str, Any] = {
            "bootstrap_servers": settings.bootstrap,
            "client_id": f"polar-{name}",
            "request_timeout_ms": round(settings.request_timeout_s * 1000),
            "security_protocol": settings.security_protocol,
            **_security(settings),
        }

    async def producer(self, transactional_id: str | None = None) -> AIOKafkaProducer:
        """Started: idempotent, acks=all, zstd. With an id (prefix included) it has fenced its predecessor, whose open
        transaction is over."""
        settings = self.settings
        extra: dict[str, Any] = {}
        if transactional_id is not None:
            extra = {
                "transactional_id": transactional_id,
                "transaction_timeout_ms": settings.transaction_timeout_ms,
            }
        return await self._started(
            lambda: AIOKafkaProducer(
                **self._common,
                acks="all",
                enable_idempotence=True,
                compression_type="zstd",
                max_request_size=settings.max_record_bytes,
                max_batch_size=min(BATCH_BYTES, settings.max_record_bytes),
                **extra,
            ),
            stop_producer,
        )

    async def reading(self, *, committed: bool, lookup: bool = False) -> AIOKafkaConsumer:
        """Started, without a group, for manual assignment. Every position is given by a seek in the same breath as the
        assignment, and leaving the log's range is an error, never a silent reset."""
        return await self._started(
            lambda: self._consumer(
                isolation_level="read_committed" if committed else "read_uncommitted",
                auto_offset_reset="none",
                max_partition_fetch_bytes=LOOKUP_FETCH_BYTES if lookup else self.settings.max_record_bytes,
            ),
            stop_consumer,
        )

    async def member(self, group: str, topic: str, listener: Any) -> AIOKafkaConsumer:
        """Started and a member of `group` (prefix included), for its assignment alone: it is there to be paused."""
        session_ms = self.settings.session_timeout_ms

        def make() -> AIOKafkaConsumer:
            consumer = self._consumer(
                group_id=group,
                session_timeout_ms=session_ms,
                heartbeat_interval_ms=session_ms // 6,
                rebalance_timeout_ms=session_ms,
                # sticky is broken in aiokafka (#1176); Range puts equal partition numbers on the same member
                partition_assignment_strategy=(RangePartitionAssignor,),
                isolation_level="read_committed",
                auto_offset_reset="earliest",
                max_partition_fetch_bytes=1024,
            )
            consumer.subscribe([topic], listener=listener)
            return consumer

        return await self._started(make, stop_consumer)

    async def admin(self) -> AIOKafkaAdminClient:
        """Started. Its calls return error codes instead of raising."""
        return await self._started(lambda: AIOKafkaAdminClient(**self._common), stop_admin)

    def _consumer(self, **extra: Any) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **self._common,
            enable_auto_commit=False,
            fetch_max_bytes=max(FETCH_BYTES, self.settings.max_record_bytes),
            **extra,
        )

    async def _started(self, make: Callable[[], Client], stop: Callable[[Any], Awaitable[None]]) -> Client:
        """A client of `make`, started; tries again while no broker answers, up to `connect_timeout_s`.

        Raises:
            BrokerUnavailable: none did.
            BusError: it answered and refused.
        """
        try:
            async with asyncio.timeout(self.settings.connect_timeout_s):
                async for attempt in AsyncRetrying(
                    retry=retry_if_exception_type(KafkaConnectionError),
                    wait=wait_exponential(multiplier=0.2, max=2),
                    reraise=True,
                ):
                    with attempt:
                        client: Any = make()
                        try:
                            await client.start()
                        except BaseException:
                            await stop(client)
                            raise
                        found: Client = client
                        return found
        except (TimeoutError, KafkaConnectionError):
            raise BrokerUnavailable(
                f"cannot reach Kafka at {self.settings.bootstrap}: start one or set POLAR_KAFKA_BOOTSTRAP"
            ) from None
        except KafkaError as error:
            raise translate(error, f"connecting to Kafka at {self.settings.bootstrap}") from error
        raise AssertionError("unreachable: the loop above returns or raises")


async def stop_consumer(consumer: AIOKafkaConsumer) -> None:
    """Stops it, within `STOP_S` also where the broker is away."""
    if not await _in_time(consumer.stop(), "consumer"):
        # stop() was waiting for the group's coordinator; what is left are its connections
        await _in_time(consumer._client.close(), "consumer")


async def stop_producer(producer: AIOKafkaProducer) -> None:
    """Stops it, within a few `STOP_S` also where the broker is away: then without flushing.

    aiokafka's `stop` waits until everything is delivered, for ever where no broker answers, and leaves its sender and
    its waiter behind when it is cut short; there is no documented way to give up, hence the private names.
    """
    stopped = await _in_time(producer.stop(), "producer")
    _look_at_failure(producer)
    if stopped:
        return
    producer._message_accumulator.fail_all(KafkaError("the producer was closed before the broker answered"))
    await _in_time(producer.client.close(), "producer")
    await _in_time(producer._sender.close(), "producer")


def _look_at_failure(producer: AIOKafkaProducer) -> None:
    """A fatal error of a transaction has reached its sender; aiokafka keeps it in a future, too, which nobody awaits
    and which would complain of that in the log."""
    manager = producer._txn_manager
    waiter = None if manager is None else manager._transaction_waiter
    if waiter is not None and waiter.done() and not waiter.cancelled():
        waiter.exception()


async def stop_admin(admin: AIOKafkaAdminClient) -> None:
    await _in_time(admin.close(), "admin client")


async def _in_time(stopping: Coroutine[Any, Any, None], what: str) -> bool:
    task = asyncio.current_task()
    assert task is not None
    before, stopped = task.cancelling(), True
    try:
        async with asyncio.timeout(STOP_S):
            await stopping
    except TimeoutError:
        stopped = False
    except (KafkaError, OSError, AssertionError, AttributeError) as error:
        # nothing is lost: what was acknowledged is on the log, what was not has been reported to its sender
        _log.debug("client did not stop cleanly", client=what, error=repr(error))
    if task.cancelling() > before:
        # aiokafka takes a cancellation of whoever stops it for one of its own tasks' and goes on
        raise asyncio.CancelledError
    return stopped


def _security(settings: BusSettings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if settings.security_protocol.endswith("SSL"):
        context = ssl.create_default_context(cafile=settings.ssl_cafile)
        if settings.ssl_certfile is not None:
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
        found["ssl_context"] = context
    if settings.security_protocol.startswith("SASL"):
        assert settings.sasl_password is not None  # the settings have checked it
        found["sasl_mechanism"] = settings.sasl_mechanism
        found["sasl_plain_username"] = settings.sasl_username
        found["sasl_plain_password"] = settings.sasl_password.get_secret_value()
    return found
