"""Cursors and the log: what a worker does that comes back late, or to another log than it left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiokafka.admin import NewTopic
from aiokafka.errors import for_code
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient

from polar.bus import Bus, BusSettings, CursorLost, Out, PartitionWorker
from polar.bus.clients import stop_admin
from polar.schemas import Cursor
from polar.schemas.topics import Service
from tests.bus.support import Copier, Counter, aborted, call, delete_below, final, until
from tests.bus.test_worker import at_end, cursors, reports, working


@pytest.fixture
async def buses(bus_settings: BusSettings) -> AsyncIterator[tuple[Bus, Bus]]:
    """The proxy's, which writes the input, and the builder's."""
    async with Bus(bus_settings, Service.PROXY) as proxy, Bus(bus_settings, Service.BUILDER) as builder:
        await builder.prepare()
        yield proxy, builder


async def lost(builder: Bus) -> CursorLost:
    with pytest.raises(CursorLost) as caught:
        await asyncio.wait_for(PartitionWorker(builder, "completions", "builder", lambda _: Copier()).run(), 60)
    return caught.value


async def put_cursor(builder: Bus, where: int, cursor: Cursor) -> None:
    await builder.send(Out("cursors", f"builder/completions/{where}", cursor, partition=where))


async def make_anew(bus: Bus, name: str) -> None:
    """Deletes a topic and makes it again, as an operator might who thinks that nobody will notice."""
    full = bus.settings.full(name)
    admin = await bus.clients.admin()
    try:
        await admin.delete_topics([full])

        async def gone() -> bool:
            return full not in await admin.list_topics()

        await until(gone)

        async def made() -> bool:
            # Apache Kafka deletes in the background and refuses the name meanwhile
            response = await admin.create_topics([NewTopic(full, bus.partitions(name), 1)])
            return all(for_code(code).errno in (0, 36) for _, code, *_ in response.topic_errors)

        await until(made)
    finally:
        await stop_admin(admin)


async def test_a_cursor_below_the_log_names_what_was_never_processed_and_what_the_state_needs(
    buses: tuple[Bus, Bus],
) -> None:
    proxy, builder = buses
    await proxy.send(*[call(number) for number in range(20)])
    where = builder.partition_of("completions", "s")
    await put_cursor(builder, where, Cursor(next=4, replay_from=2))
    await delete_below(builder, "completions", where, 9)
    error = await lost(builder)
    assert (error.topic, error.partition, error.lost, error.log_start) == ("completions", where, (2, 8), 9)
    assert error.cursor.next == 4
    assert "offsets 4 to 8 were never processed" in str(error)
    assert "offsets 2 to 3, which rebuild its state" in str(error)
    assert "accept_loss" in str(error)
    assert not await reports(builder)


async def test_a_state_whose_first_records_are_gone_is_named_though_all_were_processed(buses: tuple[Bus, Bus]) -> None:
    proxy, builder = buses
    await proxy.send(*[call(number) for number in range(20)])
    where = builder.partition_of("completions", "s")
    await put_cursor(builder, where, Cursor(next=15, replay_from=2))
    await delete_below(builder, "completions", where, 9)
    error = await lost(builder)
    assert "offsets 2 to 8, which rebuild its state" in str(error)
    assert "never processed" not in str(error)
    async with working(builder, lambda _: Copier(), accept_loss=True) as worker:
        await until(at_end(worker, builder))
    assert [number for _, number in await reports(builder)] == list(range(15, 20)), "what was processed stays so"


async def test_a_cursor_beyond_the_log_of_a_topic_made_anew_is_named_and_with_accept_loss_all_that_is_new_is_read(
    buses: tuple[Bus, Bus],
) -> None:
    proxy, builder = buses
    where = builder.partition_of("completions", "s")
    await proxy.send(*[call(number) for number in range(20)])
    async with working(builder, lambda _: Copier()) as worker:
        await until(at_end(worker, builder))
    await make_anew(builder, "completions")
    await proxy.send(*[call(number) for number in range(100, 105)])
    error = await lost(builder)
    assert (error.topic, error.partition, error.log_end) == ("completions", where, 5)
    assert error.cursor.next == 20
    assert "ends at 5" in str(error)
    assert "made anew" in str(error)
    async with working(builder, lambda _: Copier(), accept_loss=True) as worker:
        await until(at_end(worker, builder))
    assert [number for _, number in await reports(builder)] == [*range(20), *range(100, 105)]
    # the new cursor stands on the log, so growing past the old one cannot hide anything
    await proxy.send(*[call(number) for number in range(105, 130)])
    async with working(builder, lambda _: Copier()) as worker:
        await until(at_end(worker, builder))
    assert [number for _, number in await reports(builder)] == [*range(20), *range(100, 130)]


async def test_a_log_cut_off_behind_the_start_of_the_state_is_named_instead_of_waited_for(
    buses: tuple[Bus, Bus],
) -> None:
    proxy, builder = buses
    where = builder.partition_of("completions", "s")
    await proxy.send(*[call(number) for number in range(10)])
    await put_cursor(builder, where, Cursor(next=30, replay_from=5, at_ms=builder.clock.now_ms()))
    error = await lost(builder)
    assert error.lost == (5, 29)
    await proxy.send(*[call(number) for number in range(10, 14)])
    async with working(builder, lambda _: Copier(), accept_loss=True) as worker:
        await until(at_end(worker, builder))
    assert [number for _, number in await reports(builder)] == list(range(10, 14))


async def test_a_cursor_behind_aborted_records_and_markers_is_within_its_log(buses: tuple[Bus, Bus]) -> None:
    _, builder = buses
    async with Bus(builder.settings, Service.PROXY) as proxy:
        writer = await proxy.transactional("aborts")
        await aborted(writer, *[call(number) for number in range(5)])
        async with writer.transaction() as opened:
            await opened.send(call(5))
    async with working(builder, lambda _: Copier(), cursor_every_s=0.05) as worker:
        await until(at_end(worker, builder))
    async with working(builder, lambda _: Copier()) as worker:
        await until(at_end(worker, builder))
    assert await reports(builder) == [("s", 5)]


async def delete_group(bus: Bus, name: str) -> None:
    """As the broker does with a group that has been away for longer than it keeps its offsets."""
    admin = AdminClient({"bootstrap.servers": bus.settings.bootstrap})

    def gone() -> bool:
        (answer,) = admin.delete_consumer_groups([bus.settings.full(name)]).values()
        error = answer.exception(timeout=20)
        code = None if error is None else error.args[0].code()
        # not empty yet: the member that has just left is still being written down
        return code in (None, KafkaError.GROUP_ID_NOT_FOUND)

    async def deleted() -> bool:
        return await asyncio.to_thread(gone)

    await until(deleted)


async def test_a_group_away_for_weeks_goes_on_at_its_cursors(buses: tuple[Bus, Bus]) -> None:
    proxy, builder = buses
    await proxy.send(call(0, "a"), call(1, "a"), call(0, "b"), final("b"))
    async with working(builder, lambda _: Counter(), cursor_every_s=0.05) as worker:
        await until(at_end(worker, builder))
    await delete_group(builder, "builder")
    # retention has meanwhile taken what nobody needs any more
    for key, cursor in (await cursors(builder)).items():
        await delete_below(builder, "completions", int(key.rpartition("/")[2]), cursor.replay_from)
    await proxy.send(call(2, "a"), final("a"), call(0, "c"), final("c"))
    async with working(builder, lambda _: Counter()) as worker:
        await until(at_end(worker, builder))
    assert sorted(await reports(builder)) == [("a", 3), ("b", 1), ("c", 1)]
