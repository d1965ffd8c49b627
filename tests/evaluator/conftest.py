"""A gateway's runtime API that really runs commands, and what surrounds a grade."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from polar.bus import Bus, BusSettings
from polar.schemas.topics import Service

PATIENCE_S = 60.0
KEY = "the-key-of-this-box"


@dataclass
class Gateway:
    """Runs commands on this machine for whoever has the key; one box, of session `s` attempt 1."""

    url: str = ""
    running: int = 0
    most: int = 0
    """Commands at once, at the peak."""
    commands: list[dict[str, Any]] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def exec(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response(
                {"error": {"code": "other_box", "message": "this key is for another box"}}, status=403
            )
        body = await request.json()
        await self._count(1, body)
        process = await asyncio.create_subprocess_shell(
            body["command"],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **body["env"]},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(body["timeout_s"]):
                stdout, stderr = await process.communicate()
            found = {"return_code": process.returncode, "stdout": stdout.decode(), "stderr": stderr.decode()}
            return web.json_response({**found, "timed_out": False, "truncated": False})
        except TimeoutError:
            found = {"return_code": None, "stdout": "", "stderr": ""}
            return web.json_response({**found, "timed_out": True, "truncated": False})
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await self._count(-1)

    async def _count(self, change: int, body: dict[str, Any] | None = None) -> None:
        async with self.changed:
            self.running += change
            self.most = max(self.most, self.running)
            if body is not None:
                self.commands.append(body)
            self.changed.notify_all()

    async def until_running(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: self.running == count)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    found = Gateway()
    app = web.Application()
    app.router.add_post("/v1/boxes/{session}/{attempt}/exec", found.exec)
    # as the real one: a client that goes away ends its command
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


@pytest.fixture
async def scheduler(bus_settings: BusSettings) -> AsyncIterator[Bus]:
    async with Bus(bus_settings, Service.SCHEDULER) as bus:
        await bus.prepare()
        yield bus
