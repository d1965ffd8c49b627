"""The table of harness quirks, rows of clients of OpenAI's Chat API: each has a test here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from multidict import CIMultiDict

from polar.proxy.calls import Call
from polar.proxy.dialects import Limits, OpenAIChat, Told
from polar.proxy.dialects.quirks import QUIRKS
from polar.proxy.record import hints

HARNESSES = ("qwen-code", "opencode", "pi")


def parse(*messages: Any) -> Call:
    return OpenAIChat().parse(json.dumps({"model": "m", "messages": messages}).encode(), Limits(max_choices=1))


@pytest.mark.parametrize(
    "quirk", [quirk for quirk in QUIRKS if quirk.harness in HARNESSES], ids=lambda quirk: quirk.name
)
def test_every_quirk_has_its_test_and_its_reason(quirk: Any) -> None:
    assert callable(globals()[quirk.test])
    assert quirk.reason
    assert quirk.version


def test_some_keep_alives_are_chunks() -> None:
    encoder = OpenAIChat().stream(parse({"role": "user", "content": "hi"}), Told("1", 0, "m"))
    beats = [encoder.keepalive(beat) for beat in range(16)]
    chunks = [beat.removeprefix(b"data: ") for beat in beats if not beat.startswith(b":")]
    assert len(chunks) == 2
    assert json.loads(chunks[1])["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]


def test_the_memory_agent_is_marked() -> None:
    said = "You are now acting as the managed memory extraction subagent for an AI coding assistant.\nLook."
    call = parse({"role": "system", "content": said}, {"role": "user", "content": "hi"})
    sent = CIMultiDict({"User-Agent": "QwenCode/0.24.4 (linux; x64)"})
    assert hints(sent, call.marks, call.messages, call.tools).request_kind == "side"


def test_arguments_are_passed_on_as_they_came() -> None:
    for arguments in ('{"a":1,"b":"ä"}', '{"a": 1.0}', '{"a": ', ""):
        used = {"id": "1", "type": "function", "function": {"name": "x", "arguments": arguments}}
        (made,) = parse({"role": "assistant", "tool_calls": [used]}).messages[0]["tool_calls"]
        assert made["function"]["arguments"] == arguments


def test_thoughts_are_passed_on_as_they_came() -> None:
    for thought in ("A file.", "\nA file.\n"):
        message = parse({"role": "assistant", "content": "", "reasoning_content": thought}).messages[0]
        assert message["reasoning"] == thought


def test_a_developer_message_is_the_systems() -> None:
    assert parse({"role": "developer", "content": "Be brief."}).messages == [{"role": "system", "content": "Be brief."}]
