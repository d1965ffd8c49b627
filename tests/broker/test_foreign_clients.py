"""Clients that are not aiokafka, on both brokers: librdkafka, kafka-python and kcat."""

import asyncio
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka import TopicPartition

from tests.broker.cluster import Cluster

confluent = pytest.importorskip("confluent_kafka")
confluent_admin = pytest.importorskip("confluent_kafka.admin")
kafka = pytest.importorskip("kafka")


def poll_all(consumer: Any, count: int, timeout: float = 20.0) -> list[Any]:
    """Exactly `count` messages of a librdkafka consumer."""
    messages: list[Any] = []
    deadline = time.monotonic() + timeout
    while len(messages) < count:
        assert time.monotonic() < deadline, f"{len(messages)} of {count} within {timeout} s"
        message = consumer.poll(0.2)
        if message is not None:
            assert message.error() is None, message.error()
            messages.append(message)
    return messages


async def test_librdkafka_produces_and_consumes_in_a_group(cluster: Cluster) -> None:
    topic, group = await cluster.topic(3), cluster.name("g")

    def work() -> list[tuple[bytes, Any]]:
        producer = confluent.Producer(
            {"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "compression.type": "zstd"}
        )
        for index in range(300):
            producer.produce(topic, b"%d" % index, key=b"k%d" % (index % 10), headers=[("h", b"1")])
        assert producer.flush(20) == 0
        consumer = confluent.Consumer(
            {"bootstrap.servers": cluster.bootstrap, "group.id": group, "auto.offset.reset": "earliest"}
        )
        consumer.subscribe([topic])
        messages = poll_all(consumer, 300)
        consumer.commit(asynchronous=False)
        consumer.close()
        return [(message.value(), message.headers()) for message in messages]

    seen = await asyncio.to_thread(work)
    assert sorted(int(value) for value, _ in seen) == list(range(300))
    assert seen[0][1] == [("h", b"1")]
    admin = await cluster.admin()
    committed = await admin.list_consumer_group_offsets(group)
    assert sum(each.offset for each in committed.values()) == 300


async def test_librdkafka_commits_and_aborts_transactions(cluster: Cluster) -> None:
    topic, group = await cluster.topic(1), cluster.name("g")

    def work() -> None:
        producer = confluent.Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": cluster.name("x")})
        producer.init_transactions(20)
        consumer = confluent.Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": group})
        consumer.subscribe([topic])
        while not consumer.assignment():
            consumer.poll(0.1)
        producer.begin_transaction()
        producer.produce(topic, b"committed")
        producer.send_offsets_to_transaction(
            [confluent.TopicPartition(topic, 0, 7)], consumer.consumer_group_metadata(), 20
        )
        producer.commit_transaction(20)
        producer.begin_transaction()
        producer.produce(topic, b"aborted")
        producer.flush(20)
        producer.abort_transaction(20)
        committed = consumer.committed([confluent.TopicPartition(topic, 0)], 20)
        assert committed[0].offset == 7
        consumer.close()

    await asyncio.to_thread(work)
    assert [record.value for record in await cluster.read(topic, 1, isolation_level="read_committed")] == [b"committed"]


async def test_librdkafka_rebalances_cooperatively(cluster: Cluster) -> None:
    topic, group = await cluster.topic(6), cluster.name("g")

    def work() -> None:
        def member() -> tuple[Any, list[int]]:
            lost: list[int] = []
            consumer = confluent.Consumer(
                {
                    "bootstrap.servers": cluster.bootstrap,
                    "group.id": group,
                    "partition.assignment.strategy": "cooperative-sticky",
                    "heartbeat.interval.ms": 200,
                    "auto.offset.reset": "earliest",
                }
            )
            consumer.subscribe(
                [topic], on_revoke=lambda _, partitions: lost.extend(each.partition for each in partitions)
            )
            return consumer, lost

        def poll_until(condition: Callable[[], bool], consumers: list[Any]) -> None:
            deadline = time.monotonic() + 30
            while not condition():
                assert time.monotonic() < deadline, [consumer.assignment() for consumer in consumers]
                for consumer in consumers:
                    consumer.poll(0.05)

        first, lost = member()
        poll_until(lambda: len(first.assignment()) == 6, [first])
        second, _ = member()
        poll_until(lambda: len(first.assignment()) == len(second.assignment()) == 3, [first, second])
        assert len(lost) == 3, "only what moves is revoked"
        second.close()
        poll_until(lambda: len(first.assignment()) == 6, [first])
        first.close()

    await asyncio.to_thread(work)


async def test_librdkafkas_admin_sees_what_aiokafkas_does(cluster: Cluster) -> None:
    name = cluster.name()

    def work() -> None:
        admin = confluent_admin.AdminClient({"bootstrap.servers": cluster.bootstrap})
        admin.create_topics([confluent_admin.NewTopic(name, 3, 1, config={"retention.ms": "9999"})])[name].result(20)
        resource = confluent_admin.ConfigResource(confluent_admin.ConfigResource.Type.TOPIC, name)
        deadline = time.monotonic() + 20
        while name not in admin.list_topics(timeout=20).topics:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(admin.list_topics(name, timeout=20).topics[name].partitions) == 3
        assert admin.describe_configs([resource])[resource].result(20)["retention.ms"].value == "9999"
        assert admin.describe_cluster().result(20).controller is not None
        assert not admin.list_consumer_groups().result(20).errors
        admin.delete_topics([name])[name].result(20)

    await asyncio.to_thread(work)


async def test_librdkafka_finds_offsets_by_time(cluster: Cluster) -> None:
    topic = await cluster.topic()
    producer = await cluster.producer()
    base = int(time.time() * 1000) - 10_000
    for index in range(5):
        await producer.send_and_wait(topic, b"v", timestamp_ms=base + index)

    def work() -> tuple[int, tuple[int, int]]:
        consumer = confluent.Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "none"})
        (found,) = consumer.offsets_for_times([confluent.TopicPartition(topic, 0, base + 3)], 20)
        marks = consumer.get_watermark_offsets(confluent.TopicPartition(topic, 0), 20)
        consumer.close()
        return found.offset, marks

    assert await asyncio.to_thread(work) == (3, (0, 5))


async def test_kafka_python_produces_and_consumes_in_a_group(cluster: Cluster) -> None:
    topic, group = await cluster.topic(2), cluster.name("g")

    def work() -> list[bytes]:
        producer = kafka.KafkaProducer(bootstrap_servers=cluster.bootstrap, acks="all")
        for index in range(50):
            producer.send(topic, b"%d" % index, key=b"%d" % (index % 5))
        producer.flush(20)
        producer.close()
        consumer = kafka.KafkaConsumer(
            bootstrap_servers=cluster.bootstrap,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        # kafka-python's leader may hand out partitions before it knows of any, and then hands out none for minutes.
        assert consumer.partitions_for_topic(topic) == {0, 1}
        consumer.subscribe([topic])
        values: list[bytes] = []
        deadline = time.monotonic() + 20
        while len(values) < 50 and time.monotonic() < deadline:
            for batch in consumer.poll(timeout_ms=200).values():
                values += [record.value for record in batch]
        consumer.commit()
        consumer.close()
        return values

    values = await asyncio.to_thread(work)
    assert sorted(int(value) for value in values) == list(range(50))
    admin = await cluster.admin()
    committed = await admin.list_consumer_group_offsets(group)
    assert sum(committed[TopicPartition(topic, each)].offset for each in (0, 1)) == 50


async def test_kafka_pythons_transactions_and_admin_work(cluster: Cluster) -> None:
    topic, name = await cluster.topic(), cluster.name()

    def work() -> None:
        producer = kafka.KafkaProducer(bootstrap_servers=cluster.bootstrap, transactional_id=cluster.name("x"))
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"aborted")
        producer.flush(20)
        producer.abort_transaction()
        producer.begin_transaction()
        producer.send(topic, b"committed")
        producer.commit_transaction()
        producer.close()
        admin = kafka.KafkaAdminClient(bootstrap_servers=cluster.bootstrap)
        admin.create_topics([kafka.admin.NewTopic(name, 2, 1)])
        admin.list_topics()
        admin.delete_topics([name])
        admin.close()

    await asyncio.to_thread(work)
    assert [record.value for record in await cluster.read(topic, 1, isolation_level="read_committed")] == [b"committed"]


async def test_kcat_lists_writes_and_reads(cluster: Cluster) -> None:
    kcat = shutil.which("kcat")
    if kcat is None:
        pytest.skip("kcat is not installed")
    topic = await cluster.topic()

    async def run(*arguments: str, given: bytes = b"") -> bytes:
        process = await asyncio.create_subprocess_exec(
            kcat,
            "-b",
            cluster.bootstrap,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await asyncio.wait_for(process.communicate(given), 30)
        assert process.returncode == 0
        return said

    await run("-P", "-t", topic, "-K", ":", given=b"a:1\nb:2\n")
    assert await run("-C", "-t", topic, "-e", "-q", "-f", "%k=%s ") == b"a=1 b=2 "
    assert topic.encode() in await run("-L")
