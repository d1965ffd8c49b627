"""The finisher on a real log: one published trajectory per grade, whatever is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from polar.bus import Bus, BusSettings, Out, PartitionWorker, Record
from polar.evaluator import EvaluatorSettings, FinisherService
from polar.evaluator.finisher import FinishProcessor
from polar.evaluator.metrics import FinisherMetrics
from polar.schemas import (
    Artifact,
    BuilderSpec,
    Claim,
    EvaluatorSpec,
    Failure,
    FailureKind,
    Grade,
    Label,
    Logprobs,
    Outcome,
    Pool,
    RecordRef,
    RewardRevised,
    SessionGraded,
    SessionResult,
    Span,
    Stage,
    StageChanged,
    Status,
    TokenIds,
    Trace,
    Trajectory,
    Turn,
)
from polar.schemas.topics import Service
from tests.evaluator.conftest import PATIENCE_S

SCRIPT = Path(__file__).parent / "run_finisher.py"
COMPLETED = Outcome(status=Status.COMPLETED, exit_code=0)


@pytest.fixture
async def builder(bus_settings: BusSettings) -> AsyncIterator[Bus]:
    async with Bus(bus_settings, Service.BUILDER) as bus:
        await bus.prepare()
        yield bus


@asynccontextmanager
async def finishing(settings: BusSettings) -> AsyncIterator[None]:
    async with Bus(settings, Service.FINISHER) as bus:
        task = asyncio.create_task(FinisherService(bus, EvaluatorSettings()).run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


def trajectory(session: str, *, tokens: int = 10, **more: Any) -> Trajectory:
    def trace(name: str, label: Label) -> Trace:
        turn = Turn(completion_id=f"{session}-{name}", start=4, end=tokens, finish="stop")
        return Trace(
            trace_id=f"{session}-{name}",
            segments=[Span(start=0, end=tokens)],
            prompt_length=4,
            turns=[turn],
            label=label,
            trainable=label is Label.MAIN,
        )

    place = RecordRef(topic="completions", partition=0, offset=1)
    fields: dict[str, Any] = {
        "trajectory_id": f"trajectory-{session}",
        "session_id": session,
        "attempt": 1,
        "task_id": "t",
        "group_id": "g",
        "sample": 2,
        "num_samples": 4,
        "status": Status.COMPLETED,
        "outcome": COMPLETED,
        "pool": Pool(
            tokens=TokenIds(np.arange(tokens)), logprobs=Logprobs(np.linspace(-1, 0, tokens, dtype=np.float32))
        ),
        "traces": [trace("main", Label.MAIN), trace("side", Label.SIDE)],
        "closing": place,
        "opening": place,
        "captured": 2,
        "builder": BuilderSpec(),
        "builder_version": "1.1",
        "evaluator": EvaluatorSpec(),
        "timing_ms": {"model_ms": 5.0},
        "metadata": {"rollout_step": 3},
    }
    return Trajectory(**(fields | more))


def grade(session: str, built: RecordRef, **more: Any) -> SessionGraded:
    fields: dict[str, Any] = {
        "session_id": session,
        "attempt": 1,
        "task_id": "t",
        "group_id": "g",
        "outcome": COMPLETED,
        "built": built,
        "grade": Grade(reward=0.5, rewards={"tests": 1.0}, report={"said": "well"}),
        "evaluator": EvaluatorSpec(strategy="command", config={"command": "true"}),
        "artifacts": [Artifact(name="a.patch", claim=Claim(sha256="0" * 64, size=3, uri="00/0"))],
        "timing_ms": {"run_ms": 7.0},
        "node": "node-1",
        "at_ms": 1,
    }
    return SessionGraded(**(fields | more))


async def committed(bus: Bus, topic: str) -> list[Record]:
    reader = await bus.reader([topic])
    try:
        return [record async for record in reader.to_end()]
    finally:
        await reader.close()


async def until(bus: Bus, topic: str, count: int) -> list[Record]:
    """All records of `topic`, once there are `count`."""
    async with asyncio.timeout(PATIENCE_S):
        while len(found := await committed(bus, topic)) < count:  # noqa: ASYNC110 - it happens at the broker
            await asyncio.sleep(0.1)
    return found


async def test_a_grade_publishes_trajectory_result_and_stage_together(
    bus_settings: BusSettings, scheduler: Bus, builder: Bus
) -> None:
    (built,) = await builder.send(Out("built", "s", trajectory("s")))
    (graded,) = await scheduler.send(Out("graded", "s", grade("s", built)))
    async with finishing(bus_settings):
        (record,) = await until(scheduler, "trajectories", 1)
        (stage,) = await until(scheduler, "stages", 1)
        (result,) = await until(scheduler, "results", 1)
    found = record.value
    assert isinstance(found, Trajectory)
    assert record.partition == scheduler.partition_of("trajectories", "g")
    assert record.headers["source"] == f"graded/{graded.partition}/{graded.offset}".encode()
    assert (found.reward, found.rewards, found.report) == (0.5, {"tests": 1.0}, {"said": "well"})
    assert [(one.label, one.reward) for one in found.traces] == [(Label.MAIN, 0.5), (Label.SIDE, None)]
    assert found.timing_ms == {"model_ms": 5.0, "run_ms": 7.0}
    assert [one.name for one in found.artifacts] == ["a.patch"]
    assert found.evaluator.strategy == "command"
    assert found.pool == trajectory("s").pool
    assert isinstance(stage.value, StageChanged)
    assert (stage.value.stage, stage.value.published, stage.value.outcome) == (Stage.FINISHED, record.ref, COMPLETED)
    assert isinstance(result.value, SessionResult)
    assert result.key == "s/s"
    assert (result.value.trajectory, result.value.reward, result.value.node_id) == (record.ref, 0.5, "node-1")
    assert result.value.summary is not None
    assert (result.value.summary.traces, result.value.summary.trained_tokens) == (2, 6)


async def test_a_session_without_a_grade_is_published_with_its_outcome(
    bus_settings: BusSettings, scheduler: Bus, builder: Bus
) -> None:
    failure = Failure(kind=FailureKind.NO_COMPLETIONS, message="no call")
    outcome = Outcome(status=Status.ERROR, failure=failure)
    (built,) = await builder.send(Out("built", "s", trajectory("s", traces=[], pool=Pool())))
    await scheduler.send(Out("graded", "s", grade("s", built, grade=None, failure=failure, outcome=outcome)))
    async with finishing(bus_settings):
        (record,) = await until(scheduler, "trajectories", 1)
        (result,) = await until(scheduler, "results", 1)
    assert isinstance(record.value, Trajectory)
    assert (record.value.reward, record.value.status, record.value.outcome) == (None, Status.ERROR, outcome)
    assert record.value.grade_failure == failure
    assert isinstance(result.value, SessionResult)
    assert result.value.error == failure


async def test_a_later_grade_is_a_revised_reward_and_looks_nothing_up(
    bus_settings: BusSettings, scheduler: Bus
) -> None:
    gone = RecordRef(topic="built", partition=0, offset=12345)
    revised = grade("s", gone, revision=2, run="again", grade=Grade(reward=0.75, trace_rewards={"x": 1.0}))
    await scheduler.send(Out("graded", "s", revised))
    async with finishing(bus_settings):
        (record,) = await until(scheduler, "rewards", 1)
    found = record.value
    assert isinstance(found, RewardRevised)
    assert (found.reward, found.revision, found.run, found.trace_rewards) == (0.75, 2, "again", {"x": 1.0})
    assert found.revision_id
    assert await committed(scheduler, "trajectories") == []


async def test_what_is_too_large_with_its_report_is_an_error_without_traces(
    bus_settings: BusSettings, scheduler: Bus
) -> None:
    tight = bus_settings.model_copy(update={"max_record_bytes": 12_000})
    # the broker's topics take more: only the finisher is tight, so that what it adds is what breaks the limit
    async with Bus(bus_settings, Service.BUILDER) as builder:
        await builder.prepare()
        (built,) = await builder.send(Out("built", "s", trajectory("s", tokens=1300)))
    await scheduler.send(Out("graded", "s", grade("s", built, grade=Grade(reward=1.0, report={"log": "x" * 1000}))))
    async with Bus(tight, Service.FINISHER) as bus:
        task = asyncio.create_task(_without_check(bus))
        try:
            (record,) = await until(scheduler, "trajectories", 1)
        finally:
            task.cancel()
            await asyncio.wait([task])
    found = record.value
    assert isinstance(found, Trajectory)
    assert (found.status, found.traces, found.reward) == (Status.ERROR, [], 1.0)
    assert found.error is not None
    assert "MAX_RECORD_BYTES" in found.error.message
    assert {one.completion_id for one in found.set_aside} == {"s-main", "s-side"}


async def _without_check(bus: Bus) -> None:
    metrics = FinisherMetrics(CollectorRegistry())
    await PartitionWorker(bus, "graded", "finisher", lambda _: FinishProcessor(bus, metrics)).run()


async def test_a_grade_whose_build_is_gone_still_ends_in_one_trajectory(
    bus_settings: BusSettings, scheduler: Bus, builder: Bus
) -> None:
    (other,) = await builder.send(Out("built", "other", trajectory("other")))
    await scheduler.send(Out("graded", "s", grade("s", other)))
    async with finishing(bus_settings):
        (record,) = await until(scheduler, "trajectories", 1)
    assert isinstance(record.value, Trajectory)
    assert (record.value.session_id, record.value.status, record.value.traces) == ("s", Status.ERROR, [])


async def test_kills_at_any_moment_leave_one_of_each_per_session(bus_settings: BusSettings) -> None:
    settings = bus_settings.model_copy(update={"transaction_timeout_ms": 5_000})
    env = {
        **os.environ,
        "POLAR_KAFKA_BOOTSTRAP": settings.bootstrap,
        "POLAR_KAFKA_TOPIC_PREFIX": settings.topic_prefix,
        "POLAR_KAFKA_PARTITIONS": str(settings.partitions),
        "POLAR_KAFKA_TASK_PARTITIONS": str(settings.task_partitions),
        "POLAR_KAFKA_NODE_PARTITIONS": str(settings.node_partitions),
        "POLAR_KAFKA_BLOB_URL": settings.blob_url,
        "POLAR_EVALUATOR_MAX_BATCH": "3",
    }

    async def start() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(sys.executable, str(SCRIPT), env=env)

    names = [f"s-{number}" for number in range(60)]
    async with Bus(settings, Service.BUILDER) as builder, Bus(settings, Service.SCHEDULER) as scheduler:
        await builder.prepare()
        refs = await builder.send(*(Out("built", name, trajectory(name)) for name in names))
        process = await start()
        try:
            for share in range(3):
                part = list(zip(names, refs, strict=True))[share * 20 : (share + 1) * 20]
                await scheduler.send(*(Out("graded", name, grade(name, ref)) for name, ref in part))
                await until(scheduler, "trajectories", share * 20 + 5)
                process.send_signal(signal.SIGKILL)
                await process.wait()
                process = await start()
            found = await until(scheduler, "trajectories", len(names))
        finally:
            process.kill()
            await process.wait()
        results = await committed(scheduler, "results")
        stages = await committed(scheduler, "stages")
    once = Counter(names)
    assert Counter(one.value.session_id for one in found if isinstance(one.value, Trajectory)) == once
    assert Counter(one.value.session_id for one in results if isinstance(one.value, SessionResult)) == once
    assert Counter(one.value.session_id for one in stages if isinstance(one.value, StageChanged)) == once
