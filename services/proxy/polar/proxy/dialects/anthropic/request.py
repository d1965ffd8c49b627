"""A request of the Messages API as a `Call`. Pure."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from polar.schemas import Sampling

from ...calls import Call, Json
from ...errors import BadRequest
from ..base import Limits, json_object
from ..fields import Action, names
from .checks import of_validation, one_of, wrong
from .content import Reading, conversation
from .fields import FIELDS
from .tools import chosen, offered

REFUSED = {one.path: one.note for one in FIELDS if one.path.isidentifier() and one.action is Action.REFUSED}
BY_SETTING = names(FIELDS, Action.SETTING)
KNOWN = names(FIELDS, *Action)
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""The words that every engine knows."""
THINKING = ("enabled", "disabled", "adaptive", "between_tools")
MAX_STOPS = 64
SESSION_IN_USER_ID = re.compile(r"_session_([0-9a-fA-F-]{36})\Z")
"""Of Claude Code before it sent JSON."""


class _Body(msgspec.Struct):
    """The fields that are read; null is as good as absent."""

    model: str
    messages: list[Json]
    max_tokens: int | None = None
    system: str | list[Json] | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    metadata: Json | None = None
    output_config: Json | None = None
    output_format: Json | None = None


def read(body: bytes, limits: Limits, *, dialect: str, counting: bool = False) -> Call:
    """The call that a body asks for; `counting`: only to count its prompt, so `max_tokens` may be absent.

    Raises:
        BadRequest: naming the field, in Anthropic's words.
    """
    raw = json_object(body)
    try:
        return _read(raw, limits, dialect, counting)
    except RecursionError:
        raise BadRequest("The body is nested too deep.") from None


def _read(raw: Json, limits: Limits, dialect: str, counting: bool) -> Call:
    for name, why in REFUSED.items():
        if raw.get(name):
            raise wrong(name, f"not supported here: {why}")
    dropped = [name for name in sorted(BY_SETTING) if raw.get(name)]
    if dropped and limits.provider_tools == "refuse":
        raise wrong(dropped[0], "belongs to tools of the provider's, which are not available here.")
    try:
        asked = msgspec.convert(raw, _Body)
    except msgspec.ValidationError as error:
        raise of_validation(error) from None
    if not asked.messages:
        raise wrong("messages", "at least one message is required")
    reading = Reading(limits)
    messages = conversation(asked.system, asked.messages, reading)
    if not messages:
        raise wrong("messages", "there is no text in them")
    tools = offered(asked.tools, reading.changes, limits)
    extras, marks = chosen(asked.tool_choice, tools)
    extras |= _prefill(messages)
    extras |= _template(asked, limits)
    form = _format(asked)
    if form is not None:
        extras["response_format"] = form
        marks.append("grammar")
    return Call(
        dialect=dialect,
        model=asked.model,
        messages=messages,
        tools=tools.functions,
        extras=extras,
        asked=_sampling(asked, counting),
        stream=bool(asked.stream),
        include_usage=True,
        constraints=tuple(marks),
        unknown=len(raw.keys() - KNOWN),
        media=tuple(reading.media),
        marks=_marks(asked.metadata) | reading.marks,
        dropped=(*dropped, *tools.dropped, *reading.dropped),
        hide_thinking=(asked.thinking or {}).get("display") == "omitted",
    )


def _sampling(asked: _Body, counting: bool) -> Sampling:
    if asked.max_tokens is None and not counting:
        raise wrong("max_tokens", "Field required")
    if asked.max_tokens is not None and asked.max_tokens < 1:
        raise wrong("max_tokens", "Input should be greater than or equal to 1")
    for name in ("temperature", "top_p"):
        value = getattr(asked, name)
        if value is not None and not 0.0 <= value <= 1.0:
            raise wrong(name, "range: 0..1")
    if asked.top_k is not None and asked.top_k < 0:
        raise wrong("top_k", "Input should be greater than or equal to 0")
    stop = asked.stop_sequences or []
    if len(stop) > MAX_STOPS:
        raise wrong("stop_sequences", f"List should have at most {MAX_STOPS} items")
    if any(not one.strip() for one in stop):
        raise wrong("stop_sequences", "each stop sequence must contain non-whitespace")
    return Sampling(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k or None,
        max_tokens=asked.max_tokens,
        stop=stop,
        n=1,
    )


def _prefill(messages: list[Json]) -> Json:
    """A conversation that ends with the assistant's words is gone on with, not answered."""
    last = messages[-1]
    if last["role"] != "assistant":
        return {}
    content = last["content"]
    if last.get("tool_calls"):
        raise wrong("messages", "`tool_use` ids were found without `tool_result` blocks immediately after")
    said = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    if not said:
        raise wrong("messages", "the final assistant message has no text to go on with")
    if said != said.rstrip():
        raise wrong("messages", "final assistant content cannot end with trailing whitespace")
    return {"add_generation_prompt": False, "continue_final_message": True}


def _template(asked: _Body, limits: Limits) -> Json:
    """Whether and how hard the model thinks, as chat templates are told it."""
    extras: Json = {}
    kind = None if asked.thinking is None else one_of(asked.thinking.get("type"), THINKING, "thinking.type")
    effort = (asked.output_config or {}).get("effort")
    if effort is not None:
        effort = EFFORTS[one_of(effort, tuple(EFFORTS), "output_config.effort")]
    if limits.thinking_switch == "template":
        return extras
    if kind is not None:
        # templates know the one name or the other, and ignore what they do not know
        on = kind != "disabled"
        extras["chat_template_kwargs"] = {"enable_thinking": on, "thinking": on}
    if effort is not None:
        extras["reasoning_effort"] = effort
    return extras


def _format(asked: _Body) -> Json | None:
    given = (asked.output_config or {}).get("format") or asked.output_format
    if given is None:
        return None
    where = "output_config.format" if asked.output_format is None else "output_format"
    if not isinstance(given, dict) or given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise wrong(where, "Input should be an object with `type: json_schema` and a `schema`")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"]}}


def _marks(metadata: Json | None) -> dict[str, str]:
    """The session that Claude Code writes into `metadata.user_id`."""
    told: Any = (metadata or {}).get("user_id")
    if told is None:
        return {}
    if not isinstance(told, str):
        raise wrong("metadata.user_id", "Input should be a valid string")
    try:
        session = msgspec.json.decode(told).get("session_id")
    except (msgspec.DecodeError, AttributeError, RecursionError):
        found = SESSION_IN_USER_ID.search(told)
        session = found.group(1) if found else None
    return {"session": session} if isinstance(session, str) and session else {}
