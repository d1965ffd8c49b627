"""Whatever is killed or stopped while 300 sessions run, and started again: 300 outcomes, 300 trajectories, none twice.

POLAR_CHAOS_SEED      another schedule, or that of a failure (default 20261121)
POLAR_CHAOS_SESSIONS  fewer sessions (default 300)
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path

import pytest

from polar.client import PolarClient
from polar.schemas import Status

from .brokers import KillableBroker
from .checks import check_log
from .conftest import Install
from .faults import Chaos
from .installation import SUBMITS
from .pace import PacedEngine
from .schedule import schedule
from .work import conversation, ended, settled, task_of

pytestmark = [pytest.mark.chaos, pytest.mark.sandbox, pytest.mark.timeout(1800)]

SESSIONS = int(os.environ.get("POLAR_CHAOS_SESSIONS", "300"))
SEED = int(os.environ.get("POLAR_CHAOS_SEED", "20261121"))
PER_TASK = 20
TURNS = 3


async def test_everything_is_killed_and_stopped_and_each_session_ends_once(
    tmp_path: Path, broker: KillableBroker, paced_engine: PacedEngine, install: Install
) -> None:
    faults = schedule(SEED, SESSIONS * TURNS)
    print(f"POLAR_CHAOS_SEED={SEED} POLAR_CHAOS_SESSIONS={SESSIONS}", *faults, sep="\n  ")
    stack = install(broker.bootstrap, paced_engine.base_url)
    stack.start_all()
    await asyncio.to_thread(stack.wait_ready, 180)
    chaos = Chaos(stack, broker, paced_engine)
    async with PolarClient(stack.bus_settings()) as client:
        sizes = [min(PER_TASK, SESSIONS - first) for first in range(0, SESSIONS, PER_TASK)]
        tasks = [task_of(conversation(TURNS), num_samples=size) for size in sizes]
        accepted = [await client.submit(task, timeout_s=60) for task in tasks]
        sessions = [session for one in accepted for session in one.sessions]
        async with asyncio.TaskGroup() as group:
            group.create_task(chaos.run(faults))
            collecting = group.create_task(ended(client, {one.task_id for one in accepted}, stack))
        trajectories = collecting.result()
        await settled(client, stack)
        print(*chaos.happened, sep="\n")
        print(Counter(str(one.status) for one in trajectories), Counter(one.attempt for one in trajectories))
        print(Counter(one.outcome.failure.message for one in trajectories if one.outcome.failure))
        print(Counter(aside.reason for one in trajectories for aside in one.set_aside))
        print(Counter(one.reward for one in trajectories))
        assert len(sessions) == len(set(sessions)) == SESSIONS
        await check_log(client, paced_engine, sessions, trajectories)
    # every fault of the schedule, at its moment, into calls that were under way
    assert [(one.fault, one.finished) for one in chaos.happened] == [(one, one.after) for one in faults]
    assert all(one.in_flight for one in chaos.happened)
    assert all(stack.times(name, "leading") for name in SUBMITS), "no standby has taken over"
    assert any(aside.reason == "fenced" for one in trajectories for aside in one.set_aside), "no attempt was fenced"
    # the faults may cost attempts and grades, but not the work
    assert Counter(one.status for one in trajectories)[Status.COMPLETED] > SESSIONS / 2
    assert Counter(one.reward for one in trajectories)[1.0] > SESSIONS / 2
