"""When two chat messages say the same: one normal form for all who ask which call goes on with which. Pure.

A harness sends a reply back as it read it: under call ids of its own or none, with arguments spelled anew (`1.0` as
`1`, other spaces and key order), an empty text where there was none, thinking and text trimmed. All of that is left out
of the normal form, so that the reply is found again. Equal normal forms say who wrote what after what; whether a prompt
shows a reply letter by letter is for its ids to say, or its text.

Promises: total over arguments as policies write them (NaN, numbers of any length, half a surrogate pair, nesting
without end, no JSON at all): none of it raises, and other values have another form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

Message = dict[str, Any]

EXACT_FLOATS: Final = 2.0**53
"""Whole numbers below are the same as float and as integer."""
NESTED: Final = 100
"""Deeper JSON is compared as text: what Python's stack has left must not decide."""

_encode = msgspec.msgpack.Encoder(order="sorted").encode


def normal(message: Mapping[str, Any], *, reasoning: bool = True) -> Message:
    """What of an OpenAI-style `message` a prompt can show; `reasoning`: its thinking too."""
    role = message.get("role") or "assistant"
    found: Message = {"role": role}
    content = message.get("content")
    if isinstance(content, list):
        content = _joined(content)
    if role == "assistant" and isinstance(content, str):
        content = content.strip()  # harnesses trim what they send back
    if content:
        found["content"] = content
    if reasoning and (thought := thinking(message)):
        found["reasoning"] = thought
    calls = message.get("tool_calls")
    if calls:
        found["tool_calls"] = [_call(one) for one in calls] if isinstance(calls, list) else calls
    for name in ("name", "refusal"):
        if message.get(name):
            found[name] = message[name]
    return found


def thinking(message: Mapping[str, Any]) -> str:
    """The thinking of a reply, trimmed as harnesses do; empty where there is none."""
    return str(message.get("reasoning") or message.get("reasoning_content") or "").strip()


def encoded(message: Mapping[str, Any]) -> bytes:
    """A normal form as bytes, equal exactly where normal forms are."""
    try:
        return _encode(message)
    except (OverflowError, UnicodeEncodeError):
        return json.dumps(message, sort_keys=True).encode()


def plain(value: Any, *, nested: int = NESTED) -> Any:
    """A JSON value with 1.0 as 1: JSON has one kind of number, and clients in JavaScript send it back so.

    Raises:
        RecursionError: it is nested deeper than `nested`.
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < EXACT_FLOATS else value
    if not isinstance(value, dict | list):
        return value
    if not nested:
        raise RecursionError("nested too deep")
    if isinstance(value, dict):
        return {name: plain(one, nested=nested - 1) for name, one in value.items()}
    return [plain(one, nested=nested - 1) for one in value]


def _joined(parts: Sequence[Any]) -> Any:
    """Text parts as the one text that engines make of them; others as they are."""
    if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return "\n".join(str(part.get("text") or "") for part in parts)
    return list(parts)


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {"name": function.get("name"), "arguments": _value(function.get("arguments"))}


def _value(arguments: Any) -> Any:
    """Arguments as the value they spell; what is no JSON, as text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    text = arguments.strip()
    try:
        return plain(_loaded(text)) if text else {}
    except (ValueError, RecursionError):
        return text


def _loaded(text: str) -> Any:
    """A JSON value; the quick reader knows neither NaN nor half a surrogate pair, and takes long numbers for floats."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return json.loads(text)
