"""What the conformance suite asks a broker through: clients that are closed with the test, and a raw connection.

Nothing here knows which broker it talks to; a test that has to allow for Apache Kafka asks `is_kafka`.
"""

import asyncio
import io
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from kio.index import load_payload_module, load_request_schema, load_response_schema
from kio.records.schema import NewRecordBatch, Record
from kio.records.writers import write_new_batch
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType


async def until(condition: Callable[[], Awaitable[Any]], timeout: float = 20.0, every: float = 0.05) -> Any:
    """The first true result of `condition`; fails when there is none within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        result = await condition()
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {timeout} s: {condition}"
        await asyncio.sleep(every)


def structs(api_key: int, version: int) -> Any:
    """kio's module with the structs of a request."""
    return load_payload_module(api_key, version, EntityType.request)


class Cluster:
    """Clients of one broker, all closed by `close`."""

    def __init__(self, bootstrap: str, *, is_kafka: bool) -> None:
        self.bootstrap = bootstrap
        self.is_kafka = is_kafka
        self._stack = AsyncExitStack()
        self._topics: list[str] = []
        self._admin: AIOKafkaAdminClient | None = None

    async def close(self, *, keep_topics: bool = False) -> None:
        # Clients first: a group whose topics go away under it may be slow to stop.
        await self._stack.aclose()
        if self._admin is not None:
            if not keep_topics and self._topics:
                await self._admin.delete_topics(self._topics)
            await self._admin.close()

    def name(self, kind: str = "t") -> str:
        """A name nobody else uses."""
        return f"conformance-{kind}-{uuid4().hex[:12]}"

    async def admin(self) -> AIOKafkaAdminClient:
        if self._admin is None:
            self._admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
            await self._admin.start()
        return self._admin

    async def topic(self, partitions: int = 1, name: str | None = None, **configs: object) -> str:
        """A new topic; configs are given with underscores for dots."""
        name = name or self.name()
        admin = await self.admin()
        settings = {key.replace("_", "."): str(value) for key, value in configs.items()}
        response = await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=settings)])
        assert [error[1] for error in response.topic_errors] == [0], response
        self._topics.append(name)

        raw = await self.raw()
        v7 = structs(2, 7)
        asked = tuple(v7.ListOffsetsPartition(partition_index=each, timestamp=-1) for each in range(partitions))

        async def has_leaders() -> bool:
            # Apache Kafka answers that a topic is there a moment before its partitions can be written to.
            response = await raw.call(
                2, 7, replica_id=-1, isolation_level=0, topics=(v7.ListOffsetsTopic(name=name, partitions=asked),)
            )
            return all(each.error_code == 0 for each in response.topics[0].partitions)

        await until(has_leaders)
        return name

    async def set_configs(self, topic: str, **configs: object) -> None:
        admin = await self.admin()
        settings = {key.replace("_", "."): str(value) for key, value in configs.items()}
        (response,) = await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs=settings)])
        assert [each[0] for each in response.resources] == [0], response

    async def producer(self, **options: Any) -> AIOKafkaProducer:
        producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap, **{"acks": "all", **options})
        await producer.start()
        self._stack.push_async_callback(producer.stop)
        return producer

    async def consumer(self, *topics: str, **options: Any) -> AIOKafkaConsumer:
        defaults = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
        consumer = AIOKafkaConsumer(*topics, bootstrap_servers=self.bootstrap, **{**defaults, **options})
        await consumer.start()
        self._stack.push_async_callback(consumer.stop)
        return consumer

    async def read(self, topic: str, count: int, timeout: float = 20.0, **options: Any) -> list[Any]:
        """The first `count` records of a topic by a consumer of its own, in the order they came."""
        consumer = await self.consumer(topic, **options)
        try:
            return await take(consumer, count, timeout)
        finally:
            await consumer.stop()

    async def raw(self) -> "RawConnection":
        connection = await RawConnection.open(self.bootstrap)
        self._stack.push_async_callback(connection.close)
        return connection


async def take(consumer: AIOKafkaConsumer, count: int, timeout: float = 20.0) -> list[Any]:
    """Exactly `count` records, or a failure that says how many came."""
    records: list[Any] = []
    deadline = time.monotonic() + timeout
    while len(records) < count:
        assert time.monotonic() < deadline, f"{len(records)} of {count} records within {timeout} s"
        for batch in (await consumer.getmany(timeout_ms=200)).values():
            records += batch
    assert len(records) == count, f"{len(records)} records instead of {count}"
    return records


async def ends(consumer: AIOKafkaConsumer, topic: str, partition: int = 0) -> int:
    place = TopicPartition(topic, partition)
    return int((await consumer.end_offsets([place]))[place])


class RawConnection:
    """Requests as kio's structs, for what no client library would send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next = 0

    @classmethod
    async def open(cls, bootstrap: str) -> "RawConnection":
        host, _, port = bootstrap.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def close(self) -> None:
        self._writer.close()

    async def send(self, api_key: int, version: int, **fields: Any) -> None:
        self._next += 1
        schema = load_request_schema(api_key, version)
        header: Any = schema.__header_schema__
        buffer = io.BytesIO()
        entity_writer(header)(
            buffer,
            header(request_api_key=api_key, request_api_version=version, correlation_id=self._next, client_id="raw"),
        )
        entity_writer(schema)(buffer, schema(**fields))
        self.send_bytes(struct.pack(">i", buffer.tell()) + buffer.getvalue())
        await self._writer.drain()

    def send_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    async def receive(self, api_key: int, version: int) -> Any:
        (size,) = struct.unpack(">i", await self._reader.readexactly(4))
        frame = await self._reader.readexactly(size)
        schema = load_response_schema(api_key, version)
        _, read = entity_reader(schema.__header_schema__)(frame, 0)
        response, _ = entity_reader(schema)(frame, read)
        return response

    async def is_closed_by_peer(self, timeout: float = 5.0) -> bool:
        return await asyncio.wait_for(self._reader.read(1), timeout) == b""

    async def call(self, api_key: int, version: int, **fields: Any) -> Any:
        await self.send(api_key, version, **fields)
        return await self.receive(api_key, version)

    async def produce(
        self, topic: str, batch: bytes, *, partition: int = 0, transactional_id: str | None = None, acks: int = -1
    ) -> Any:
        """The answer for the one partition."""
        v9 = structs(0, 9)
        data = v9.PartitionProduceData(index=partition, records=batch)
        response = await self.call(
            0,
            9,
            transactional_id=transactional_id,
            acks=acks,
            timeout=timedelta(seconds=10),
            topic_data=(v9.TopicProduceData(name=topic, partition_data=(data,)),),
        )
        return response.responses[0].partition_responses[0]

    async def new_producer(self, transactional_id: str | None = None, timeout_ms: int = 60_000) -> tuple[int, int]:
        async def attempt() -> Any:
            answer = await self.call(
                22,
                4,
                transactional_id=transactional_id,
                transaction_timeout=timedelta(milliseconds=timeout_ms),
                producer_id=-1,
                producer_epoch=-1,
            )
            # A fresh coordinator loads, and one that aborts for us asks to come again.
            return answer if answer.error_code.name == "none" else None

        answer = await until(attempt)
        return answer.producer_id, answer.producer_epoch


def batch_of(
    *values: bytes,
    producer: tuple[int, int] = (-1, -1),
    sequence: int = -1,
    attributes: int = 0,
    key: bytes | None = b"k",
) -> bytes:
    """A record batch as a client would send it."""
    now = datetime.now(UTC).replace(microsecond=0)
    record: Any = Record
    records: Sequence[Record] = [
        record(attributes=0, timestamp=now, offset=index, key=key, value=value, headers=())
        for index, value in enumerate(values)
    ]
    buffer = io.BytesIO()
    batch: Any = NewRecordBatch
    write_new_batch(
        buffer,
        batch(
            producer_id=producer[0],
            producer_epoch=producer[1],
            base_sequence=sequence,
            records=tuple(records),
            attributes=attributes,
        ),
    )
    return buffer.getvalue()
