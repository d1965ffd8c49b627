"""How a grader reaches a session's box: a gateway that is away is waited for, one that was asked is not asked twice."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from polar.evaluator.box import BoxClient
from polar.evaluator.errors import BoxError
from polar.schemas import BoxAccess


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Site:
    """A runtime API that counts; `cut`: it goes away in the middle of an answer."""

    def __init__(self, *, cut: bool = False) -> None:
        self.asked = 0
        self._cut = cut

    async def exec(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        await request.read()
        if self._cut:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"return_code": 0, "stdout": "", "stderr": "", "timed_out": False, "truncated": False})

    @asynccontextmanager
    async def at(self, port: int) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post("/v1/boxes/s/1/exec", self.exec)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield
        finally:
            await runner.cleanup()


@asynccontextmanager
async def box(port: int, patience_s: float, refused: asyncio.Event | None = None) -> AsyncIterator[BoxClient]:
    trace = aiohttp.TraceConfig()

    async def failed(*_: object) -> None:
        if refused is not None:
            refused.set()

    trace.on_request_exception.append(failed)
    async with aiohttp.ClientSession(trace_configs=[trace]) as http:
        access = BoxAccess(url=f"http://127.0.0.1:{port}", key="key")
        yield BoxClient(http, access, "s", 1, patience_s=patience_s)


async def test_a_gateway_that_starts_again_meanwhile_is_waited_for() -> None:
    port, refused, site = free_port(), asyncio.Event(), Site()
    async with box(port, 60, refused) as client:
        running = asyncio.create_task(client.exec("true", timeout_s=5))
        async with asyncio.timeout(30):
            await refused.wait()
        async with site.at(port):
            assert (await running).return_code == 0
    assert site.asked == 1


async def test_a_gateway_that_stays_away_is_told_after_the_patience() -> None:
    async with box(free_port(), 0.3) as client:
        with pytest.raises(BoxError, match="cannot be reached"):
            await client.exec("true", timeout_s=5)


async def test_a_command_that_may_have_run_is_not_sent_again() -> None:
    port, site = free_port(), Site(cut=True)
    async with site.at(port), box(port, 60) as client:
        with pytest.raises(BoxError, match="cannot be reached"):
            await client.exec("true", timeout_s=5)
    assert site.asked == 1
