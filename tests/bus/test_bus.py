"""Sending, transactions, look-ups and dead letters on a real broker."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from polar.bus import (
    BlobWrong,
    BrokerUnavailable,
    Bus,
    BusError,
    BusSettings,
    Fenced,
    Out,
    Reader,
    Record,
    RecordGone,
    RecordTooLarge,
    Transactional,
)
from polar.schemas import (
    CallStarted,
    Claim,
    CompletionFailed,
    DeadLetter,
    Failure,
    FailureKind,
    GroupState,
    RecordRef,
    Tick,
    encode,
)
from polar.schemas.topics import Service, topic
from tests.bus.support import aborted, call, delete_below, report, tick, until


@pytest.fixture
async def bus(bus_settings: BusSettings) -> AsyncIterator[Bus]:
    async with Bus(bus_settings, Service.SCHEDULER) as bus:
        await bus.prepare()
        yield bus


@pytest.fixture
async def writer(bus: Bus) -> Transactional:
    return await bus.transactional("writer")


async def everything(bus: Bus, topic: str, *, committed: bool = True) -> list[Record]:
    reader = await bus.reader([topic], committed=committed)
    found = [record async for record in reader.to_end()]
    await reader.close()
    return found


def numbers(records: list[Record]) -> list[int]:
    return [record.value.number for record in records if isinstance(record.value, Tick)]


async def test_send_returns_the_place_of_every_record_in_order(bus: Bus) -> None:
    refs = await bus.send(*[Out("nodes", "tick", tick(number)) for number in range(300)])
    assert refs == [RecordRef(topic="nodes", partition=0, offset=offset) for offset in range(300)]
    assert numbers(await everything(bus, "nodes")) == list(range(300))


async def test_many_tasks_may_send_at_once(bus: Bus) -> None:
    refs = await asyncio.gather(*[bus.send(Out("nodes", "tick", tick(number))) for number in range(200)])
    assert sorted(ref.offset for (ref,) in refs) == list(range(200))


async def test_a_record_says_what_it_is_and_where_it_comes_from(bus: Bus) -> None:
    source = RecordRef(topic="tasks", partition=1, offset=7)
    before = time.time_ns() // 1_000_000
    (ref,) = await bus.send(Out("nodes", "tick", tick(3), source=source))
    (record,) = await everything(bus, "nodes")
    assert (record.ref, record.key, record.value) == (ref, "tick", tick(3))
    assert record.error is None
    assert before <= record.timestamp_ms <= time.time_ns() // 1_000_000
    assert dict(record.headers) == {
        "content-type": b"application/msgpack",
        "polar-schema": b"Tick.v1",
        "source": b"tasks/1/7",
    }


async def test_a_key_has_the_partition_that_java_clients_give_it(bus: Bus) -> None:
    java = {"21": -973932308, "foobar": -790332482, "a-little-bit-long-string": -985981536, "abc": 479470107}
    for key, hashed in java.items():  # the values of Apache Kafka's own UtilsTest
        assert bus.partition_of("stages", key) == (hashed & 0x7FFFFFFF) % 2
    (ref,) = await bus.send(report("session-1", 1))
    assert ref.partition == bus.partition_of("stages", "session-1")


async def test_a_tombstone_is_read_as_no_value(bus: Bus) -> None:
    state = GroupState(group_id="g", size=1, opened_at_ms=0)
    await bus.send(Out("leases", "g/g", state), Out("leases", "g/g", None))
    first, second = await everything(bus, "leases")
    assert first.value == state
    assert (second.key, second.value, second.error, second.raw) == ("g/g", None, None, None)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (Out("rewards", "g", tick(1)), "does not write `rewards`"),
        (Out("stages", "s", tick(1)), "takes StageChanged"),
        (Out("stages", "s", None), "compacted"),
        (Out("nodes", None, tick(1)), "needs a key"),
    ],
)
async def test_what_the_topic_table_forbids_is_a_type_error(bus: Bus, out: Out, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        await bus.send(out)


async def test_a_record_over_the_limit_is_refused_before_anything_is_sent(bus: Bus) -> None:
    limit = bus.settings.max_record_bytes
    with pytest.raises(RecordTooLarge) as caught:
        await bus.send(
            Out("nodes", "tick", tick(1)), Out("nodes", "tick", Tick(leader_id="x" * limit, number=1, at_ms=0))
        )
    assert caught.value.size > limit == caught.value.limit
    assert not caught.value.retryable
    assert await everything(bus, "nodes") == []


async def test_a_record_just_below_the_limit_goes_through_and_comes_back(bus: Bus) -> None:
    noise = os.urandom(bus.settings.max_record_bytes // 2 - 4096).hex()  # hardly to be compressed further than by half
    await bus.send(Out("nodes", "tick", Tick(leader_id=noise, number=1, at_ms=0)))
    (record,) = await everything(bus, "nodes")
    assert isinstance(record.value, Tick)
    assert record.value.leader_id == noise
    assert (await bus.lookup(record.ref)).value == record.value


async def test_incompressible_bytes_up_to_the_limit_are_not_refused_by_the_broker(bus: Bus) -> None:
    # MessagePack text that zstd cannot shrink: the limit must leave room for the batch's own bytes
    raw = os.urandom(bus.settings.max_record_bytes - 2048)
    failed = Failure(kind=FailureKind.INFRA, message="x", detail={"bytes": raw})
    async with Bus(bus.settings, Service.PROXY) as proxy:
        event = CompletionFailed(completion_id="c", session_id="s", attempt=1, call=0, failure=failed, at_ms=0)
        await proxy.send(Out("completions", "s", event))
    (record,) = await everything(bus, "completions")
    assert record.error is None


async def test_a_transaction_is_visible_as_a_whole_and_only_once_committed(bus: Bus, writer: Transactional) -> None:
    async with writer.transaction() as opened:
        first = await opened.send(Out("nodes", "tick", tick(1)), report("s", 1))
        assert numbers(await everything(bus, "nodes")) == []
        assert numbers(await everything(bus, "nodes", committed=False)) == [1]
        (second,) = await opened.send(report("s", 2))
    assert [ref.offset for ref in first] == [0, 0]
    assert second.offset == 1, "a later record of the same transaction may refer to an earlier one"
    assert numbers(await everything(bus, "nodes")) == [1]
    assert len(await everything(bus, "stages")) == 2


async def test_an_exception_aborts_and_the_next_transaction_goes_on(bus: Bus, writer: Transactional) -> None:
    await aborted(writer, Out("nodes", "tick", tick(1)))
    async with writer.transaction() as opened:
        await opened.send(Out("nodes", "tick", tick(2)))
    assert numbers(await everything(bus, "nodes")) == [2]
    assert numbers(await everything(bus, "nodes", committed=False)) == [1, 2]


async def test_a_refused_record_leaves_the_transaction_open(bus: Bus, writer: Transactional) -> None:
    async with writer.transaction() as opened:
        with pytest.raises(TypeError):
            await opened.send(Out("stages", "s", tick(1)))
        await opened.send(Out("nodes", "tick", tick(2)))
    assert numbers(await everything(bus, "nodes")) == [2]


async def test_an_empty_transaction_writes_nothing(bus: Bus, writer: Transactional) -> None:
    async with writer.transaction():
        pass
    assert await everything(bus, "nodes") == []


async def test_a_new_writer_fences_the_old_one_and_ends_its_transaction(bus: Bus, writer: Transactional) -> None:
    successors: list[Transactional] = []

    async def overtaken() -> None:
        async with writer.transaction() as opened:
            await opened.send(Out("nodes", "tick", tick(1)))
            successors.append(await bus.transactional("writer"))
            async with successors[0].transaction() as theirs:
                await theirs.send(Out("nodes", "tick", tick(2)))
            await opened.send(report("s", 3))

    with pytest.raises(Fenced) as caught:
        await overtaken()
    assert not caught.value.retryable
    assert not writer.usable
    assert numbers(await everything(bus, "nodes")) == [2]
    with pytest.raises(BusError, match="make a new one"):
        async with writer.transaction():
            pass
    async with successors[0].transaction() as theirs:
        await theirs.send(Out("nodes", "tick", tick(4)))
    assert numbers(await everything(bus, "nodes")) == [2, 4]


async def test_being_fenced_shows_at_the_commit_too(bus: Bus, writer: Transactional) -> None:
    async def overtaken() -> None:
        async with writer.transaction() as opened:
            await opened.send(Out("nodes", "tick", tick(1)))
            await bus.transactional("writer")

    with pytest.raises(Fenced):
        await overtaken()
    assert numbers(await everything(bus, "nodes")) == []


async def test_a_cancelled_transaction_is_aborted(bus: Bus, writer: Transactional) -> None:
    sent = asyncio.Event()

    async def work() -> None:
        async with writer.transaction() as opened:
            await opened.send(Out("nodes", "tick", tick(1)))
            sent.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await sent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with writer.transaction() as opened:
        await opened.send(Out("nodes", "tick", tick(2)))
    assert numbers(await everything(bus, "nodes")) == [2]


async def test_ids_of_other_prefixes_do_not_fence_each_other(bus: Bus, writer: Transactional) -> None:
    other = bus.settings.model_copy(update={"topic_prefix": "x" + bus.settings.topic_prefix})
    async with Bus(other, Service.SCHEDULER) as neighbour:
        await neighbour.transactional("writer")
        async with writer.transaction() as opened:
            await opened.send(Out("nodes", "tick", tick(1)))


async def test_a_look_up_finds_one_record(bus: Bus) -> None:
    refs = await bus.send(*[Out("nodes", "tick", tick(number)) for number in range(50)], report("s", 9))
    for number in (49, 0, 17):
        assert (await bus.lookup(refs[number])).value == tick(number)
    found = await asyncio.gather(*[bus.lookup(ref) for ref in refs])
    assert [record.ref for record in found] == refs


async def test_a_look_up_waits_for_the_commit(bus: Bus, writer: Transactional) -> None:
    async with writer.transaction() as opened:
        (ref,) = await opened.send(Out("nodes", "tick", tick(1)))
        looking = asyncio.create_task(bus.lookup(ref))
        assert (await bus.lookup(ref, committed=False)).value == tick(1)
        assert not looking.done()
    assert (await looking).value == tick(1)


async def test_a_look_up_of_what_was_aborted_or_deleted_names_it(bus: Bus, writer: Transactional) -> None:
    (ref,) = await aborted(writer, Out("nodes", "tick", tick(1)))
    await bus.send(Out("nodes", "tick", tick(2)))
    with pytest.raises(RecordGone, match="offset 0 of partition 0 of `nodes` does not exist"):
        await bus.lookup(ref)
    refs = await bus.send(*[report("s", number) for number in range(10)])
    await delete_below(bus, "stages", refs[0].partition, 5)
    with pytest.raises(RecordGone, match="is lost: the log starts at offset 5") as caught:
        await bus.lookup(refs[2])
    assert (caught.value.offset, caught.value.log_start) == (2, 5)
    assert (await bus.lookup(refs[5])).ref == refs[5]


async def test_a_look_up_of_what_is_not_there_yet_ends_in_a_retryable_error(bus: Bus) -> None:
    settings = bus.settings.model_copy(update={"lookup_timeout_s": 0.3})
    async with Bus(settings, Service.SCHEDULER) as impatient:
        with pytest.raises(BusError) as caught:
            await impatient.lookup(RecordRef(topic="nodes", partition=0, offset=12))
    assert caught.value.retryable
    assert not isinstance(caught.value, RecordGone)


async def test_foreign_json_is_read_and_what_cannot_be_read_has_its_error(bus: Bus) -> None:
    producer = await bus.clients.producer()
    name = bus.settings.full("tasks")
    good = {"type": "CancelRequest", "task_id": "t"}
    for value in (msgspec.json.encode(good), b'{"type": "CancelRequest"}', b"\x93junk"):
        await producer.send_and_wait(name, value, partition=0)
    await producer.send_and_wait(name, msgspec.json.encode(good), key=b"\xff", partition=0)
    await producer.stop()
    first, second, third, fourth = await everything(bus, "tasks")
    assert type(first.value).__name__ == "CancelRequest"
    assert first.key is None
    assert second.error is not None
    assert "task_id" in str(second.error)
    assert third.error is not None
    assert third.raw == b"\x93junk"
    assert fourth.error is not None
    assert "UTF-8" in str(fourth.error)


async def test_a_dead_letter_holds_the_first_64_kib_and_claims_the_rest(bus: Bus) -> None:
    async with Bus(bus.settings, Service.PROXY) as proxy:
        event = call(1).value
        assert isinstance(event, CallStarted)
        long = msgspec.structs.replace(event, dialect="x" * 100_000)
        refs = await proxy.send(call(0), Out("completions", "s", long))
    small, large = [await bus.lookup(ref) for ref in refs]
    await bus.dead_letter(small, "reason one")
    await bus.dead_letter(large, ValueError("reason two"))
    first, second = [record.value for record in await everything(bus, "dead")]
    assert isinstance(first, DeadLetter)
    assert isinstance(second, DeadLetter)
    assert (first.origin, first.value, first.whole, first.error) == (refs[0], small.raw, None, "reason one")
    assert first.service == "scheduler"
    assert second.error == "ValueError: reason two"
    assert large.raw is not None
    assert second.value == large.raw[: 64 * 1024]
    assert second.whole is not None
    assert await bus.blobs.get(second.whole) == large.raw


async def test_claims_round_trip_and_are_checked(bus: Bus) -> None:
    data = bytes(range(256)) * 8192
    claim = await bus.blobs.put(data, "text/plain")
    assert claim == await bus.blobs.put(data, "text/plain"), "the same bytes have the same claim"
    assert (claim.size, claim.content_type) == (len(data), "text/plain")
    assert await bus.blobs.get(claim) == data
    assert await bus.blobs.get(await bus.blobs.put(b"")) == b""
    missing = "0" * 64
    with pytest.raises(BlobWrong, match="is not in the blob store"):
        await bus.blobs.get(Claim(sha256=missing, size=1, uri=f"sha256/00/{missing}"))
    with pytest.raises(BlobWrong, match="not those that were put"):
        await bus.blobs.get(msgspec.structs.replace(claim, size=1))
    with pytest.raises(BlobWrong, match="points elsewhere"):
        await bus.blobs.get(msgspec.structs.replace(claim, uri="../../etc/passwd"))


async def test_a_broker_that_is_away_at_the_start_is_one_clear_error(bus_settings: BusSettings) -> None:
    settings = bus_settings.model_copy(update={"bootstrap": "127.0.0.1:9", "connect_timeout_s": 0.7})
    begun = time.monotonic()
    with pytest.raises(BrokerUnavailable) as caught:
        async with Bus(settings, Service.PROXY):
            pass
    assert str(caught.value) == "cannot reach Kafka at 127.0.0.1:9: start one or set POLAR_KAFKA_BOOTSTRAP"
    assert caught.value.retryable
    assert time.monotonic() - begun < 5


async def test_closing_leaves_no_task_behind(bus_settings: BusSettings) -> None:
    before = asyncio.all_tasks()
    async with Bus(bus_settings, Service.SCHEDULER) as bus:
        await bus.prepare()
        await bus.send(Out("nodes", "tick", tick(1)))
        writer = await bus.transactional("writer")
        async with writer.transaction() as opened:
            (ref,) = await opened.send(Out("nodes", "tick", tick(2)))
        reader: Reader = await bus.reader(["nodes"])
        await reader.poll(timeout_s=5)
        await bus.lookup(ref)
    await until(lambda: asyncio.all_tasks() <= before, 5)


async def test_a_dead_letter_fits_a_record_whatever_the_dead_record_is_called(bus: Bus) -> None:
    row = topic("tasks")
    size = bus.settings.max_record_bytes // 2
    record = Record(row.name, 0, 3, 0, "k" * size, None, raw=b"x", headers={"h" * size: b"v"})
    (letter,) = [(await bus.dead_out(record, "bad")).value]
    assert isinstance(letter, DeadLetter)
    assert len(encode(letter)) < 10_000
