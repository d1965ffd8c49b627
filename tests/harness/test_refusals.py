"""What the proxy cannot answer reaches every coding CLI with its true status, and ends it as it ends by itself.

Each test runs all CLIs at the same time, for some try again for over a minute.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from polar.devmodel import Match, Reply, Rule, Script
from polar.schemas import CompletionCaptured, CompletionFailed
from tests.harness.adapters import Adapter
from tests.harness.endings import OVERFLOW, UNKNOWN, Ending
from tests.harness.place import Place, Ran, failures
from tests.harness.running import installed, name_missing, needs_some, place_for
from tests.proxy.harness import Door

pytestmark = [pytest.mark.harness, pytest.mark.sandbox, needs_some, pytest.mark.timeout(420)]
Start = Callable[..., Any]
PATIENCE: Mapping[str, Mapping[str, str]] = {"claude-code": {"CLAUDE_CODE_MAX_RETRIES": "1"}}
"""Fewer tries, where that can be set: the default is ten, over three minutes."""


async def refused(cli: Adapter, place: Place, *, patient: bool = False) -> Ran:
    told = place.told()
    launch = cli.launch(told)
    env = {**launch.env, **({} if patient else PATIENCE.get(cli.name, {}))}
    return await place.run(dataclasses.replace(launch, env=env), told, timeout=300)


async def of_all(one: Callable[[Adapter], Awaitable[None]]) -> None:
    """`one` of every CLI at the same time; all have ended before the first failure is told."""
    results = await asyncio.gather(*(one(cli) for cli in installed()), return_exceptions=True)
    failed = [each for each in results if isinstance(each, BaseException)]
    if failed:
        raise failed[0] if len(failed) == 1 else BaseExceptionGroup("several CLIs", failed)
    name_missing()


def assert_ended(cli: Adapter, place: Place, ran: Ran, status: int, ending: Ending) -> None:
    said = (ran.out + ran.err).lower()
    print(cli.name, ran.code, place.statuses)
    assert set(place.statuses) == {status}, cli.name
    assert ending.tries[0] <= len(place.statuses) <= ending.tries[1], (cli.name, place.statuses)
    assert ran.code == ending.code, cli.name
    assert ending.told.lower() in said, cli.name


async def test_a_context_overflow_is_a_400(engine_of: Start, door_to: Start, places: Start) -> None:
    async def one(cli: Adapter) -> None:
        engine = await engine_of(Script.say("Here."), max_model_len=300)
        place: Place = await place_for(cli, await door_to(engine), places, session=cli.name)
        ran = await refused(cli, place)
        assert_ended(cli, place, ran, 400, OVERFLOW[cli.name])
        records = await place.records()
        assert set(failures(records)) == {400}
        assert len(records) == 2 * len(place.statuses)

    await of_all(one)


async def test_an_unknown_model_is_a_404(engine_of: Start, door_to: Start, places: Start) -> None:
    async def one(cli: Adapter) -> None:
        engine = await engine_of(Script.say("Here."))
        door = await door_to(engine, engines=[{"model": "another-policy", "urls": [engine.base_url]}])
        place: Place = await place_for(cli, door, places, session=cli.name)
        ran = await refused(cli, place)
        assert_ended(cli, place, ran, 404, UNKNOWN[cli.name])
        assert set(failures(await place.records())) <= {404}
        assert not [call for call in engine.calls if call.body.get("messages") and len(call.prompt_ids) > 100]

    await of_all(one)


async def test_a_full_queue_is_a_503_until_there_is_room(engine_of: Start, door_to: Start, places: Start) -> None:
    async def one(cli: Adapter) -> None:
        rules = [
            Rule(match=Match(last_user="Hold the line"), replies=[Reply(text="Over.", gate="line")]),
            Rule(match=Match(tools=False), replies=[Reply(text="A title")]),
            Rule(replies=[Reply(text="Here.")]),
        ]
        engine = await engine_of(Script(rules))
        door: Door = await door_to(engine, max_calls_per_endpoint=1, max_waiting_per_endpoint=0)
        place: Place = await place_for(cli, door, places, session=cli.name)
        asked = [{"role": "user", "content": "Hold the line"}]
        async with door.client("other") as client:
            holding = asyncio.create_task(client.chat.completions.create(model="m", messages=asked, timeout=300))
            await engine.until(lambda stats: stats.running == 1)
            running = asyncio.create_task(refused(cli, place, patient=True))
            while not running.done() and len(place.statuses) < 2:  # noqa: ASYNC110 - the relay tells nobody
                await asyncio.sleep(0.05)
            engine.open("line")
            await holding
            ran = await running
        print(cli.name, ran.code, place.statuses)
        assert (ran.code, cli.words(ran)) == (0, "Here."), cli.name
        full = 529 if cli.name == "claude-code" else 503
        assert place.statuses[0] == full
        assert set(place.statuses) == {full, 200}
        assert len(place.statuses) > 1
        await place.dump(f"{cli.name}-full-queue")
        ends = [one for one in await place.records() if isinstance(one, CompletionCaptured | CompletionFailed)]
        done = [one for one in ends if isinstance(one, CompletionCaptured) and one.prompt.tools]
        assert len(done) == 1
        # what never had a place at the engine is no call: the relay alone has seen it
        assert failures(ends) == []

    await of_all(one)
