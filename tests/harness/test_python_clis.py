"""The agents from PyPI while a model is silent: 70 and 130 seconds before its first token, all at once to wait once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from polar.devmodel import Match, Reply, Rule, Script
from polar.gateway.harness import Launch, Session
from tests.harness.place import Place
from tests.harness.python_clis import AIDER, MINI, MINI_DIALECTS, SUBMIT, aider, mini, whole
from tests.proxy.harness import Door

pytestmark = [pytest.mark.harness, pytest.mark.sandbox, MINI.needed, AIDER.needed, pytest.mark.timeout(400)]
Start = Callable[..., Any]
SILENCES = (70, 130)


EDIT = "It is here.\n\nhello.txt\n```\n<<<<<<< SEARCH\n=======\nhi\n>>>>>>> REPLACE\n```\n"


def bash(command: str) -> dict[str, Any]:
    return {"name": "bash", "arguments": {"command": command}}


def launch(how: str, told: Session) -> Launch:
    return aider(told) if how == "aider" else mini(told, how)


async def test_a_silent_model_is_waited_for_without_a_second_generation(
    engine_of: Start, door_to: Start, places: Start
) -> None:
    rules, runs = [], {}
    for silence in SILENCES:
        for how in ("aider", *MINI_DIALECTS):
            name = f"{how} {silence}"
            runs[name] = (how, silence)
            reply = Reply(text=EDIT) if how == "aider" else Reply(tool_calls=[bash("echo hi > hello.txt")])
            rules.append(Rule(match=Match(any_message=name), replies=[replace(reply, delay=silence)], times=1))
    engine = await engine_of(Script([*rules, Rule(replies=[Reply(tool_calls=[bash(SUBMIT)])])]))
    door: Door = await door_to(engine)

    async def run(name: str, how: str, silence: int) -> Place:
        cli = AIDER if how == "aider" else MINI
        place: Place = await places(door, session=name, **await cli.shown())
        told = place.told(f"Make hello.txt ({name}).")
        ran = await place.run(launch(how, told), told, timeout=360)
        assert ran.code == 0, name
        assert ran.seconds > silence
        return place

    for place in await asyncio.gather(*(run(name, *of) for name, of in runs.items())):
        assert await place.file("hello.txt") == "hi\n"
        calls = 1 if place.session.startswith("aider") else 2
        assert len(whole(await place.records())) == calls
        assert place.statuses == [200] * calls
    assert engine.stats.started == len(SILENCES) * (1 + 2 * len(MINI_DIALECTS))
