"""A proxy on a port, between the official client, the scripted engine and a real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from polar.bus import Bus, BusSettings
from polar.devmodel import ChatTokenizer, Script, ScriptedEngine
from polar.proxy import ProxyService, ProxySettings
from polar.schemas.topics import Service
from tests.proxy.harness import SECRET, Door, GatedSender, running


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.small()


@pytest.fixture
async def engine_of(tokenizer: ChatTokenizer) -> AsyncIterator[Callable[..., Any]]:
    """Starts scripted engines."""
    async with AsyncExitStack() as stack:

        async def start(script: Script | None = None, **options: Any) -> ScriptedEngine:
            return await stack.enter_async_context(ScriptedEngine(script, **{"tokenizer": tokenizer, **options}))

        yield start


@pytest.fixture
async def buses(bus_settings: BusSettings) -> AsyncIterator[tuple[Bus, Bus]]:
    """The proxy's and the scheduler's, over fresh topics."""
    async with Bus(bus_settings, Service.PROXY) as bus, Bus(bus_settings, Service.SCHEDULER) as scheduler:
        await bus.prepare()
        yield bus, scheduler


@pytest.fixture
async def door_to(buses: tuple[Bus, Bus]) -> AsyncIterator[Callable[..., Any]]:
    """Starts proxies in front of an engine: `await door_to(engine, stream_mode="synthetic", …)`."""
    bus, scheduler = buses
    async with AsyncExitStack() as stack:

        async def start(engine: Any, **changes: Any) -> Door:
            urls = engine if isinstance(engine, str) else engine.base_url
            values = {
                "port": 0,
                "engine_urls": urls,
                "logprobs_mode": "processed_logprobs",
                "drain_timeout": 5,
                **changes,
            }
            sender = GatedSender(bus)
            service = ProxyService(ProxySettings(**values), bus, SECRET, sender=sender)
            await stack.enter_async_context(running(service))
            door = Door(service, bus, scheduler, sender)
            await stack.enter_async_context(door.closing)
            return door

        yield start
