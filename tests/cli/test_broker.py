"""Commands as processes against a real broker, on which a test plays the services."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from typing import Any

import aiohttp
import pytest

from polar.bus import Bus, BusSettings, Out
from polar.schemas import (
    Capacity,
    GroupState,
    Held,
    Lease,
    NodeHeartbeat,
    Offers,
    Phase,
    RecordRef,
    SessionResult,
    TaskCounts,
    TaskState,
    Tick,
)
from polar.schemas.topics import Service
from tests.cli.conftest import Polar
from tests.cli.records import failed, group, trace, trajectory
from tests.e2e.stack import Stack, free_port, wait_until


def now_ms() -> int:
    return round(time.time() * 1000)


async def call(polar: Polar, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(polar, *arguments, **more)


def state(task_id: str = "t", **counts: Any) -> TaskState:
    return TaskState(
        task_id=task_id,
        body_sha256="0" * 64,
        source=RecordRef(topic="tasks", partition=0, offset=0),
        group_id=task_id,
        counts=TaskCounts(**{"accepted": 2, **counts}),
        accepted_at_ms=now_ms() - 90_000,
    )


def lease(session: str, sample: int, phase: Phase, **more: Any) -> Lease:
    return Lease(
        session_id=session,
        task_id="t",
        group_id="t",
        sample=sample,
        phase=phase,
        queued_at_ms=now_ms() - 5_000,
        **more,
    )


@pytest.fixture
async def topics(bus_settings: BusSettings) -> BusSettings:
    async with Bus(bus_settings, Service.USER) as bus:
        await bus.prepare()
    return bus_settings


@pytest.fixture
async def finished(topics: BusSettings) -> BusSettings:
    """A group of two, of which one failed, with its results on the log."""
    ones = [
        trajectory([1, 2, 3], [trace(1, [(1, 3)], 3)], session_id="s0", reward=1.0),
        trajectory(session_id="s1", sample=1, outcome=failed(output_tail="last words")),
    ]
    async with Bus(topics, Service.FINISHER) as bus:
        for one in ones:
            (ref,) = await bus.send(Out("trajectories", "t", one))
            result = SessionResult(
                session_id=one.session_id,
                task_id="t",
                group_id="t",
                sample=one.sample,
                attempt=1,
                status=one.status,
                outcome=one.outcome,
                reward=one.reward,
                trajectory=ref,
                at_ms=now_ms(),
            )
            await bus.send(Out("results", f"s/{one.session_id}", result))
    async with Bus(topics, Service.SCHEDULER) as bus:
        await bus.send(
            Out("trajectories", "t", group({"s0": 1.0, "s1": None}, ["s0"])),
            Out("leases", "t/t", state(finished=2, completed=1, error=1, rewarded=1, reward_sum=1.0)),
            Out("leases", "g/t", GroupState(group_id="t", size=2, tasks=["t"], opened_at_ms=1, decided_at_ms=2)),
        )
    return topics


def test_without_topics_it_says_what_makes_them(polar: Polar) -> None:
    ended = polar("status")
    assert ended.returncode == 1
    assert "topics are missing" in ended.stderr
    assert "polar topics --create" in ended.stderr
    assert polar("topics").returncode == 1
    made = polar("topics", "--create")
    assert made.returncode == 0, made.stderr
    assert "as they should be" in made.stdout
    assert polar("status").returncode == 0


async def test_other_partition_counts_are_refused_before_records_are_missed(topics: BusSettings, polar: Polar) -> None:
    ended = await call(polar, "trajectories", POLAR_KAFKA_PARTITIONS="1")
    assert ended.returncode == 1
    assert "partitions is 2, wanted 1" in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_status_of_an_empty_installation_says_what_is_missing(topics: BusSettings, polar: Polar) -> None:
    ended = await call(polar, "status")
    assert ended.returncode == 0, ended.stderr
    for said in ("no tasks yet", "no scheduler is alive", "no node is alive"):
        assert said in ended.stdout


async def test_status_shows_tasks_sessions_groups_and_nodes_in_80_columns(topics: BusSettings, polar: Polar) -> None:
    sessions = [f"{n:08}-0000-0000-0000-000000000000" for n in range(2)]
    failure = failed(message="the node is gone").failure
    held = [Held(assignment_id="a", session_id=sessions[0], attempt=1, stage="RUNNING")]
    soon = now_ms() + 120_000  # still fresh when a slow machine has come to the last command
    async with Bus(topics, Service.SCHEDULER) as bus:
        await bus.send(
            Out("leases", "t/t", state()),
            Out("leases", "t/gone", state("gone")),
            Out("leases", "g/t", GroupState(group_id="t", size=2, tasks=["t"], opened_at_ms=1)),
            Out("leases", sessions[0], lease(sessions[0], 0, Phase.RUNNING, node="n")),
            Out("leases", sessions[1], lease(sessions[1], 1, Phase.QUEUED, attempt=2, failure=failure)),
            Out("leases", "other", lease("other", 2, Phase.QUEUED)),
            Out("leases", "t/gone", None),
            Out("leases", "other", None),
            Out("nodes", "tick", Tick(leader_id="l", number=1, at_ms=soon)),
        )
    async with Bus(topics, Service.GATEWAY) as bus:
        for node, at_ms in (("n", soon), ("dead", now_ms() - 60_000)):
            beat = NodeHeartbeat(
                node_id=node,
                boot_id="b",
                capacity=Capacity(init=4, ready=2, run=8),
                held=held,
                offers=Offers(backends=["local"], harnesses=["shell"]),
                beat=1,
                at_ms=at_ms,
            )
            await bus.send(Out("nodes", node, beat))
    ended = await call(polar, "status", COLUMNS="80")
    assert ended.returncode == 0, ended.stderr
    assert "gone" not in ended.stdout
    assert "1 queued, 1 running" in ended.stdout
    assert "1/8" in ended.stdout
    assert "dead" not in ended.stdout
    one = await call(polar, "status", "t", COLUMNS="80")
    for said in (*sessions, "on n", "harness: the", "group t: 0 of 2 have ended, open"):
        assert said in one.stdout
    assert max(map(len, (ended.stdout + one.stdout).splitlines())) <= 80
    found = json.loads((await call(polar, "status", "t", "--json")).stdout)
    assert {one["session_id"] for one in found["sessions"]} == set(sessions)
    assert found["leader"]["leader_id"] == "l"


async def test_trajectories_come_as_lines_as_json_and_in_upstreams_shape(finished: BusSettings, polar: Polar) -> None:
    lines = (await call(polar, "trajectories")).stdout.splitlines()
    assert lines == [
        "s0  completed  reward 1    1 calls, 1 traces, 2 tokens",
        "s1  harness    no reward   0 calls, 0 traces, 0 tokens",
        "group t closed (complete): 1 of 2 sessions to train on",
    ]
    as_json = [json.loads(line) for line in (await call(polar, "trajectories", "--json")).stdout.splitlines()]
    assert [one["type"] for one in as_json] == ["Trajectory", "Trajectory", "GroupClosed"]
    upstream = [json.loads(line) for line in (await call(polar, "trajectories", "--upstream")).stdout.splitlines()]
    assert [(one["status"], one["reward"]) for one in upstream] == [("COMPLETED", 1.0), ("ERROR", None)]
    assert upstream[0]["traces"][0]["response_ids"] == [2, 3]
    assert "no trajectories of these" in (await call(polar, "trajectories", "--task", "other")).stdout
    assert len((await call(polar, "trajectories", "--since", "1h", "--group", "t")).stdout.splitlines()) == 3


async def test_a_reader_that_stops_early_gets_no_traceback(finished: BusSettings, polar: Polar) -> None:
    async with Bus(finished, Service.FINISHER) as bus:
        large = trajectory(list(range(50_000)), [trace(1, [(1, 50_000)], 50_000)], session_id="s2")
        await bus.send(*(Out("trajectories", "t", large) for _ in range(10)))

    def head() -> tuple[str, str]:
        process = polar.start("trajectories", "--json")
        assert process.stdout is not None
        assert process.stderr is not None
        with process, process.stdout, process.stderr:
            line = process.stdout.readline()
            process.stdout.close()
            return line, process.stderr.read()

    line, errors = await asyncio.to_thread(head)
    assert json.loads(line)["type"] == "Trajectory"
    assert errors == ""


async def test_following_ends_with_ctrl_c_and_no_traceback(finished: BusSettings, polar: Polar) -> None:
    def follow() -> tuple[int, str]:
        process = polar.start("trajectories", "--follow")
        assert process.stdout is not None
        assert process.stderr is not None
        with process, process.stdout, process.stderr:
            try:
                for _ in range(3):
                    process.stdout.readline()
                process.send_signal(signal.SIGINT)
                return process.wait(30), process.stderr.read()
            finally:
                process.kill()  # a shell's background jobs ignore SIGINT, and so do their children

    assert await asyncio.to_thread(follow) == (130, "")


async def test_show_prints_the_trace_and_says_what_is_wrong_with_an_id(finished: BusSettings, polar: Polar) -> None:
    ended = await call(polar, "show", "s0")
    assert ended.returncode == 0, ended.stderr
    assert "1 ⟦2 3 ⟧" in ended.stdout
    assert "last words" in (await call(polar, "show", "s1")).stdout
    assert json.loads((await call(polar, "show", "s0", "--json")).stdout)["session_id"] == "s0"
    assert json.loads((await call(polar, "show", "s0", "--upstream")).stdout)["metadata"]["session_id"] == "s0"
    for arguments, said in (
        (["none"], "no finished session none"),
        (["t"], "t is a task"),
        (["s0", "--trace", "1"], "has 1 traces"),
    ):
        ended = await call(polar, "show", *arguments)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert said in ended.stderr
    async with Bus(finished, Service.SCHEDULER) as bus:
        await bus.send(Out("leases", "running", lease("running", 1, Phase.RUNNING)))
    ended = await call(polar, "show", "running")
    assert ended.returncode == 1
    assert "has not finished: it is running" in ended.stderr
    assert "polar status t --wait" in ended.stderr


async def test_cancel_says_what_will_happen(finished: BusSettings, polar: Polar) -> None:
    assert "remembered for a day" in (await call(polar, "cancel", "unknown")).stdout
    assert "nothing left to cancel" in (await call(polar, "cancel", "t")).stdout
    async with Bus(finished, Service.SCHEDULER) as bus:
        await bus.send(Out("leases", "going", lease("going", 1, Phase.RUNNING)))
        reader = await bus.reader(["tasks"])
        assert "cancelling 1 of the 2 sessions" in (await call(polar, "cancel", "t", "--session", "going")).stdout
        assert "nothing left" in (await call(polar, "cancel", "t", "--session", "s0")).stdout
        wrong = await call(polar, "cancel", "going")
        assert wrong.returncode == 2
        assert "polar cancel t --session going" in wrong.stderr
        asked = [(record.key, record.value.session_id) async for record in reader.to_end()]  # type: ignore[union-attr]
        assert asked == [("unknown", None), ("t", "going")]


async def test_without_a_scheduler_submit_says_that_the_task_is_kept(topics: BusSettings, polar: Polar) -> None:
    text = "task_id: kept\ninstruction: x\nagent: {harness: shell, custom_shell: {command: 'true'}}"
    ended = await call(polar, "submit", "-", stdin=text)
    assert ended.returncode == 1
    assert "is `polar serve submit` running?" in ended.stderr
    assert "kept" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


async def test_a_served_process_answers_operators_where_a_port_is_set(topics: BusSettings, polar: Polar) -> None:
    port = free_port()
    polar.env["POLAR_METRICS_PORT"] = str(port)
    process = polar.start("serve", "builder", "evaluator")
    try:
        await asyncio.to_thread(
            wait_until, lambda: Stack.answers(f"http://127.0.0.1:{port}/ready"), "the process is ready"
        )
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/metrics") as answer:
            text = await answer.text()
        for name in ("polar_builder_", "polar_finisher_", "process_resident_memory_bytes"):
            assert name in text
        taken = await call(polar, "serve", "builder")
        assert taken.returncode == 1
        assert str(port) in taken.stderr
        assert "Traceback" not in taken.stderr
    finally:
        process.terminate()
        _, errors = await asyncio.to_thread(process.communicate, timeout=30)
    assert process.returncode == 0, errors
