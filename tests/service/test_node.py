"""A node's link: assignments in order, heartbeats that never claim more than the books hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from polar.bus import Bus, BusSettings, Out
from polar.schemas import Capacity, DeadLetter, Event, Held, NodeHeartbeat, Offers, SessionReleased
from polar.schemas.topics import Service
from polar.service.node import NodeLink
from tests.bus.support import delete_below, until


@pytest.fixture
async def scheduler(bus_settings: BusSettings) -> AsyncIterator[Bus]:
    async with Bus(bus_settings, Service.SCHEDULER) as bus:
        await bus.prepare()
        yield bus


@pytest.fixture
async def gateway(bus_settings: BusSettings, scheduler: Bus) -> AsyncIterator[Bus]:
    async with Bus(bus_settings, Service.GATEWAY) as bus:
        yield bus


def assigned(number: int, node: str = "n1") -> Out:
    return Out("assignments", node, SessionReleased(node=node, boot="b", session_id=f"s{number}", attempt=number))


class Books:
    """A node's books."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []
        self.marks: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def take(self, event: Event, offset: int) -> None:
        assert isinstance(event, SessionReleased)
        await self.gate.wait()
        self.taken.append((event.attempt, offset))

    async def held(self) -> list[Held]:
        return [
            Held(assignment_id=str(offset), session_id=f"s{attempt}", attempt=attempt, stage="INITIALIZING")
            for attempt, offset in self.taken
        ]

    async def mark(self, offset: int) -> None:
        self.marks.append(offset)

    def attempts(self) -> list[int]:
        return [attempt for attempt, _ in self.taken]


def link(bus: Bus, books: Books, *, start: int | None = None, half: str = "all", node: str = "n1") -> NodeLink:
    return NodeLink(
        bus,
        node_id=node,
        boot_id="b",
        half=half,
        capacity=Capacity(init=2, run=1),
        offers=Offers(backends=["local"]),
        held=books.held,
        on_assignment=None if half == "run" else books.take,
        runtime_api="http://node",
        heartbeat_s=0.05,
        start=start,
        on_read_to=books.mark,
    )


@asynccontextmanager
async def running(one: NodeLink) -> AsyncIterator[NodeLink]:
    task = asyncio.create_task(one.run())
    try:
        await until(lambda: one.beating.is_set() or task.done())
        yield one
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def beats(bus: Bus) -> list[tuple[str | None, NodeHeartbeat]]:
    reader = await bus.reader(["nodes"])
    found = [record async for record in reader.to_end()]
    await reader.close()
    return [(record.key, record.value) for record in found if isinstance(record.value, NodeHeartbeat)]


async def test_assignments_of_this_node_come_in_order_and_others_not(scheduler: Bus, gateway: Bus) -> None:
    books = Books()
    await scheduler.send(assigned(-1))  # to a former boot: before the end as it is at the start
    async with running(link(gateway, books)) as one:
        await scheduler.send(*[assigned(number, f"n{1 + number % 3}") for number in range(30)])
        await until(lambda: len(books.taken) == 10)
        reader = await scheduler.reader(["assignments"], start="latest")
        end = reader.positions()["assignments", one.partition]
        await until(lambda: one.read_to == end)
        assert books.attempts() == list(range(0, 30, 3))
        assert books.marks == sorted(set(books.marks))
        assert books.marks[-1] == end


async def test_a_heartbeat_tells_what_the_node_has_and_can(scheduler: Bus, gateway: Bus) -> None:
    books = Books()
    async with running(link(gateway, books)) as one:
        await scheduler.send(assigned(1))
        await until(lambda: len(books.taken) == 1)
        one.draining = True
        one.beat_now()

        async def told() -> bool:
            return (await beats(scheduler))[-1][1].draining

        await until(told)
    key, beat = (await beats(scheduler))[-1]
    assert key == "n1"
    assert (beat.node_id, beat.boot_id, beat.half) == ("n1", "b", "all")
    assert beat.capacity == Capacity(init=2, run=1)
    assert beat.offers.backends == ["local"]
    assert beat.runtime_api == "http://node"
    assert [one.session_id for one in beat.held] == ["s1"]
    assert beat.read_to == books.taken[0][1] + 1
    numbers = [beat.beat for _, beat in await beats(scheduler)]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_read_to_waits_for_the_books(scheduler: Bus, gateway: Bus) -> None:
    books = Books()
    async with running(link(gateway, books)) as one:
        books.gate.clear()
        await scheduler.send(assigned(1), assigned(2))
        count = len(await beats(scheduler))

        async def two_more() -> bool:
            return len(await beats(scheduler)) >= count + 3

        await until(two_more)
        assert one.read_to <= 0
        books.gate.set()
        await until(lambda: len(books.taken) == 2)
    for _, beat in await beats(scheduler):
        booked = {one.session_id for one in beat.held}
        for attempt, offset in books.taken:
            assert offset >= beat.read_to or f"s{attempt}" in booked, "below read_to and not held would count as lost"


async def test_a_restart_goes_on_at_the_mark(scheduler: Bus, gateway: Bus) -> None:
    first, second = Books(), Books()
    async with running(link(gateway, first)):
        await scheduler.send(assigned(1), assigned(2))
        await until(lambda: len(first.taken) == 2)
        await until(lambda: bool(first.marks))
    await scheduler.send(assigned(3))
    async with running(link(gateway, second, start=first.marks[-1])):
        await until(lambda: second.attempts() == [3])


async def test_a_mark_below_the_start_of_the_log_goes_on_at_its_start(scheduler: Bus, gateway: Bus) -> None:
    refs = await scheduler.send(*[assigned(number) for number in range(10)])
    await delete_below(scheduler, "assignments", refs[0].partition, 6)
    books = Books()
    async with running(link(gateway, books, start=2)):
        await until(lambda: books.attempts() == [6, 7, 8, 9])


async def test_the_run_half_beats_with_its_own_key_and_reads_nothing(scheduler: Bus, gateway: Bus) -> None:
    books = Books()
    async with running(link(gateway, books, half="run")):
        await scheduler.send(assigned(1))
    key, beat = (await beats(scheduler))[0]
    assert (key, beat.half, beat.read_to) == ("n1/run", "run", -1)
    assert books.taken == []


async def test_an_assignment_that_cannot_be_read_is_told_and_passed(scheduler: Bus, gateway: Bus) -> None:
    books = Books()
    async with running(link(gateway, books)) as one:
        producer = await scheduler.clients.producer()
        await producer.send_and_wait(
            scheduler.settings.full("assignments"), b"\xc1", key=b"n1", partition=one.partition
        )
        await producer.stop()
        await scheduler.send(assigned(2))
        await until(lambda: books.attempts() == [2])
    reader = await scheduler.reader(["dead"])
    letters = [record.value async for record in reader.to_end()]
    assert [letter.value for letter in letters if isinstance(letter, DeadLetter)] == [b"\xc1"]


async def test_what_the_books_raise_ends_the_link(scheduler: Bus, gateway: Bus) -> None:
    class Full(Books):
        async def take(self, event: Event, offset: int) -> None:
            raise OSError("the disk is full")

    one = link(gateway, Full())
    task = asyncio.create_task(one.run())
    await one.beating.wait()
    await scheduler.send(assigned(1))
    with pytest.raises(OSError, match="the disk is full"):
        await asyncio.wait_for(task, 20)
