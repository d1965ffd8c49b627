"""Records in and out: order, content, compression, size, time and long polls, on both brokers."""

import asyncio
import os
import time
from datetime import timedelta
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete
from aiokafka.errors import CorruptRecordException, MessageSizeTooLargeError

from tests.broker.cluster import Cluster, batch_of, ends, structs, take, until


async def test_records_of_a_key_keep_their_order(cluster: Cluster) -> None:
    topic = await cluster.topic(3)
    producer = await cluster.producer(linger_ms=5)
    sends = [await producer.send(topic, b"%d" % index, key=b"k%d" % (index % 7)) for index in range(700)]
    for each in sends:
        await each
    by_key: dict[bytes, list[int]] = {}
    for record in await cluster.read(topic, 700):
        by_key.setdefault(record.key, []).append(int(record.value))
    assert by_key == {b"k%d" % key: list(range(key, 700, 7)) for key in range(7)}


async def test_headers_nulls_and_timestamps_come_back_as_sent(cluster: Cluster) -> None:
    topic = await cluster.topic()
    producer = await cluster.producer()
    now = int(time.time() * 1000) - 5000
    await producer.send_and_wait(
        topic, b"v", key=None, timestamp_ms=now, headers=[("a", b"1"), ("a", b""), ("ü", b"\0")]
    )
    await producer.send_and_wait(topic, None, key=b"k", timestamp_ms=now + 1)
    await producer.send_and_wait(topic, b"", key=b"", timestamp_ms=now + 2)
    records = await cluster.read(topic, 3)
    assert [(record.key, record.value, record.timestamp) for record in records] == [
        (None, b"v", now),
        (b"k", None, now + 1),
        (b"", b"", now + 2),
    ]
    assert records[0].headers == (("a", b"1"), ("a", b""), ("ü", b"\0"))
    assert [record.offset for record in records] == [0, 1, 2]


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_compressed_batches_come_back(cluster: Cluster, codec: str) -> None:
    topic = await cluster.topic()
    producer = await cluster.producer(compression_type=codec, linger_ms=20)
    sends = [await producer.send(topic, b"value %d " % index * 20) for index in range(200)]
    for each in sends:
        await each
    assert [record.value for record in await cluster.read(topic, 200)] == [
        b"value %d " % index * 20 for index in range(200)
    ]


@pytest.mark.parametrize("size", [900_000, 5_000_000, 20_000_000])
async def test_large_records_pass_whole(cluster: Cluster, size: int) -> None:
    topic = await cluster.topic(max_message_bytes=25_000_000)
    value = os.urandom(size)
    producer = await cluster.producer(max_request_size=25_000_000)
    await producer.send_and_wait(topic, value)
    await producer.send_and_wait(topic, b"after")
    records = await cluster.read(topic, 2, max_partition_fetch_bytes=1_000_000, timeout=40)
    assert records[0].value == value
    assert records[1].value == b"after"


async def test_a_batch_over_max_message_bytes_is_refused(cluster: Cluster) -> None:
    topic = await cluster.topic(max_message_bytes=10_000)
    producer = await cluster.producer()
    with pytest.raises(MessageSizeTooLargeError):
        await producer.send_and_wait(topic, os.urandom(11_000))
    await producer.send_and_wait(topic, os.urandom(9_000))
    await cluster.set_configs(topic, max_message_bytes=20_000)

    async def fits() -> bool:
        try:
            await producer.send_and_wait(topic, os.urandom(11_000))
        except MessageSizeTooLargeError:
            return False
        return True

    await until(fits)


async def test_a_record_over_the_default_size_is_refused(cluster: Cluster) -> None:
    topic = await cluster.topic()
    producer = await cluster.producer(max_request_size=5_000_000)
    with pytest.raises(MessageSizeTooLargeError):
        await producer.send_and_wait(topic, os.urandom(1_500_000))


@pytest.mark.parametrize("acks", [0, 1, "all"])
async def test_every_kind_of_acknowledgement_stores_the_record(cluster: Cluster, acks: Any) -> None:
    topic = await cluster.topic()
    producer = await cluster.producer(acks=acks)
    for index in range(20):
        await producer.send_and_wait(topic, b"%d" % index)
    await producer.flush()
    assert [int(record.value) for record in await cluster.read(topic, 20)] == list(range(20))


async def test_a_batch_with_a_wrong_checksum_is_refused(cluster: Cluster) -> None:
    topic = await cluster.topic()
    raw = await cluster.raw()
    batch = bytearray(batch_of(b"value"))
    batch[-1] ^= 0xFF
    answer = await raw.produce(topic, bytes(batch))
    assert answer.error_code == CorruptRecordException.errno
    assert (await raw.produce(topic, batch_of(b"value"))).base_offset == 0


async def test_required_acks_other_than_0_1_and_all_are_refused(cluster: Cluster) -> None:
    topic = await cluster.topic()
    raw = await cluster.raw()
    assert (await raw.produce(topic, batch_of(b"v"), acks=2)).error_code.name == "invalid_required_acks"


async def test_a_record_from_the_future_is_refused(cluster: Cluster) -> None:
    topic = await cluster.topic()
    producer = await cluster.producer()
    with pytest.raises(Exception, match="InvalidTimestamp"):
        await producer.send_and_wait(topic, b"v", timestamp_ms=int((time.time() + 7200) * 1000))


async def test_a_topic_with_log_append_time_has_the_brokers_clock(cluster: Cluster) -> None:
    topic = await cluster.topic(message_timestamp_type="LogAppendTime")
    producer = await cluster.producer()
    before = int(time.time() * 1000)
    sent = await producer.send_and_wait(topic, b"v", timestamp_ms=1000)
    (record,) = await cluster.read(topic, 1)
    assert before <= record.timestamp <= int(time.time() * 1000)
    assert (record.timestamp_type, sent.timestamp) == (1, record.timestamp)


async def test_offsets_for_times_finds_the_record_also_inside_a_batch(cluster: Cluster) -> None:
    topic = await cluster.topic()
    place = TopicPartition(topic, 0)
    base = int(time.time() * 1000) - 100_000
    for codec in (None, "zstd"):
        producer = await cluster.producer(compression_type=codec)
        batch = producer.create_batch()
        for index in range(10):
            batch.append(key=None, value=b"v", timestamp=base + index * 100)
        batch.close()
        await (await producer.send_batch(batch, topic, partition=0))
        base += 1000
    base -= 2000
    consumer = await cluster.consumer()

    async def at(timestamp: int) -> tuple[int, int] | None:
        found = (await consumer.offsets_for_times({place: timestamp}))[place]
        return None if found is None else (found.offset, found.timestamp)

    assert await at(base - 50_000) == (0, base)
    assert await at(base) == (0, base)
    assert await at(base + 350) == (4, base + 400)
    assert await at(base + 1000) == (10, base + 1000)
    assert await at(base + 1850) == (19, base + 1900)
    assert await at(base + 1901) is None


async def test_a_consumer_seeks_to_an_offset_the_beginning_and_the_end(cluster: Cluster) -> None:
    topic = await cluster.topic()
    place = TopicPartition(topic, 0)
    producer = await cluster.producer()
    for index in range(30):
        await producer.send_and_wait(topic, b"%d" % index)
    consumer = await cluster.consumer()
    consumer.assign([place])
    assert (await consumer.getone()).offset == 0
    consumer.seek(place, 17)
    assert (await consumer.getone()).value == b"17"
    await consumer.seek_to_beginning()
    assert (await consumer.getone()).value == b"0"
    await consumer.seek_to_end()
    await producer.send_and_wait(topic, b"30")
    assert (await consumer.getone()).value == b"30"
    assert await consumer.beginning_offsets([place]) == {place: 0}
    assert await consumer.end_offsets([place]) == {place: 31}


async def test_a_position_out_of_range_is_reset(cluster: Cluster) -> None:
    topic = await cluster.topic()
    producer = await cluster.producer()
    await producer.send_and_wait(topic, b"only")
    consumer = await cluster.consumer()
    consumer.assign([TopicPartition(topic, 0)])
    consumer.seek(TopicPartition(topic, 0), 1000)
    assert (await consumer.getone()).offset == 0


async def test_delete_records_moves_the_start_of_the_log(cluster: Cluster) -> None:
    topic = await cluster.topic()
    place = TopicPartition(topic, 0)
    producer = await cluster.producer(linger_ms=20)
    sends = [await producer.send(topic, b"%d" % index) for index in range(20)]
    for each in sends:
        await each
    admin = await cluster.admin()
    assert await admin.delete_records({place: RecordsToDelete(7)}) == {place: 7}
    consumer = await cluster.consumer()
    assert await consumer.beginning_offsets([place]) == {place: 7}
    assert [record.offset for record in await cluster.read(topic, 13)] == list(range(7, 20))
    with pytest.raises(Exception, match="OffsetOutOfRange"):
        await admin.delete_records({place: RecordsToDelete(21)})
    assert await admin.delete_records({place: RecordsToDelete(-1)}) == {place: 20}
    assert await consumer.beginning_offsets([place]) == {place: 20}
    assert (await producer.send_and_wait(topic, b"next")).offset == 20


async def test_a_new_record_wakes_a_waiting_consumer_at_once(cluster: Cluster) -> None:
    topic = await cluster.topic()
    producer = await cluster.producer()
    consumer = await cluster.consumer(topic, fetch_max_wait_ms=5000)
    await producer.send_and_wait(topic, b"first")
    assert (await consumer.getone()).value == b"first"
    delays = []
    for index in range(10):
        waiting = asyncio.create_task(consumer.getone())
        # Long enough for the consumer's fetch to be parked at the broker.
        await asyncio.sleep(0.1)
        start = time.perf_counter()
        await producer.send_and_wait(topic, b"%d" % index)
        await waiting
        delays.append(time.perf_counter() - start)
    assert sorted(delays)[5] < 0.1, delays


async def test_an_idle_fetch_lasts_as_long_as_it_asked_for(cluster: Cluster) -> None:
    topic = await cluster.topic()
    raw = await cluster.raw()
    # Apache Kafka answers with an error, so at once, until the partition has its leader: a write waits for that.
    await (await cluster.producer()).send_and_wait(topic, b"first")
    start = time.perf_counter()
    response = await raw.call(1, 11, **fetch_of(topic, max_wait=0.8, min_bytes=1, offset=1))
    assert 0.7 < time.perf_counter() - start < 2
    assert response.responses[0].partitions[0].records in (b"", None)


async def test_a_fetch_waits_for_min_bytes_and_answers_then(cluster: Cluster) -> None:
    topic = await cluster.topic()
    raw = await cluster.raw()
    producer = await cluster.producer()
    await raw.send(1, 11, **fetch_of(topic, max_wait=20, min_bytes=5000))
    waiting = asyncio.create_task(raw.receive(1, 11))
    await producer.send_and_wait(topic, b"x" * 2000)
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    await producer.send_and_wait(topic, b"x" * 4000)
    response = await asyncio.wait_for(waiting, 5)
    assert len(response.responses[0].partitions[0].records) > 6000


async def test_a_fetch_respects_its_limits_but_always_gives_one_batch(cluster: Cluster) -> None:
    topic = await cluster.topic(2)
    raw = await cluster.raw()
    for partition in (0, 1):
        for _ in range(10):
            await raw.produce(topic, batch_of(b"x" * 1000), partition=partition)
    small = await raw.call(1, 11, **fetch_of(topic, partitions=(0, 1), partition_bytes=10, max_bytes=10))
    sizes = [len(each.records or b"") for each in small.responses[0].partitions]
    one = len(batch_of(b"x" * 1000))
    assert sizes == [one, 0]
    larger = await raw.call(1, 11, **fetch_of(topic, partitions=(0, 1), partition_bytes=3 * one, max_bytes=5 * one))
    sizes = [len(each.records or b"") for each in larger.responses[0].partitions]
    assert sizes[0] == 3 * one
    assert one <= sizes[1] <= 3 * one


def fetch_of(
    topic: str,
    *,
    partitions: tuple[int, ...] = (0,),
    max_wait: float = 0.0,
    min_bytes: int = 1,
    partition_bytes: int = 1_000_000,
    max_bytes: int = 10_000_000,
    offset: int = 0,
    isolation_level: int = 0,
) -> dict[str, Any]:
    v11 = structs(1, 11)
    places = tuple(
        v11.FetchPartition(partition=each, fetch_offset=offset, partition_max_bytes=partition_bytes)
        for each in partitions
    )
    return {
        "max_wait": timedelta(seconds=max_wait),
        "min_bytes": min_bytes,
        "max_bytes": max_bytes,
        "isolation_level": isolation_level,
        "topics": (v11.FetchTopic(topic=topic, partitions=places),),
        "forgotten_topics_data": (),
    }


async def test_lag_is_the_distance_from_the_commit_to_the_end(cluster: Cluster) -> None:
    topic, group = await cluster.topic(), cluster.name("g")
    place = TopicPartition(topic, 0)
    producer = await cluster.producer()
    for index in range(50):
        await producer.send_and_wait(topic, b"%d" % index)
    consumer = await cluster.consumer(topic, group_id=group)
    await take(consumer, 50)
    await consumer.commit({place: 20})
    admin = await cluster.admin()
    committed = await admin.list_consumer_group_offsets(group)
    assert await ends(consumer, topic) - committed[place].offset == 30
