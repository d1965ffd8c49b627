"""The real mini-swe-agent against the proxy, where it is installed (`mini`, or what MINI_SWE_AGENT_CLI names).

It lives in a virtual environment of its own; `.ci/install-harnesses` makes one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from polar.devmodel import Match, Reply, Rule, Script
from tests.harness.place import Place, failures
from tests.harness.python_clis import MINI, MINI_DIALECTS, SUBMIT, mini, until, whole
from tests.proxy.harness import Door
from tests.proxy.test_calls import assert_as_sampled

pytestmark = [pytest.mark.harness, pytest.mark.sandbox, MINI.needed, pytest.mark.timeout(300)]
Start = Callable[..., Any]
TWO_TRIES = {"MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2"}
"""Of its own, each of which is three of LiteLLM's; ten by default, which is minutes."""
BROKEN = "def add(a, b):\n    return a - b\n"
FILES = {"sums.py": BROKEN, "check.py": "from sums import add\nassert add(2, 3) == 5, add(2, 3)\nprint('all good')\n"}


def bash(command: str) -> dict[str, Any]:
    return {"name": "bash", "arguments": {"command": command}}


END = Reply(text="Done.", tool_calls=[bash(SUBMIT)])
TASK = [
    Rule(
        match=Match(turn=1),
        replies=[Reply(text="I look.", tool_calls=[bash("cat sums.py"), bash("python -B check.py")])],
    ),
    Rule(
        match=Match(turn=2, last_message="AssertionError: -1"),
        replies=[Reply(reasoning="A minus.", text="I mend it.", tool_calls=[bash("sed -i 's/a - b/a + b/' sums.py")])],
    ),
    Rule(match=Match(turn=3), replies=[Reply(tool_calls=[bash("python -B check.py | tee said.txt")])]),
    Rule(match=Match(turn=4, last_message="all good"), replies=[END]),
]


@pytest.mark.parametrize("dialect", MINI_DIALECTS)
async def test_a_task_of_several_turns(dialect: str, engine_of: Start, door_to: Start, places: Start) -> None:
    engine = await engine_of(Script(TASK), reasoning=True)
    place: Place = await places(await door_to(engine), **await MINI.shown())
    told = place.told("Mend sums.py.")
    ran = await place.run(mini(told, dialect, files=FILES), told)
    assert ran.code == 0
    assert await place.file("sums.py") == BROKEN.replace("-", "+")
    assert await place.file("said.txt") == "all good\n"
    records = whole(await place.records())
    assert len(records) == len(engine.calls) == len(place.exchanges) == 4
    for i, record in enumerate(records):
        assert_as_sampled(record, engine, i)
        assert (record.dialect, record.streamed) == (dialect, False)
    # each history goes on from what was captured before it
    for before, after in pairwise(records):
        history = [*before.prompt.messages, before.choices[0].message]
        assert after.prompt.messages[: len(history)] == history
    assert [one["role"] for one in records[1].prompt.messages] == ["system", "user", "assistant", "tool", "tool"]


async def test_a_reply_without_a_command_is_captured_and_left_out_of_the_history(
    engine_of: Start, door_to: Start, places: Start
) -> None:
    rules = [Rule(replies=[Reply(text="I only talk.")], times=1), Rule(replies=[END])]
    place: Place = await places(await door_to(await engine_of(Script(rules))), **await MINI.shown())
    told = place.told("Say what you do.")
    assert (await place.run(mini(told), told)).code == 0
    talked, ended = whole(await place.records())
    # it asks again in words of its own; what the model said is not among them: the history has a branch
    assert [one["role"] for one in ended.prompt.messages] == ["system", "user", "user"]
    assert ended.prompt.messages[:2] == talked.prompt.messages


@pytest.mark.parametrize("dialect", MINI_DIALECTS)
async def test_a_full_queue_is_waited_out(dialect: str, engine_of: Start, door_to: Start, places: Start) -> None:
    full = 529 if dialect == "anthropic.messages" else 503
    rules = [
        Rule(match=Match(last_user="of another"), replies=[Reply(text="Mine.", gate="held")]),
        Rule(replies=[END]),
    ]
    engine = await engine_of(Script(rules))
    door: Door = await door_to(engine, max_concurrent=1)
    place: Place = await places(door, **await MINI.shown())
    told = place.told("End at once.")
    async with door.client("s2") as other:
        taken = asyncio.create_task(
            other.chat.completions.create(model="m", messages=[{"role": "user", "content": "The call of another."}])
        )
        await engine.until(lambda stats: stats.started == 1)
        running = asyncio.create_task(place.run(mini(told, dialect), told))
        await until(lambda: full in place.statuses)
        engine.open("held")
        await taken
        assert (await running).code == 0
    assert set(place.statuses[:-1]) == {full}
    assert place.statuses[-1] == 200
    assert len(whole(await place.records())) == 1


@pytest.mark.parametrize("dialect", MINI_DIALECTS)
async def test_a_prompt_that_is_too_long_ends_it_at_once(
    dialect: str, engine_of: Start, door_to: Start, places: Start
) -> None:
    rules = [Rule(replies=[Reply(text="Read.", tool_calls=[bash("seq 100000 103000"), bash("seq 200000 203000")])])]
    engine = await engine_of(Script(rules), max_model_len=16_000)
    place: Place = await places(await door_to(engine), **await MINI.shown())
    told = place.told("Read much.")
    ran = await place.run(mini(told, dialect, env=TWO_TRIES), told)
    assert ran.code == 1
    assert "ContextWindowExceededError" in ran.out + ran.err
    assert place.statuses[-1] == 400
    assert failures(await place.records()) == [400]  # asked once


@pytest.mark.parametrize("dialect", MINI_DIALECTS)
async def test_a_model_that_the_engine_does_not_serve_ends_it_at_once(
    dialect: str, engine_of: Start, door_to: Start, places: Start
) -> None:
    engine = await engine_of(Script.say("Never."))
    place: Place = await places(await door_to(engine, model="another"), **await MINI.shown())
    told = place.told("Do something.")
    ran = await place.run(mini(told, dialect, env=TWO_TRIES), told)
    assert ran.code == 1
    assert place.statuses == [404]
