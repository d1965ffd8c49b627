"""Two views of one log: the same answers of every task and session, also where one was killed on the way."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from polar.bus import Bus, BusSettings, Out
from polar.schemas import Stage
from polar.schemas.topics import Service
from polar.submit.documents import session_document, task_document, task_line
from polar.submit.entries import TaskFilter
from polar.submit.feed import ViewFeed, identity_of
from polar.submit.metrics import SubmitMetrics
from polar.submit.view import View
from tests.conftest import ROOT
from tests.submit.records import accepted, moved, ref, session_result, task_result, tick
from tests.submit.view_reader import LIMITS

TASKS, SAMPLES = 120, 3
STAGES = (Stage.INITIALIZING, Stage.READY, Stage.RUNNING, Stage.ENDED, Stage.CLOSED, Stage.BUILT, Stage.GRADED)


def history(seed: int) -> list[Out]:
    """What services write of many tasks under way at once: retries, repeats, endings, and some that have not ended."""
    chance = random.Random(seed)
    lives: list[list[Out]] = []
    for number in range(TASKS):
        task = f"t{number:03}"
        begin = accepted(task, SAMPLES, at_ms=1_000 + number, source=number)
        life = [Out("stages", task, begin)]
        for sample in range(SAMPLES):
            session, attempt = f"{task}-{sample}", 1
            if chance.random() < 0.2:
                life.append(Out("stages", session, moved(session, Stage.RUNNING, 1, node="n1")))
                attempt = 2
            for stage in STAGES:
                life.append(Out("stages", session, moved(session, stage, attempt, node=chance.choice(["n1", None]))))
            if number % 10:
                life.append(Out("stages", session, moved(session, Stage.FINISHED, attempt)))
                result = session_result(session, attempt=attempt, reward=chance.random(), at_ms=5_000 + number)
                life.append(Out("results", f"s/{session}", result))
        if number % 10:
            life.append(Out("results", f"t/{task}", task_result(task, SAMPLES, at_ms=5_000 + chance.randrange(1_000))))
            life.append(Out("stages", f"{task}-0", moved(f"{task}-0", Stage.RUNNING, 1)))
        if chance.random() < 0.3:
            repeat = accepted(task, SAMPLES, at_ms=9_000, source=number, answers=ref(500 + number, topic="tasks"))
            life.append(Out("stages", task, repeat))
        lives.append(life)
    mixed = []
    while lives:
        life = chance.choice(lives)
        mixed.append(life.pop(0))
        if not life:
            lives.remove(life)
    return [*mixed, Out("nodes", "tick", tick(100))]


async def answers(view: View) -> Any:
    """All that the API answers of tasks and their sessions."""
    whole: dict[str, Any] = {}
    for name in await view.everything():
        task = await view.task(name)
        assert task is not None
        whole[name] = (task_document(task), [session_document(one) for one in task.sessions.values()])
    listed = [task_line(one) for one in (await view.select(TaskFilter(None, None, None, 1_000))).tasks]
    return whole, listed, await view.statuses(), view.in_flight()


async def read_to_end(bus: Bus, path: Path) -> Any:
    async with await View.open(path, LIMITS, identity=identity_of(bus.settings)) as view:
        feed = ViewFeed(bus, view, SubmitMetrics(CollectorRegistry()), [], batch_records=97)
        task = asyncio.create_task(feed.run())
        try:
            async with asyncio.timeout(60):
                await feed.ready.wait()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return await answers(view)


def applied(path: Path) -> int:
    """Offsets in a view's file, all partitions together; 0 where there is none yet."""
    if path.exists():
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            return int(db.execute("SELECT coalesce(sum(next), 0) FROM offsets").fetchone()[0])
    return 0


async def kill_on_the_way(settings: BusSettings, path: Path, after: int) -> int:
    """Runs a view in a process of its own until it has applied more than `after` records; what it had when killed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POLAR_")} | {
        "POLAR_KAFKA_BOOTSTRAP": settings.bootstrap,
        "POLAR_KAFKA_TOPIC_PREFIX": settings.topic_prefix,
        "POLAR_KAFKA_PARTITIONS": str(settings.partitions),
        "POLAR_KAFKA_TASK_PARTITIONS": str(settings.task_partitions),
        "POLAR_KAFKA_NODE_PARTITIONS": str(settings.node_partitions),
        "POLAR_KAFKA_BLOB_URL": settings.blob_url,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.submit.view_reader", str(path), "5", env=environment, cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            while await asyncio.to_thread(applied, path) <= after:  # noqa: ASYNC110 - as a passer-by would see it
                await asyncio.sleep(0.002)
    finally:
        process.kill()
        await process.wait()
    return await asyncio.to_thread(applied, path)


@pytest.fixture
async def bus(bus_settings: BusSettings) -> AsyncIterator[Bus]:
    async with Bus(bus_settings, Service.SCHEDULER) as made:
        await made.prepare()
        yield made


async def written(bus: Bus, outs: list[Out]) -> None:
    """As the services would write them: these are of several."""
    finisher = Bus(bus.settings, Service.FINISHER)
    try:
        for start in range(0, len(outs), 500):
            part = outs[start : start + 500]
            await finisher.send(*(one for one in part if one.topic == "results" and str(one.key).startswith("s/")))
            await bus.send(*(one for one in part if not str(one.key).startswith("s/")))
    finally:
        await finisher.close()


async def test_a_view_that_was_killed_on_the_way_answers_as_one_that_was_not(
    bus: Bus, bus_settings: BusSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outs = await asyncio.to_thread(history, 7)
    await written(bus, outs)
    killed, had = tmp_path / "killed.sqlite", [0]
    for share in (0.1, 0.3, 0.5):
        had.append(await kill_on_the_way(bus_settings, killed, round(share * len(outs))))
    assert had == sorted(set(had)), "each went on where the one before was killed"
    assert had[-1] < len(outs), "and the last one had more to do"
    one = await read_to_end(bus, killed)
    other = await read_to_end(bus, tmp_path / "fresh.sqlite")
    assert "thrown away" not in capsys.readouterr().out
    assert one == other
    whole, listed, *_ = one
    running = TASKS // 10
    assert len(whole) == len(listed) == LIMITS.max_tasks + running
    assert sum(line["status"] == "running" for line in listed) == running


async def test_a_view_that_was_always_there_answers_as_one_that_reads_all_at_once(bus: Bus, tmp_path: Path) -> None:
    outs = await asyncio.to_thread(history, 11)
    async with await View.open(tmp_path / "live.sqlite", LIMITS, identity=identity_of(bus.settings)) as view:
        feed = ViewFeed(bus, view, SubmitMetrics(CollectorRegistry()), [], batch_records=500)
        task = asyncio.create_task(feed.run())
        try:
            for start in range(0, len(outs), 100):
                await written(bus, outs[start : start + 100])
            fresh = await read_to_end(bus, tmp_path / "fresh.sqlite")
            async with asyncio.timeout(60):
                while await answers(view) != fresh:  # noqa: ASYNC110 - it reads on, and nothing announces the end
                    await asyncio.sleep(0.05)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
