"""Reading without a group: where to start, when at the end, what is never skipped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from polar.bus import Bus, BusSettings, Out, Reader, Record, RecordGone
from polar.schemas import GroupState, StageChanged, Tick
from polar.schemas.topics import Service
from polar.service.clock import ManualClock, SystemClock
from tests.bus.support import aborted, delete_below, report, tick, until


@pytest.fixture
async def bus(bus_settings: BusSettings) -> AsyncIterator[Bus]:
    async with Bus(bus_settings, Service.SCHEDULER) as bus:
        await bus.prepare()
        yield bus


async def put(bus: Bus, *numbers: int) -> None:
    await bus.send(*[Out("nodes", "tick", tick(number)) for number in numbers])


def numbers(records: list[Record]) -> list[int]:
    return [record.value.number for record in records if isinstance(record.value, Tick)]


async def rest(reader: Reader) -> list[int]:
    return numbers([record async for record in reader.to_end()])


async def put_stages(bus: Bus, *attempts: int) -> tuple[str, int]:
    """Into a topic that is not compacted: Apache Kafka deletes records of no other. Its name and the partition."""
    refs = await bus.send(*[report("s", attempt) for attempt in attempts])
    return refs[0].topic, refs[0].partition


async def rest_of_stages(reader: Reader) -> list[int]:
    values = [record.value async for record in reader.to_end()]
    return [value.attempt for value in values if isinstance(value, StageChanged)]


async def test_it_starts_at_the_earliest_the_latest_an_offset_or_a_moment(bus: Bus) -> None:
    await put(bus, 0, 1, 2)
    (middle,) = await bus.send(Out("nodes", "tick", tick(3)))
    record = await bus.lookup(middle)
    await asyncio.sleep(0.01)  # so that the clock of the next records differs
    await put(bus, 4)
    assert await rest(await bus.reader(["nodes"])) == [0, 1, 2, 3, 4]
    latest = await bus.reader(["nodes"], start="latest")
    assert await rest(latest) == []
    assert await rest(await bus.reader(["nodes"], start={("nodes", 0): 2})) == [2, 3, 4]
    assert (await rest(await bus.reader(["nodes"], start=record.timestamp_ms)))[-2:] == [3, 4]
    assert await rest(await bus.reader(["nodes"], start=record.timestamp_ms + 1)) == [4]
    future = await bus.reader(["nodes"], start=record.timestamp_ms + 3_600_000)
    assert await rest(future) == []
    await put(bus, 5)
    assert await rest(latest) == [5]
    assert await rest(future) == [5]


async def test_it_reads_all_partitions_of_all_topics_or_those_named(bus: Bus) -> None:
    await bus.send(*[report(f"s{number}", number) for number in range(20)], Out("nodes", "tick", tick(1)))
    everything = [record async for record in (await bus.reader(["stages", "nodes"])).to_end()]
    assert len(everything) == 21
    assert {(record.topic, record.partition) for record in everything} == {("stages", 0), ("stages", 1), ("nodes", 0)}
    one = await bus.reader(["stages"], partitions={"stages": [1]})
    found = [record async for record in one.to_end()]
    assert {record.partition for record in found} == {1}
    assert list(one.positions()) == [("stages", 1)]


async def test_positions_step_over_markers_and_aborted_records(bus: Bus) -> None:
    writer = await bus.transactional("writer")
    async with writer.transaction() as opened:
        await opened.send(Out("nodes", "tick", tick(0)))
    await aborted(writer, Out("nodes", "tick", tick(1)), Out("nodes", "tick", tick(2)))
    reader = await bus.reader(["nodes"])
    assert not await reader.caught_up()
    assert await rest(reader) == [0]
    assert await reader.caught_up()
    assert reader.positions() == {("nodes", 0): 5}, "one record, its marker, two aborted ones and theirs"


async def test_caught_up_ends_at_the_last_stable_offset(bus: Bus) -> None:
    writer = await bus.transactional("writer")
    await put(bus, 0)
    async with writer.transaction() as opened:
        await opened.send(Out("nodes", "tick", tick(1)))
        await put(bus, 2)
        committed, uncommitted = await bus.reader(["nodes"]), await bus.reader(["nodes"], committed=False)
        assert await rest(committed) == [0]
        assert await committed.caught_up()
        assert await rest(uncommitted) == [0, 1, 2]
    await until(lambda: _is_behind(committed))
    assert await rest(committed) == [1, 2]


async def _is_behind(reader: Reader) -> bool:
    return not await reader.caught_up()


async def test_leaving_to_end_early_loses_nothing(bus: Bus) -> None:
    await put(bus, *range(10))
    reader = await bus.reader(["nodes"])
    async for record in reader.to_end():
        if record.offset == 3:
            break
    assert reader.positions() == {("nodes", 0): 4}
    assert not await reader.caught_up()
    assert numbers(await reader.poll(max_records=2, timeout_s=5)) == [4, 5]
    assert await rest(reader) == [6, 7, 8, 9]


async def test_poll_gives_at_most_as_many_as_asked_and_none_where_nothing_is_new(bus: Bus) -> None:
    await put(bus, *range(10))
    reader = await bus.reader(["nodes"])
    assert numbers(await reader.poll(max_records=4, timeout_s=5)) == [0, 1, 2, 3]
    assert numbers(await reader.poll(max_records=100, timeout_s=5)) == [4, 5, 6, 7, 8, 9]
    assert await reader.poll(timeout_s=0.01) == []
    waiting = asyncio.create_task(reader.poll(timeout_s=10))
    await put(bus, 10)
    assert numbers(await waiting) == [10], "a new record ends the wait"


async def test_seek_goes_anywhere(bus: Bus) -> None:
    await put(bus, *range(10))
    reader = await bus.reader(["nodes"])
    assert len(await rest(reader)) == 10
    reader.seek("nodes", 0, 7)
    assert reader.positions() == {("nodes", 0): 7}
    assert await rest(reader) == [7, 8, 9]
    with pytest.raises(KeyError, match="partition 3 of `nodes`"):
        reader.seek("nodes", 3, 0)


async def test_an_offset_below_the_start_of_the_log_is_a_named_error(bus: Bus) -> None:
    where = await put_stages(bus, *range(10))
    await delete_below(bus, *where, 6)
    with pytest.raises(RecordGone) as caught:
        await bus.reader(["stages"], start={where: 2})
    assert (caught.value.topic, caught.value.partition) == where
    assert (caught.value.offset, caught.value.log_start) == (2, 6)
    assert await rest_of_stages(await bus.reader(["stages"])) == [6, 7, 8, 9]


async def test_retention_that_overtakes_a_reader_is_a_named_error(bus: Bus) -> None:
    where = await put_stages(bus, *range(4))
    reader = await bus.reader(["stages"])
    assert await rest_of_stages(reader) == [0, 1, 2, 3]
    consumer = reader._consumer
    assert consumer is not None
    consumer.pause(*consumer.assignment())  # nothing is fetched ahead
    reader.seek(*where, 1)
    await put_stages(bus, *range(4, 10))
    await delete_below(bus, *where, 6)
    consumer.resume(*consumer.assignment())
    with pytest.raises(RecordGone, match="offsets 1 to 5, which were still to be read, are lost"):
        await rest_of_stages(reader)
    reader.seek(*where, 6)
    assert await rest_of_stages(reader) == [6, 7, 8, 9]


async def test_a_reader_from_the_earliest_may_be_overtaken_before_its_first_record(bus: Bus) -> None:
    where = await put_stages(bus, *range(10))
    reader = await bus.reader(["stages"], partitions={"stages": [where[1]]})
    consumer = reader._consumer
    assert consumer is not None
    await delete_below(bus, *where, 6)
    consumer.seek(*next(iter(reader._next.items())))  # what it has fetched ahead is dropped
    assert await rest_of_stages(reader) == [6, 7, 8, 9]


async def test_a_position_past_the_end_of_the_log_is_a_named_error(bus: Bus) -> None:
    await put(bus, 0)
    reader = await bus.reader(["nodes"], start={("nodes", 0): 50})
    with pytest.raises(RecordGone, match="ends before offset 50"):
        await until(lambda: _poll(reader))


async def _poll(reader: Reader) -> bool:
    return bool(await reader.poll())


class _SteppedClock(ManualClock):
    """A clock that moves on by a minute whenever it is read, and sleeps for real."""

    def monotonic(self) -> float:
        self._elapsed += 60
        return super().monotonic()

    async def sleep(self, s: float) -> None:
        await SystemClock().sleep(s)


async def test_a_reader_that_stands_still_while_behind_gets_a_new_consumer(bus_settings: BusSettings) -> None:
    async with Bus(bus_settings, Service.SCHEDULER, clock=_SteppedClock()) as bus:
        await bus.prepare()
        reader = await bus.reader(["nodes"])
        consumer = reader._consumer
        assert consumer is not None
        consumer.pause(*consumer.assignment())  # stuck: it never fetches again
        await put(bus, 1, 2, 3)
        await until(lambda: _has_moved(reader))
        assert reader.replaced >= 1
        assert reader.positions() == {("nodes", 0): 3}


async def _has_moved(reader: Reader) -> bool:
    await reader.poll(timeout_s=0.05)
    return reader.positions()["nodes", 0] == 3


async def test_an_idle_reader_keeps_its_consumer(bus_settings: BusSettings) -> None:
    async with Bus(bus_settings, Service.SCHEDULER, clock=_SteppedClock()) as bus:
        await bus.prepare()
        reader = await bus.reader(["nodes"])
        for _ in range(3):
            assert await reader.poll(timeout_s=0.05) == []
        assert reader.replaced == 0


async def test_compaction_leaves_gaps_that_positions_step_over(bus: Bus) -> None:
    states = [GroupState(group_id="g", size=size, opened_at_ms=0) for size in range(1, 4)]
    await bus.send(*[Out("leases", "g/g", state) for state in states])
    reader = await bus.reader(["leases"])
    found = [record async for record in reader.to_end()]
    assert found[-1].value == states[-1]
    assert await reader.caught_up()


async def test_a_poll_that_is_cancelled_while_it_decodes_loses_nothing(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(bus, *range(12))
    reader = await bus.reader(["nodes"])

    async def interrupted(_: object) -> list[Record]:
        await asyncio.sleep(3600)
        return []

    with monkeypatch.context() as patched:
        patched.setattr(reader, "_decoded", interrupted)
        task = asyncio.create_task(reader.poll(timeout_s=5))
        await until(lambda: reader.positions() == {("nodes", 0): 12})
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert reader.positions() == {("nodes", 0): 0}
    assert await rest(reader) == list(range(12))
