"""Retention and compaction, on both brokers."""

import asyncio
import time
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from tests.broker.cluster import Cluster, ends, until

SEGMENT = 1 << 20
CLEANER_WAIT = 60
"""Apache Kafka's cleaner looks every 15 s by default; the embedded broker of this suite every half second."""


async def needs(cluster: Cluster, setting: str, most_ms: int) -> None:
    """Skip on an Apache Kafka whose housekeeping is rarer than a test can wait for, as it is by default."""
    if not cluster.is_kafka:
        return
    admin = await cluster.admin()
    node = (await admin.describe_cluster())["brokers"][0]["node_id"]
    (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.BROKER, str(node))])
    configs = {entry[0]: entry[1] for entry in response.resources[0][4]}
    if int(configs[setting]) > most_ms:
        pytest.skip(f"Apache Kafka here: {setting}={configs[setting]}, the test needs {most_ms} or less")


async def fill(producer: AIOKafkaProducer, topic: str, count: int, *, size: int = 200_000, **options: Any) -> None:
    for index in range(count):
        await producer.send_and_wait(topic, bytes([index % 256]) * size, **options)


async def beginning(cluster: Cluster, topic: str) -> int:
    consumer = await cluster.consumer()
    place = TopicPartition(topic, 0)
    try:
        return int((await consumer.beginning_offsets([place]))[place])
    finally:
        await consumer.stop()


async def test_old_segments_go_by_time(cluster: Cluster) -> None:
    await needs(cluster, "log.retention.check.interval.ms", 30_000)
    topic = await cluster.topic(retention_ms=60_000, segment_bytes=SEGMENT)
    producer = await cluster.producer()
    old = int(time.time() * 1000) - 120_000
    await fill(producer, topic, 12, timestamp_ms=old)
    await producer.send_and_wait(topic, b"young")

    async def is_shorter() -> bool:
        return await beginning(cluster, topic) >= 10

    await until(is_shorter, CLEANER_WAIT, every=0.3)
    assert await ends(await cluster.consumer(), topic) == 13
    values = [record.value for record in await cluster.read(topic, 13 - await beginning(cluster, topic))]
    assert values[-1] == b"young"


async def test_a_log_is_cut_to_its_size(cluster: Cluster) -> None:
    await needs(cluster, "log.retention.check.interval.ms", 30_000)
    topic = await cluster.topic(retention_bytes=2 * SEGMENT, segment_bytes=SEGMENT)
    await fill(await cluster.producer(), topic, 40)

    async def is_shorter() -> bool:
        return 20 <= await beginning(cluster, topic) <= 35

    await until(is_shorter, CLEANER_WAIT, every=0.3)


async def compacted(cluster: Cluster, topic: str, expected: int, timeout: float = CLEANER_WAIT) -> list[Any]:
    """The records of a topic once only `expected` are left."""
    found: list[Any] = []

    async def is_clean() -> bool:
        nonlocal found
        consumer = await cluster.consumer(topic, isolation_level="read_committed")
        end = await ends(consumer, topic)
        found = []
        while await consumer.position(TopicPartition(topic, 0)) < end:
            for batch in (await consumer.getmany(timeout_ms=200)).values():
                found += batch
        await consumer.stop()
        return len(found) == expected

    await until(is_clean, timeout, every=0.5)
    return found


@pytest.mark.parametrize("codec", [None, "gzip", "snappy", "lz4", "zstd"])
async def test_compaction_keeps_the_last_of_each_key(cluster: Cluster, codec: str | None) -> None:
    if codec not in (None, "zstd"):
        await needs(cluster, "log.cleaner.backoff.ms", 5_000)  # two codecs are enough where each takes 15 s
    topic = await cluster.topic(cleanup_policy="compact", segment_ms=200, min_cleanable_dirty_ratio=0.01)
    producer = await cluster.producer(compression_type=codec, linger_ms=5)
    for turn in range(5):
        sends = [await producer.send(topic, b"%d.%d" % (turn, key), key=b"k%d" % key) for key in range(20)]
        await asyncio.gather(*sends)
    await asyncio.sleep(0.3)  # older than segment.ms, so the next record starts a segment and seals the former
    last = await producer.send_and_wait(topic, b"active", key=b"k0")
    records = await compacted(cluster, topic, 21)
    assert {record.key: record.value for record in records[:-1]} == {b"k%d" % key: b"4.%d" % key for key in range(20)}
    assert [record.offset for record in records] == [*range(80, 100), last.offset]
    assert records[-1].value == b"active"
    assert (await producer.send_and_wait(topic, b"next", key=b"k1")).offset == last.offset + 1


async def test_tombstones_go_after_their_time_and_with_them_the_key(cluster: Cluster) -> None:
    topic = await cluster.topic(
        cleanup_policy="compact", segment_ms=200, min_cleanable_dirty_ratio=0.01, delete_retention_ms=500
    )
    producer = await cluster.producer()
    await producer.send_and_wait(topic, b"gone", key=b"a")
    await producer.send_and_wait(topic, b"kept", key=b"b")
    await producer.send_and_wait(topic, None, key=b"a")

    async def settled() -> bool:
        # Each round seals what is there; tombstones go with the first cleaning after their time.
        await producer.send_and_wait(topic, b"tick", key=b"tick")
        consumer = await cluster.consumer(topic)
        end = await ends(consumer, topic)
        keys = []
        while await consumer.position(TopicPartition(topic, 0)) < end:
            for batch in (await consumer.getmany(timeout_ms=200)).values():
                keys += [record.key for record in batch]
        await consumer.stop()
        assert b"b" in keys
        return b"a" not in keys

    await until(settled, CLEANER_WAIT, every=0.5)


async def test_compaction_drops_what_was_aborted_and_leaves_what_is_open(cluster: Cluster) -> None:
    topic = await cluster.topic(cleanup_policy="compact", segment_ms=200, min_cleanable_dirty_ratio=0.01)
    producer = await cluster.producer(transactional_id=cluster.name("x"))
    async with producer.transaction():
        await producer.send_and_wait(topic, b"committed", key=b"a")
        await producer.send_and_wait(topic, b"first", key=b"b")
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"aborted", key=b"a")
    await producer.abort_transaction()
    async with producer.transaction():
        await producer.send_and_wait(topic, b"second", key=b"b")
    await asyncio.sleep(0.3)  # older than segment.ms: what follows is in a segment of its own
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"open", key=b"a")
    records = await compacted(cluster, topic, 2)
    assert {record.key: record.value for record in records} == {b"a": b"committed", b"b": b"second"}
    await producer.commit_transaction()

    async def sees_open() -> bool:
        values = {record.key: record.value for record in await cluster.read(topic, 3, isolation_level="read_committed")}
        return bool(values[b"a"] == b"open")

    await until(sees_open)


async def test_a_record_without_a_key_is_refused_by_a_compacted_topic(cluster: Cluster) -> None:
    topic = await cluster.topic(cleanup_policy="compact")
    for codec in (None, "zstd"):
        producer = await cluster.producer(compression_type=codec)
        with pytest.raises(Exception, match=r"InvalidRecord|Error 87|Unknown"):
            await producer.send_and_wait(topic, b"x")
    await (await cluster.producer()).send_and_wait(topic, b"x", key=b"k")
