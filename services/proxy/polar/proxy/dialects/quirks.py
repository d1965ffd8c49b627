"""What particular harnesses send beside their provider's API, and what is done about it.

One table: harness, the version in which it was seen, the reason, and the test that shows it. What is not here is passed
on as it came; text of a prompt is changed only where a row says so, because the prompt is what the model is trained on.
Pure data and lookups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirk:
    """One habit of one harness."""

    name: str
    harness: str
    version: str
    """In which it was seen, or where it was read of."""
    sends: str
    done: str
    reason: str
    test: str
    """The function that shows it, in `tests/proxy/test_anthropic_quirks.py`."""
    cuts: re.Pattern[str] | None = None
    """Cut from the beginning of a system text."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Roles of messages, and what they are taken for."""


QUIRKS = (
    Quirk(
        name="billing line",
        harness="claude-code",
        version="2.1.329",
        sends="a text `x-anthropic-billing-header: cc_version=…; cc_entrypoint=…;` at the head of the system prompt",
        done="cut; its `cc_is_subagent=true` becomes a mark",
        reason="its hash is of the first user text (of each request in older versions): it breaks prefixes and caches, "
        "and is meant for a biller, not a model",
        test="test_the_billing_line_does_not_reach_the_prompt",
        cuts=re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*(?:\n|\Z)"),
    ),
    Quirk(
        name="moving cache marks",
        harness="claude-code",
        version="2.1.329",
        sends="`cache_control` on the last message of each request only, and a content that is a list of one text with "
        "it and a string without",
        done="marks are left out, one text is a string",
        reason="the same message would differ from turn to turn",
        test="test_cache_marks_and_one_text_lists_make_no_difference",
    ),
    Quirk(
        name="system messages in the conversation",
        harness="claude-code",
        version="2.1.329",
        sends="`role: system` as messages[1] (environment, skills, deferred tools), for known models with "
        "`output_config`",
        done="left where it is; folded into the user message before it only where the engine's template refuses it",
        reason="moving it to the front would change the head of every later prompt",
        test="test_a_system_message_stays_where_it_was_sent",
    ),
    Quirk(
        name="roles ctx and msg",
        harness="claude-code",
        version="reported of newer versions; not in 2.1.329",
        sends="messages of the roles `ctx` and `msg`",
        done="taken for `system` and `user`",
        reason="refusing them would end the session; the mapping follows their names and is not measured",
        test="test_reported_roles_are_taken_for_known_ones",
        roles={"ctx": "system", "msg": "user"},
    ),
    Quirk(
        name="deferred tools",
        harness="claude-code",
        version="2.1.329",
        sends="tools with `defer_loading`, among them DeferredToolPlaceholder; after ToolSearch they come without it, "
        "or as `tool_reference` in its result",
        done="not shown to the model before they are referred to",
        reason="that is what the field says; the placeholder's own text asks never to be called",
        test="test_a_deferred_tool_is_shown_once_it_is_referred_to",
    ),
    Quirk(
        name="day's date",
        harness="claude-code",
        version="2.1.329",
        sends="today's date in the first messages",
        done="nothing",
        reason="it is fixed when a session begins, so it breaks no prefix within one, and it is part of what the model "
        "was shown",
        test="test_a_date_in_the_prompt_is_left_alone",
    ),
    Quirk(
        name="re-serialized arguments",
        harness="claude-code",
        version="2.1.329",
        sends="a tool call's input as an object of its own making (1.0 comes back as 1)",
        done="written as models write it, with a space after colons and commas",
        reason="the dialect's shape is an object; only numbers' spelling is lost, which drift shows",
        test="test_arguments_come_back_as_models_write_them",
    ),
)

IS_SUBAGENT = re.compile(r"\bcc_is_subagent=true\b")


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
    Mark("session", "X-Session-Id", "opencode 1.18.33", "measured"),
    Mark("session", "Session_id", "pi 0.87.1", "measured"),
    Mark("session", "X-Session-Affinity", "opencode 1.18.33", "measured"),
    Mark("subagent", "X-Claude-Code-Agent-Id", "claude-code 2.1.329", "measured"),
    Mark("parent", "X-Claude-Code-Parent-Agent-Id", "claude-code 2.1.329", "read"),
    Mark("parent", "X-Parent-Session-Id", "opencode 1.18.33", "measured"),
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


def cut_system(text: str) -> tuple[str, dict[str, str]]:
    """A system text without what is cut from it, and the marks found in the cut."""
    marks: dict[str, str] = {}
    for quirk in QUIRKS:
        found = None if quirk.cuts is None else quirk.cuts.match(text)
        if found is not None:
            if IS_SUBAGENT.search(found.group()):
                marks["subagent"] = "true"
            text = text[found.end() :]
    return text, marks


def known_role(role: object) -> object:
    """The role that a message's role is taken for."""
    return next((quirk.roles[role] for quirk in QUIRKS if isinstance(role, str) and role in quirk.roles), role)


def marked(headers: Mapping[str, str]) -> dict[str, str]:
    """The hints that headers give."""
    found: dict[str, str] = {}
    for mark in MARKS:
        value = headers.get(mark.header)
        if not value or mark.hint in found or (mark.word is not None and not mark.word.search(value)):
            continue
        found[mark.hint] = mark.says or value
    return found
