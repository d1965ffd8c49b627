"""Consumer groups and committed offsets, on both brokers."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, OffsetAndMetadata, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalGenerationError, KafkaError, UnknownMemberIdError

from tests.broker.cluster import Cluster, structs, take, until

SESSION = 6000
"""The shortest session time-out that brokers allow by default."""

QUICK = {"session_timeout_ms": SESSION, "heartbeat_interval_ms": 200}


async def test_three_members_share_the_partitions(cluster: Cluster) -> None:
    topic, group = await cluster.topic(6), cluster.name("g")
    members = [await cluster.consumer(topic, group_id=group, **QUICK) for _ in range(3)]

    async def is_shared() -> bool:
        for member in members:
            await member.getmany(timeout_ms=10)
        return sorted(len(member.assignment()) for member in members) == [2, 2, 2]

    await until(is_shared)
    assert len(set().union(*(member.assignment() for member in members))) == 6


async def test_a_clean_leave_hands_the_partitions_over_at_once(cluster: Cluster) -> None:
    topic, group = await cluster.topic(2), cluster.name("g")
    first = await cluster.consumer(topic, group_id=group, **QUICK)
    second = await cluster.consumer(topic, group_id=group, **QUICK)

    async def is_shared() -> bool:
        await first.getmany(timeout_ms=10)
        await second.getmany(timeout_ms=10)
        return len(first.assignment()) == len(second.assignment()) == 1

    await until(is_shared)
    start = time.monotonic()
    await first.stop()

    async def is_alone() -> bool:
        await second.getmany(timeout_ms=10)
        return len(second.assignment()) == 2

    await until(is_alone)
    assert time.monotonic() - start < SESSION / 1000


WORKER = """
import asyncio, sys
from aiokafka import AIOKafkaConsumer
async def main(bootstrap, topic, group):
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False,
        auto_offset_reset="earliest", session_timeout_ms=6000, heartbeat_interval_ms=200, max_poll_records=1)
    await consumer.start()
    async for record in consumer:
        print(record.partition, record.value.decode(), flush=True)
        await consumer.commit({__import__("aiokafka").TopicPartition(topic, record.partition): record.offset + 1})
asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def worker(cluster: Cluster, topic: str, group: str) -> Iterator["subprocess.Popen[str]"]:
    """A consumer in a process of its own, that prints what it read and commits each record after it."""
    command = [sys.executable, "-c", WORKER, cluster.bootstrap, topic, group]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


async def test_a_killed_member_is_put_out_and_nothing_is_lost(cluster: Cluster) -> None:
    topic, group = await cluster.topic(2), cluster.name("g")
    producer = await cluster.producer()
    for index in range(20):
        await producer.send_and_wait(topic, b"%d" % index, partition=index % 2)
    with worker(cluster, topic, group) as process:
        assert process.stdout is not None
        seen = [await asyncio.to_thread(process.stdout.readline) for _ in range(5)]
        assert all(seen)
        process.send_signal(signal.SIGKILL)
        rest = await asyncio.to_thread(process.stdout.read)
    by_worker = {int(line.split()[1]) for line in [*seen, *rest.splitlines()] if line.strip()}
    start = time.monotonic()
    survivor = await cluster.consumer(topic, group_id=group, **QUICK)
    taken: set[int] = set()

    async def has_rest() -> bool:
        for batch in (await survivor.getmany(timeout_ms=200)).values():
            taken.update(int(record.value) for record in batch)
        return taken | by_worker == set(range(20))

    await until(has_rest, SESSION / 1000 + 10)
    assert time.monotonic() - start < SESSION / 1000 + 6


async def test_a_silent_member_is_put_out_after_its_session(cluster: Cluster) -> None:
    topic, group = await cluster.topic(1), cluster.name("g")
    raw = RawMember(cluster, group, topic)
    await raw.join()
    await raw.sync()
    assert await raw.heartbeat() == "none"
    start = time.monotonic()
    admin = await cluster.admin()

    async def is_empty() -> bool:
        (response,) = await admin.describe_consumer_groups([group])
        return bool(response.groups[0][2] == "Empty")

    await until(is_empty, 15, every=0.2)
    assert SESSION / 1000 - 1 < time.monotonic() - start < SESSION / 1000 + 4
    assert await raw.heartbeat() == "unknown_member_id"


class RawMember:
    """A group member by hand: it heartbeats only when told to."""

    def __init__(
        self, cluster: Cluster, group: str, topic: str, instance: str | None = None, session_ms: int = SESSION
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._topic = topic
        self._instance = instance
        self._session_ms = session_ms
        self._raw: Any = None
        self.member_id = ""
        self.generation = -1
        self.leader = ""
        self.members: tuple[Any, ...] = ()
        self.skip_assignment = False

    async def call(self, api: int, version: int, **fields: Any) -> Any:
        if self._raw is None:
            self._raw = await self._cluster.raw()
            # Apache Kafka has no coordinators before somebody first asked for one.
            await self._raw.call(10, 2, key=self._group, key_type=0)
        return await self._raw.call(api, version, **fields)

    async def join(self, *, protocols: tuple[str, ...] = ("range",)) -> str:
        v9 = structs(11, 9)

        async def attempt() -> Any:
            answer = await self.call(
                11,
                9,
                group_id=self._group,
                session_timeout=timedelta(milliseconds=self._session_ms),
                rebalance_timeout=timedelta(seconds=5),
                member_id=self.member_id,
                group_instance_id=self._instance,
                protocol_type="consumer",
                protocols=tuple(v9.JoinGroupRequestProtocol(name=name, metadata=b"m") for name in protocols),
                reason=None,
            )
            if answer.error_code.name == "member_id_required":
                self.member_id = answer.member_id
                return None
            return None if answer.error_code.name in ("coordinator_load_in_progress", "not_coordinator") else answer

        answer = await until(attempt)
        if answer.error_code.name == "none":
            self.member_id, self.generation = answer.member_id, answer.generation_id
            self.leader, self.members, self.skip_assignment = answer.leader, answer.members, answer.skip_assignment
        return str(answer.error_code.name)

    async def sync(self, assignments: dict[str, bytes] | None = None) -> tuple[str, bytes]:
        v5 = structs(14, 5)
        if assignments is None:
            assignments = {self.member_id: b"all"} if self.leader == self.member_id else {}
        answer = await self.call(
            14,
            5,
            group_id=self._group,
            generation_id=self.generation,
            member_id=self.member_id,
            group_instance_id=self._instance,
            protocol_type="consumer",
            protocol_name="range",
            assignments=tuple(
                v5.SyncGroupRequestAssignment(member_id=key, assignment=value) for key, value in assignments.items()
            ),
        )
        return str(answer.error_code.name), answer.assignment

    async def heartbeat(self) -> str:
        answer = await self.call(
            12,
            4,
            group_id=self._group,
            generation_id=self.generation,
            member_id=self.member_id,
            group_instance_id=self._instance,
        )
        return str(answer.error_code.name)

    async def commit(self, offset: int, metadata: str | None = "") -> str:
        v8 = structs(8, 8)
        partition = v8.OffsetCommitRequestPartition(
            partition_index=0, committed_offset=offset, committed_metadata=metadata
        )
        answer = await self.call(
            8,
            8,
            group_id=self._group,
            generation_id_or_member_epoch=self.generation,
            member_id=self.member_id,
            group_instance_id=self._instance,
            topics=(v8.OffsetCommitRequestTopic(name=self._topic, partitions=(partition,)),),
        )
        return str(answer.topics[0].partitions[0].error_code.name)


async def test_a_stale_members_commit_is_refused(cluster: Cluster) -> None:
    topic, group = await cluster.topic(), cluster.name("g")
    first, second = RawMember(cluster, group, topic), RawMember(cluster, group, topic)
    await first.join()
    await first.sync()
    assert await first.commit(5) == "none"
    stale = first.generation
    joining = asyncio.create_task(second.join())

    async def must_rejoin() -> bool:
        return await first.heartbeat() == "rebalance_in_progress"

    await until(must_rejoin)
    assert await first.commit(6) == "none", "a member may commit while the group prepares to rebalance"
    await first.join()
    await joining
    assert first.generation == stale + 1
    assert await first.commit(7) == "rebalance_in_progress"
    leader, follower = (first, second) if first.leader == first.member_id else (second, first)
    await leader.sync({first.member_id: b"1", second.member_id: b"2"})
    await follower.sync()
    current, first.generation = first.generation, stale
    assert await first.commit(8) == "illegal_generation"
    assert await first.heartbeat() == "illegal_generation"
    first.generation = current
    assert await first.commit(9) == "none"
    first.member_id = "somebody"
    assert await first.commit(10) == "unknown_member_id"


async def test_the_leader_hands_out_the_assignments(cluster: Cluster) -> None:
    topic, group = await cluster.topic(), cluster.name("g")
    first, second = RawMember(cluster, group, topic), RawMember(cluster, group, topic)
    await first.join()
    assert await first.sync() == ("none", b"all")
    joining = asyncio.create_task(second.join())

    async def must_rejoin() -> bool:
        return await first.heartbeat() == "rebalance_in_progress"

    await until(must_rejoin)
    await first.join()
    await joining
    leader, follower = (first, second) if first.leader == first.member_id else (second, first)
    assert len(leader.members) == 2
    assert follower.members == ()
    waiting = asyncio.create_task(follower.sync())
    assert await leader.sync({leader.member_id: b"L", follower.member_id: b"F"}) == ("none", b"L")
    assert await waiting == ("none", b"F")
    assert await follower.sync() == ("none", b"F"), "a repeated sync gives the same"


async def test_members_without_a_common_protocol_are_refused(cluster: Cluster) -> None:
    topic, group = await cluster.topic(), cluster.name("g")
    first, second = RawMember(cluster, group, topic), RawMember(cluster, group, topic)
    await first.join(protocols=("range",))
    await first.sync()
    assert await second.join(protocols=("own",)) == "inconsistent_group_protocol"


async def test_a_static_member_comes_back_without_a_rebalance(cluster: Cluster) -> None:
    topic, group = await cluster.topic(), cluster.name("g")
    first = RawMember(cluster, group, topic, instance="one")
    await first.join()
    await first.sync()
    again = RawMember(cluster, group, topic, instance="one")
    assert await again.join() == "none"
    assert again.generation == first.generation
    assert again.member_id != first.member_id
    assert again.skip_assignment
    assert await again.sync({}) == ("none", b"all")
    assert await first.heartbeat() == "fenced_instance_id"
    assert await first.commit(1) == "fenced_instance_id"
    assert await again.heartbeat() == "none"


async def test_static_members_keep_their_partitions_over_a_restart(cluster: Cluster) -> None:
    topic, group = await cluster.topic(4), cluster.name("g")
    first = await cluster.consumer(topic, group_id=group, group_instance_id="one", **QUICK)
    second = await cluster.consumer(topic, group_id=group, group_instance_id="two", **QUICK)

    async def is_shared() -> bool:
        await first.getmany(timeout_ms=10)
        await second.getmany(timeout_ms=10)
        return len(first.assignment()) == len(second.assignment()) == 2

    await until(is_shared)
    had = second.assignment()
    await first.stop()
    restarted = await cluster.consumer(topic, group_id=group, group_instance_id="one", **QUICK)
    await restarted.getmany(timeout_ms=10)
    assert second.assignment() == had
    assert len(restarted.assignment()) == 2


async def test_a_commit_with_metadata_is_read_back_and_resumed_from(cluster: Cluster) -> None:
    topic, group = await cluster.topic(), cluster.name("g")
    place = TopicPartition(topic, 0)
    producer = await cluster.producer()
    for index in range(10):
        await producer.send_and_wait(topic, b"%d" % index)
    consumer = await cluster.consumer(topic, group_id=group)
    await take(consumer, 10)
    await consumer.commit({place: OffsetAndMetadata(4, "half way")})
    assert await consumer.committed(place) == 4
    await consumer.stop()
    admin = await cluster.admin()
    assert (await admin.list_consumer_group_offsets(group))[place] == OffsetAndMetadata(4, "half way")
    resumed = await cluster.consumer(topic, group_id=group)
    assert (await resumed.getone()).value == b"4"


async def test_a_commit_without_a_group_membership_is_for_empty_groups_only(cluster: Cluster) -> None:
    topic, group = await cluster.topic(), cluster.name("g")
    alone = await cluster.consumer(group_id=group)
    place = TopicPartition(topic, 0)
    alone.assign([place])
    await alone.commit({place: 3})
    assert await alone.committed(place) == 3
    member = RawMember(cluster, group, topic)
    await member.join()
    await member.sync()
    with pytest.raises((CommitFailedError, UnknownMemberIdError, IllegalGenerationError)):
        await alone.commit({place: 4})


async def test_metadata_of_a_commit_has_a_limit(cluster: Cluster) -> None:
    topic, group = await cluster.topic(), cluster.name("g")
    member = RawMember(cluster, group, topic)
    await member.join()
    await member.sync()
    assert await member.commit(1, "m" * 5000) == "offset_metadata_too_large"


async def test_the_commit_of_an_unknown_topic_is_refused(cluster: Cluster) -> None:
    member = RawMember(cluster, cluster.name("g"), topic=cluster.name())
    await member.join()
    await member.sync()
    assert await member.commit(1) == "unknown_topic_or_partition"


async def test_groups_are_listed_and_described(cluster: Cluster) -> None:
    topic, group = await cluster.topic(2), cluster.name("g")
    consumer = await cluster.consumer(topic, group_id=group, client_id="somebody")
    await consumer.getmany(timeout_ms=10)
    admin = await cluster.admin()
    assert (group, "consumer") in [entry[:2] for entry in await admin.list_consumer_groups()]
    (response,) = await admin.describe_consumer_groups([group])
    code, name, state, kind, _protocol, members = response.groups[0][:6]
    assert (code, name, state, kind, len(members)) == (0, group, "Stable", "consumer", 1)
    assert "somebody" in str(members[0])
    await consumer.stop()

    async def is_empty() -> bool:
        (response,) = await admin.describe_consumer_groups([group])
        return bool(response.groups[0][2] == "Empty")

    await until(is_empty)
    (response,) = await admin.describe_consumer_groups([cluster.name("g")])
    assert response.groups[0][2] == "Dead"


async def test_a_group_is_deleted_when_it_is_empty(cluster: Cluster) -> None:
    topic, group = await cluster.topic(), cluster.name("g")
    place = TopicPartition(topic, 0)
    consumer = await cluster.consumer(topic, group_id=group)
    await consumer.getmany(timeout_ms=10)
    await consumer.commit({place: 0})
    raw = await cluster.raw()

    async def delete() -> str:
        response = await raw.call(42, 2, groups_names=(group,))
        return str(response.results[0].error_code.name)

    assert await delete() == "non_empty_group"
    await consumer.stop()

    async def is_deleted() -> bool:
        return await delete() == "none"

    await until(is_deleted)
    assert await delete() == "group_id_not_found"
    admin = await cluster.admin()
    found = await admin.list_consumer_group_offsets(group, partitions=[place])
    assert found[place].offset == -1


async def test_offsets_go_with_their_topic(cluster: Cluster) -> None:
    topic, group = await cluster.topic(), cluster.name("g")
    place = TopicPartition(topic, 0)
    consumer = await cluster.consumer(group_id=group)
    consumer.assign([place])
    await consumer.commit({place: 3})
    admin = await cluster.admin()
    await admin.delete_topics([topic])

    async def is_forgotten() -> bool:
        found = await admin.list_consumer_group_offsets(group, partitions=[place])
        return bool(found[place].offset == -1)

    await until(is_forgotten)


async def test_a_session_timeout_outside_the_brokers_bounds_is_refused(cluster: Cluster) -> None:
    topic = await cluster.topic()
    with pytest.raises(KafkaError, match="InvalidSessionTimeout"):
        await cluster.consumer(topic, group_id=cluster.name("g"), session_timeout_ms=10, heartbeat_interval_ms=5)


async def test_a_soak_with_members_coming_and_going_is_exact(cluster: Cluster) -> None:
    """Twelve seconds of producing while members join and leave: every record is processed at least once, none lost."""
    topic, group = await cluster.topic(6), cluster.name("g")
    producer = await cluster.producer(enable_idempotence=True, linger_ms=2)
    seen: set[int] = set()
    stopping = asyncio.Event()
    sent = 0

    async def produce() -> None:
        nonlocal sent
        while not stopping.is_set():
            sends = [await producer.send(topic, b"%d" % (sent + index)) for index in range(20)]
            await asyncio.gather(*sends)
            sent += 20
            await asyncio.sleep(0.01)

    async def consume(consumer: AIOKafkaConsumer, until_set: asyncio.Event) -> None:
        while not until_set.is_set():
            batches = await consumer.getmany(timeout_ms=100)
            for batch in batches.values():
                seen.update(int(record.value) for record in batch)
            positions = {place: batch[-1].offset + 1 for place, batch in batches.items()}
            if positions:
                try:
                    await consumer.commit(positions)
                except KafkaError:
                    continue  # rebalanced meanwhile: the next owner reads them again

    producing = asyncio.create_task(produce())
    end = time.monotonic() + 12
    leaving: list[tuple[asyncio.Event, asyncio.Task[None], AIOKafkaConsumer]] = []
    while time.monotonic() < end:
        stop = asyncio.Event()
        consumer = await cluster.consumer(topic, group_id=group, **QUICK)
        leaving.append((stop, asyncio.create_task(consume(consumer, stop)), consumer))
        await asyncio.sleep(1.5)
        if len(leaving) > 2:
            event, task, member = leaving.pop(0)
            event.set()
            await task
            await member.stop()
    stopping.set()
    await producing

    async def has_all() -> bool:
        return len(seen) == sent

    await until(has_all, 30)
    for event, task, _ in leaving:
        event.set()
        await task
    assert seen == set(range(sent))
