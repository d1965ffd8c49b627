"""SIGKILL of the proxy at every event boundary: no client has run a tool whose call is not in the log (promise 1).

Proxies are processes of their own, on a real broker; clients are the official ones, as eager as a harness can be. What
a client has run by the time its proxy is dead must stand on the log, with its id and its arguments.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from polar.bus import Bus, BusSettings
from polar.devmodel import Reply, Rule, Script, ScriptedEngine
from polar.schemas import CompletionCaptured, SamplingSpec
from polar.schemas.topics import Service
from polar.service.clock import SystemClock
from polar.service.tokens import SessionToken, sign_session
from tests.proxy.harness import SECRET
from tests.proxy.kill_harness import CLIENTS, Acted, Harness, Proxies, Relay, asked_of, proxies

pytestmark = pytest.mark.timeout(300)
Start = Callable[..., Any]
MODES = ["live", "synthetic"]
CALLS = ({"city": "Oslo"}, {"city": "Rome {}"})
REPLY = Reply(
    reasoning="Hm.",
    text="I look.",
    tool_calls=[{"name": "get_weather", "arguments": given} for given in CALLS],
)
SETTLE_S = 0.03
"""What a proxy gets to tell what it should not; less makes the test weaker, never wrong."""
EVERY = {"anthropic": 4, "google": 4}
"""Of the engine's chunks: these two tell a call as one piece, at the end, so that its chunks are all alike."""
STEP_S = 0.008
"""Between the moments at which an unstreamed call is killed; a call takes about a twentieth of a second."""


@dataclass
class Field:
    """Where proxies are killed: an engine, a log, and what clients did."""

    engine: ScriptedEngine
    settings: BusSettings
    bus: Bus
    told: dict[str, Harness]
    """By session; each has one call."""

    def key(self, session: str) -> str:
        token = SessionToken(
            session_id=session,
            attempt=1,
            task_id="t1",
            group_id="g1",
            sample=0,
            model="the-policy",
            sampling=SamplingSpec(),
            tenant="default",
            harness="shell",
            not_after_ms=SystemClock().now_ms() + 600_000,
        )
        return sign_session(token, SECRET)

    async def killed(self, some: Proxies, dialect: str, *, stream: bool = True, **cut: int) -> Relay:
        """One call, through a relay that lets so much of the answer through and kills the proxy then."""
        victim = await some.next()
        async with Relay(victim.port) as relay:
            relay.arm(victim.kill, **cut)
            await self.asked(dialect, relay.url, stream=stream)
        victim.kill()
        return relay

    async def asked(self, dialect: str, url: str, *, stream: bool) -> None:
        session = f"s{len(self.told)}"
        self.told[session] = await asked_of(dialect, url, self.key(session), stream=stream)

    async def killed_by_engine(self, some: Proxies, between: Relay, dialect: str, chunks: int | None) -> None:
        """One call of an engine that falls silent after so many chunks, as seen from a proxy that is killed then."""
        victim = await some.next()
        loop = asyncio.get_running_loop()
        between.arm(lambda: loop.call_later(SETTLE_S, victim.kill), events=chunks)
        await self.asked(dialect, f"http://127.0.0.1:{victim.port}", stream=True)
        victim.kill()

    async def killed_in(self, seconds: float, some: Proxies, dialect: str) -> None:
        """One unstreamed call to a proxy that is killed so long after it was asked."""
        victim = await some.next()
        async with Relay(victim.port) as relay:
            asking = asyncio.create_task(self.asked(dialect, relay.url, stream=False))
            await asyncio.wait([asking], timeout=seconds)
            victim.kill()
            await asking

    async def lost(self) -> list[tuple[str, Acted]]:
        """Tools that clients have run and whose calls are not in the log."""
        on_log: dict[str, list[Acted]] = {}
        reader = await self.bus.reader(["completions"], committed=True)
        try:
            async for record in reader.to_end():
                if isinstance(record.value, CompletionCaptured):
                    made = record.value.choices[0].message.get("tool_calls", ())
                    on_log[str(record.key)] = [
                        Acted(one["id"], one["function"]["name"], json.loads(one["function"]["arguments"]))
                        for one in made
                    ]
        finally:
            await reader.close()
        return [
            (session, acted)
            for session, harness in self.told.items()
            for acted in harness.acted
            if acted not in on_log.get(session, [])
        ]

    def check_power(self) -> None:
        """The client whose proxy lived ran every tool, as did the last one; the one that was told nothing, none."""
        whole, nothing, *_, last = self.told.values()
        assert whole.ended
        assert [acted.arguments for acted in whole.acted] == [*CALLS]
        assert [acted.arguments for acted in last.acted] == [*CALLS]
        assert nothing.acted == []


@pytest.fixture
async def ground(engine_of: Start, bus_settings: BusSettings) -> AsyncIterator[Field]:
    engine = await engine_of(Script([Rule(replies=[REPLY])]), reasoning=True)
    async with Bus(bus_settings, Service.SCHEDULER) as bus:
        await bus.prepare()
        yield Field(engine, bus_settings, bus, {})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dialect", CLIENTS)
async def test_killed_after_any_event_of_a_reply(dialect: str, mode: str, ground: Field) -> None:
    async with proxies(ground.settings, ground.engine.base_url, stream_mode=mode) as some:
        whole = await ground.killed(some, dialect)
        for events in range(whole.seen + 1):
            await ground.killed(some, dialect, events=events)
    assert await ground.lost() == []
    ground.check_power()


@pytest.mark.parametrize("dialect", CLIENTS)
async def test_killed_after_any_chunk_of_the_engines(dialect: str, ground: Field) -> None:
    async with (
        Relay(int(ground.engine.url.rpartition(":")[2])) as between,
        proxies(ground.settings, f"{between.url}/v1", stream_mode="live") as some,
    ):
        await ground.killed_by_engine(some, between, dialect, None)
        for chunks in range(1, between.seen + 1, EVERY.get(dialect, 1)):
            await ground.killed_by_engine(some, between, dialect, chunks)
    assert await ground.lost() == []


@pytest.mark.parametrize("dialect", CLIENTS)
async def test_killed_anywhere_in_an_unstreamed_reply(dialect: str, ground: Field) -> None:
    async with proxies(ground.settings, ground.engine.base_url) as some:
        whole = await ground.killed(some, dialect, stream=False)
        for octets in (0, 1, whole.octets // 2, whole.octets - 1, whole.octets):
            await ground.killed(some, dialect, stream=False, octets=octets)
        for step in range(12):
            await ground.killed_in(step * STEP_S, some, dialect)
    assert await ground.lost() == []


@pytest.mark.parametrize("mode", [*MODES, "whole"])
async def test_a_proxy_that_tells_before_the_acknowledgement_is_found_out(mode: str, ground: Field) -> None:
    whole = mode == "whole"
    streaming = "live" if whole else mode
    async with proxies(ground.settings, ground.engine.base_url, broken="early", stream_mode=streaming) as some:
        through = await ground.killed(some, "anthropic", stream=not whole)
        cut = {"octets": through.octets} if whole else {"events": through.seen}
        await ground.killed(some, "anthropic", stream=not whole, **cut)
    assert {session for session, _ in await ground.lost()} == {"s0", "s1"}


@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_a_proxy_that_tells_what_closes_as_it_comes_is_found_out(dialect: str, ground: Field) -> None:
    # the other dialects' encoders would hold it back too
    async with (
        Relay(int(ground.engine.url.rpartition(":")[2])) as between,
        proxies(ground.settings, f"{between.url}/v1", stream_mode="live", broken="ungated") as some,
    ):
        await ground.killed_by_engine(some, between, dialect, None)
        # the engine's last three chunks only end what is whole before them
        await ground.killed_by_engine(some, between, dialect, between.seen - 3)
    lost = await ground.lost()
    assert {session for session, _ in lost} == {"s1"}
    assert len(lost) == len(CALLS)
