"""What a call is, as its harness lets it be known: by headers, or by the prompt that it always sends for such calls.

Two tables, each row with the harness and the version in which it was seen. They fill `ClientHints`; nothing in a prompt
is changed for them. Pure data and lookups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Mark(NamedTuple):
    """A header in which a client says what a call is, for `ClientHints`."""

    hint: str
    header: str
    harness: str
    seen: str
    """`measured`, or `read` in the shipped program."""
    word: re.Pattern[str] | None = None
    """Only where the value matches; the hint is then `says`."""
    says: str = ""


MARKS = (
    Mark("session", "X-Claude-Code-Session-Id", "claude-code 2.1.329", "measured"),
    Mark("session", "Session-Id", "codex 0.169.0, opencode 1.18.33", "measured"),
    Mark("session", "X-Session-Id", "opencode 1.18.33", "measured"),
    Mark("session", "Session_id", "pi 0.87.1", "measured"),
    Mark("session", "X-Session-Affinity", "opencode 1.18.33", "measured"),
    Mark("subagent", "X-Claude-Code-Agent-Id", "claude-code 2.1.329", "measured"),
    Mark("parent", "X-Claude-Code-Parent-Agent-Id", "claude-code 2.1.329", "read"),
    Mark("parent", "X-Parent-Session-Id", "opencode 1.18.33", "measured"),
    # only its sub-agents have a parent, and nothing else names them
    Mark("subagent", "X-Parent-Session-Id", "opencode 1.18.33", "measured", word=re.compile(r"."), says="true"),
    Mark("subagent", "X-Openai-Subagent", "codex 0.169.0", "measured"),
    Mark("parent", "X-Codex-Parent-Thread-Id", "codex 0.169.0", "measured"),
    Mark("thread", "Thread-Id", "codex 0.169.0", "measured"),
    *(
        Mark(
            "request_kind",
            "X-Codex-Turn-Metadata",
            "codex 0.169.0",
            "measured",
            word=re.compile(rf'"request_kind":\s*"{kind}"'),
            says=kind,
        )
        for kind in ("turn", "compaction")
    ),
    Mark("request_kind", "X-Claude-Code-Request-Class", "claude-code 2.1.329", "read"),
    Mark(
        "request_kind",
        "Anthropic-Beta",
        "claude-code 2.1.329",
        "measured",
        word=re.compile(r"\bfallback-credit-"),
        says="compaction",
    ),
    Mark("request_kind", "X-Interaction-Type", "copilot 1.0.102", "measured"),
)
"""In order; the first that says anything wins."""


class Tell(NamedTuple):
    """What a call of a harness is known by where no header says it: a tool, or the head of its system prompt or of its
    last message, if that is the user's."""

    hint: str
    says: str
    harness: str
    seen: str
    """`measured`, or `read` in the shipped program."""
    agent: re.Pattern[str]
    """Its User-Agent; prompts of other harnesses are not looked at."""
    system: re.Pattern[str] | None = None
    last: re.Pattern[str] | None = None
    tool: str = ""
    reason: str = ""


_GEMINI, _QWEN, _OPENCODE = (re.compile(rf"\A{name}") for name in ("GeminiCLI", "QwenCode/", "opencode/"))


def _begins(text: str) -> re.Pattern[str]:
    return re.compile(rf"\A\s*{text}")


TELLS = (
    Tell(
        "subagent",
        "true",
        "gemini-cli 0.61.0",
        "measured",
        _GEMINI,
        tool="complete_task",
        reason="a sub-agent ends by this tool, and the main agent has no such tool",
    ),
    Tell(
        "request_kind",
        "compaction",
        "gemini-cli 0.61.0",
        "read",
        _GEMINI,
        system=_begins("You are a specialized system component responsible for distilling chat history"),
        reason="it asks for a summary that the next conversation begins with",
    ),
    Tell(
        "request_kind",
        "classifier",
        "gemini-cli 0.61.0",
        "measured",
        _GEMINI,
        system=_begins("You are a (?:specialized )?Task Routing AI"),
        reason="without `-m` it asks which model a prompt deserves",
    ),
    Tell(
        "request_kind",
        "probe",
        "gemini-cli 0.61.0",
        "read",
        _GEMINI,
        system=_begins("You are a diagnostic agent that determines whether a conversational AI assistant is stuck"),
        reason="it asks whether the conversation is in a loop",
    ),
    Tell(
        "request_kind",
        "side",
        "gemini-cli 0.61.0",
        "read",
        _GEMINI,
        system=_begins("You are an expert code-editing assistant"),
        reason="it has an edit that failed repaired",
    ),
    Tell(
        "subagent",
        "true",
        "qwen-code 0.24.4",
        "measured",
        _QWEN,
        system=_begins("You are a (?:general-purpose subagent|file search specialist agent)"),
        reason="no header tells it from its parent",
    ),
    Tell(
        "request_kind",
        "compaction",
        "qwen-code 0.24.4",
        "measured",
        _QWEN,
        last=_begins("You are the component that summarizes a conversation"),
        reason="on top of the whole conversation it asks for a summary that the next one begins with",
    ),
    Tell(
        "request_kind",
        "compaction",
        "qwen-code 0.24.4",
        "measured",
        _QWEN,
        system=_begins("You are the component that summarizes a conversation"),
        reason="the same, where the conversation is too long to be asked on top of",
    ),
    Tell(
        "request_kind",
        "side",
        "qwen-code 0.24.4",
        "measured",
        _QWEN,
        system=_begins("You are now acting as the managed memory extraction subagent"),
        reason="after some turns it looks for what to remember, unless `memory.enableManagedAutoMemory` is false",
    ),
    Tell(
        "request_kind",
        "title",
        "opencode 1.18.33",
        "measured",
        _OPENCODE,
        system=_begins("You are a title generator"),
        reason="asked beside the first turn, unless `--title` is given",
    ),
    Tell(
        "request_kind",
        "compaction",
        "opencode 1.18.33",
        "measured",
        _OPENCODE,
        system=_begins("You are a context summarization agent"),
        reason="it asks for a summary that the conversation goes on from",
    ),
)


def marked(headers: Mapping[str, str]) -> dict[str, str]:
    """The hints that headers give."""
    found: dict[str, str] = {}
    for mark in MARKS:
        value = headers.get(mark.header)
        if not value or mark.hint in found or (mark.word is not None and not mark.word.search(value)):
            continue
        found[mark.hint] = mark.says or value
    return found


def known_by(agent: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The hints that a prompt gives, to who knows the harness by its User-Agent. Messages and tools as in `Call`."""
    found: dict[str, str] = {}
    for tell in TELLS:
        if tell.hint in found or not tell.agent.match(agent):
            continue
        if tell.tool:
            holds = any(tool.get("function", {}).get("name") == tell.tool for tool in tools)
        elif tell.system is not None:
            holds = _holds(tell.system, messages[:1], "system")
        else:
            holds = tell.last is not None and _holds(tell.last, messages[-1:], "user")
        if holds:
            found[tell.hint] = tell.says
    return found


def _holds(pattern: re.Pattern[str], messages: Sequence[Mapping[str, Any]], role: str) -> bool:
    """Whether a text of these messages, if they are that role's, begins so."""
    for message in messages:
        content = message.get("content") if message.get("role") == role else None
        for text in [part.get("text") for part in content] if isinstance(content, list) else [content]:
            if isinstance(text, str) and pattern.match(text):
                return True
    return False
