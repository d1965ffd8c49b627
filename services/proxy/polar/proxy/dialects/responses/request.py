"""A request of the Responses API as a `Call`. Pure, but for what the session's memory is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from polar.schemas import Sampling

from ...calls import Call, Json
from ...errors import BadRequest
from ..base import Limits, json_object
from ..fields import Action, names
from .checks import listed, mapping, missing, of_validation, one_of, text, unsupported, wrong
from .fields import FIELDS
from .items import conversation
from .memory import Recall
from .reading import Reading
from .tools import Offered, Tool, chosen, offered

REFUSED = {one.path: one.note for one in FIELDS if one.path.isidentifier() and one.action is Action.REFUSED}
KNOWN = names(FIELDS, *Action)
EFFORTS = {
    "none": None,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""The words that every engine knows; none: the model does not think."""
SUMMARIES = ("auto", "concise", "detailed", "none")
MAX_TOP_LOGPROBS = 20
SEALED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"


class _Body(msgspec.Struct):
    """The fields that are read; null is as good as absent."""

    model: str | None = None
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Json | None = None
    text: Json | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    max_tool_calls: int | None = None
    truncation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What the reply needs of its request beside the `Call`."""

    told: Json
    """Fields that every body of the response repeats."""
    known: Mapping[str, Tool]
    """What the functions stand for."""
    summary: bool
    """Reasoning is told as its summary."""
    sealed: bool
    """Reasoning is told in `encrypted_content` too."""
    asked: bytes | None
    """The request's items, as JSON, where the response is to be kept."""
    previous: str | None


def read(body: bytes, limits: Limits, recall: Recall, *, dialect: str, counting: bool = False) -> Call:
    """The call that a body asks for; `counting`: only to count its prompt.

    Raises:
        BadRequest: naming the field, in OpenAI's words.
    """
    raw = json_object(body)
    try:
        return _read(raw, limits, recall, dialect, counting)
    except RecursionError:
        raise BadRequest("The body is nested too deep.") from None


def _read(raw: Json, limits: Limits, recall: Recall, dialect: str, counting: bool) -> Call:
    for name, why in REFUSED.items():
        if raw.get(name):
            raise unsupported(name, why)
    try:
        asked = msgspec.convert(raw, _Body)
    except msgspec.ValidationError as error:
        raise of_validation(error) from None
    if asked.model is None and not counting:
        raise missing("model")
    own = _items(asked, recall)
    items, where = _history(asked, recall)
    items, where = items + own, where + [f"input[{i}]" for i in range(len(own))]
    reading = Reading(limits)
    messages = conversation(asked.instructions, items, where, reading)
    if not messages or messages == [{"role": "system", "content": asked.instructions}]:
        raise missing("input") if asked.input is None else wrong("input", "there is nothing in it to answer.")
    if open_calls := messages[-1].get("tool_calls"):
        raise wrong("input", f"No tool output found for function call {open_calls[0]['id'][:80]}.")
    tools = offered(asked.tools, reading)
    functions, extras, marks = chosen(asked.tool_choice, tools, asked.parallel_tool_calls)
    effort, summary = _reasoning(asked)
    if limits.thinking_switch == "client":
        extras |= effort
    form = _format(asked)
    if form is not None:
        extras["response_format"] = form
        marks.append("grammar")
    include = asked.include or []
    top = asked.top_logprobs or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise wrong("top_logprobs", f"it lies between 0 and {MAX_TOP_LOGPROBS}.")
    details = _details(asked, own, tools, summary=summary, sealed=SEALED in include)
    return Call(
        dialect=dialect,
        model=asked.model or "",
        messages=messages,
        tools=functions or None,
        extras=extras,
        asked=_sampling(asked),
        stream=bool(asked.stream) and not counting,
        include_usage=True,
        logprobs=LOGPROBS in include,
        top_logprobs=top if LOGPROBS in include else 0,
        constraints=tuple(marks),
        unknown=len(raw.keys() - KNOWN),
        media=tuple(reading.media),
        marks={"session": asked.prompt_cache_key} if asked.prompt_cache_key else {},
        dropped=tuple(reading.dropped),
        details=details,
    )


def _items(asked: _Body, recall: Recall) -> list[Json]:
    """The request's own items, references replaced by what they refer to."""
    if asked.input is None:
        return []
    if isinstance(asked.input, str):
        return [{"type": "message", "role": "user", "content": asked.input}]
    found = []
    for i, one in enumerate(listed(asked.input, "input")):
        item = mapping(one, f"input[{i}]")
        if item.get("type") == "item_reference":
            name = text(item.get("id"), f"input[{i}].id")
            known = recall.item(name)
            if known is None:
                raise BadRequest(
                    f"Item with id '{name[:80]}' not found. Items are kept where `store` is not false, and as long as "
                    "memory goes; send the item itself.",
                    status=404,
                    param="input",
                )
            item = known
        found.append(item)
    return found


def _history(asked: _Body, recall: Recall) -> tuple[list[Json], list[str]]:
    """What went before, and where that stands."""
    previous = asked.previous_response_id
    if previous is None:
        return [], []
    items = recall.history(previous)
    if items is None:
        raise BadRequest(
            f"Previous response with id '{previous[:80]}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return items, [f"previous_response_id.items[{i}]" for i in range(len(items))]


def _sampling(asked: _Body) -> Sampling:
    if asked.max_output_tokens is not None and asked.max_output_tokens < 1:
        raise wrong("max_output_tokens", "it is at least 1.")
    for name, high in (("temperature", 2.0), ("top_p", 1.0)):
        value = getattr(asked, name)
        if value is not None and not 0.0 <= value <= high:
            raise wrong(name, f"it lies between 0 and {high:g}.")
    return Sampling(temperature=asked.temperature, top_p=asked.top_p, max_tokens=asked.max_output_tokens, n=1)


def _reasoning(asked: _Body) -> tuple[Json, bool]:
    """Whether and how hard the model thinks, as chat templates are told it; whether its summary is asked for."""
    given = asked.reasoning or {}
    told = given.get("summary") or given.get("generate_summary")
    summary = told is not None and one_of(told, SUMMARIES, "reasoning.summary") != "none"
    if given.get("effort") is None:
        return {}, summary
    effort = EFFORTS[one_of(given["effort"], tuple(EFFORTS), "reasoning.effort")]
    if effort is None:
        # templates know the one name or the other, and ignore what they do not know
        return {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}, summary
    return {"reasoning_effort": effort}, summary


def _format(asked: _Body) -> Json | None:
    given = (asked.text or {}).get("format")
    if given is None:
        return None
    form = mapping(given, "text.format")
    match one_of(form.get("type"), ("text", "json_object", "json_schema"), "text.format.type"):
        case "text":
            return None
        case "json_object":
            return {"type": "json_object"}
    schema = {
        "name": text(form.get("name"), "text.format.name"),
        "schema": mapping(form.get("schema"), "text.format.schema"),
    }
    if form.get("description") is not None:
        schema["description"] = text(form["description"], "text.format.description")
    if isinstance(form.get("strict"), bool):
        schema["strict"] = form["strict"]
    return {"type": "json_schema", "json_schema": schema}


def _details(asked: _Body, own: list[Json], tools: Offered, *, summary: bool, sealed: bool) -> Details:
    reasoning, form = asked.reasoning or {}, asked.text or {}
    keep = asked.store is not False
    told: Json = {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.get("effort"),
            "summary": None if reasoning.get("summary") == "none" else reasoning.get("summary"),
        },
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": keep,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {**form, "format": form.get("format") or {"type": "text"}},
        "tool_choice": asked.tool_choice or "auto",
        "tools": [_told_tool(tool) for tool in asked.tools or ()],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "user": asked.user,
    }
    items = msgspec.json.encode(own) if keep else None
    previous = asked.previous_response_id
    return Details(told=told, known=tools.known, summary=summary, sealed=sealed, asked=items, previous=previous)


def _told_tool(tool: Json) -> Json:
    return {"parameters": None, "strict": False, **tool} if tool.get("type") == "function" else tool
