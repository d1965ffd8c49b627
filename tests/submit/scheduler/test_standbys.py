"""Leader and standby as two real submit processes, while one of them is paused, woken and killed.

The node is played here: it beats and takes whatever it is given, so that every decision is one record on the log.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from polar.bus import Bus, BusSettings, Out
from polar.schemas import Capacity, NodeHeartbeat, Offers, SessionAssigned, SessionOpened, TaskAccepted, Tick
from polar.schemas.topics import Service
from tests.bus.support import until
from tests.submit.scheduler.cluster import shell_task

PATIENCE_S = 90.0


class Submit:
    """A submit process of its own state folder and port."""

    def __init__(self, root: Path, name: str, settings: BusSettings, env: dict[str, str]) -> None:
        self.log = root / f"{name}.log"
        self.url = ""
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "polar.cli.main", "serve", "submit"],
                env={
                    **{key: value for key, value in os.environ.items() if not key.startswith("POLAR_")},
                    "POLAR_KAFKA_BOOTSTRAP": settings.bootstrap,
                    "POLAR_KAFKA_TOPIC_PREFIX": settings.topic_prefix,
                    "POLAR_KAFKA_PARTITIONS": str(settings.partitions),
                    "POLAR_KAFKA_TASK_PARTITIONS": str(settings.task_partitions),
                    "POLAR_KAFKA_NODE_PARTITIONS": str(settings.node_partitions),
                    "POLAR_KAFKA_BLOB_URL": settings.blob_url,
                    "POLAR_STATE_DIR": str(root / name),
                    "POLAR_SUBMIT_PORT": "0",
                    "POLAR_LOG_FORMAT": "json",
                    **env,
                },
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                cwd=root,
            )

    def said(self, text: str) -> int:
        return self.log.read_text(errors="replace").count(text)

    async def ready(self) -> None:
        def listening() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            for line in self.log.read_text(errors="replace").splitlines(keepends=True):
                if "the API listens" in line and line.endswith("\n"):
                    self.url = f"http://127.0.0.1:{json.loads(line)['port']}"
            return bool(self.url)

        await until(listening, PATIENCE_S)
        async with aiohttp.ClientSession() as http:

            async def answers() -> bool:
                async with http.get(f"{self.url}/ready") as answer:
                    return answer.status == 200

            await until(answers, PATIENCE_S)

    async def submit(self, task_id: str) -> int:
        body = {
            "task_id": task_id,
            "instruction": "do it",
            "num_samples": 2,
            "agent": {"harness": "shell", "custom_shell": {"command": "true"}},
        }
        async with aiohttp.ClientSession() as http, http.post(f"{self.url}/rollout/task/submit", json=body) as answer:
            return answer.status

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as one:
        yield one


async def every(bus: Bus, topic: str, kind: type) -> list[object]:
    reader = await bus.reader([topic])
    try:
        return [one.value async for one in reader.to_end() if isinstance(one.value, kind)]
    finally:
        await reader.close()


async def leaders(bus: Bus) -> list[str]:
    """Who led, in the log's order, each leadership once (what compaction has left of it)."""
    found: list[str] = []
    for one in await every(bus, "nodes", Tick):
        assert isinstance(one, Tick)
        if not found or found[-1] != one.leader_id:
            found.append(one.leader_id)
    return found


async def ticks_of(bus: Bus, leader: str) -> int:
    return max((one.number for one in await every(bus, "nodes", Tick) if one.leader_id == leader), default=0)  # type: ignore[attr-defined]


@asynccontextmanager
async def beating(settings: BusSettings) -> AsyncIterator[None]:
    """A node with room for everything, which never says what it does."""
    async with Bus(settings, Service.GATEWAY) as bus:

        async def beat() -> None:
            number = 0
            while True:
                number += 1
                heartbeat = NodeHeartbeat(
                    node_id="node",
                    boot_id="boot",
                    capacity=Capacity(init=100_000, ready=100_000, run=100_000),
                    offers=Offers(backends=["local"], harnesses=["shell"]),
                    read_to=0,
                    beat=number,
                    at_ms=0,
                )
                await bus.send(Out("nodes", "node", heartbeat))
                await asyncio.sleep(0.5)

        task = asyncio.create_task(beat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


def assert_nothing_doubled(accepted: list[object], opened: list[object], assigned: list[object]) -> None:
    tasks = Counter(one.task_id for one in accepted)  # type: ignore[attr-defined]
    assert set(tasks.values()) == {1}, "a task was accepted twice"
    sessions = {session for one in accepted for session in one.sessions}  # type: ignore[attr-defined]
    for found in (opened, assigned):
        counts = Counter(one.session_id for one in found)  # type: ignore[attr-defined]
        assert set(counts.values()) == {1}, "a session was decided twice"
        assert set(counts) == sessions


@pytest.mark.timeout(300)
@pytest.mark.parametrize("delivery_s", ["45", "2"], ids=["fenced by the log", "its own time-outs come first"])
async def test_a_paused_leader_is_succeeded_and_wakes_as_a_standby_that_has_written_nothing(
    stack: AsyncExitStack,
    bus_settings: BusSettings,
    tmp_path: Path,
    delivery_s: str,
    record_property: pytest.RecordProperty,
) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    await user.prepare()
    await stack.enter_async_context(beating(bus_settings))
    env = {"POLAR_KAFKA_DELIVERY_TIMEOUT_S": delivery_s}
    first = Submit(tmp_path, "first", bus_settings, env)
    stack.callback(first.end)
    await first.ready()
    await until(lambda: first.said('"leading"') == 1, PATIENCE_S)
    second = Submit(tmp_path, "second", bus_settings, env)
    stack.callback(second.end)
    await second.ready()
    await until(lambda: second.said("standing by") == 1, PATIENCE_S)
    (leader,) = await leaders(user)
    before = await ticks_of(user, leader)

    async def ticks_on(who: str, least: int) -> bool:
        return await ticks_of(user, who) >= least

    await until(lambda: ticks_on(leader, before + 3), PATIENCE_S)
    assert await leaders(user) == [leader], "a standby that joins changes nothing"
    assert await second.submit("by-the-standby") == 200, "the API of a standby answers, by the leader's word"

    sent = 0

    async def send_on() -> None:
        nonlocal sent
        while True:
            await user.send(Out("tasks", f"t{sent}", shell_task(f"t{sent}", 2)))
            sent += 1
            await asyncio.sleep(0.02)

    sending = asyncio.create_task(send_on())
    stack.callback(sending.cancel)

    async def accepted_more(than: int) -> bool:
        return len(await every(user, "stages", TaskAccepted)) > than

    await until(lambda: accepted_more(20), PATIENCE_S)
    first.signal(signal.SIGSTOP)
    paused_at = time.monotonic()
    await until(lambda: second.said("taking the lead") == 1, PATIENCE_S)
    took_s = time.monotonic() - paused_at
    await until(lambda: second.said('"leading"') == 1, PATIENCE_S)
    record_property("take_over_s", f"{took_s:.1f} to the decision, {time.monotonic() - paused_at:.1f} to leading")
    print(f"take-over {took_s:.1f} s after SIGSTOP, leading after {time.monotonic() - paused_at:.1f} s")
    done = len(await every(user, "stages", TaskAccepted))
    await until(lambda: accepted_more(done + 20), PATIENCE_S)
    first.signal(signal.SIGCONT)
    await until(lambda: first.said("standing by") >= 1, PATIENCE_S)
    (_, successor) = await leaders(user)
    before = await ticks_of(user, successor)
    await until(lambda: ticks_on(successor, before + 5), PATIENCE_S)
    sending.cancel()
    await asyncio.wait([sending])
    assert await first.submit("by-the-one-that-woke") == 200

    async def all_accepted() -> bool:
        return len(await every(user, "stages", TaskAccepted)) >= sent + 2

    async def all_assigned() -> bool:
        return len(await every(user, "assignments", SessionAssigned)) >= 2 * (sent + 2)

    await until(all_accepted, PATIENCE_S)
    await until(all_assigned, PATIENCE_S)
    assert (await leaders(user))[-1] == successor
    assert len(await leaders(user)) == 2, "the one that woke has written nothing, and has not taken the lead back"
    assert_nothing_doubled(
        await every(user, "stages", TaskAccepted),
        await every(user, "completions", SessionOpened),
        await every(user, "assignments", SessionAssigned),
    )

    # and back: the one that woke is as good a standby as any
    second.signal(signal.SIGKILL)
    killed_at = time.monotonic()
    await until(lambda: first.said("taking the lead") == 2, PATIENCE_S)
    print(f"take-over {time.monotonic() - killed_at:.1f} s after SIGKILL")
    assert await first.submit("after-the-kill") == 200
    assert first.process.poll() is None


@pytest.mark.timeout(180)
async def test_a_leader_that_is_stopped_in_order_hands_over_without_the_silence(
    stack: AsyncExitStack, bus_settings: BusSettings, tmp_path: Path
) -> None:
    user = await stack.enter_async_context(Bus(bus_settings, Service.USER))
    await user.prepare()
    env = {"POLAR_SCHEDULER_LEADER_SILENCE": "40"}
    first = Submit(tmp_path, "first", bus_settings, env)
    stack.callback(first.end)
    await first.ready()
    await until(lambda: first.said('"leading"') == 1, PATIENCE_S)
    first.signal(signal.SIGTERM)
    assert await asyncio.to_thread(first.process.wait, 60) == 0, first.log.read_text()
    second = Submit(tmp_path, "second", bus_settings, env)
    stack.callback(second.end)
    await second.ready()
    await until(lambda: second.said("the last one resigned") == 1, PATIENCE_S)
    assert await second.submit("t") == 200
    assert second.said("standing by") == 0
