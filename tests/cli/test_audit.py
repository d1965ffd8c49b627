"""`polar audit` as a process: what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from msgspec.structs import replace
from typer.testing import CliRunner

from polar.bus import Bus, BusSettings, Out
from polar.cli.main import app
from polar.schemas import DeadLetter, RecordRef, Trajectory, encode, headers
from polar.schemas.topics import Service
from tests.audit.model import CallPlan, LogModel, SessionPlan, TaskPlan
from tests.bus.support import delete_below
from tests.cli.conftest import Polar

PLANS = [
    TaskPlan(sessions=(SessionPlan(attempts=((CallPlan(), CallPlan(ending="failed")),)), SessionPlan())),
    TaskPlan(sessions=(SessionPlan(until="running"),)),
]


@pytest.fixture
async def bus(bus_settings: BusSettings) -> AsyncIterator[Bus]:
    async with Bus(bus_settings, Service.FINISHER) as one:
        await one.prepare()
        yield one


@pytest.fixture
def polar(bus_settings: BusSettings, tmp_path: Path) -> Polar:
    return Polar(bus_settings, tmp_path)


async def written(bus: Bus, plans: list[TaskPlan] = PLANS) -> LogModel:
    """A right log, on the test's broker."""
    now = bus.clock.now_ms() - 60_000
    model = LogModel(plans, 1, where=bus.partition_of, gaps=False, start_ms=now).run()
    producer = AIOKafkaProducer(bootstrap_servers=bus.settings.bootstrap, enable_idempotence=True)
    await producer.start()
    try:
        for one in model.records:
            await producer.send_and_wait(
                bus.settings.full(one.topic),
                None if one.value is None else encode(one.value),
                one.key.encode(),
                one.partition,
                one.at_ms,
                [] if one.value is None else headers(one.value, source=one.source),
            )
    finally:
        await producer.stop()
    return model


async def test_a_clean_log_ends_with_0_and_says_what_was_proven(bus: Bus, polar: Polar) -> None:
    model = await written(bus)
    done = await run(polar, "audit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(model.records)} records" in done.stdout
    assert "sessions: 3 accepted = 2 finished + 1 in flight" in done.stdout
    assert "calls: 4 = 2 in traces + 1 failed + 1 of sessions in flight" in done.stdout
    assert "clean" in done.stdout
    assert done.stderr == "", "no bar where standard error is no terminal"


async def test_offences_end_with_1_and_are_named(bus: Bus, polar: Polar) -> None:
    model = await written(bus)
    published = [one for one in model.records if isinstance(one.value, Trajectory) and one.topic == "trajectories"]
    for one in published:
        assert isinstance(one.value, Trajectory)
        await bus.send(Out("trajectories", one.key, replace(one.value, reward=9.0), source=one.source))
    done = await run(polar, "audit", "--limit", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 offences: 2 published_twice" in done.stdout
    assert "… and 1 more" in done.stdout
    done = await run(polar, "audit", "--json", "--task", "task-0", "--no-tokens")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert {one["kind"] for one in report["offences"]} == {"published_twice"}
    assert {one["session_id"] for one in report["offences"]} == {
        one.value.session_id for one in published if isinstance(one.value, Trajectory)
    }
    other = next(life for life in model.lives if life.published is None)
    done = await run(polar, "audit", "--session", other.session, "--since", "1h")
    assert done.returncode == 0, done.stdout
    assert "1 accepted" in done.stdout


async def test_a_dead_letter_is_listed_and_the_session_it_holds_is_an_offence(bus: Bus, polar: Polar) -> None:
    model = await written(bus)
    life = next(one for one in model.lives if one.published is None)
    letter = DeadLetter(
        origin=RecordRef(topic="completions", partition=0, offset=1),
        service="builder",
        error="cannot digest",
        key=life.session.encode(),
        at_ms=0,
    )
    async with Bus(bus.settings, Service.BUILDER) as builder:
        await builder.send(Out("dead", "completions/0/1", letter))
    done = await run(polar, "audit")
    assert done.returncode == 1
    assert "1 dead letter" in done.stdout
    assert "left_open" in done.stdout
    assert life.session in done.stdout


async def test_what_retention_took_is_told_and_no_offence(bus: Bus, polar: Polar) -> None:
    await written(bus)
    for topic in ("stages", "built", "graded", "tasks"):
        for partition in range(bus.partitions(topic)):
            await delete_below(bus, topic, partition, -1)
    done = await run(polar, "audit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "built: 2 offsets before what was read" in done.stdout


@pytest.mark.parametrize("options", [["--since", "yesterday"], ["--nonsense"], ["--limit", "-1"]])
def test_wrong_options_end_with_2(environment: None, options: list[str]) -> None:
    assert CliRunner().invoke(app, ["audit", *options]).exit_code == 2


async def test_a_log_that_cannot_be_read_ends_with_3(polar: Polar) -> None:
    missing = await run(polar, "audit")
    assert missing.returncode == 3
    assert "cannot be read" in missing.stderr
    away = await run(polar, "audit", POLAR_KAFKA_BOOTSTRAP="127.0.0.1:1", POLAR_KAFKA_CONNECT_TIMEOUT_S="1")
    assert away.returncode == 3
    assert "cannot reach Kafka" in away.stderr


async def run(polar: Polar, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(polar, *arguments, **more)
