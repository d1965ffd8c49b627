"""PolarClient against a real broker, on which the test plays the scheduler and the finisher."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest
from msgspec.structs import replace

from polar.bus import Bus, BusSettings, Out
from polar.bus.errors import TopicsWrong
from polar.client import NoAnswer, PolarClient, TaskRefused, advantages_of
from polar.schemas import (
    AgentSpec,
    Capacity,
    Claim,
    CustomShell,
    DecodeError,
    GroupClosed,
    Lease,
    NodeHeartbeat,
    Phase,
    Problem,
    RecordRef,
    SessionResult,
    Stage,
    StageChanged,
    TaskAccepted,
    TaskCounts,
    TaskRejected,
    TaskRequest,
    TaskResult,
    TaskState,
    Tick,
    Trajectory,
)
from polar.schemas.topics import Service
from tests.cli.records import group, moved, trajectory

TASK = TaskRequest(
    instruction="do it", agent=AgentSpec(harness="shell", custom_shell=CustomShell(command="true")), num_samples=2
)
Answer = Callable[[TaskRequest, RecordRef], TaskAccepted | TaskRejected]


def now_ms() -> int:
    return round(time.time() * 1000)


def accepted(task: TaskRequest, ref: RecordRef) -> TaskAccepted:
    assert task.task_id is not None
    return TaskAccepted(
        task_id=task.task_id, count=task.num_samples, group_id=task.task_id, source=ref, answers=ref, at_ms=now_ms()
    )


@pytest.fixture
async def scheduler(bus_settings: BusSettings) -> AsyncIterator[Bus]:
    async with Bus(bus_settings, Service.SCHEDULER) as bus:
        await bus.prepare()
        yield bus


@pytest.fixture
async def client(scheduler: Bus) -> AsyncIterator[PolarClient]:
    async with PolarClient(scheduler.settings) as one:
        yield one


@asynccontextmanager
async def answering(bus: Bus, answer: Answer) -> AsyncIterator[list[TaskRequest]]:
    """A scheduler that answers each task; what it has read."""
    seen: list[TaskRequest] = []
    reader = await bus.reader(["tasks"])

    async def work() -> None:
        while True:
            for record in await reader.poll():
                if isinstance(record.value, TaskRequest):
                    seen.append(record.value)
                    await bus.send(Out("stages", record.key, answer(record.value, record.ref)))

    task = asyncio.create_task(work())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.wait([task])
        await reader.close()


def result(one: Trajectory, ref: RecordRef | None) -> SessionResult:
    return SessionResult(
        session_id=one.session_id,
        task_id=one.task_id,
        group_id=one.group_id,
        sample=one.sample,
        attempt=1,
        status=one.status,
        outcome=one.outcome,
        trajectory=ref,
        at_ms=now_ms(),
    )


async def test_a_task_gets_an_id_and_its_own_answer(scheduler: Bus, client: PolarClient) -> None:
    async with answering(scheduler, accepted) as seen:
        answers = await asyncio.gather(*(client.submit(TASK) for _ in range(5)))
    assert len({one.task_id for one in answers}) == 5
    assert {one.task_id for one in seen} == {one.task_id for one in answers}


async def test_a_refused_task_tells_every_field(scheduler: Bus, client: PolarClient) -> None:
    problems = [Problem(field="agent.harness", message="is unknown"), Problem(field="", message="is odd")]

    def refuse(task: TaskRequest, ref: RecordRef) -> TaskRejected:
        return TaskRejected(task_id=task.task_id, answers=ref, problems=problems, at_ms=1)

    async with answering(scheduler, refuse):
        with pytest.raises(TaskRefused) as refused:
            await client.submit(replace(TASK, task_id="mine"))
    assert refused.value.problems == problems
    assert str(refused.value) == "agent.harness: is unknown; task: is odd"


async def test_the_answer_to_an_earlier_task_of_that_id_is_not_taken(scheduler: Bus, client: PolarClient) -> None:
    def odd(task: TaskRequest, ref: RecordRef) -> TaskAccepted:
        return replace(accepted(task, ref), answers=replace(ref, offset=ref.offset + 100))

    async with answering(scheduler, odd):
        with pytest.raises(NoAnswer) as none:
            await client.submit(replace(TASK, task_id="mine"), timeout_s=1.0)
    assert none.value.task_id == "mine"
    assert "polar serve submit" in str(none.value)


async def test_a_long_instruction_goes_through_the_blob_store(scheduler: Bus, client: PolarClient) -> None:
    text = "ü" * 200_000
    async with answering(scheduler, accepted) as seen:
        await client.submit(replace(TASK, instruction=text))
    claim = seen[0].instruction
    assert isinstance(claim, Claim)
    assert (await client.bus.blobs.get(claim)).decode() == text


async def test_stages_end_with_the_result_after_every_report(scheduler: Bus, client: PolarClient) -> None:
    done = TaskResult(task_id="t", group_id="t", status="completed", counts=TaskCounts(accepted=40), at_ms=1)
    reports = [moved(f"s{n}", stage) for n in range(20) for stage in (Stage.RUNNING, Stage.FINISHED)]
    other = replace(moved("x", Stage.RUNNING), task_id="other")
    await scheduler.send(*(Out("stages", one.session_id, one) for one in [*reports, other]))
    await scheduler.send(Out("results", "t/t", done))
    async with asyncio.timeout(30), aclosing(client.stages("t")) as events:
        found = [event async for event in events]
    assert found[-1] == done
    key = lambda one: (one.session_id, one.stage)  # noqa: E731
    assert sorted((one for one in found if isinstance(one, StageChanged)), key=key) == sorted(reports, key=key)


async def test_stages_follow_what_comes_later(scheduler: Bus, client: PolarClient) -> None:
    done = TaskResult(task_id="t", group_id="t", status="completed", counts=TaskCounts(accepted=1), at_ms=1)
    async with asyncio.timeout(30), aclosing(client.stages("t", since_ms=now_ms() - 1_000)) as events:
        await scheduler.send(Out("stages", "s", moved("s", Stage.RUNNING)))
        assert await anext(events) == moved("s", Stage.RUNNING)
        await scheduler.send(Out("results", "t/t", done))
        assert await anext(events) == done
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_trajectories_are_filtered_and_resumed_at_offsets(scheduler: Bus, client: PolarClient) -> None:
    async with Bus(scheduler.settings, Service.FINISHER) as bus:
        for task in ("a", "b"):
            one = trajectory(session_id=f"{task}0", task_id=task, group_id=task)
            await bus.send(Out("trajectories", task, one))
    await scheduler.send(Out("trajectories", "a", group({"a0": 1.0}, ["a0"], group_id="a", tasks=["a"])))
    everything = [one async for one in client.trajectories(follow=False)]
    assert len(everything) == 3
    mine = [one async for one in client.trajectories(task_ids={"a"}, follow=False)]
    assert [type(one) for one in mine] == [Trajectory, GroupClosed]
    assert [one async for one in client.trajectories(group_ids=["a"], follow=False)] == mine
    assert [one async for one in client.trajectories(task_ids={"none"}, follow=False)] == []
    with pytest.raises(TypeError, match="collections"):
        [one async for one in client.trajectories(task_ids="a", follow=False)]
    records = [one async for one in client.records(task_ids={"a"}, follow=False)]
    following = {(one.topic, one.partition): one.offset + 1 for one in records[:1]}
    rest = [one.value async for one in client.records(task_ids={"a"}, follow=False, start=following)]
    assert rest == [mine[1]]
    async with asyncio.timeout(30), aclosing(client.trajectories(task_ids={"a"}, start="latest")) as events:
        waiting = asyncio.ensure_future(anext(events))
        late = trajectory(session_id="a1", task_id="a", group_id="a")
        async with Bus(scheduler.settings, Service.FINISHER) as bus:
            while not waiting.done():
                await bus.send(Out("trajectories", "a", late))
                await asyncio.wait([waiting], timeout=0.5)
        assert waiting.result() == late


async def test_a_finished_session_is_found_by_its_id(scheduler: Bus, client: PolarClient) -> None:
    one = trajectory(session_id="s0")
    async with Bus(scheduler.settings, Service.FINISHER) as bus:
        (ref,) = await bus.send(Out("trajectories", "t", one))
        await bus.send(
            Out("results", "s/s0", result(one, ref)),
            Out("results", "s/s1", result(replace(one, session_id="s1"), None)),
            Out("results", "s/s2", result(replace(one, session_id="s2"), ref)),
        )
    assert await client.trajectory("s0") == one
    assert await client.trajectory("s1") is None
    assert await client.trajectory("never") is None
    found = await client.result("s0")
    assert found is not None
    assert found.trajectory == ref
    tasks, sessions = await client.results()
    assert tasks == {}
    assert set(sessions) == {"s0", "s1", "s2"}


async def test_a_result_that_points_at_something_else_is_told(scheduler: Bus, client: PolarClient) -> None:
    one = trajectory(session_id="s0")
    (closed,) = await scheduler.send(Out("trajectories", "t", group({"s0": 1.0}, ["s0"])))
    async with Bus(scheduler.settings, Service.FINISHER) as bus:
        await bus.send(Out("results", "s/s0", result(one, closed)))
    with pytest.raises(DecodeError, match="is no trajectory"):
        await client.trajectory("s0")


async def test_a_record_of_another_version_is_told_and_not_passed_over(scheduler: Bus, client: PolarClient) -> None:
    producer = await client.bus.clients.producer()
    await producer.send_and_wait(scheduler.settings.full("trajectories"), b"\x81\xa4type\xa6Future", key=b"t")
    await producer.stop()
    with pytest.raises(DecodeError):
        [one async for one in client.trajectories(follow=False)]


async def test_nodes_and_the_leader_are_those_that_beat(scheduler: Bus, client: PolarClient) -> None:
    async with Bus(scheduler.settings, Service.GATEWAY) as bus:
        for node, age_ms in (("b", 0), ("a", 0), ("silent", 60_000)):
            beat = NodeHeartbeat(
                node_id=node, boot_id="boot", capacity=Capacity(run=1), beat=1, at_ms=now_ms() - age_ms
            )
            await bus.send(Out("nodes", node, beat))
    assert await client.leader() is None
    await scheduler.send(Out("nodes", "tick", Tick(leader_id="l", number=7, at_ms=now_ms())))
    assert [one.node_id for one in await client.nodes()] == ["a", "b"]
    assert [one.node_id for one in await client.nodes(within_ms=120_000)] == ["a", "b", "silent"]
    leader = await client.leader()
    assert leader is not None
    assert leader.number == 7


async def test_the_schedulers_state_is_what_its_records_leave(scheduler: Bus, client: PolarClient) -> None:
    def lease(session: str) -> Lease:
        return Lease(session_id=session, task_id="t", group_id="t", sample=0, phase=Phase.QUEUED, queued_at_ms=1)

    task = TaskState(
        task_id="t",
        body_sha256="0",
        source=RecordRef(topic="tasks", partition=0, offset=0),
        group_id="t",
        counts=TaskCounts(accepted=1),
        accepted_at_ms=1,
    )
    await scheduler.send(
        Out("leases", "t/t", task),
        Out("leases", "t/gone", replace(task, task_id="gone")),
        Out("leases", "a", lease("a")),
        Out("leases", "b", lease("b")),
        Out("leases", "t/gone", None),
        Out("leases", "b", None),
    )
    state = await client.scheduler_state()
    assert state.tasks == {"t": task}
    assert set(state.leases) == {"a"}
    assert state.groups == {}


async def test_a_client_of_other_partitions_is_refused(scheduler: Bus) -> None:
    settings = scheduler.settings.model_copy(update={"partitions": 5})
    with pytest.raises(TopicsWrong, match="partitions is 2, wanted 5"):
        async with PolarClient(settings):
            pass


async def test_a_client_does_not_mind_how_long_records_are_kept(scheduler: Bus) -> None:
    settings = scheduler.settings.model_copy(update={"max_record_bytes": 16 * 1024 * 1024})
    async with PolarClient(settings) as client:
        assert await client.nodes() == []


def test_advantages_of_a_group_are_those_of_its_selection() -> None:
    closed = group({"a": 1.0, "b": 0.0, "late": 5.0, "none": None}, ["a", "b", "none"])
    found = advantages_of(closed)
    assert set(found) == {"a", "b"}
    assert found["a"] == -found["b"]
