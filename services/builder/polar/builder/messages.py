"""The message pool, and when two messages say the same.

Every distinct message is kept once, as it came. Beside that each has a normal form, in which what does not reach the
prompt's text is gone (call ids, absent and empty fields, whitespace and key order of JSON arguments), so that a reply
as captured and the same reply as a harness sends it back are recognised as equal. It must not know tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from .pool import Span

Message = dict[str, Any]
Tools = list[dict[str, Any]]

_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


def normal(message: Message) -> dict[str, Any]:
    """What of `message` a prompt can show."""
    found: dict[str, Any] = {"role": message.get("role") or "assistant"}
    content = message.get("content")
    if isinstance(content, list):
        content = _parts(content)
    if content:
        found["content"] = content
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        found["reasoning"] = reasoning
    calls = message.get("tool_calls")
    if calls:
        found["tool_calls"] = [_call(one) for one in calls]
    for name in ("name", "refusal"):
        if message.get(name):
            found[name] = message[name]
    return found


def _parts(parts: Sequence[Any]) -> Any:
    """Text parts as one text, as engines join them; anything else as it is."""
    if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return "\n".join(str(part.get("text") or "") for part in parts)
    return list(parts)


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = plain(json.loads(arguments))
        except (ValueError, RecursionError):
            arguments = arguments.strip()
    return {"name": function.get("name"), "arguments": arguments or {}}


def plain(value: Any) -> Any:
    """A JSON value with 1.0 as 1: JSON has one kind of number, and clients in JavaScript send it back so."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value


def text_of(message: Message) -> str:
    """What a message says in words; images and calls left out."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


class MessagePool:
    """Distinct messages and distinct tool lists of one session, by number in the order they came."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.tools: list[Tools] = []
        self._by_text: dict[bytes, tuple[int, int]] = {}
        self._normals: dict[bytes, int] = {}
        self._tools_by_text: dict[bytes, int] = {}
        self._paths: dict[tuple[int, int], int] = {}
        self._parents: list[int] = []

    def add(self, message: Message) -> tuple[int, int]:
        """The message's number and the number of its normal form."""
        text = _encode(message)
        known = self._by_text.get(text)
        if known is None:
            form = self._normals.setdefault(_encode_sorted(normal(message)), len(self._normals))
            known = self._by_text[text] = len(self.messages), form
            self.messages.append(message)
        return known

    def path(self, before: int, normal: int) -> int:
        """The number of a conversation: that of number `before` (-1: none yet), then a message of this normal form.

        Two conversations have the same number exactly where their messages say the same.
        """
        known = self._paths.setdefault((before, normal), len(self._parents))
        if known == len(self._parents):
            self._parents.append(before)
        return known

    def path_before(self, path: int) -> int:
        """The conversation without its last message; -1: it had one only."""
        return self._parents[path]

    def add_tools(self, tools: Tools) -> int:
        text = _encode(tools)
        known = self._tools_by_text.setdefault(text, len(self.tools))
        if known == len(self.tools):
            self.tools.append(tools)
        return known


def runs(numbers: Iterable[int]) -> list[Span]:
    """Numbers as half-open runs, in their order."""
    found: list[Span] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found
