"""A model that says nothing for long is waited for by every coding CLI, and asked once.

All of them wait at the same time, each with an engine and a proxy of its own, so the longest silence is paid for once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from polar.devmodel import Match, Reply, Rule, Script
from polar.schemas import CallStarted
from tests.harness.adapters import Adapter
from tests.harness.place import Place, captures
from tests.harness.running import installed, name_missing, needs_some, place_for

pytestmark = [pytest.mark.harness, pytest.mark.sandbox, needs_some, pytest.mark.timeout(540)]
Start = Callable[..., Any]
SILENCES = (70, 130)
"""Seconds. Gemini CLI gives up after 60 without headers, Qwen Code after 120."""


async def test_a_silent_model_is_waited_for_without_a_second_generation(
    engine_of: Start, door_to: Start, places: Start
) -> None:
    async def waited(cli: Adapter, silence: int) -> str:
        rules = [
            Rule(match=Match(tools=False), replies=[Reply(text="A title")]),
            # some of it after the engine has sent its headers
            Rule(replies=[Reply(text="Here.", delay=silence - 20, first_delay=20)]),
        ]
        session = f"{cli.name}-{silence}"
        place: Place = await place_for(cli, await door_to(await engine_of(Script(rules))), places, session=session)
        told = place.told()
        ran = await place.run(cli.launch(told), told, timeout=400)
        assert (ran.code, cli.words(ran)) == (0, "Here."), session
        assert ran.seconds > silence
        records = await place.records()
        turns = [one for one in captures(records) if one.prompt.tools]
        started = [one for one in records if isinstance(one, CallStarted)]
        titles = cli.name == "opencode"
        assert (len(turns), len(started), len(place.exchanges)) == (1, 1 + titles, 1 + titles), session
        assert {one.status for one in place.exchanges} == {200}, session
        return session

    runs = [waited(cli, silence) for silence in SILENCES for cli in installed()]
    for each in await asyncio.gather(*runs, return_exceptions=True):
        if isinstance(each, BaseException):
            raise each
    name_missing()
