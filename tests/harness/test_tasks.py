"""Each coding CLI does a task in a box: it writes, runs, reads, and every call of it is on the log.

npm install --prefix DIR PACKAGE@VERSION …       # the line is in docs/harnesses.md, the variables in adapters.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from polar.devmodel import ChatTokenizer, Match, Reply, Rule, Script
from polar.devmodel.script import View, content_text
from polar.gateway.harness import Launch
from polar.schemas import ClientHints, CompletionCaptured, Label
from tests.harness.adapters import Adapter
from tests.harness.building import DROPPED, OTHER_TEMPLATE, Told, built, expected, traces
from tests.harness.place import Place, captures
from tests.harness.running import each_cli, place_for
from tests.harness_tables import script
from tests.proxy.test_calls import assert_as_sampled

pytestmark = [pytest.mark.harness, pytest.mark.sandbox, pytest.mark.timeout(300)]
Start = Callable[..., Any]
WORKSPACE = "/polar/session/workspace"
SELF_TEST = "polar-self-test"
"""Calls of the proxy's own, when it meets an engine."""
TITLE = Rule(match=Match(tools=False), replies=[Reply(text="A title")])
"""What opencode asks beside the first turn."""


def task(cli: Adapter) -> list[Rule]:
    """A file is written, two commands run side by side (one fails), the file is read, and last words are said."""
    written = cli.write(f"{WORKSPACE}/hello.txt", "hi\n")
    looks = [cli.shell("sleep 0.5; cat hello.txt"), cli.shell("ls nothing-of-that-name")]
    return [
        TITLE,
        Rule(match=Match(turn=1), replies=[Reply(reasoning="A file.", text="I write it.", tool_calls=[written])]),
        Rule(match=Match(turn=2), replies=[Reply(reasoning="Two looks.", tool_calls=looks)]),
        Rule(match=Match(turn=3), replies=[Reply(text="Again.", tool_calls=[cli.read(f"{WORKSPACE}/hello.txt")])]),
        Rule(replies=[Reply(text="It says hi.")]),
    ]


def kind(hints: ClientHints) -> str:
    """What a call is by its marks alone; a builder also looks at the prompts."""
    if hints.request_kind not in (None, "turn"):
        return hints.request_kind
    return "main" if hints.subagent is None else "agent"


def main_calls(records: list[CompletionCaptured]) -> list[CompletionCaptured]:
    return [one for one in records if kind(one.hints) == "main"]


@pytest.mark.parametrize("mode", ["live", "synthetic"])
@pytest.mark.parametrize("cli", each_cli())
async def test_a_task_of_several_turns(
    cli: Adapter, mode: str, engine_of: Start, door_to: Start, places: Start, thoughtful: ChatTokenizer
) -> None:
    thinks = mode == "synthetic" and not OTHER_TEMPLATE
    options = {"tokenizer": thoughtful} if thinks else {}
    engine = await engine_of(Script(task(cli)), reasoning=True, **options)
    place: Place = await place_for(cli, await door_to(engine, stream_mode=mode, delta_prompts=False), places)
    told = place.told()
    # as an adapter launches it, and by the lines in docs/harnesses.md
    launch = cli.launch(told) if mode == "live" else Launch(command=script(cli))
    ran = await place.run(launch, told)
    assert (ran.code, cli.words(ran)) == (0, "It says hi.")
    assert await place.file("hello.txt") == "hi\n"
    records = captures(await place.records())
    await place.dump(f"{cli.name}-task-{mode}")
    # nothing was asked that the proxy does not know, and nothing twice
    assert {one.status for one in place.exchanges} == {200}
    assert len(records) == len(place.exchanges)
    truth = {call.id: i for i, call in enumerate(engine.calls) if call.id != SELF_TEST}
    assert truth.keys() == {one.completion_id for one in records}
    for record in records:
        assert_as_sampled(record, engine, truth[record.completion_id])
        assert record.dialect == cli.dialect
        assert record.streamed
        assert re.search(cli.agent, record.hints.user_agent or "")
        assert (record.hints.session is not None) == cli.tells_session
    turns = main_calls(records)
    assert [kind(one.hints) for one in records if one not in turns] == ["title"] * (cli.name == "opencode")
    assert len({one.hints.session for one in records}) == 1
    # what was told came back as it was captured, but for what this client loses, and each history goes on
    for before, after in pairwise(turns):
        history = [*before.prompt.messages, before.choices[0].message]
        shown = after.prompt.messages[: len(history)]
        assert [returned(cli, one) for one in shown] == [returned(cli, one) for one in history]
    assert [message["role"] for message in turns[2].prompt.messages][-3:] == ["assistant", "tool", "tool"]
    # each result after its own call, whichever ended first
    looked, failed = turns[2].prompt.messages[-2:]
    assert "hi" in str(looked["content"])
    assert "nothing-of-that-name" in str(failed["content"])
    assert [each["tool_call_id"] for each in (looked, failed)] == [
        call["id"] for call in turns[1].choices[0].message["tool_calls"]
    ]
    assert turns[1].choices[0].message["reasoning"]
    assert cli.usage(ran) == (
        sum(len(one.prompt.ids) for one in turns),
        sum(len(choice.ids) for one in turns for choice in one.choices),
    )
    if not OTHER_TEMPLATE:
        # nothing was interrupted: one trace, but for what the template leaves out
        own = [Told("main", 4)] if thinks else [DROPPED, DROPPED, Told("main", 2)]
        assert traces(await built(place)) == expected(cli, *own)
        assert len((await built(place, "per_request")).traces) == len(records)


def counting(cli: Adapter, delegate: dict[str, Any]) -> list[Rule]:
    """The main agent has a sub-agent count, which runs a command of its own."""
    counts = Match(last_user="Count to three", turn=1)
    ended = Reply(text="One, two, three.")
    if cli.name == "gemini-cli":  # its sub-agents end by a tool
        ended = Reply(tool_calls=[{"name": "complete_task", "arguments": {"result": {"response": "One, two, three."}}}])
    rules = [
        TITLE,
        Rule(match=counts, replies=[Reply(tool_calls=[cli.shell("seq 3 > counted.txt")])]),
        Rule(match=Match(last_user="Count to three"), replies=[ended]),
        Rule(match=Match(turn=1), replies=[Reply(tool_calls=[delegate])]),
    ]
    if cli.name == "codex":  # it does not wait for one by itself
        rules.append(Rule(match=Match(turn=2), replies=[wait_for_agent]))
    return [*rules, Rule(replies=[Reply(text="It counted.")])]


def wait_for_agent(view: View) -> Reply:
    started = json.loads(content_text(view.messages[-1]["content"]))
    asked = {"targets": [started["agent_id"]], "timeout_ms": 60_000}
    return Reply(tool_calls=[{"name": "multi_agent_v1__wait_agent", "arguments": asked}])


@pytest.mark.parametrize("cli", each_cli(but="pi"))
async def test_a_sub_agent_is_captured_and_told_apart(
    cli: Adapter, engine_of: Start, door_to: Start, places: Start
) -> None:
    delegate = cli.delegate("Count to three.")
    assert delegate is not None
    engine = await engine_of(Script(counting(cli, delegate)), reasoning=True)
    place: Place = await place_for(cli, await door_to(engine, delta_prompts=False), places)
    told = place.told("Let an agent count.")
    ran = await place.run(cli.launch(told), told)
    assert (ran.code, cli.words(ran)) == (0, "It counted.")
    assert await place.file("counted.txt") == "1\n2\n3\n"
    records = captures(await place.records())
    await place.dump(f"{cli.name}-agent")
    assert {one.completion_id for one in records} == {call.id for call in engine.calls} - {SELF_TEST}

    agent = [one for one in records if is_agent(one)]
    rest = [one for one in records if one not in agent]
    assert len(agent) == 2
    assert {kind(one.hints) for one in agent} == {"agent"}
    others = [kind(one.hints) for one in rest]
    assert others.count("title") == (cli.name == "opencode")
    assert others.count("main") == len(others) - others.count("title") >= 2
    own, main = agent[0].hints, main_calls(records)[0].hints
    assert {one.hints for one in agent} == {own}
    assert own.session == main.session or own.parent == main.session
    if not OTHER_TEMPLATE:
        trajectory = await built(place)
        mains = len(rest) - others.count("title")
        assert traces(trajectory) == expected(cli, Told("main", mains), Told("subagent", 2))
        (delegated,) = [trace for trace in trajectory.traces if trace.label is Label.SUBAGENT]
        assert {turn.completion_id for turn in delegated.turns} == {one.completion_id for one in agent}
    if cli.name == "codex":
        assert own.parent == main.thread == main.session
        assert own.thread not in (None, main.thread)


def is_agent(record: CompletionCaptured) -> bool:
    """Whether the sub-agent's own instruction is what this call's conversation began with."""
    users = [content_text(each.get("content")) for each in record.prompt.messages if each["role"] == "user"]
    return any(text.rstrip().endswith("Count to three.") for text in users)


def returned(cli: Adapter, message: dict[str, Any]) -> dict[str, Any]:
    """A message without what this client does not give back."""
    found = dict(message)
    for lost in cli.loses:
        LOSSES[lost](found)
    return found


def _without_spaces(message: dict[str, Any]) -> None:
    if isinstance(message.get("reasoning"), str):
        message["reasoning"] = message["reasoning"].strip()


def _without_spelling(message: dict[str, Any]) -> None:
    message["tool_calls"] = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or []
    ]


def _without_emptiness(message: dict[str, Any]) -> None:
    message["content"] = message.get("content") or None


LOSSES: dict[str, Callable[[dict[str, Any]], None]] = {
    "spaces": _without_spaces,
    "spelling": _without_spelling,
    "emptiness": _without_emptiness,
}
"""Spaces around a thought; how a call's arguments were spelled; whether a text was empty or absent."""
