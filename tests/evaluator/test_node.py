"""A grader node on a real log, with a real HTTP runtime API: what it takes, does and reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from polar.bus import Bus, BusSettings, Out, Reader
from polar.evaluator import EvaluatorSettings, GraderService
from polar.schemas import (
    BoxAccess,
    EvaluatorSpec,
    Failure,
    FailureKind,
    GradeAssigned,
    GradeRevoked,
    NodeHeartbeat,
    Outcome,
    RecordRef,
    Stage,
    StageChanged,
    Status,
)
from polar.schemas.topics import Service
from tests.evaluator.conftest import KEY, PATIENCE_S, Gateway

NODE = "grader-1"
COMPLETED = Outcome(status=Status.COMPLETED, exit_code=0)
CRASHED = Outcome(status=Status.ERROR, failure=Failure(kind=FailureKind.HARNESS, message="exit 1"), exit_code=1)


class Desk:
    """The scheduler's side: assigns, and reads what the node says."""

    def __init__(self, bus: Bus, stages: Reader, service: GraderService, gateway: Gateway) -> None:
        self.bus = bus
        self.service = service
        self.gateway = gateway
        self._stages = stages
        self.reports: list[StageChanged] = []

    async def beat(self) -> NodeHeartbeat:
        """The node's newest heartbeat."""
        reader = await self.bus.reader(["nodes"])
        try:
            beats = [one.value async for one in reader.to_end() if isinstance(one.value, NodeHeartbeat)]
        finally:
            await reader.close()
        return beats[-1]

    async def assign(self, grade_id: str, evaluator: EvaluatorSpec, **more: Any) -> None:
        fields: dict[str, Any] = {
            "grade_id": grade_id,
            "node": NODE,
            "boot": (await self.beat()).boot_id,
            "session_id": "s",
            "attempt": 1,
            "task_id": "t",
            "evaluator": evaluator,
            "instruction_ref": RecordRef(topic="tasks", partition=0, offset=0),
            "outcome": COMPLETED,
            "built": RecordRef(topic="built", partition=0, offset=0),
            "timeout_s": 30.0,
        }
        await self.bus.send(Out("assignments", NODE, GradeAssigned(**(fields | more))))

    async def check(self, grade_id: str, command: str, **more: Any) -> None:
        """Assigns a `command` grade in the session's box."""
        spec = EvaluatorSpec(strategy="command", config={"command": command}, env=more.pop("env", {}))
        await self.assign(grade_id, spec, **({"box": BoxAccess(url=self.gateway.url, key=KEY)} | more))

    async def graded(self, grade_id: str) -> StageChanged:
        """The GRADED report of a grade."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for one in self.reports:
                    if one.assignment == grade_id and one.stage is Stage.GRADED:
                        return one
                found = await self._stages.poll()
                self.reports += [one.value for one in found if isinstance(one.value, StageChanged)]

    def stages(self, grade_id: str) -> list[Stage]:
        return [one.stage for one in self.reports if one.assignment == grade_id]


@asynccontextmanager
async def grading(settings: BusSettings, bus: Bus, gateway: Gateway, **more: Any) -> AsyncIterator[Desk]:
    async with Bus(settings, Service.GRADER) as own:
        service = GraderService(own, EvaluatorSettings(node_id=NODE, heartbeat_s=0.1, gateway_patience_s=0.5, **more))
        task = asyncio.create_task(service.run())
        try:
            await asyncio.wait_for(service.link.beating.wait(), PATIENCE_S)
            yield Desk(bus, await bus.reader(["stages"]), service, gateway)
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.fixture
async def desk(bus_settings: BusSettings, scheduler: Bus, gateway: Gateway) -> AsyncIterator[Desk]:
    async with grading(bus_settings, scheduler, gateway, slots=2) as found:
        yield found


async def test_the_heartbeat_says_what_it_can_do(desk: Desk) -> None:
    beat = await desk.beat()
    assert (beat.node_id, beat.capacity.grade, beat.capacity.run) == (NODE, 2, 0)
    assert {"session_completed", "command"} <= set(beat.offers.evaluators)


@pytest.mark.parametrize(("outcome", "reward"), [(COMPLETED, 1.0), (CRASHED, 0.0)])
async def test_session_completed_reports_that_it_starts_and_then_the_reward(
    desk: Desk, outcome: Outcome, reward: float
) -> None:
    await desk.assign("g", EvaluatorSpec(), outcome=outcome)
    report = await desk.graded("g")
    assert report.grade is not None
    assert (report.grade.reward, report.node, report.failure) == (reward, NODE, None)
    assert desk.stages("g") == [Stage.EVALUATING, Stage.GRADED]
    assert "grade_ms" in report.timing_ms


async def test_a_command_is_run_in_the_box_and_its_words_are_kept(desk: Desk) -> None:
    await desk.check(
        "g", 'echo "checking $WHAT" >&2; echo \'{"reward": 0.5, "rewards": {"tests": 1}}\'', env={"WHAT": "it"}
    )
    report = await desk.graded("g")
    assert report.grade is not None
    assert (report.grade.reward, report.grade.rewards) == (0.5, {"tests": 1.0})
    assert report.grade.report["stderr"] == "checking it\n"
    assert report.grade.report["exit_code"] == 0


async def test_a_failing_check_is_reward_zero(desk: Desk) -> None:
    await desk.check("g", "echo no; exit 4")
    report = await desk.graded("g")
    assert report.grade is not None
    assert (report.grade.reward, report.grade.report["exit_code"]) == (0.0, 4)


async def test_a_check_out_of_time_is_the_graders_failure_and_no_reward(desk: Desk) -> None:
    await desk.check("g", "sleep 60", timeout_s=0.5)
    report = await desk.graded("g")
    assert report.grade is None
    assert report.failure is not None
    assert (report.failure.kind, report.failure.retryable) == (FailureKind.EVALUATOR, False)
    await desk.gateway.until_running(0)


@pytest.mark.parametrize(
    ("box", "retryable", "message"),
    [
        (BoxAccess(url="http://127.0.0.1:9", key=KEY), True, "cannot be reached"),
        (BoxAccess(url="", key="of another box"), False, "other_box"),
        (None, False, "names none"),
    ],
)
async def test_what_a_try_elsewhere_may_mend_says_so(
    desk: Desk, box: BoxAccess | None, retryable: bool, message: str
) -> None:
    if box is not None and not box.url:
        box = BoxAccess(url=desk.gateway.url, key=box.key)
    await desk.check("g", "true", box=box)
    report = await desk.graded("g")
    assert report.failure is not None
    assert message in report.failure.message
    assert (report.failure.kind, report.failure.retryable) == (FailureKind.EVALUATOR, retryable)


async def test_an_evaluator_that_is_not_allowed_is_named_with_the_setting(desk: Desk) -> None:
    await desk.assign("g", EvaluatorSpec(strategy="os:system"))
    report = await desk.graded("g")
    assert report.failure is not None
    assert "POLAR_EVALUATOR_ALLOW" in report.failure.message


async def test_no_more_at_once_than_there_are_slots_and_all_of_them_held(desk: Desk) -> None:
    names = [f"g{number}" for number in range(5)]
    for name in names:
        await desk.check(name, "sleep 0.3")
    await desk.gateway.until_running(2)
    held = (await desk.beat()).held
    assert {one.stage for one in held} <= {"GRADE"}
    for name in names:
        assert (await desk.graded(name)).grade is not None
    assert desk.gateway.most == 2
    await asyncio.wait_for(desk.service.drain(), PATIENCE_S)
    assert desk.service.link.draining


async def test_a_revoked_grade_stops_its_command_and_reports_nothing_more(desk: Desk) -> None:
    await desk.check("gone", "sleep 600")
    await desk.gateway.until_running(1)
    boot = (await desk.beat()).boot_id
    revoked = GradeRevoked(grade_id="gone", node=NODE, boot=boot, session_id="s", reason="cancelled")
    await desk.bus.send(Out("assignments", NODE, revoked, None))
    await desk.gateway.until_running(0)
    await desk.check("next", "true")
    await desk.graded("next")
    assert desk.stages("gone") == [Stage.EVALUATING]


async def test_what_is_for_another_process_is_left_alone(desk: Desk) -> None:
    await desk.check("old", "true", boot="a former process")
    await desk.check("new", "true")
    await desk.graded("new")
    assert desk.stages("old") == []
