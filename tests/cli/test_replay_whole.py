"""Building and publishing again what a whole installation made: every service, a proxy's own records, real grades."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.bus import Bus
from polar.client.files import read_values
from polar.devmodel import Script, ScriptedEngine
from polar.schemas import Trajectory
from polar.schemas.topics import Service
from tests.builder.replaying import committed
from tests.conftest import delete_topics
from tests.e2e.stack import Stack, shell_agent

pytestmark = [pytest.mark.e2e, pytest.mark.sandbox, pytest.mark.timeout(240)]


@pytest.fixture
async def stack(tmp_path: Path, bootstrap: str) -> AsyncIterator[Stack]:
    async with ScriptedEngine(Script()) as engine:
        one = Stack(tmp_path / "stack", bootstrap, engine.base_url, prefix=f"test-{uuid.uuid4().hex[:8]}.")
        one.start("all")
        await asyncio.to_thread(one.wait_ready)
        yield one
        await asyncio.to_thread(one.stop)
        await delete_topics(one.bus_settings())


async def test_a_tasks_trajectories_are_built_and_published_again_byte_for_byte(stack: Stack, tmp_path: Path) -> None:
    command = shell_agent(tmp_path / "agent.py", turns=4)
    check = "test -s answer.txt"
    ran = await stack.apolar(
        *("run", "-n", "3", "--upload", "agent.py", "--check", check, "--task-id", "whole", *command), cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr + stack.tails()
    again = tmp_path / "again.msgpack"
    rebuilt = await stack.apolar("rebuild", "--task", "whole", "--to-file", str(again))
    assert (rebuilt.returncode, rebuilt.stderr) == (0, ""), rebuilt.stdout + stack.tails()
    checked = await stack.apolar("rebuild", "--check", "--since", "1h")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "3 byte for byte as in polar.built" in checked.stdout
    other = await stack.apolar("rebuild", "--builder", "per_request", "--task", "whole", "--to-file", "each.jsonl")
    assert "3 sessions, 12 traces" in other.stdout, other.stderr
    name = f"{stack.prefix}copy.trajectories"
    copied = await stack.apolar("replay", "--task", "whole", "--to-topic", name)
    assert (copied.returncode, copied.stderr) == (0, ""), copied.stdout
    settings = stack.bus_settings()
    async with Bus(settings, Service.USER) as bus:
        published = await committed(bus, "trajectories")
        assert {one.value.reward for one in published if isinstance(one.value, Trajectory)} == {1.0}
        assert sorted(read_values(again)) == sorted(one.raw or b"" for one in published)
    async with Bus(settings.model_copy(update={"topic_prefix": f"{stack.prefix}copy."}), Service.USER) as bus:
        copies = await committed(bus, "trajectories")
    assert [one.raw for one in copies] == [one.raw for one in published]
