"""The table of harness quirks: each row has a test of its own here, and the marks that clients send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from multidict import CIMultiDict

from polar.proxy.calls import Call
from polar.proxy.dialects import AnthropicMessages, Limits
from polar.proxy.dialects.quirks import MARKS, QUIRKS
from polar.proxy.record import HINT_LENGTH, hints
from polar.schemas import ClientHints

BILLING = "x-anthropic-billing-header: cc_version=2.1.329.{}; cc_entrypoint=sdk-cli;{}"


def parse(**fields: Any) -> Call:
    body = {"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}], **fields}
    return AnthropicMessages().parse(json.dumps(body).encode(), Limits(max_choices=1))


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


@pytest.mark.parametrize(
    "quirk", [quirk for quirk in QUIRKS if quirk.harness == "claude-code"], ids=lambda quirk: quirk.name
)
def test_every_quirk_has_its_test_and_its_reason(quirk: Any) -> None:
    assert callable(globals()[quirk.test])
    assert quirk.reason
    assert quirk.version


def test_the_billing_line_does_not_reach_the_prompt() -> None:
    rest = [text("You are an agent."), text("Be brief.")]
    calls = [parse(system=[text(BILLING.format(suffix, "")), *rest]) for suffix in ("c10", "f7e")]
    for call in calls:
        assert call.messages[0] == {"role": "system", "content": rest}
        assert call.marks == {}
    subagent = parse(system=[text(BILLING.format("c10", " cc_is_subagent=true;")), *rest])
    assert subagent.messages == calls[0].messages
    assert subagent.marks == {"subagent": "true"}
    # older versions: the first line of the one text
    assert parse(system=BILLING.format("c10", "") + "\nBe brief.").messages[0]["content"] == "Be brief."
    assert parse(system=[text(BILLING.format("c10", ""))]).messages[0]["role"] == "user"
    # what only speaks of it stays
    told = "Explain x-anthropic-billing-header: it is a header."
    assert parse(system=told).messages[0]["content"] == told


def test_cache_marks_and_one_text_lists_make_no_difference() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    history: list[Any] = [
        {"role": "user", "content": [text("hi", **mark)]},
        {"role": "system", "content": [text("Environment", **mark)]},
        {
            "role": "assistant",
            "content": [text("I look."), {"type": "tool_use", "id": "1", "name": "x", "input": {}, **mark}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [text("ok", **mark)]}]},
    ]
    plain: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "Environment"},
        {"role": "assistant", "content": [text("I look."), {"type": "tool_use", "id": "1", "name": "x", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "ok", **mark}]},
    ]
    assert parse(messages=history).messages == parse(messages=plain).messages


def test_a_system_message_stays_where_it_was_sent() -> None:
    sent = [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "Environment", "output_config": {"effort": "high"}},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And now?"},
    ]
    roles = [message["role"] for message in parse(system="Be brief.", messages=sent).messages]
    assert roles == ["system", "user", "system", "assistant", "user"]


def test_reported_roles_are_taken_for_known_ones() -> None:
    found = parse(messages=[{"role": "msg", "content": "hi"}, {"role": "ctx", "content": "here"}]).messages
    assert [message["role"] for message in found] == ["user", "system"]


def test_a_deferred_tool_is_shown_once_it_is_referred_to() -> None:
    tools = [
        {"name": "ToolSearch", "input_schema": {}},
        {"name": "mcp__x__y", "input_schema": {}, "defer_loading": True},
        {"name": "DeferredToolPlaceholder", "input_schema": {}, "defer_loading": True},
    ]

    def shown(**fields: Any) -> list[str]:
        return [tool["function"]["name"] for tool in parse(tools=tools, **fields).tools or ()]

    assert shown() == ["ToolSearch"]
    found = {
        "type": "tool_result",
        "tool_use_id": "1",
        "content": [{"type": "tool_reference", "tool_name": "mcp__x__y"}],
    }
    assert shown(messages=[{"role": "user", "content": [found]}]) == ["ToolSearch", "mcp__x__y"]
    tools[1].pop("defer_loading")
    assert shown() == ["ToolSearch", "mcp__x__y"]


def test_a_date_in_the_prompt_is_left_alone() -> None:
    said = "Today's date is 2026-11-21."
    assert parse(system=said).messages[0]["content"] == said


def test_arguments_come_back_as_models_write_them() -> None:
    used = {"type": "tool_use", "id": "1", "name": "x", "input": {"path": "ä", "lines": [1, 2], "deep": {"a": None}}}
    history = [{"role": "assistant", "content": [used]}, {"role": "user", "content": "go on"}]
    (made,) = parse(messages=history).messages[0]["tool_calls"]
    assert made["function"]["arguments"] == '{"path": "ä", "lines": [1, 2], "deep": {"a": null}}'


def told(headers: dict[str, str], **marks: str) -> ClientHints:
    return hints(CIMultiDict(headers), marks)


def test_headers_say_what_a_call_is() -> None:
    assert told(
        {
            "User-Agent": "claude-cli/2.1.329 (external, sdk-cli)",
            "X-Claude-Code-Session-Id": "s",
            "x-claude-code-agent-id": "a",
            "x-claude-code-parent-agent-id": "p",
            "x-claude-code-request-class": "subagent",
        },
        session="of the body",
    ) == ClientHints(
        user_agent="claude-cli/2.1.329 (external, sdk-cli)",
        session="s",
        subagent="a",
        parent="p",
        request_kind="subagent",
    )
    assert told({"anthropic-beta": "x-2026,fallback-credit-2026-01-01"}).request_kind == "compaction"
    assert told({"anthropic-beta": "x-2026"}).request_kind is None
    assert told({}, session="of the body").session == "of the body"
    assert told({"X-Session-Id": "o", "X-Parent-Session-Id": "q"}) == ClientHints(session="o", parent="q")
    assert len(told({"X-Session-Id": "o" * 999}).session or "") == HINT_LENGTH


def test_marks_name_fields_of_the_record() -> None:
    assert {mark.hint for mark in MARKS} <= set(ClientHints.__struct_fields__)


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ('{"device_id":"d","account_uuid":"","session_id":"fbb6aa62"}', "fbb6aa62"),
        ("user_ab_account__session_0b1c2d3e-0000-4000-8000-000000000000", "0b1c2d3e-0000-4000-8000-000000000000"),
        ("somebody", None),
        ("[1]", None),
        ('{"session_id": 7}', None),
    ],
)
def test_the_session_in_the_metadata_is_a_mark(user_id: str, session: str | None) -> None:
    assert parse(metadata={"user_id": user_id}).marks.get("session") == session
