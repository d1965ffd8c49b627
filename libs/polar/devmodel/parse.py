"""Find tool calls and reasoning in generated text, as vLLM's hermes tool parser does.

Pure: text in, fields of a message or of a stream's deltas out. It keeps vLLM's habits that a client meets: a whole
answer whose tool JSON is broken stays text; a stream has by then told the name and drops the rest; a possible start
of a tag is held back in a stream and lost if the turn ends there; text before a call that is only white space is
null.
"""

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
THINK_START, THINK_END = "<think>", "</think>"
_CALLS = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_NAME = re.compile(r'"name"\s*:\s*"([^"]+)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')


def call_id() -> str:
    """A new tool call's id, in vLLM's form."""
    return f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


def held_back(text: str, tag: str) -> int:
    """How many last characters of `text` may be the beginning of `tag`."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


def read_calls(text: str) -> tuple[str | None, list[Json]]:
    """Content and `tool_calls` of a whole answer; no calls when one of them is not readable."""
    if CALL_START not in text:
        return text, []
    calls = []
    try:
        for body in _CALLS.findall(text):
            call = json.loads(body)
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            calls.append(
                {"id": call_id(), "type": "function", "function": {"name": call["name"], "arguments": arguments}}
            )
    except (json.JSONDecodeError, KeyError, TypeError):
        return text, []
    content = text[: text.index(CALL_START)]
    return content if content.strip() else None, calls


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Reasoning and the rest of a whole answer that starts with `<think>`; what has no end is all reasoning."""
    if not text.startswith(THINK_START):
        return None, text
    reasoning, _, rest = text.removeprefix(THINK_START).partition(THINK_END)
    return reasoning, rest


class ReasoningStream:
    """Splits a stream's text into reasoning and the rest."""

    def __init__(self) -> None:
        self._buffer = ""
        self._state = "start"

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the other text that `text` adds."""
        if self._state == "after":
            return "", text
        self._buffer += text
        if self._state == "start":
            if len(self._buffer) < len(THINK_START) and THINK_START.startswith(self._buffer):
                return "", ""
            if not self._buffer.startswith(THINK_START):
                self._state = "after"
                return "", self._drain(len(self._buffer))
            self._drain(len(THINK_START))
            self._state = "reasoning"
        end = self._buffer.find(THINK_END)
        if end < 0:
            return self._drain(len(self._buffer) - held_back(self._buffer, THINK_END)), ""
        reasoning = self._drain(end)
        self._drain(len(THINK_END))
        self._state = "after"
        return reasoning, self._drain(len(self._buffer))

    def _drain(self, size: int) -> str:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken


@dataclass(slots=True)
class _OpenCall:
    start: int
    named: bool = False
    told: str = ""


class CallStream:
    """Turns a stream's text into content deltas and `tool_calls` deltas."""

    def __init__(self) -> None:
        self._text = ""
        self._told = 0
        self._calls: list[_OpenCall] = []
        self._done = 0

    @property
    def any_call(self) -> bool:
        """Whether a call's name was told."""
        return any(call.named for call in self._calls)

    def feed(self, text: str) -> tuple[str, list[Json]]:
        """The content and the `tool_calls` entries that `text` adds."""
        self._text += text
        content, deltas = self._content(), []
        while call := self._current():
            end = self._text.find(CALL_END, call.start)
            raw = self._text[call.start : end] if end >= 0 else self._text[call.start :]
            if end < 0 and (size := held_back(raw, CALL_END)):
                raw = raw[:-size]
            deltas += self._advance(call, raw.strip(), end >= 0)
            if end < 0 or not call.named:
                break  # as vLLM: a call without a name holds up the ones after it
            self._done += 1
        return content, deltas

    def _content(self) -> str:
        first = self._text.find(CALL_START)
        until = first if first >= 0 else len(self._text) - held_back(self._text, CALL_START)
        told, self._told = self._told, max(self._told, until)
        return self._text[told : self._told]

    def _current(self) -> _OpenCall | None:
        if self._done == len(self._calls):
            after = self._text.find(CALL_END, self._calls[-1].start) if self._calls else 0
            start = self._text.find(CALL_START, after)
            if start < 0:
                return None
            self._calls.append(_OpenCall(start + len(CALL_START)))
        return self._calls[self._done]

    def _advance(self, call: _OpenCall, raw: str, closed: bool) -> list[Json]:
        deltas: list[Json] = []
        index = self._calls.index(call)
        if not call.named:
            if not (name := _NAME.search(raw)):
                return []
            call.named = True
            deltas.append({"id": call_id(), "type": "function", "index": index, "function": {"name": name.group(1)}})
        if found := _ARGUMENTS.search(raw):
            arguments = raw[found.end() :]
            if closed or _is_json(raw):
                arguments = arguments.rstrip().removesuffix("}").rstrip()
            if len(arguments) > len(call.told):
                deltas.append({"index": index, "function": {"arguments": arguments[len(call.told) :]}})
                call.told = arguments
        return deltas


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True
