"""The scheduler's shell on a real log: take-over, fencing, and nothing decided twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
from aiokafka import AIOKafkaProducer

from polar.bus import Bus, BusSettings, Out, Reader
from polar.schemas import (
    Capacity,
    Cursor,
    DeadLetter,
    NodeHeartbeat,
    Offers,
    RecordRef,
    SessionAssigned,
    SessionOpened,
    TaskAccepted,
    TaskRejected,
    TaskRequest,
    Tick,
)
from polar.schemas.topics import Service
from polar.schemas.validation import Limits
from polar.submit.scheduler import SchedulerService
from polar.submit.scheduler.core import Scheduler
from polar.submit.scheduler.settings import SchedulerSettings
from tests.bus.support import delete_below
from tests.submit.scheduler.cluster import shell_task


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as one:
        yield one


async def scheduler(stack: AsyncExitStack, settings: BusSettings, name: str) -> SchedulerService:
    bus = await stack.enter_async_context(Bus(settings, Service.SCHEDULER))
    await bus.prepare()
    return SchedulerService(
        bus,
        SchedulerSettings(leader_silence=1.0, tick_seconds=0.2),
        Limits(),
        lambda session, attempt, until: "key",
        leader_id=name,
        inline_instruction_bytes=1024,
    )


async def wait_for(bus: Bus, topic: str, kind: type, count: int) -> list[object]:
    """The first `count` records of a kind on a topic."""
    reader = await bus.reader([topic])
    found: list[object] = []
    try:
        async with asyncio.timeout(40):
            while len(found) < count:
                found += [one.value for one in await reader.poll() if isinstance(one.value, kind)]
    except TimeoutError:
        raise AssertionError(f"{len(found)} of {count} {kind.__name__}: {found}") from None
    finally:
        await reader.close()
    return found


async def all_of(bus: Bus, topic: str, kind: type) -> list[object]:
    reader = await bus.reader([topic])
    found = [one.value async for one in reader.to_end() if isinstance(one.value, kind)]
    await reader.close()
    return found


@asynccontextmanager
async def foreign(settings: BusSettings) -> AsyncIterator[AIOKafkaProducer]:
    """A producer that knows nothing of Polar."""
    producer = AIOKafkaProducer(bootstrap_servers=settings.bootstrap, max_request_size=settings.max_record_bytes)
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


@asynccontextmanager
async def closing(reader: Reader) -> AsyncIterator[Reader]:
    try:
        yield reader
    finally:
        await reader.close()


async def beat(bus: Bus) -> None:
    await bus.send(
        Out(
            "nodes",
            "node",
            NodeHeartbeat(
                node_id="node",
                boot_id="boot",
                capacity=Capacity(init=50, ready=0, run=50),
                offers=Offers(backends=["local"], harnesses=["shell"]),
                read_to=0,
                beat=1,
                at_ms=0,
            ),
        )
    )


async def test_a_standby_goes_on_where_a_dead_leader_stopped(stack: AsyncExitStack, bus_settings: BusSettings) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    gateway = await stack.enter_async_context(Bus(bus_settings, Service.GATEWAY))
    first, second = [await scheduler(stack, bus_settings, name) for name in ("first", "second")]
    leading = asyncio.create_task(first.run())
    await asyncio.wait_for(first.leading.wait(), 20)
    await user.send(Out("tasks", "a", shell_task("a", 3)))
    await wait_for(user, "stages", TaskAccepted, 1)
    leading.cancel()
    await asyncio.gather(leading, return_exceptions=True)
    await user.send(Out("tasks", "b", shell_task("b", 2)))
    following = asyncio.create_task(second.run())
    try:
        await asyncio.wait_for(second.leading.wait(), 20)
        await wait_for(user, "stages", TaskAccepted, 2)
        await beat(gateway)
        assigned = await wait_for(user, "assignments", SessionAssigned, 5)
        assert {one.task_id for one in assigned} == {"a", "b"}  # type: ignore[attr-defined]
        opened = await all_of(user, "completions", SessionOpened)
        assert len(opened) == len({one.session_id for one in opened}) == 5  # type: ignore[attr-defined]
        assert len(await all_of(user, "stages", TaskAccepted)) == 2
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_two_that_start_at_once_settle_by_one_fencing_and_decide_once(
    stack: AsyncExitStack, bus_settings: BusSettings
) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    both = [await scheduler(stack, bus_settings, name) for name in ("first", "second")]
    running = [asyncio.create_task(one.run()) for one in both]
    try:
        for number in range(10):
            await user.send(Out("tasks", f"t{number}", shell_task(f"t{number}", 2)))
        await wait_for(user, "stages", TaskAccepted, 10)
        async with asyncio.timeout(30):
            while sum(one.leading.is_set() for one in both) != 1:
                await all_of(user, "nodes", Tick)
        accepted = await all_of(user, "stages", TaskAccepted)
        assert sorted(one.task_id for one in accepted) == [f"t{number}" for number in range(10)]  # type: ignore[attr-defined]
        assert not any(task.done() for task in running), "the fenced one stands by"
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_what_is_no_task_is_answered_and_buried_and_the_next_is_taken(
    stack: AsyncExitStack, bus_settings: BusSettings
) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    leader = await scheduler(stack, bus_settings, "one")
    running = asyncio.create_task(leader.run())
    producer = await stack.enter_async_context(foreign(bus_settings))
    try:
        tasks = bus_settings.full("tasks")
        for value in (
            b"not json",
            b'{"task_id": "x", "instruction": 3}',
            b'{"num_sample": 2}',
            b"\x81\xa4type\xa3Foo",
            b"",
        ):
            await producer.send_and_wait(tasks, value, key=b"k")
        good = b'{"task_id":"ok","instruction":"i","agent":{"harness":"shell","custom_shell":{"command":"true"}}}'
        await producer.send_and_wait(tasks, good, key=b"k")
        (accepted,) = await wait_for(user, "stages", TaskAccepted, 1)
        assert accepted.task_id == "ok"  # type: ignore[attr-defined]
        rejected = await wait_for(user, "stages", TaskRejected, 5)
        fields = [{one.field for one in each.problems} for each in rejected]  # type: ignore[attr-defined]
        assert {"instruction"} in fields
        assert any("num_sample" in each for each in fields)
        letters = await wait_for(user, "dead", DeadLetter, 5)
        assert all(one.origin.topic == "tasks" for one in letters)  # type: ignore[attr-defined]
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_long_instruction_becomes_a_claim_before_it_is_handed_out(
    stack: AsyncExitStack, bus_settings: BusSettings
) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    gateway = await stack.enter_async_context(Bus(bus_settings, Service.GATEWAY))
    leader = await scheduler(stack, bus_settings, "one")
    running = asyncio.create_task(leader.run())
    try:
        from msgspec.structs import replace

        long = "read this. " * 400
        await asyncio.wait_for(leader.leading.wait(), 20)
        await beat(gateway)
        await user.send(Out("tasks", "t", replace(shell_task("t", 2), instruction=long)))
        assigned = await wait_for(user, "assignments", SessionAssigned, 2)
        for one in assigned:
            claim = one.task.instruction  # type: ignore[attr-defined]
            assert (await user.blobs.get(claim)).decode() == long
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_no_record_of_tasks_stops_the_scheduler(stack: AsyncExitStack, bus_settings: BusSettings) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    leader = await scheduler(stack, bus_settings, "one")
    task = {
        "task_id": "x",
        "instruction": "i",
        "agent": {"harness": "shell", "custom_shell": {"command": "true"}},
    }
    large = "x" * 4_000_000
    nested: object = 1
    for _ in range(500):
        nested = [nested]
    values = [
        json.dumps({**task, "num_samples": 10**400}).encode(),
        json.dumps({**task, "metadata": {"seed": 2**70}}).encode(),
        json.dumps({**task, "metadata": {"deep": nested}}).encode(),
        json.dumps({**task, "agent": {"harness": large}}).encode(),
        json.dumps({**task, "task_id": large}).encode(),
        json.dumps({**task, "runtime": {"env": {"A": large + large[:300_000]}}}).encode(),
        json.dumps({**task, **{f"field{i}": i for i in range(50_000)}}).encode(),
        json.dumps({"type": "CancelRequest", "task_id": large}).encode(),
        json.dumps({"type": "CancelRequest", "task_id": "y", "reason": large}).encode(),
        msgspec.msgpack.encode({"type": "TaskRequest", **task, "metadata": {"a": {1: 2}}}),
        msgspec.msgpack.encode({"type": "TaskRequest", **task, "metadata": {"a": msgspec.msgpack.Ext(5, b"x")}}),
    ]
    running = asyncio.create_task(leader.run())
    async with foreign(bus_settings) as producer:
        for value in values:
            await producer.send_and_wait(bus_settings.full("tasks"), value, key=b"k")
        await producer.send_and_wait(bus_settings.full("tasks"), b"{}", key=b"k" * 4_000_000, partition=0)
        await user.send(Out("tasks", "ok", shell_task("ok")))
    try:
        (accepted,) = await wait_for(user, "stages", TaskAccepted, 1)
        assert accepted.task_id == "ok"  # type: ignore[attr-defined]
        await wait_for(user, "stages", TaskRejected, len(values) + 1)
        await wait_for(user, "dead", DeadLetter, len(values) + 1)
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_record_at_which_the_machine_fails_goes_to_dead_and_the_next_is_taken(
    stack: AsyncExitStack, bus_settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    leader = await scheduler(stack, bus_settings, "one")
    taken = Scheduler.on_task

    def on_task(self: Scheduler, ref: RecordRef, request: TaskRequest, body: str) -> None:
        taken(self, ref, request, body)
        if request.task_id == "bad":
            raise LookupError("a bug")

    monkeypatch.setattr(Scheduler, "on_task", on_task)
    running = asyncio.create_task(leader.run())
    try:
        await user.send(*[Out("tasks", "k", shell_task(name)) for name in ("a", "bad", "b")])
        accepted = await wait_for(user, "stages", TaskAccepted, 2)
        assert [one.task_id for one in accepted] == ["a", "b"]  # type: ignore[attr-defined]
        (letter,) = await wait_for(user, "dead", DeadLetter, 1)
        assert letter.origin.topic == "tasks"  # type: ignore[attr-defined]
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_leader_starts_after_retention_has_emptied_its_inputs(
    stack: AsyncExitStack, bus_settings: BusSettings
) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    first, second = [await scheduler(stack, bus_settings, name) for name in ("first", "second")]
    running = asyncio.create_task(first.run())
    await user.send(*[Out("tasks", f"t{number}", shell_task(f"t{number}")) for number in range(6)])
    await wait_for(user, "stages", TaskAccepted, 6)
    reader = await user.reader(["stages", "tasks"])
    await stack.enter_async_context(closing(reader))
    ends = await reader.ends()
    cursors = {f"c/{topic}/{number}": end for (topic, number), end in ends.items() if end}
    leases = await user.reader(["leases"])
    await stack.enter_async_context(closing(leases))
    written: dict[str, int] = {}
    async with asyncio.timeout(20):
        while not all(written.get(key, 0) >= end for key, end in cursors.items()):
            for one in await leases.poll():
                if isinstance(one.value, Cursor) and one.key is not None:
                    written[one.key] = one.value.next
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for (topic, number), end in ends.items():
        if end and topic == "stages":  # of what is accepted, the tasks themselves outlive the sessions
            await delete_below(user, topic, number, end)
    running = asyncio.create_task(second.run())
    try:
        await asyncio.wait_for(second.leading.wait(), 20)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
