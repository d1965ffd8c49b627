"""A real line is audited clean; a forged record is named."""

from __future__ import annotations

import asyncio
import json

import pytest
from msgspec.structs import replace

from polar.audit import AuditOptions, audit
from polar.bus import Bus, Out
from polar.client import PolarClient
from polar.devmodel import ScriptedEngine
from polar.schemas import Trajectory
from polar.schemas.topics import Service
from tests.e2e.conftest import engine, make_stack
from tests.e2e.test_line import MakeStack, calling, ending, task

pytestmark = [pytest.mark.e2e, pytest.mark.sandbox, pytest.mark.timeout(240)]

__all__ = ["engine", "make_stack"]


async def test_a_real_line_is_clean_and_a_second_trajectory_is_named(
    make_stack: MakeStack, engine: ScriptedEngine, tmp_path: object
) -> None:
    stack = make_stack(engine.base_url)
    stack.start("all")
    await asyncio.to_thread(stack.wait_ready)
    settings = stack.bus_settings()
    async with PolarClient(settings) as client, Bus(settings, Service.FINISHER) as bus:
        good = task(calling(tmp_path, turns=3), num_samples=3)  # type: ignore[arg-type]
        published, _ = await ending(client, good)
        # one that fails, one that is never run, and while they are under way the books balance too
        failing, waiting = task("raise SystemExit(3)"), task("import time; time.sleep(60)", num_samples=2)
        await client.submit(waiting)
        report = await audit(bus)
        assert report.clean, report.offences
        assert report.counts["accepted"] == report.counts["finished"] + report.counts["in_flight"] == 5
        await ending(client, failing)
        assert waiting.task_id is not None
        await client.cancel(waiting.task_id)
        await until_finished(bus, 6)
        report = await audit(bus)
        assert report.clean, report.offences
        assert report.counts["accepted"] == report.counts["finished"] == 6
        assert report.counts["calls"] == report.counts["calls_traced"] == 9
        assert report.counts["sampled_tokens"] > 0
        told = await stack.apolar("audit")
        assert told.returncode == 0, told.stdout + told.stderr
        assert "6 accepted = 6 finished + 0 in flight" in told.stdout

        forged = replace(published[0], reward=0.5)
        await bus.send(Out("trajectories", forged.group_id, forged))
        assert isinstance(forged, Trajectory)
        told = await stack.apolar("audit", "--json")
        assert told.returncode == 1, told.stdout + told.stderr
        found = json.loads(told.stdout)
        twice = next(one for one in found["offences"] if one["kind"] == "published_twice")
        assert twice["session_id"] == forged.session_id
        elsewhere = await audit(bus, AuditOptions(sessions=frozenset({published[1].session_id})))
        assert elsewhere.clean, elsewhere.offences
        assert elsewhere.counts["accepted"] == 1


async def until_finished(bus: Bus, count: int) -> None:
    """Waits until so many sessions have finished, auditing meanwhile: it must be clean at any moment."""
    async with asyncio.timeout(120):
        while True:
            report = await audit(bus)
            assert report.clean, report.offences
            if report.counts["finished"] >= count:
                return
