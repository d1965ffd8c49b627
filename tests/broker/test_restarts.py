"""A broker that is stopped or killed and started again, on both brokers.

Apache Kafka takes a while after it answers until it leads its partitions and has loaded its groups: what is asked after
a start is asked until it is told.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from polar.broker import BrokerProcess
from tests.broker.cluster import Cluster, RawConnection, batch_of, until
from tests.broker.kafka_image import KafkaContainer
from tests.broker.test_groups import RawMember
from tests.broker.test_topics import configs_of

pytestmark = pytest.mark.timeout(240)
MORTAL = BrokerProcess | KafkaContainer
JVM_AFTER_SIGTERM = 143


@pytest.fixture
async def fresh(own: Cluster) -> AsyncIterator[Cluster]:
    """Clients that never knew the broker before its restart."""
    cluster = Cluster(own.bootstrap, is_kafka=own.is_kafka)
    yield cluster
    await cluster.close()


async def restart(broker: MORTAL, how: str) -> None:
    if how == "sigkill":
        await broker.kill()
    else:
        assert await broker.stop() in (0, JVM_AFTER_SIGTERM)
    await broker.start()


async def produced(raw: RawConnection, topic: str, batch: bytes) -> Any:
    """The answer, once the partition has its leader again."""

    async def attempt() -> Any:
        answer = await raw.produce(topic, batch)
        return None if answer.error_code.name in ("not_leader_or_follower", "unknown_topic_or_partition") else answer

    return await until(attempt, 60)


async def offset_of(cluster: Cluster, group: str, topic: str) -> Any:
    """What a group committed, once its coordinator knows; aiokafka tells nothing of one that loads."""
    admin = await cluster.admin()

    async def attempt() -> Any:
        return (await admin.list_consumer_group_offsets(group)).get(TopicPartition(topic, 0))

    return await until(attempt, 60)


@pytest.mark.parametrize("how", ["sigterm", "sigkill"])
async def test_a_restart_keeps_records_offsets_configs_and_groups(
    mortal: MORTAL, own: Cluster, fresh: Cluster, how: str
) -> None:
    topic, group = await own.topic(2, retention_ms=777_777_777), own.name("g")
    producer = await own.producer()
    for index in range(20):
        await producer.send_and_wait(topic, b"%d" % index, partition=index % 2)
    # A session that outlasts the 10 s or so for which Apache Kafka is away after SIGKILL.
    member = RawMember(own, group, topic, session_ms=45_000)
    await member.join()
    await member.sync()
    assert await member.commit(5, "note") == "none"
    generation = member.generation
    await restart(mortal, how)
    again = RawMember(fresh, group, topic)
    again.member_id, again.generation = member.member_id, generation

    async def heartbeat() -> str | None:
        answer = await again.heartbeat()
        return None if answer in ("not_coordinator", "coordinator_load_in_progress") else answer

    assert await until(heartbeat, 60) == "none", "a member of a stable generation goes on after the restart"
    records = await fresh.read(topic, 20, 60)
    assert sorted(int(record.value) for record in records) == list(range(20))
    assert (await configs_of(fresh, topic))["retention.ms"] == "777777777"
    committed = await offset_of(fresh, group, topic)
    assert (committed.offset, committed.metadata) == (5, "note")


@pytest.mark.parametrize("how", ["sigterm", "sigkill"])
async def test_a_restart_remembers_producers_and_open_transactions(
    mortal: MORTAL, own: Cluster, fresh: Cluster, how: str
) -> None:
    topic, transactional_id = await own.topic(), own.name("x")
    raw = await own.raw()
    producer = await raw.new_producer()
    batch = batch_of(b"once", producer=producer, sequence=0)
    assert (await raw.produce(topic, batch)).base_offset == 0
    transactional = await own.producer(transactional_id=transactional_id, transaction_timeout_ms=60_000)
    async with transactional.transaction():
        await transactional.send_and_wait(topic, b"committed")
    await transactional.begin_transaction()
    await transactional.send_and_wait(topic, b"aborted")
    await transactional.abort_transaction()
    await transactional.begin_transaction()
    await transactional.send_and_wait(topic, b"open")
    await restart(mortal, how)
    raw = await fresh.raw()
    again = await produced(raw, topic, batch)
    assert (again.error_code.name, again.base_offset) == ("none", 0)
    refused = await produced(raw, topic, batch_of(b"gap", producer=producer, sequence=5))
    assert refused.error_code.name == "out_of_order_sequence_number"
    records = await fresh.read(topic, 2, isolation_level="read_committed")
    assert [record.value for record in records] == [b"once", b"committed"]
    successor = await fresh.producer(transactional_id=transactional_id)
    async with successor.transaction():
        await successor.send_and_wait(topic, b"successor")
    records = await fresh.read(topic, 3, isolation_level="read_committed")
    assert [record.value for record in records] == [b"once", b"committed", b"successor"]
    with pytest.raises(KafkaError):
        await transactional.commit_transaction()


async def test_a_transaction_goes_on_over_a_kill(mortal: MORTAL, own: Cluster) -> None:
    topic, group = await own.topic(), own.name("g")
    producer = await own.producer(transactional_id=own.name("x"))
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"before")
    await restart(mortal, "sigkill")
    await producer.send_and_wait(topic, b"after")
    await producer.send_offsets_to_transaction({TopicPartition(topic, 0): 9}, group)
    await producer.commit_transaction()
    records = await own.read(topic, 2, isolation_level="read_committed")
    assert [record.value for record in records] == [b"before", b"after"]
    assert (await offset_of(own, group, topic)).offset == 9


async def test_live_clients_lose_nothing_acknowledged_while_the_broker_is_bounced(mortal: MORTAL, own: Cluster) -> None:
    topic, group = await own.topic(3), own.name("g")
    acknowledged: list[int] = []
    seen: list[int] = []
    stopping, done = asyncio.Event(), asyncio.Event()

    async def produce() -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=own.bootstrap, enable_idempotence=True, linger_ms=2, request_timeout_ms=60_000
        )
        await producer.start()
        number = 0
        while not stopping.is_set():
            numbers = range(number, number + 10)
            sends = [await producer.send(topic, b"%d" % each) for each in numbers]
            for each, result in zip(numbers, await asyncio.gather(*sends, return_exceptions=True), strict=True):
                if not isinstance(result, BaseException):
                    acknowledged.append(each)
            number += 10
            await asyncio.sleep(0.005)
        await producer.stop()

    async def consume() -> None:
        consumer = AIOKafkaConsumer(
            topic, bootstrap_servers=own.bootstrap, group_id=group, auto_offset_reset="earliest",
            enable_auto_commit=False,
        )  # fmt: skip
        await consumer.start()
        while not (done.is_set() and set(seen) >= set(acknowledged)):
            for batch in (await consumer.getmany(timeout_ms=100)).values():
                seen.extend(int(record.value) for record in batch)
        await consumer.stop()

    producing, consuming = asyncio.create_task(produce()), asyncio.create_task(consume())
    for how in ("sigkill", "sigterm", "sigkill"):
        before = len(acknowledged)

        async def has_progress(before: int = before) -> bool:
            return len(acknowledged) > before + 100

        await until(has_progress, 60)
        await restart(mortal, how)
    before = len(acknowledged)
    await until(lambda: has_progress(before), 60)
    stopping.set()
    await producing
    done.set()
    await asyncio.wait_for(consuming, 60)
    assert set(seen) >= set(acknowledged)
    assert len(seen) == len(set(seen)), "an idempotent producer's retries are stored once"
