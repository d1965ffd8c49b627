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
            arguments = json.loads(arguments)
        except ValueError:
            arguments = arguments.strip()
    return {"name": function.get("name"), "arguments": arguments or {}}


class MessagePool:
    """Distinct messages and distinct tool lists of one session, by number in the order they came."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.tools: list[Tools] = []
        self._by_text: dict[bytes, tuple[int, int]] = {}
        self._normals: dict[bytes, int] = {}
        self._tools_by_text: dict[bytes, int] = {}

    def add(self, message: Message) -> tuple[int, int]:
        """The message's number and the number of its normal form."""
        text = _encode(message)
        known = self._by_text.get(text)
        if known is None:
            form = self._normals.setdefault(_encode_sorted(normal(message)), len(self._normals))
            known = self._by_text[text] = len(self.messages), form
            self.messages.append(message)
        return known

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
