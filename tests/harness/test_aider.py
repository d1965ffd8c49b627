"""The real aider against the proxy, where it is installed (`aider`, or what AIDER_CLI names).

It lives in a virtual environment of its own; `.ci/install-harnesses` makes one. Aider knows no tools: the model writes
edits as blocks of text, and what they come to (a block that does not fit, a test that fails) is aider's next message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from polar.devmodel import Failure, Match, Reply, Rule, Script
from tests.harness.place import Place, failures
from tests.harness.python_clis import AIDER, aider, until, whole
from tests.proxy.harness import Door
from tests.proxy.test_calls import assert_as_sampled

pytestmark = [pytest.mark.harness, pytest.mark.sandbox, AIDER.needed, pytest.mark.timeout(300)]
Start = Callable[..., Any]
BROKEN = "def add(a, b):\n    return a - b\n"
FILES = {"sums.py": BROKEN, "check.py": "from sums import add\nassert add(2, 3) == 5, add(2, 3)\nprint('all good')\n"}
WRONG = {"sums.py": BROKEN.replace("-", "*")}
CHECKED = ("--auto-test", "--test-cmd", "python -B check.py")


def edit(path: str, search: str, replace: str) -> str:
    return f"I change it.\n\n{path}\n```python\n<<<<<<< SEARCH\n{search}=======\n{replace}>>>>>>> REPLACE\n```\n"


RIGHT = Reply(text=edit("sums.py", "    return a * b\n", "    return a + b\n"))
TASK = [
    Rule(
        match=Match(last_user="Mend add"),
        replies=[Reply(text=edit("sums.py", "    result = a - b\n    return result\n", "    return a * b\n"))],
    ),
    Rule(
        match=Match(last_user="failed to match"),
        replies=[Reply(text=edit("sums.py", "    return a - b\n", "    return a * b\n"))],
    ),
    Rule(match=Match(last_user="AssertionError: 6"), replies=[RIGHT]),
]


@pytest.mark.parametrize("mode", ["live", "synthetic"])
async def test_a_task_with_an_edit_that_does_not_fit_and_a_test_that_fails(
    mode: str, engine_of: Start, door_to: Start, places: Start
) -> None:
    engine = await engine_of(Script(TASK))
    place: Place = await places(await door_to(engine, stream_mode=mode), **await AIDER.shown())
    told = place.told("Mend add in sums.py.")
    ran = await place.run(aider(told, *CHECKED, "sums.py", files=FILES), told)
    assert ran.code == 0
    assert await place.file("sums.py") == BROKEN.replace("-", "+")
    records = whole(await place.records())
    assert len(records) == len(engine.calls) == len(place.exchanges) == 3
    for i, record in enumerate(records):
        assert_as_sampled(record, engine, i)
        assert (record.dialect, record.streamed) == ("openai.chat", True)
    # no prompt goes on from the one before: the last user's message stands behind the files as they are now and ends
    # with the rules of edits; later it stands in front of them and without. The reply loses white space at its end
    for before, after in pairwise(records):
        asked, replied = before.prompt.messages[-1], before.choices[0].message
        at = after.prompt.messages.index({**replied, "content": replied["content"].rstrip()})
        again = after.prompt.messages[at - 1]
        assert asked["role"] == again["role"] == "user"
        assert asked["content"].startswith(again["content"] + "\n")
        assert again != before.prompt.messages[at - 1]


async def test_a_full_queue_is_waited_out(engine_of: Start, door_to: Start, places: Start) -> None:
    rules = [
        Rule(match=Match(last_user="of another"), replies=[Reply(text="Mine.", gate="held")]),
        Rule(replies=[RIGHT]),
    ]
    engine = await engine_of(Script(rules))
    door: Door = await door_to(engine, max_concurrent=1)
    place: Place = await places(door, **await AIDER.shown())
    told = place.told("Mend add in sums.py.")
    async with door.client("s2") as other:
        taken = asyncio.create_task(
            other.chat.completions.create(model="m", messages=[{"role": "user", "content": "The call of another."}])
        )
        await engine.until(lambda stats: stats.started == 1)
        running = asyncio.create_task(place.run(aider(told, "sums.py", files=WRONG), told))
        await until(lambda: 503 in place.statuses)
        engine.open("held")
        await taken
        assert (await running).code == 0
    assert await place.file("sums.py") == BROKEN.replace("-", "+")
    assert set(place.statuses[:-1]) == {503}
    assert place.statuses[-1] == 200
    assert len(whole(await place.records())) == 1


async def test_an_engine_that_is_overloaded_is_waited_for(engine_of: Start, door_to: Start, places: Start) -> None:
    full = Reply(error=Failure(status=503, headers={"Retry-After": "1"}))
    engine = await engine_of(Script([Rule(replies=[full], times=2), Rule(replies=[RIGHT])]))
    place: Place = await places(await door_to(engine), **await AIDER.shown())
    told = place.told("Mend add in sums.py.")
    assert (await place.run(aider(told, "sums.py", files=WRONG), told)).code == 0
    assert await place.file("sums.py") == BROKEN.replace("-", "+")
    assert place.statuses == [503, 503, 200]
    assert failures(await place.records()) == [503, 503]


async def test_a_prompt_that_is_too_long_ends_it_at_once(engine_of: Start, door_to: Start, places: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[RIGHT])]), max_model_len=1_000)
    place: Place = await places(await door_to(engine), **await AIDER.shown())
    told = place.told("Mend add in sums.py.")
    ran = await place.run(aider(told, "sums.py", files=FILES), told)
    assert ran.code == 0  # as always: what became of the task is not its exit code
    assert "has hit a token limit" in ran.out
    assert await place.file("sums.py") == BROKEN
    assert place.statuses == failures(await place.records()) == [400]


async def test_a_model_that_the_engine_does_not_serve_is_told_as_such(
    engine_of: Start, door_to: Start, places: Start
) -> None:
    engine = await engine_of(Script.say("Never."))
    place: Place = await places(await door_to(engine, model="another"), **await AIDER.shown())
    told = place.told("Mend add in sums.py.")
    ran = await place.run(aider(told, "sums.py", files=FILES), told)
    assert ran.code == 0
    assert "the engine does not serve another" in ran.out
    assert place.statuses == [404]
