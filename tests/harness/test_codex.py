"""What only Codex does: free-form tools, summaries of thinking or none, errors and keep-alives within a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from polar.devmodel import Failure, Match, Reply, Rule, Script
from tests.harness.adapters import BY_NAME
from tests.harness.place import Place, captures, failures
from tests.harness.running import missing, place_for

CODEX = BY_NAME["codex"]
pytestmark = [
    pytest.mark.harness,
    pytest.mark.sandbox,
    pytest.mark.skipif(bool(missing(CODEX)), reason=missing(CODEX)),
    pytest.mark.timeout(240),
]
Start = Callable[..., Any]


@pytest.fixture
def codex(engine_of: Start, door_to: Start, places: Start) -> Start:
    """`await codex(rules, "--flags", early_headers_after=1.0)`: its box and how it ended."""

    async def run(rules: list[Rule], *more: str, model: str | None = None, **settings: Any) -> tuple[Any, Any, Place]:
        engine = await engine_of(Script(rules), reasoning=True)
        place = await place_for(CODEX, await door_to(engine, delta_prompts=False, **settings), places)
        told = place.told()
        told = dataclasses.replace(told, model=model or told.model)
        return await place.run(CODEX.launch(told, more=more), told), engine, place

    return run


async def test_free_form_tools_of_a_known_model(codex: Start) -> None:
    patch = "*** Begin Patch\n*** Add File: hello.txt\n+hi \u00e4\n*** End Patch\n"
    rules = [
        Rule(match=Match(turn=1), replies=[Reply(tool_calls=[{"name": "apply_patch", "arguments": {"input": patch}}])]),
        Rule(replies=[Reply(text="Done.")]),
    ]
    ran, _, place = await codex(rules, model="gpt-5.5")
    assert (ran.code, CODEX.words(ran)) == (0, "Done.")
    assert await place.file("hello.txt") == "hi \u00e4\n"
    first, second = captures(await place.records())
    assert second.prompt.messages[len(first.prompt.messages)] == first.choices[0].message


@pytest.mark.parametrize("mode", ["live", "synthetic"])
async def test_thinking_comes_back_though_no_summary_of_it_is_asked_for(mode: str, codex: Start) -> None:
    rules = [
        Rule(match=Match(turn=1), replies=[Reply(reasoning="A file.", tool_calls=[CODEX.shell("touch hello.txt")])]),
        Rule(replies=[Reply(reasoning="There it is.", text="Done.")]),
    ]
    ran, _, place = await codex(rules, "-c", 'model_reasoning_summary="none"', stream_mode=mode)
    assert ran.code == 0
    for before, after in pairwise(captures(await place.records())):
        assert before.choices[0].message["reasoning"]
        assert after.prompt.messages[len(before.prompt.messages)] == before.choices[0].message


async def test_keep_alives_reset_its_idle_timer(codex: Start) -> None:
    rules = [Rule(replies=[Reply(text="Here.", delay=9)])]
    idle = ("-c", "model_providers.polar.stream_idle_timeout_ms=4000")
    ran, _, place = await codex(rules, *idle, early_headers_after=1.0, keepalive_every=1.0)
    assert (ran.code, CODEX.words(ran)) == (0, "Here.")
    assert len(captures(await place.records())) == len(place.exchanges) == 1


@pytest.mark.parametrize("status", [500, 503])
async def test_an_error_within_the_stream_is_tried_again(status: int, codex: Start) -> None:
    broken = Reply(delay=1.0, error=Failure(status=status, headers={"Retry-After": "1"}))
    rules = [Rule(replies=[broken], times=1), Rule(replies=[Reply(text="Here.")])]
    ran, _, place = await codex(rules, early_headers_after=0.3)
    assert (ran.code, CODEX.words(ran)) == (0, "Here.")
    assert failures(await place.records()) == [200]
    assert place.statuses == [200, 200]
