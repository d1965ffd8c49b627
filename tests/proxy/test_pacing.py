"""A stream is read on in steps, and never waited for once it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from polar.devmodel import Reply, Rule, Script
from polar.proxy.pacing import Pacing
from tests.proxy.harness import Door, captured

LONG = 3_600.0
"""A step that no test waits for."""
TEXT = "one two three four five six seven eight nine ten"
Start = Callable[..., Any]


class Source:
    """A server that writes what it is given."""

    def __init__(self) -> None:
        self.more: asyncio.Queue[bytes] = asyncio.Queue()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while data := await self.more.get():
            await response.write(data)
        return response


async def opened(source: Source) -> AsyncIterator[aiohttp.StreamReader]:
    app = web.Application()
    app.router.add_get("/", source.handle)
    async with TestServer(app) as server, aiohttp.ClientSession() as http, http.get(server.make_url("/")) as response:
        yield response.content


async def test_what_comes_in_a_step_is_read_together() -> None:
    source = Source()
    async for content in opened(source):
        pacing = Pacing(content, 0.2)
        source.more.put_nowait(b"a")
        assert await content.readany() == b"a"
        source.more.put_nowait(b"b")
        pausing = asyncio.create_task(pacing.pause())
        source.more.put_nowait(b"c")
        await pausing
        assert await content.readexactly(2) == b"bc"
        source.more.put_nowait(b"")


async def test_a_pause_ends_with_the_stream() -> None:
    source = Source()
    async for content in opened(source):
        pacing = Pacing(content, LONG)
        source.more.put_nowait(b"a")
        assert await content.readany() == b"a"
        pausing = asyncio.create_task(pacing.pause())
        await asyncio.sleep(0)
        assert not pausing.done()
        source.more.put_nowait(b"")
        async with asyncio.timeout(30):
            await pausing
            await pacing.pause()  # nor does one begin any more


async def test_no_step_is_no_pause() -> None:
    source = Source()
    async for content in opened(source):
        async with asyncio.timeout(30):
            await Pacing(content, 0.0).pause()
        source.more.put_nowait(b"")


async def test_a_cancelled_pause_leaves_nothing() -> None:
    source = Source()
    async for content in opened(source):
        pausing = asyncio.create_task(Pacing(content, LONG).pause())
        await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.gather(pausing, return_exceptions=True)
        assert pausing.cancelled()
        source.more.put_nowait(b"")  # its end wakes nobody


async def test_a_reply_in_the_longest_steps_is_whole(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text=TEXT, tokens_per_chunk=1)])]))
    door: Door = await door_to(engine, stream_step=1.0)
    async with asyncio.timeout(60), door.client() as client:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Count."}], stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert text == TEXT
    assert captured(await door.settled()).choices[0].message["content"] == TEXT
