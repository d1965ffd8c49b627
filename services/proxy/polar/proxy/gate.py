"""Which parts of a live stream may go out before the call is on the log (design, promise 1).

Clients act on what is closed: a tool call whose arguments are whole, a text after which a call begins. So text and
reasoning go out as they come, and held back until the broker's acknowledgement are

- the character that closes a tool call's arguments, and everything of that choice after it;
- the beginning of a tool call after text or after another call, since it closes what stood before it;
- white space before anything else, since beside tool calls alone it is no text at all.

Finish reason and usage are no deltas: a dialect tells them with the reply. What reasoning is followed by does not close
anything that a client acts on. Pure: deltas in, deltas out; all of them in order, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from .calls import Delta, ToolDelta


class Closing:
    """Finds where a JSON text, told in pieces, closes."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def split(self, piece: str) -> int:
        """How many characters of `piece` may be told while the whole stays unfinished."""
        for at, char in enumerate(piece):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                if self._depth <= 1:
                    return at
                self._depth -= 1
            elif self._depth == 0 and not char.isspace():
                return at  # a bare value has no end to wait for
            elif char == '"':
                self._in_string = True
        return len(piece)


@dataclass(slots=True)
class _Choice:
    blank: str = ""
    """White space told before anything else."""
    text: bool = False
    call: int | None = None
    """The tool call that is open."""
    calls: bool = False
    closing: Closing = field(default_factory=Closing)
    held: list[Delta] = field(default_factory=list)


class Gate:
    """The deltas of one call, of `n` choices."""

    def __init__(self, n: int) -> None:
        self._choices = [_Choice() for _ in range(n)]

    def admit(self, delta: Delta) -> Delta | None:
        """What of `delta` may go out now; the rest is held."""
        choice = self._choices[delta.index]
        goes_on = not (delta.reasoning if choice.text else delta.content)
        if goes_on and choice.call is None and not (delta.tools or choice.held):
            return delta  # nearly all: text goes on after text, reasoning before any
        choice.calls = choice.calls or bool(delta.tools)
        if choice.held or (choice.call is not None and (delta.content or delta.reasoning)):
            choice.held.append(delta)
            return None
        if delta.reasoning and choice.text:
            choice.held.append(delta)
            return None
        content = delta.content
        if content and not choice.text:
            content = choice.blank + content
            if content.strip():
                choice.text, choice.blank = True, ""
            else:
                choice.blank, content = content, ""
        told, held = self._tools(choice, delta.tools)
        if held:
            choice.held.append(Delta(index=delta.index, tools=tuple(held)))
        passed = replace(delta, content=content, tools=tuple(told))
        return None if passed.empty else passed

    def _tools(self, choice: _Choice, tools: Sequence[ToolDelta]) -> tuple[list[ToolDelta], list[ToolDelta]]:
        told: list[ToolDelta] = []
        held: list[ToolDelta] = []
        for tool in tools:
            if held or (tool.index != choice.call and (choice.text or choice.call is not None)):
                held.append(tool)
                continue
            choice.call = tool.index
            safe = choice.closing.split(tool.arguments)
            rest = tool.arguments[safe:]
            if safe or tool.name is not None:
                told.append(replace(tool, arguments=tool.arguments[:safe]))
            if rest:
                held.append(ToolDelta(tool.index, arguments=rest))
        return told, held

    def rest(self) -> list[Delta]:
        """What was held, in order, to be told once the call is on the log."""
        found: list[Delta] = []
        for index, choice in enumerate(self._choices):
            if choice.calls and not choice.text and not any(delta.content.strip() for delta in choice.held):
                # white space is all the text there is beside the calls, which the engine does not call one
                kept = [replace(delta, content="") for delta in choice.held]
                found += [delta for delta in kept if not delta.empty]
            else:
                found += [Delta(index=index, content=choice.blank)] if choice.blank else []
                found += choice.held
            choice.held, choice.blank = [], ""
        return found
