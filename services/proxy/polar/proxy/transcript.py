"""What was told of a call so far, for readers who come later or read slower than it grows.

Promises: each reader gets every delta's content once, in the order of its choice, put together as far as that goes, so
that coming late costs one read and not one event for each token; adding and reading cost what is added and read. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from .calls import Delta, Entry, ToolDelta


class _Kind(Enum):
    REASONING = auto()
    CONTENT = auto()
    TOOL = auto()


@dataclass(slots=True)
class _Segment:
    """What stands together: a text, a reasoning, one tool call."""

    kind: _Kind
    tool: ToolDelta | None = None
    """The call's first piece, without arguments."""
    pieces: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def goes_on(self, kind: _Kind, tool: ToolDelta | None) -> bool:
        if kind is not self.kind:
            return False
        if tool is None or self.tool is None:
            return True
        return tool.name is None and tool.index == self.tool.index

    def since(self, index: int, piece: int, entry: int) -> Delta:
        text, entries = "".join(self.pieces[piece:]), self.entries[entry:]
        if self.kind is _Kind.REASONING:
            return Delta(index=index, reasoning=text, entries=entries)
        if self.kind is _Kind.CONTENT:
            return Delta(index=index, content=text, entries=entries)
        assert self.tool is not None
        first = piece == 0
        tool = ToolDelta(
            self.tool.index, self.tool.id if first else None, self.tool.name if first else None, arguments=text
        )
        return Delta(index=index, tools=[tool], entries=entries)


class Transcript:
    """Of one call with `choices` replies."""

    def __init__(self, choices: int) -> None:
        self._choices: list[list[_Segment]] = [[] for _ in range(choices)]

    def add(self, deltas: Iterable[Delta]) -> None:
        """What was told next."""
        for delta in deltas:
            segments = self._choices[delta.index]
            if delta.reasoning:
                _add(segments, _Kind.REASONING, delta.reasoning)
            if delta.content:
                _add(segments, _Kind.CONTENT, delta.content)
            for tool in delta.tools:
                _add(segments, _Kind.TOOL, tool.arguments, tool)
            if delta.entries:
                if not segments:
                    segments.append(_Segment(_Kind.CONTENT))
                segments[-1].entries += delta.entries

    def reader(self) -> Reader:
        """One who has read nothing yet."""
        return Reader(self._choices)


class Reader:
    """How far one reader is."""

    def __init__(self, choices: Sequence[Sequence[_Segment]]) -> None:
        self._choices = choices
        self._at = [(0, 0, 0) for _ in choices]
        """For each choice: segment, and how many of its pieces and entries were read."""

    def read(self) -> list[Delta]:
        """What was added since."""
        return [delta for index in range(len(self._choices)) for delta in self._read(index)]

    def _read(self, index: int) -> Iterator[Delta]:
        segments = self._choices[index]
        at, piece, entry = self._at[index]
        while at < len(segments):
            segment = segments[at]
            if piece < len(segment.pieces) or entry < len(segment.entries):
                yield segment.since(index, piece, entry)
            piece, entry = len(segment.pieces), len(segment.entries)
            self._at[index] = (at, piece, entry)
            if at + 1 == len(segments):
                return
            at, piece, entry = at + 1, 0, 0


def _add(segments: list[_Segment], kind: _Kind, piece: str, tool: ToolDelta | None = None) -> None:
    if not segments or not segments[-1].goes_on(kind, tool):
        first = None if tool is None else ToolDelta(tool.index, tool.id, tool.name)
        segments.append(_Segment(kind, first))
    segments[-1].pieces.append(piece)
