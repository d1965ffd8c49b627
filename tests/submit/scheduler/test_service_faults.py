"""The scheduler's shell on a real log that has lost records, takes only small ones, or holds a leader up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from polar.bus import Bus, BusSettings, CursorLost, Out
from polar.schemas import (
    Artifact,
    BuildSummary,
    Claim,
    Cursor,
    Failure,
    FailureKind,
    RecordRef,
    SessionAssigned,
    SessionClosed,
    SessionGraded,
    Stage,
    StageChanged,
    Status,
    TaskAccepted,
    TaskRejected,
    Tick,
)
from polar.schemas.topics import Service
from polar.schemas.validation import Limits
from polar.submit.scheduler import SchedulerService
from polar.submit.scheduler.service import SchedulerStuck
from polar.submit.scheduler.settings import SchedulerSettings
from polar.submit.scheduler.turns import Turns
from tests.bus.support import delete_below
from tests.submit.scheduler.cluster import shell_task
from tests.submit.scheduler.test_service import all_of, beat, wait_for


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as one:
        yield one


@asynccontextmanager
async def leading(
    settings: BusSettings,
    name: str,
    *,
    registry: CollectorRegistry | None = None,
    ended: asyncio.Event | None = None,
    **changed: object,
) -> AsyncIterator[SchedulerService]:
    """A scheduler that leads; what it raises comes out at the end. `ended`: set when it has ended by itself."""
    ended = ended or asyncio.Event()
    async with Bus(settings, Service.SCHEDULER) as bus:
        await bus.prepare()
        service = SchedulerService(
            bus,
            SchedulerSettings(**{"leader_silence": 1.0, "tick_seconds": 0.2, "final_grace": 3, **changed}),
            Limits(),
            lambda session, attempt, until: "key",
            leader_id=name,
            inline_instruction_bytes=1024,
            registry=registry,
        )
        running = asyncio.create_task(service.run())
        running.add_done_callback(lambda _: ended.set())
        try:
            waiting = asyncio.create_task(service.leading.wait())
            await asyncio.wait([running, waiting], timeout=60, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if running.done():
                running.result()
            yield service
        finally:
            running.cancel()
            await asyncio.wait([running])
            if not running.cancelled() and (error := running.exception()) is not None:
                raise error


async def test_a_task_whose_record_is_gone_ends_with_the_reason_and_the_scheduler_goes_on(
    stack: AsyncExitStack, bus_settings: BusSettings
) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    async with leading(bus_settings, "first"):
        await user.send(Out("tasks", "k", shell_task("gone", 2)), Out("tasks", "k", shell_task("kept", 1)))
        accepted = await wait_for(user, "stages", TaskAccepted, 2)
    source = next(one.source for one in accepted if one.task_id == "gone")  # type: ignore[attr-defined]
    await delete_below(user, "tasks", source.partition, source.offset + 1)
    gateway = await stack.enter_async_context(Bus(bus_settings, Service.GATEWAY))
    async with leading(bus_settings, "second"):
        closed = await wait_for(user, "completions", SessionClosed, 2)
        for one in closed:
            outcome = one.outcome  # type: ignore[attr-defined]
            assert outcome.status is Status.ERROR
            assert outcome.failure.kind is FailureKind.INFRA
            assert f"log starts at offset {source.offset + 1}" in outcome.failure.message
        await beat(gateway)
        (assigned,) = await wait_for(user, "assignments", SessionAssigned, 1)
        assert assigned.task_id == "kept"  # type: ignore[attr-defined]
        await user.send(Out("tasks", "k", shell_task("next", 1)))
        await wait_for(user, "stages", TaskAccepted, 3)


async def test_tasks_that_no_leader_has_read_and_that_are_lost_are_named(
    stack: AsyncExitStack, bus_settings: BusSettings
) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    async with leading(bus_settings, "first"):
        await user.send(Out("tasks", "k", shell_task("a")))
        await wait_for(user, "stages", TaskAccepted, 1)
    where = user.partition_of("tasks", "k")
    await user.send(*[Out("tasks", "k", shell_task(name)) for name in ("b", "c", "d")])
    await delete_below(user, "tasks", where, 3)
    with pytest.raises(CursorLost) as caught:
        async with leading(bus_settings, "second"):
            pass
    assert (caught.value.topic, caught.value.partition, caught.value.lost) == ("tasks", where, (1, 2))
    assert "offsets 1 to 2 were never processed" in str(caught.value)
    async with leading(bus_settings, "third", accept_loss=True):
        accepted = await wait_for(user, "stages", TaskAccepted, 2)
        assert {one.task_id for one in accepted} == {"a", "d"}  # type: ignore[attr-defined]


async def test_a_cursor_beyond_the_end_of_tasks_is_named(stack: AsyncExitStack, bus_settings: BusSettings) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    before = await stack.enter_async_context(Bus(bus_settings, Service.SCHEDULER))
    await before.prepare()
    await before.send(Out("leases", "c/tasks/1", Cursor(next=7, replay_from=7, at_ms=before.clock.now_ms())))
    with pytest.raises(CursorLost, match=r"partition 1 of `tasks`.*ends at 0"):
        async with leading(bus_settings, "first"):
            pass
    async with leading(bus_settings, "second", accept_loss=True):
        await user.send(*[Out("tasks", f"k{number}", shell_task(f"t{number}")) for number in range(8)])
        await wait_for(user, "stages", TaskAccepted, 8)


async def test_a_report_from_which_too_large_records_follow_ends_its_session_and_not_the_leader(
    stack: AsyncExitStack, bus_settings: BusSettings
) -> None:
    settings = bus_settings.model_copy(update={"max_record_bytes": 128 * 1024})
    user = await stack.enter_async_context(Bus(settings, Service.USER))
    gateway = await stack.enter_async_context(Bus(settings, Service.GATEWAY))
    registry = CollectorRegistry()
    async with leading(settings, "one", registry=registry):
        await beat(gateway)
        await user.send(Out("tasks", "k", shell_task("t", 2)))
        victim, sibling = await wait_for(user, "assignments", SessionAssigned, 2)

        def ended(one: SessionAssigned, **more: object) -> Out:
            event = StageChanged(
                session_id=one.session_id,
                task_id="t",
                attempt=1,
                stage=Stage.ENDED,
                at_ms=1,
                assignment=one.assignment_id,
                **more,  # type: ignore[arg-type]
            )
            return Out("stages", one.session_id, event)

        # each part fits; the lease has the failure twice, as its last one and as its outcome's
        large = Failure(kind=FailureKind.HARNESS, message="no", detail={"output_tail": "x" * 50_000})
        claim = Claim(sha256="0" * 64, size=1, uri="u")
        files = [Artifact(name="y" * 100, claim=claim) for _ in range(200)]
        await gateway.send(ended(victim, failure=large, artifacts=files))  # type: ignore[arg-type]
        await gateway.send(ended(sibling))  # type: ignore[arg-type]
        closed = {one.session_id: one for one in await wait_for(user, "completions", SessionClosed, 2)}  # type: ignore[attr-defined]
        outcome = closed[victim.session_id].outcome  # type: ignore[attr-defined]
        assert outcome.status is Status.ERROR
        assert outcome.failure.kind is FailureKind.INFRA
        assert "the limit is 131072" in outcome.failure.message
        assert closed[sibling.session_id].outcome.status is Status.COMPLETED  # type: ignore[attr-defined]
        await user.send(Out("tasks", "k", shell_task("next", 1)))
        await wait_for(user, "stages", TaskAccepted, 2)
        assert len(await all_of(user, "completions", SessionClosed)) == 2
    assert registry.get_sample_value("polar_scheduler_terms_ended_total", {"reason": "too_large"}) == 1


async def test_a_task_from_which_too_large_records_follow_is_rejected_and_the_next_is_taken(
    stack: AsyncExitStack, bus_settings: BusSettings
) -> None:
    settings = bus_settings.model_copy(update={"max_record_bytes": 32 * 1024})
    user = await stack.enter_async_context(Bus(settings, Service.USER))
    async with leading(settings, "one"):
        await user.send(Out("tasks", "k", shell_task("many", 2_000)), Out("tasks", "k", shell_task("few", 2)))
        (rejected,) = await wait_for(user, "stages", TaskRejected, 1)
        assert rejected.task_id == "many"  # type: ignore[attr-defined]
        assert "TaskAccepted" in rejected.problems[0].message  # type: ignore[attr-defined]
        (accepted,) = await wait_for(user, "stages", TaskAccepted, 1)
        assert accepted.task_id == "few"  # type: ignore[attr-defined]


async def test_restoring_many_tasks_reads_their_records_in_rows(
    stack: AsyncExitStack, bus_settings: BusSettings
) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    async with leading(bus_settings, "first"):
        await user.send(*[Out("tasks", f"t{number}", shell_task(f"t{number}")) for number in range(2_000)])
        await wait_for(user, "stages", TaskAccepted, 2_000)
    begun = time.monotonic()
    async with leading(bus_settings, "second") as service:
        await asyncio.wait_for(service.leading.wait(), 90)
        print(f"restored 2,000 tasks in {time.monotonic() - begun:.2f} s")
        await user.send(Out("tasks", "last", shell_task("last")))
        await wait_for(user, "stages", TaskAccepted, 2_001)


async def test_a_leader_that_stands_still_starts_anew_and_gives_up_at_last(
    stack: AsyncExitStack, bus_settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    registry, hangs = CollectorRegistry(), [0]
    dead_out: Callable[..., object] = Bus.dead_out

    async def hanging(self: Bus, *given: object) -> object:
        if hangs[0] > 0:
            hangs[0] -= 1
            await asyncio.Event().wait()
        return await dead_out(self, *given)  # type: ignore[misc]

    monkeypatch.setattr(Bus, "dead_out", hanging)
    settings = {"watchdog_s": 1.5, "watchdog_restarts": 2}
    async with leading(bus_settings, "first", registry=registry, **settings):
        hangs[0] = 1
        await user.send(Out("tasks", "k", shell_task("bad", 0)))
        await wait_for(user, "stages", TaskRejected, 1)
    assert registry.get_sample_value("polar_scheduler_terms_ended_total", {"reason": "stood_still"}) == 1

    async def hang_on() -> None:
        ended = asyncio.Event()
        async with leading(bus_settings, "second", ended=ended, **settings):
            hangs[0] = 100
            await user.send(Out("tasks", "k", shell_task("worse", 0)))
            await asyncio.wait_for(ended.wait(), 60)

    with pytest.raises(SchedulerStuck, match="3 times in a row"):
        await hang_on()


async def test_who_may_lead_at_once_and_who_waits_for_silence(stack: AsyncExitStack, bus_settings: BusSettings) -> None:
    bus = await stack.enter_async_context(Bus(bus_settings, Service.SCHEDULER))
    await bus.prepare()

    async def tick(leader: str, age_s: float = 0.0) -> None:
        at_ms = bus.clock.now_ms() - round(age_s * 1000)
        await bus.send(Out("nodes", "tick", Tick(leader_id=leader, number=1, at_ms=at_ms)))

    turns = Turns(bus, SchedulerSettings(leader_silence=2.0), "me")
    assert "no scheduler has led before" in await turns.wait(fenced=False)
    await tick("me/3")
    assert "since this process did" in await turns.wait(fenced=False)
    await tick("other/1", age_s=61)
    assert "61 s old" in await turns.wait(fenced=False)
    await bus.send(Out("nodes", "tick", None))
    assert "resigned" in await turns.wait(fenced=False)
    await tick("other/1")
    assert "no tick for" in await turns.wait(fenced=False)
    await tick("me/3")
    assert "no tick for" in await turns.wait(fenced=True), "who was fenced waits, whoever's the last tick is"

    waiting = asyncio.create_task(turns.wait(fenced=True))
    for _ in range(12):  # six silences
        await tick("other/2")
        await asyncio.sleep(0.5)
    assert not waiting.done(), "ticks that go on keep a standby waiting"
    await bus.send(Out("nodes", "tick", None))
    assert "resigned" in await asyncio.wait_for(waiting, 30)


async def test_the_graded_sessions_of_a_lost_task_need_no_request(
    stack: AsyncExitStack, bus_settings: BusSettings
) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    builder = await stack.enter_async_context(Bus(bus_settings, Service.BUILDER))
    async with leading(bus_settings, "first"):
        await user.send(Out("tasks", "k", shell_task("gone", queue_ttl=0.5)))
        (closed,) = await wait_for(user, "completions", SessionClosed, 1)
    (accepted,) = await all_of(user, "stages", TaskAccepted)
    source = accepted.source  # type: ignore[attr-defined]
    await delete_below(user, "tasks", source.partition, source.offset + 1)
    built = StageChanged(
        session_id=closed.session_id,  # type: ignore[attr-defined]
        task_id="gone",
        attempt=1,
        stage=Stage.BUILT,
        at_ms=1,
        built=RecordRef(topic="built", partition=0, offset=0),
        summary=BuildSummary(captured=1, failed=0, traces=1, trained_tokens=1, prompt_tokens=1),
    )
    async with leading(bus_settings, "second"):
        await builder.send(Out("stages", built.session_id, built))
        (graded,) = await wait_for(user, "graded", SessionGraded, 1)
        assert graded.grade is None  # type: ignore[attr-defined]
        assert "record is lost" in graded.failure.message  # type: ignore[attr-defined]
