"""The table of harness quirks, rows of clients of the Responses API: each has a test here; and the marks they send."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict

from polar.devmodel import Reply, Rule, Script
from polar.proxy.dialects.quirks import QUIRKS
from polar.proxy.record import hints
from tests.proxy.harness import Door
from tests.proxy.responses_harness import (
    FUNCTION,
    TOLD,
    TOOLS,
    USER,
    dialect,
    made,
    messages,
    parse,
    post,
    reply,
    sent_back,
    streamed,
)

Start = Callable[..., Any]
ROWS = [quirk for quirk in QUIRKS if quirk.harness in ("codex", "copilot", "langchain-openai")]


@pytest.mark.parametrize("quirk", ROWS, ids=lambda quirk: quirk.name)
def test_every_quirk_has_its_test_and_its_reason(quirk: Any) -> None:
    assert callable(globals()[quirk.test])
    assert quirk.reason
    assert quirk.version


def test_developer_items_are_system_messages_in_their_place() -> None:
    base, more = ({"type": "message", "role": "developer", "content": said} for said in ("Base.", "More."))
    assert messages(base, *USER, more) == [
        {"role": "system", "content": "Base."},
        *USER,
        {"role": "system", "content": "More."},
    ]


def test_client_metadata_makes_no_difference() -> None:
    passed = {"internal_chat_message_metadata_passthrough": {"create_time": 1.5}}
    one = parse(input=[{**USER[0], **passed}], client_metadata={"a": "1", "b": "2"})
    two = parse(input=USER, client_metadata={"b": "2", "a": "1"})
    assert one.messages == two.messages
    assert one.unknown == 0


def test_a_tool_of_a_namespace_is_called_by_its_namespace() -> None:
    said = {"content": None, "tool_calls": [made("mcp__files__look", "{}")]}
    body = json.loads(dialect().reply(parse(tools=TOOLS), TOLD, reply(said)))
    (item,) = body["output"]
    assert (item["name"], item["namespace"]) == ("look", "mcp__files")
    assert sent_back([item]) == {"role": "assistant", **said}


def test_tools_of_an_item_are_offered_like_the_others() -> None:
    space = {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]}
    item = {"type": "additional_tools", "role": "developer", "tools": [space, {"type": "web_search"}]}
    call = parse(input=[item, *USER], tools=[FUNCTION])
    assert [tool["function"]["name"] for tool in call.tools or ()] == ["get_weather", "functions__exec"]
    assert (call.messages, call.dropped) == (USER, ("web_search",))
    # sent again, as the history is, it changes nothing
    assert parse(input=[item, *USER, item], tools=[FUNCTION]).tools == call.tools


async def test_a_websocket_is_told_to_post(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    async with aiohttp.ClientSession() as http:
        for prefix in ("", f"/s/{door.key()}"):
            with pytest.raises(aiohttp.WSServerHandshakeError) as raised:
                await http.ws_connect(f"{door.url}{prefix}/v1/responses")
            assert raised.value.status == 426
    assert await door.settled() == []


async def test_keep_alives_are_events_of_the_api(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="go")])]))
    door: Door = await door_to(engine, early_headers_after=0.1, keepalive_every=0.05)
    async with aiohttp.ClientSession() as http, post(door, http, stream=True) as response:
        told = streamed(response)
        kinds = [(await anext(told))["type"] for _ in range(4)]
        engine.open("go")
        assert [event async for event in told][-1]["type"] == "response.completed"
    assert kinds == ["response.created", *["response.in_progress"] * 3]


def test_items_with_foreign_ids_are_joined_by_their_order() -> None:
    said = {"content": "So.", "reasoning": "Hm.", "tool_calls": [made("get_weather", "{}"), made("look", "{}", "2")]}
    output = json.loads(dialect().reply(parse(tools=TOOLS), TOLD, reply(said)))["output"]
    assert sent_back([{**item, "id": f"own-{i}"} for i, item in enumerate(output)]) == {"role": "assistant", **said}


def test_an_item_that_a_late_end_was_made_of_is_left_out() -> None:
    said = {"content": "So.", "reasoning": "Hm.", "tool_calls": [made("get_weather", "{}"), made("look", "{}", "2")]}
    call = parse(tools=TOOLS, reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"])
    thought, text, *calls = json.loads(dialect().reply(call, TOLD, reply(said)))["output"]
    sealed = {**thought, "summary": []}
    open_thought = {name: value for name, value in thought.items() if name != "encrypted_content"}
    unnamed = {name: value for name, value in text.items() if name != "id"}
    empty = {**text, "content": [{"type": "output_text", "text": "", "annotations": []}]}
    for late in (empty, {name: value for name, value in empty.items() if name != "id"}):
        assert sent_back([open_thought, unnamed, *calls, sealed, late]) == {"role": "assistant", **said}
    # nothing that says more is left out, and a reply of no words is a turn
    other = dialect().reply(call, TOLD, reply({**said, "reasoning": "Another."}))
    more = {**json.loads(other)["output"][0], "summary": []}
    assert len([one for one in messages(*USER, thought, text, more) if one["role"] == "assistant"]) == 2
    assert messages(*USER, empty)[-1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"session-id": "abc", "originator": "codex_exec"}, {"session": "abc"}),
        (
            {"x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "p"},
            {"subagent": "collab_spawn", "parent": "p"},
        ),
        ({"x-codex-turn-metadata": '{"turn_id":"x","request_kind":"turn"}'}, {"request_kind": "turn"}),
        ({"x-codex-turn-metadata": '{"request_kind": "compaction"}'}, {"request_kind": "compaction"}),
        ({"x-codex-turn-metadata": '{"turn_id":"x"}'}, {}),
    ],
)
def test_marks_are_hints(headers: dict[str, str], told: dict[str, str]) -> None:
    found = hints(CIMultiDict(headers), parse().marks)
    names = ("session", "subagent", "parent", "request_kind")
    assert {name: value for name in names if (value := getattr(found, name)) is not None} == told
    assert hints(CIMultiDict(), parse(prompt_cache_key="k").marks).session == "k"
