"""The table of harness quirks, rows of Claude Code: each has a test here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.proxy.calls import Call
from polar.proxy.dialects import AnthropicMessages, Limits
from polar.proxy.dialects.quirks import QUIRKS

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


def test_results_stand_in_the_order_of_their_calls() -> None:
    used = [{"type": "tool_use", "id": each, "name": "x", "input": {}} for each in "abc"]
    results = {each: {"type": "tool_result", "tool_use_id": each, "content": f"of {each}"} for each in "abcz"}

    def shown(*blocks: Any) -> list[Any]:
        history = [{"role": "assistant", "content": used}, {"role": "user", "content": list(blocks)}]
        return [message["content"] for message in parse(messages=history).messages[1:]]

    in_order = ["of a", "of b", "of c"]
    assert shown(results["c"], results["a"], results["b"]) == shown(*map(results.get, "abc")) == in_order
    assert shown(results["z"], results["b"], results["a"]) == ["of a", "of b", "of z"]
    # what was said between results stays there
    assert shown(results["b"], text("So far."), results["c"], results["a"]) == ["of b", "So far.", "of a", "of c"]
