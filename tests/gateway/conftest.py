"""Fixtures of the gateway's tests; what they give is in `desk.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from polar.bus import Bus, BusSettings
from polar.runtime import create_runtime
from polar.schemas.topics import Service
from polar.service.settings import CommonSettings
from tests.gateway.desk import NODE, Desk, ModelDoor, Site


@pytest.fixture
async def desk(bus_settings: BusSettings) -> AsyncIterator[Desk]:
    async with Bus(bus_settings, Service.SCHEDULER) as bus:
        await bus.prepare()
        reader = await bus.reader(["stages", "nodes", "ready"], start="earliest")
        yield Desk(bus, reader)
        await reader.close()


@pytest.fixture
async def door() -> AsyncIterator[ModelDoor]:
    door = ModelDoor(0)
    app = web.Application()
    app.router.add_get("/v1/wait", door.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    door.port = runner.addresses[0][1]
    yield door
    door.open.set()
    await runner.cleanup()


@pytest.fixture
async def site(bus_settings: BusSettings, door: ModelDoor, tmp_path: Path) -> Site:
    state = tmp_path / "state"
    state.mkdir()
    probe = await (await asyncio.to_thread(create_runtime, "local", {"root": tmp_path / "probe"})).probe()
    if not probe.ok:
        pytest.skip(f"no sandbox here: {probe.reason}")
    common = CommonSettings(state_dir=state)
    return Site(
        common,
        await asyncio.to_thread(common.secret),
        bus_settings,
        {
            "node_id": NODE,
            "proxy_address": f"127.0.0.1:{door.port}",
            "runtime_api_port": 0,
            "heartbeat_s": 0.2,
            "drain_grace_s": 0.5,
        },
    )
