"""PartitionWorker: consume, transform, produce."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from polar.bus import Bus, BusSettings, Out, PartitionWorker, Processor, RecordGone
from polar.schemas import Cursor, DeadLetter, StageChanged
from polar.schemas.topics import Service
from tests.bus.support import Copier, Counter, call, delete_below, final, until


@pytest.fixture
async def buses(bus_settings: BusSettings) -> AsyncIterator[tuple[Bus, Bus]]:
    """The proxy's, which writes the input, and the builder's."""
    async with Bus(bus_settings, Service.PROXY) as proxy, Bus(bus_settings, Service.BUILDER) as builder:
        await builder.prepare()
        yield proxy, builder


@asynccontextmanager
async def working(bus: Bus, make: Callable[[int], Processor], **options: object) -> AsyncIterator[PartitionWorker]:
    worker = PartitionWorker(bus, "completions", "builder", make, **options)  # type: ignore[arg-type]
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def reports(bus: Bus) -> list[tuple[str, int]]:
    reader = await bus.reader(["stages"])
    found = [record.value async for record in reader.to_end()]
    await reader.close()
    assert all(isinstance(one, StageChanged) for one in found)
    return [(one.session_id, one.attempt) for one in found if isinstance(one, StageChanged)]


async def cursors(bus: Bus) -> dict[str, Cursor]:
    reader = await bus.reader(["cursors"])
    found = {record.key or "": record.value async for record in reader.to_end()}
    await reader.close()
    return {key: value for key, value in found.items() if isinstance(value, Cursor)}


def at_end(worker: PartitionWorker, bus: Bus, *, committed: bool = True) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        reader = await bus.reader(["completions"], start="latest")
        ends = {partition: offset for (_, partition), offset in reader.positions().items()}
        await reader.close()
        progress = worker.progress()
        return set(progress) == set(ends) and all(
            (one.committed if committed else one.next) == ends[partition] or ends[partition] == 0
            for partition, one in progress.items()
        )

    return check


async def test_each_record_is_processed_once_and_the_cursor_is_written_with_it(buses: tuple[Bus, Bus]) -> None:
    proxy, builder = buses
    await proxy.send(*[call(number, f"s{number % 7}") for number in range(100)])
    async with working(builder, lambda _: Copier(), max_batch=9) as worker:
        await until(at_end(worker, builder))
    assert sorted(number for _, number in await reports(builder)) == list(range(100))
    found = await cursors(builder)
    assert set(found) == {"builder/completions/0", "builder/completions/1"}
    assert sum(one.next for one in found.values()) == 100


async def test_order_is_kept_within_a_partition(buses: tuple[Bus, Bus]) -> None:
    proxy, builder = buses
    await proxy.send(*[call(number) for number in range(200)])
    async with working(builder, lambda _: Copier(), max_batch=17) as worker:
        await until(at_end(worker, builder))
    assert [number for _, number in await reports(builder)] == list(range(200))


async def test_a_second_worker_goes_on_where_the_first_stopped(buses: tuple[Bus, Bus]) -> None:
    proxy, builder = buses
    await proxy.send(*[call(number) for number in range(30)])
    async with working(builder, lambda _: Copier()) as worker:
        await until(at_end(worker, builder))
    await proxy.send(*[call(number) for number in range(30, 60)])
    seen: list[tuple[str, int]] = []
    async with working(builder, lambda _: Copier(seen=seen)) as worker:
        await until(at_end(worker, builder))
    assert [number for _, number in await reports(builder)] == list(range(60))
    assert seen == [("process", number) for number in range(30, 60)]


async def test_state_is_rebuilt_from_replay_from_without_emitting_again(buses: tuple[Bus, Bus]) -> None:
    proxy, builder = buses
    await proxy.send(*[call(number, "a") for number in range(5)], *[call(number, "b") for number in range(3)])
    await proxy.send(final("b"))
    async with working(builder, lambda _: Counter(), cursor_every_s=0.05) as worker:
        await until(at_end(worker, builder))
    assert await reports(builder) == [("b", 3)]
    a = f"builder/completions/{builder.partition_of('completions', 'a')}"
    assert (await cursors(builder))[a].replay_from < (await cursors(builder))[a].next
    await proxy.send(*[call(number, "a") for number in range(5, 9)], final("a"))
    async with working(builder, lambda _: Counter()) as worker:
        await until(at_end(worker, builder))
    assert sorted(await reports(builder)) == [("a", 9), ("b", 3)]


async def test_a_poison_record_goes_to_dead_and_the_rest_is_processed(buses: tuple[Bus, Bus]) -> None:
    proxy, builder = buses
    refs = await proxy.send(*[call(number) for number in range(40)])
    seen: list[tuple[str, int]] = []
    async with working(builder, lambda _: Copier(frozenset({13, 14, 30}), seen)) as worker:
        await until(at_end(worker, builder))
        assert sum(one.dead for one in worker.progress().values()) == 3
    assert [number for _, number in await reports(builder)] == [n for n in range(40) if n not in (13, 14, 30)]
    reader = await builder.reader(["dead"])
    letters = [record.value async for record in reader.to_end()]
    assert [one.origin for one in letters if isinstance(one, DeadLetter)] == [refs[13], refs[14], refs[30]]
    assert all(isinstance(one, DeadLetter) and "cannot digest" in one.error for one in letters)
    assert seen.count(("process", 13)) == 2, "each record is tried twice before it is dead"


async def test_a_record_that_cannot_be_decoded_goes_to_dead(buses: tuple[Bus, Bus]) -> None:
    proxy, builder = buses
    producer = await builder.clients.producer()
    where = builder.partition_of("completions", "s")
    await proxy.send(call(0))
    await producer.send_and_wait(builder.settings.full("completions"), b"\xc1junk", key=b"s", partition=where)
    await producer.send_and_wait(builder.settings.full("completions"), None, key=b"s", partition=where)
    await producer.stop()
    await proxy.send(call(1))
    async with working(builder, lambda _: Copier()) as worker:
        await until(at_end(worker, builder))
    assert [number for _, number in await reports(builder)] == [0, 1]
    reader = await builder.reader(["dead"])
    letters = [record.value async for record in reader.to_end()]
    assert [one.value for one in letters if isinstance(one, DeadLetter)] == [b"\xc1junk", b""]


async def test_a_record_that_poisons_the_replay_is_left_out_of_the_state(buses: tuple[Bus, Bus]) -> None:
    proxy, builder = buses
    await proxy.send(
        call(0, "a"), call(1, "a"), final("a"), final("a"), call(5, "a")
    )  # the second final has no session
    async with working(builder, lambda _: Counter(), cursor_every_s=0.05) as worker:
        await until(at_end(worker, builder))
    await proxy.send(final("a"))
    async with working(builder, lambda _: Counter()) as worker:
        await until(at_end(worker, builder))
    assert await reports(builder) == [("a", 2), ("a", 1)]


async def test_a_cursor_below_the_start_of_the_log_is_a_named_error(buses: tuple[Bus, Bus]) -> None:
    proxy, builder = buses
    await proxy.send(*[call(number) for number in range(20)])
    where = builder.partition_of("completions", "s")
    key = f"builder/completions/{where}"
    await builder.send(Out("cursors", key, Cursor(next=4, replay_from=2), partition=where))
    await delete_below(builder, "completions", where, 9)
    with pytest.raises(RecordGone) as caught:
        await asyncio.wait_for(PartitionWorker(builder, "completions", "builder", lambda _: Copier()).run(), 20)
    assert (caught.value.topic, caught.value.partition, caught.value.offset) == ("completions", where, 2)
    assert caught.value.log_start == 9
    assert "offsets 4 to 8 were never processed" in str(caught.value)
    async with working(builder, lambda _: Copier(), accept_loss=True) as worker:
        await until(at_end(worker, builder))
    assert [number for _, number in await reports(builder)] == list(range(9, 20))


async def test_a_topic_without_the_cursors_partitions_is_refused(buses: tuple[Bus, Bus]) -> None:
    with pytest.raises(ValueError, match="cursors"):
        PartitionWorker(buses[1], "leases", "builder", lambda _: Copier())


async def test_a_worker_that_joins_takes_its_share_and_nothing_is_doubled(buses: tuple[Bus, Bus]) -> None:
    proxy, builder = buses
    async with working(builder, lambda _: Copier()) as first:
        await until(at_end(first, builder))
        await proxy.send(*[call(number, f"s{number}") for number in range(100)])
        async with working(builder, lambda _: Copier()) as second:
            await until(lambda: len(first.progress()) == 1 and len(second.progress()) == 1)
            await proxy.send(*[call(number, f"s{number}") for number in range(100, 200)])
            await until(lambda: all(one.live for w in (first, second) for one in w.progress().values()))

            async def all_there() -> bool:
                return len(await reports(builder)) >= 200

            await until(all_there)
    assert sorted(number for _, number in await reports(builder)) == list(range(200))
