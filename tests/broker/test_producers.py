"""Idempotent and transactional producers, on both brokers."""

import asyncio
import time
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import InvalidTxnState, KafkaError, OutOfOrderSequenceNumber, ProducerFenced

from tests.broker.cluster import Cluster, batch_of, ends, structs, take, until

TRANSACTIONAL = 0x10


async def test_an_idempotent_producer_stores_each_record_once_in_order(cluster: Cluster) -> None:
    topic = await cluster.topic(2)
    producer = await cluster.producer(enable_idempotence=True, linger_ms=1)
    sends = [await producer.send(topic, b"%d" % index, partition=index % 2) for index in range(1000)]
    for each in sends:
        await each
    records = await cluster.read(topic, 1000)
    for partition in (0, 1):
        values = [int(record.value) for record in records if record.partition == partition]
        assert values == list(range(partition, 1000, 2))


async def test_a_repeated_batch_is_stored_once_and_answered_with_its_offset(cluster: Cluster) -> None:
    topic = await cluster.topic()
    raw = await cluster.raw()
    producer = await raw.new_producer()
    batches = [batch_of(b"a%d" % index, b"b%d" % index, producer=producer, sequence=2 * index) for index in range(6)]
    assert [(await raw.produce(topic, batch)).base_offset for batch in batches] == [0, 2, 4, 6, 8, 10]
    for index in (5, 4, 3, 2, 1):
        again = await raw.produce(topic, batches[index])
        assert (again.error_code.name, again.base_offset) == ("none", 2 * index)
    assert await ends(await cluster.consumer(), topic) == 12


async def test_a_gap_in_the_sequence_is_refused(cluster: Cluster) -> None:
    topic = await cluster.topic()
    raw = await cluster.raw()
    producer = await raw.new_producer()
    assert (await raw.produce(topic, batch_of(b"0", producer=producer, sequence=0))).base_offset == 0
    refused = await raw.produce(topic, batch_of(b"2", producer=producer, sequence=2))
    assert refused.error_code == OutOfOrderSequenceNumber.errno
    assert (await raw.produce(topic, batch_of(b"1", producer=producer, sequence=1))).base_offset == 1


async def test_a_repetition_older_than_five_batches_is_refused_and_not_stored(cluster: Cluster) -> None:
    topic = await cluster.topic()
    raw = await cluster.raw()
    producer = await raw.new_producer()
    batches = [batch_of(b"%d" % index, producer=producer, sequence=index) for index in range(7)]
    for batch in batches:
        await raw.produce(topic, batch)
    assert (await raw.produce(topic, batches[0])).error_code == OutOfOrderSequenceNumber.errno
    assert await ends(await cluster.consumer(), topic) == 7


async def test_a_producer_the_partition_does_not_know_may_start_at_any_sequence(cluster: Cluster) -> None:
    topic = await cluster.topic()
    raw = await cluster.raw()
    producer = await raw.new_producer()
    assert (await raw.produce(topic, batch_of(b"x", producer=producer, sequence=41))).base_offset == 0
    assert (await raw.produce(topic, batch_of(b"y", producer=producer, sequence=42))).base_offset == 1


async def test_an_old_epoch_is_refused(cluster: Cluster) -> None:
    topic = await cluster.topic()
    raw = await cluster.raw()
    producer_id, _ = await raw.new_producer()
    assert (await raw.produce(topic, batch_of(b"0", producer=(producer_id, 1), sequence=0))).base_offset == 0
    refused = await raw.produce(topic, batch_of(b"1", producer=(producer_id, 0), sequence=0))
    assert refused.error_code.name == "invalid_producer_epoch"
    refused = await raw.produce(topic, batch_of(b"1", producer=(producer_id, 2), sequence=1))
    assert refused.error_code == OutOfOrderSequenceNumber.errno
    assert (await raw.produce(topic, batch_of(b"1", producer=(producer_id, 2), sequence=0))).base_offset == 1


async def test_producer_ids_are_never_given_twice(cluster: Cluster) -> None:
    raw = await cluster.raw()
    identities = [await raw.new_producer() for _ in range(20)]
    assert len({producer_id for producer_id, _ in identities}) == 20


async def test_a_committed_transaction_is_read_and_an_aborted_one_is_not(cluster: Cluster) -> None:
    topic = await cluster.topic(2)
    producer = await cluster.producer(transactional_id=cluster.name("x"))
    async with producer.transaction():
        for index in range(4):
            await producer.send(topic, b"committed", partition=index % 2)
    await producer.begin_transaction()
    for index in range(4):
        await producer.send_and_wait(topic, b"aborted", partition=index % 2)
    await producer.abort_transaction()
    async with producer.transaction():
        await producer.send(topic, b"later", partition=0)
    records = await cluster.read(topic, 5, isolation_level="read_committed")
    assert sorted(record.value for record in records) == [b"committed"] * 4 + [b"later"]
    everything = await cluster.read(topic, 9, isolation_level="read_uncommitted")
    assert sum(record.value == b"aborted" for record in everything) == 4


async def test_a_reader_that_starts_after_many_aborts_sees_only_what_was_committed(cluster: Cluster) -> None:
    topic = await cluster.topic()
    producer = await cluster.producer(transactional_id=cluster.name("x"))
    for index in range(20):
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"%d" % index)
        if index % 3:
            await producer.abort_transaction()
        else:
            await producer.commit_transaction()
    records = await cluster.read(topic, 7, isolation_level="read_committed")
    assert [int(record.value) for record in records] == [0, 3, 6, 9, 12, 15, 18]


async def test_the_last_stable_offset_waits_for_the_open_transaction(cluster: Cluster) -> None:
    topic = await cluster.topic()
    plain = await cluster.producer()
    await plain.send_and_wait(topic, b"before")
    producer = await cluster.producer(transactional_id=cluster.name("x"))
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"open")
    await plain.send_and_wait(topic, b"after")
    committed = await cluster.consumer(topic, isolation_level="read_committed")
    uncommitted = await cluster.consumer(isolation_level="read_uncommitted")
    assert (await take(committed, 1))[0].value == b"before"
    assert await ends(committed, topic) == 1
    assert await ends(uncommitted, topic) == 3
    waiting = asyncio.create_task(take(committed, 2))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    await producer.commit_transaction()
    assert [record.value for record in await waiting] == [b"open", b"after"]

    async def is_stable() -> bool:
        return await ends(committed, topic) == 4

    await until(is_stable)


async def test_a_waiting_read_committed_consumer_is_woken_by_the_commit(cluster: Cluster) -> None:
    topic = await cluster.topic()
    producer = await cluster.producer(transactional_id=cluster.name("x"))
    consumer = await cluster.consumer(topic, isolation_level="read_committed", fetch_max_wait_ms=10_000)
    async with producer.transaction():
        await producer.send_and_wait(topic, b"0")
    assert (await consumer.getone()).value == b"0"
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"1")
    waiting = asyncio.create_task(consumer.getone())
    await asyncio.sleep(0.2)  # the fetch is parked at the broker
    start = time.perf_counter()
    await producer.commit_transaction()
    assert (await waiting).value == b"1"
    assert time.perf_counter() - start < 2


async def test_offsets_in_a_transaction_are_committed_with_it(cluster: Cluster) -> None:
    topic, group = await cluster.topic(), cluster.name("g")
    place = TopicPartition(topic, 0)
    producer = await cluster.producer(transactional_id=cluster.name("x"))
    admin = await cluster.admin()

    async def committed() -> int:
        found = await admin.list_consumer_group_offsets(group, partitions=[place])
        return int(found[place].offset)

    await producer.begin_transaction()
    await producer.send_offsets_to_transaction({place: 11}, group)
    assert await committed() == -1
    await producer.abort_transaction()
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"x")
    await producer.send_offsets_to_transaction({place: 12}, group)
    await producer.commit_transaction()

    async def is_twelve() -> bool:
        # Allowed to Apache Kafka: readable a moment after the commit returned.
        return await committed() == 12

    await until(is_twelve, 10 if cluster.is_kafka else 0.01)


async def test_a_second_group_in_a_transaction_is_refused(cluster: Cluster) -> None:
    """aiokafka adds one group to a transaction, so the broker sees offsets of a group that was never added."""
    topic = await cluster.topic()
    producer = await cluster.producer(transactional_id=cluster.name("x"))
    await producer.begin_transaction()
    await producer.send_offsets_to_transaction({TopicPartition(topic, 0): 1}, cluster.name("g"))

    async def add_groups(count: int) -> None:
        for _ in range(count):
            await producer.send_offsets_to_transaction({TopicPartition(topic, 0): 1}, cluster.name("g"))

    with pytest.raises(KafkaError) as refused:
        # Apache Kafka remembers the partition of its offsets topic, which other groups may share.
        await add_groups(40 if cluster.is_kafka else 1)
    assert isinstance(refused.value.__cause__, InvalidTxnState)


async def test_a_new_producer_fences_the_old_one_and_aborts_its_transaction(cluster: Cluster) -> None:
    topic, name = await cluster.topic(), cluster.name("x")
    zombie = await cluster.producer(transactional_id=name)
    await zombie.begin_transaction()
    await zombie.send_and_wait(topic, b"zombie")
    successor = await cluster.producer(transactional_id=name)
    async with successor.transaction():
        await successor.send_and_wait(topic, b"successor")
    with pytest.raises(ProducerFenced):
        await zombie.send_and_wait(topic, b"too late")
    with pytest.raises(ProducerFenced):
        await zombie.commit_transaction()
    records = await cluster.read(topic, 1, isolation_level="read_committed")
    assert [record.value for record in records] == [b"successor"]
    await successor.begin_transaction()
    await successor.send_and_wait(topic, b"still")
    await successor.commit_transaction()


async def test_a_fenced_producer_between_transactions_is_refused_too(cluster: Cluster) -> None:
    topic, name = await cluster.topic(), cluster.name("x")
    zombie = await cluster.producer(transactional_id=name)
    async with zombie.transaction():
        await zombie.send_and_wait(topic, b"0")
    await cluster.producer(transactional_id=name)
    with pytest.raises(ProducerFenced):
        async with zombie.transaction():
            await zombie.send_and_wait(topic, b"1")
    assert [record.value for record in await cluster.read(topic, 1, isolation_level="read_committed")] == [b"0"]


async def test_the_transaction_of_a_dead_producer_times_out(cluster: Cluster) -> None:
    topic = await cluster.topic()
    dead = await cluster.producer(transactional_id=cluster.name("x"), transaction_timeout_ms=1000)
    await dead.begin_transaction()
    await dead.send_and_wait(topic, b"never")
    await (await cluster.producer()).send_and_wait(topic, b"after")
    # Allowed to Apache Kafka: it looks for overdue transactions every ten seconds.
    records = await cluster.read(topic, 1, timeout=25 if cluster.is_kafka else 4, isolation_level="read_committed")
    assert [record.value for record in records] == [b"after"]
    with pytest.raises(ProducerFenced):
        await dead.commit_transaction()


async def test_a_transaction_timeout_over_the_brokers_maximum_is_refused(cluster: Cluster) -> None:
    with pytest.raises(KafkaError, match=r"InvalidTransactionTimeout|InvalidTxnTimeout"):
        await cluster.producer(transactional_id=cluster.name("x"), transaction_timeout_ms=3_600_000)


async def test_a_transactional_batch_needs_its_partition_added(cluster: Cluster) -> None:
    topic, name = await cluster.topic(), cluster.name("x")
    raw = await cluster.raw()
    producer = await raw.new_producer(name)
    batch = batch_of(b"x", producer=producer, sequence=0, attributes=TRANSACTIONAL)
    refused = await raw.produce(topic, batch, transactional_id=name)
    assert refused.error_code.name == "invalid_txn_state"
    assert await ends(await cluster.consumer(), topic) == 0


async def test_a_transaction_ends_once(cluster: Cluster) -> None:
    v3 = structs(24, 3)
    topic, name = await cluster.topic(), cluster.name("x")
    raw = await cluster.raw()
    producer_id, epoch = await raw.new_producer(name)

    async def end(*, commit: bool, by: int = epoch) -> str:
        async def attempt() -> Any:
            answer = await raw.call(
                26, 3, transactional_id=name, producer_id=producer_id, producer_epoch=by, committed=commit
            )
            return None if answer.error_code.name == "concurrent_transactions" else answer.error_code.name

        return str(await until(attempt))

    assert await end(commit=True) == "invalid_txn_state"

    async def add() -> Any:
        answer = await raw.call(
            24,
            3,
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=(v3.AddPartitionsToTxnTopic(name=topic, partitions=(0,)),),
        )
        result = answer.results_by_topic_v3_and_below[0].results_by_partition[0]
        return result.partition_error_code.name == "none"

    await until(add)
    batch = batch_of(b"x", producer=(producer_id, epoch), sequence=0, attributes=TRANSACTIONAL)
    assert (await raw.produce(topic, batch, transactional_id=name)).error_code.name == "none"
    assert await end(commit=True) == "none"
    assert await end(commit=True) == "none", "a repeated end is answered as the first"
    assert await end(commit=False) == "invalid_txn_state"
    assert await end(commit=True, by=epoch + 1) in ("producer_fenced", "invalid_producer_epoch")


async def test_a_markers_offset_is_never_a_record(cluster: Cluster) -> None:
    topic = await cluster.topic()
    producer = await cluster.producer(transactional_id=cluster.name("x"))
    for index in range(5):
        async with producer.transaction():
            await producer.send(topic, b"%d" % index)
    records = await cluster.read(topic, 5, isolation_level="read_committed")
    assert [record.offset for record in records] == [0, 2, 4, 6, 8]

    async def is_ended() -> bool:
        return await ends(await cluster.consumer(), topic) == 10

    await until(is_ended)
