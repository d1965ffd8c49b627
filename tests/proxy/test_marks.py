"""How calls are told apart: every row of the two tables, and which wins."""

from __future__ import annotations

import re
from typing import Any

import pytest
from multidict import CIMultiDict

from polar.proxy.dialects.marks import MARKS, TELLS, Tell
from polar.proxy.record import HINT_LENGTH, hints
from polar.schemas import ClientHints


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
    assert told({"X-Session-Id": "o", "X-Parent-Session-Id": "q"}) == ClientHints(
        session="o", parent="q", subagent="true"
    )
    assert len(told({"X-Session-Id": "o" * 999}).session or "") == HINT_LENGTH


def test_marks_name_fields_of_the_record() -> None:
    assert {mark.hint for mark in MARKS} <= set(ClientHints.__struct_fields__)


AGENTS = {"gemini-cli": "GeminiCLI-tui/0.61.0/m", "qwen-code": "QwenCode/0.24.4", "opencode": "opencode/1.18.33 x"}


def prompt(tell: Tell) -> tuple[list[Any], list[Any]]:
    """Messages and tools by which a call is known."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("read", tell.tool) if name]
    system, last = _said(tell.system) or "You are an agent.", _said(tell.last) or "Go on."
    return [
        {"role": "system", "content": f"{system} And more."},
        {"role": "user", "content": f"{last} And more."},
    ], tools


def _said(pattern: re.Pattern[str] | None) -> str:
    """A text that begins as the pattern says."""
    if pattern is None:
        return ""
    said = re.sub(r"\(\?:([^|]*)\|[^)]*\)", r"\1", pattern.pattern.removeprefix(r"\A\s*"))
    return re.sub(r"\(\?:[^)]*\)\?", "", said)


@pytest.mark.parametrize("tell", TELLS, ids=lambda tell: f"{tell.harness}-{tell.says}")
def test_a_prompt_says_what_a_call_is_to_who_knows_its_harness(tell: Tell) -> None:
    messages, tools = prompt(tell)
    agent = AGENTS[tell.harness.split()[0]]
    known = hints(CIMultiDict({"User-Agent": agent}), {}, messages, tools)
    assert getattr(known, tell.hint) == tell.says
    assert tell.reason
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    assert getattr(hints(CIMultiDict({"User-Agent": agent}), {}, parts, tools), tell.hint) == tell.says
    # the same words of another harness, of a user, or further down say nothing
    assert hints(CIMultiDict({"User-Agent": "curl/8"}), {}, messages, tools) == ClientHints(user_agent="curl/8")
    swapped = [{**messages[0], "role": "user"}, {**messages[1], "role": "assistant"}]
    quoted = [{**message, "content": f"Never say: {message['content']}"} for message in messages]
    for others in (swapped, quoted, [*messages[1:], *messages[:1]]):
        assert hints(CIMultiDict({"User-Agent": agent}), {}, others, []) == ClientHints(user_agent=agent)


def test_headers_win_over_the_body_and_the_body_over_the_prompt() -> None:
    title = [{"role": "system", "content": "You are a title generator. You output ONLY a thread title."}]
    agent = {"User-Agent": AGENTS["opencode"]}
    assert hints(CIMultiDict(agent), {}, title).request_kind == "title"
    assert hints(CIMultiDict(agent), {"request_kind": "of the body"}, title).request_kind == "of the body"
    sent = {**agent, "X-Interaction-Type": "of a header"}
    assert hints(CIMultiDict(sent), {"request_kind": "of the body"}, title).request_kind == "of a header"


def test_codex_names_its_threads() -> None:
    sent = {"Session-Id": "s", "Thread-Id": "t", "X-Codex-Parent-Thread-Id": "s", "X-Openai-Subagent": "collab_spawn"}
    assert told(sent) == ClientHints(session="s", thread="t", parent="s", subagent="collab_spawn")
