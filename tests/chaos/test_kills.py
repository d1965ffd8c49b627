"""SIGKILL anything in the middle of 50 sessions and start it again: 50 outcomes, 50 trajectories, none twice."""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import signal
import subprocess
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.client import PolarClient
from polar.devmodel import Reply, Script, ScriptedEngine
from polar.schemas import (
    AgentSpec,
    CustomShell,
    EvaluatorSpec,
    GroupClosed,
    PrepareAction,
    RuntimeSpec,
    SessionClosed,
    SessionFinal,
    SessionGraded,
    SessionOpened,
    TaskRequest,
    Trajectory,
)
from tests.e2e.stack import Stack, shell_agent

pytestmark = [pytest.mark.chaos, pytest.mark.sandbox, pytest.mark.timeout(600)]

SESSIONS = 50
SERVICES = ("submit", "gateway", "proxy", "builder", "evaluator")


@pytest.fixture
async def slow_engine() -> AsyncIterator[ScriptedEngine]:
    """Each call takes long enough that a kill finds some in flight."""
    script = Script(default=Reply(texts=("Yes.", "No.", "It depends on the question."), delay=0.3))
    async with ScriptedEngine(script) as one:
        yield one


def fifty(tmp_path: Path) -> TaskRequest:
    script = tmp_path / "agent.py"
    shell_agent(script, turns=5)
    return TaskRequest(
        task_id=f"fifty-{uuid.uuid4().hex[:8]}",
        instruction="do it",
        num_samples=SESSIONS,
        timeout_seconds=120.0,
        max_attempts=10,
        agent=AgentSpec(harness="shell", custom_shell=CustomShell(command="python3 agent.py")),
        runtime=RuntimeSpec(
            prepare=[
                PrepareAction(
                    type="upload_file", target="/polar/session/workspace/agent.py", content=script.read_text()
                )
            ]
        ),
        evaluator=EvaluatorSpec(strategy="command", config={"command": "test -s answer.txt"}),
    )


async def more_calls(engine: ScriptedEngine, stack: Stack, finished: int) -> None:
    try:
        await engine.until(lambda stats: stats.finished >= finished, timeout=90)
    except TimeoutError:
        raise AssertionError(f"stuck: {engine.stats}, not {finished} finished\n{stack.tails()}") from None


async def all_ended(client: PolarClient, task_id: str, stack: Stack, timeout_s: float = 300) -> list[Trajectory]:
    found: list[Trajectory] = []
    try:
        async with asyncio.timeout(timeout_s):
            async for event in client.trajectories(task_ids={task_id}):
                if isinstance(event, GroupClosed):
                    return found
                found.append(event)
    except TimeoutError:
        raise AssertionError(f"{len(found)} of {SESSIONS} after {timeout_s:g} s\n{stack.tails()}") from None
    raise AssertionError("the log ended")


async def check_log(client: PolarClient, sessions: set[str], trajectories: list[Trajectory]) -> None:
    """Once each, on every topic."""
    assert Counter(one.session_id for one in trajectories) == Counter(sessions)
    counts: dict[type, Counter[str]] = {}
    for topic in ("completions", "graded", "built", "trajectories"):
        reader = await client.bus.reader([topic])
        async for record in reader.to_end():
            kind = type(record.value)
            if kind in (SessionOpened, SessionClosed, SessionFinal, SessionGraded):
                counts.setdefault(kind, Counter())[record.value.session_id] += 1
            if kind is Trajectory:
                counts.setdefault(kind, Counter())[f"{topic} {record.value.session_id}"] += 1
        await reader.close()
    for kind in (SessionOpened, SessionClosed, SessionGraded):
        assert counts[kind] == Counter(sessions), f"{kind.__name__}: {counts[kind].most_common(3)}"
    assert set(counts[Trajectory].values()) == {1}
    assert len(counts[Trajectory]) == 2 * len(sessions)
    for one in trajectories:
        turns = [turn for trace in one.traces for turn in trace.turns]
        assert len(turns) + sum(aside.reason not in ("fenced",) for aside in one.set_aside) >= one.captured


async def test_every_process_killed_in_the_middle(tmp_path: Path, bootstrap: str, slow_engine: ScriptedEngine) -> None:
    stack = Stack(tmp_path / "stack", bootstrap, slow_engine.base_url, prefix=f"chaos-{uuid.uuid4().hex[:8]}.")
    try:
        for name in SERVICES:
            stack.start(name)
        await asyncio.to_thread(stack.wait_ready)
        async with PolarClient(stack.bus_settings()) as client:
            accepted = await client.submit(fifty(tmp_path))
            chooser = random.Random(20261121)
            order = list(SERVICES) * 2
            chooser.shuffle(order)
            done = 0
            for name in order:
                # so many more calls from kill to kill, so that each falls into the work
                done = slow_engine.stats.finished + chooser.randint(2, 6)
                await more_calls(slow_engine, stack, done)
                stack.kill(name, signal.SIGKILL)
                stack.start(name)
            trajectories = await all_ended(client, accepted.task_id, stack)
            await check_log(client, set(accepted.sessions), trajectories)
    finally:
        await asyncio.to_thread(stack.stop)


def signal_kafka(folder: Path, number: signal.Signals) -> None:
    os.kill(int((folder / "pid").read_text()), number)


@pytest.mark.kafka
async def test_the_broker_killed_in_the_middle(tmp_path: Path, slow_engine: ScriptedEngine) -> None:
    folder, start = os.environ.get("POLAR_TEST_KAFKA_DIR"), os.environ.get("POLAR_TEST_KAFKA_START")
    if not folder or not start:
        pytest.skip("needs an Apache Kafka that may be killed (POLAR_TEST_KAFKA_DIR, POLAR_TEST_KAFKA_START)")

    def start_kafka() -> str:
        printed = subprocess.run(shlex.split(start), check=True, capture_output=True, text=True, timeout=120).stdout
        return printed.strip().rpartition("KAFKA_BOOTSTRAP=")[2]

    bootstrap = await asyncio.to_thread(start_kafka)
    stack = Stack(tmp_path / "stack", bootstrap, slow_engine.base_url, prefix=f"chaos-{uuid.uuid4().hex[:8]}.")
    try:
        for name in SERVICES:
            stack.start(name)
        await asyncio.to_thread(stack.wait_ready)
        async with PolarClient(stack.bus_settings()) as client:
            accepted = await client.submit(fifty(tmp_path))
            await more_calls(slow_engine, stack, 20)
            await asyncio.to_thread(signal_kafka, Path(folder), signal.SIGKILL)
            await asyncio.to_thread(start_kafka)
            trajectories = await all_ended(client, accepted.task_id, stack)
            await check_log(client, set(accepted.sessions), trajectories)
    finally:
        await asyncio.to_thread(stack.stop)
        await asyncio.to_thread(signal_kafka, Path(folder), signal.SIGTERM)
