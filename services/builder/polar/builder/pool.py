"""The token pool: every distinct run of ids once, and which sequences begin alike.

A session's prompts repeat each other almost wholly. The pool keeps the ids of all sequences in one growing array and a
radix tree over it: taking a prompt in costs one array comparison along what is known and an append of what is new, and
the same walk tells which earlier prompts and which earlier prompts-with-reply this prompt begins with. A conversation
that only grows is one node and one span, however many calls it has; nodes split where sequences part.

Sampled ids always get a run of their own, since each carries its own log-probability, even where the ids were seen
before. Spans are half-open `(start, end)` positions in the array. It must not know what a completion is.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from polar.schemas import Logprobs, TokenIds
from polar.schemas import Span as WireSpan

Ids = npt.NDArray[np.int32]
Span = tuple[int, int]

FIRST_LOOK = 1024
"""Ids compared before the rest: sequences that part early are told apart without reading them wholly."""


def common_prefix(one: Ids, other: Ids) -> int:
    """How many ids `one` and `other` begin alike."""
    length = min(len(one), len(other))
    start, size = 0, FIRST_LOOK
    while start < length:
        end = min(start + size, length)
        differs = one[start:end] != other[start:end]
        at = int(differs.argmax())
        if differs[at]:
            return start + at
        start, size = end, size * 16
    return length


def common_suffix(one: Ids, other: Ids) -> int:
    """How many ids `one` and `other` end alike."""
    return common_prefix(one[::-1], other[::-1])


class _Node:
    """A run of ids in the tree. Marks are `(depth, who)`, sorted, with `depth` within this node's reach."""

    __slots__ = ("children", "depth", "end", "prompts", "replies", "start")

    def __init__(self, start: int, end: int, depth: int) -> None:
        self.start = start
        self.end = end
        self.depth = depth
        """Ids before this run."""
        self.children: dict[int, _Node] = {}
        """By their first id."""
        self.prompts: list[tuple[int, int]] = []
        self.replies: list[tuple[int, int]] = []


class Walk(NamedTuple):
    """How far a sequence is known."""

    path: list[tuple[_Node, int]]
    """Nodes and how many of each one's ids match."""
    length: int

    def spans(self) -> list[Span]:
        return joined((node.start, node.start + taken) for node, taken in self.path)

    def prompts(self) -> list[int]:
        """Who put in a prompt that this sequence begins with: longest first, then oldest."""
        return self._marks("prompts")

    def replies(self) -> list[int]:
        """Who put in a prompt with a reply that this sequence begins with: longest first, then oldest."""
        return self._marks("replies")

    def _marks(self, name: str) -> list[int]:
        found: list[tuple[int, int]] = []
        for node, taken in self.path:
            reach = node.depth + taken
            found += [(-depth, who) for depth, who in getattr(node, name) if depth <= reach]
        return [who for _, who in sorted(found)]


class Place(NamedTuple):
    """A position in the tree: after the first `taken` ids of `node`."""

    node: _Node
    taken: int


class TokenPool:
    """Ids and log-probabilities of one session's sequences."""

    def __init__(self) -> None:
        self.size = 0
        self._ids = np.empty(4096, TokenIds.dtype)
        self._logprobs = np.empty(4096, Logprobs.dtype)
        self._root = _Node(0, 0, 0)

    def add_prompt(self, ids: Ids) -> tuple[Walk, list[Span], Place]:
        """Takes a given sequence in: what was known of it before, its spans, and its end for `add_reply`."""
        walk = self._walk(ids, Place(self._root, 0))
        spans = walk.spans()
        place = Place(*walk.path[-1])
        if walk.length < len(ids):
            start = self._append(ids[walk.length :], None)
            spans = joined([*spans, (start, self.size)])
            place = self._attach(place, start, self.size)
        return walk, spans, place

    def add_reply(self, after: Place, ids: Ids, logprobs: npt.NDArray[np.float32], who: int) -> Span:
        """Takes ids in that were sampled after `after`, in a run of their own, and marks both ends as `who`'s."""
        insort(after.node.prompts, (after.node.depth + after.taken, who))
        start = self._append(ids, logprobs)
        walk = self._walk(ids, after)
        place = Place(*walk.path[-1])
        if walk.length < len(ids):
            place = self._attach(place, start + walk.length, self.size)
        insort(place.node.replies, (place.node.depth + place.taken, who))
        return start, self.size

    def ids(self, span: Span) -> Ids:
        """A view; good until the next addition."""
        return self._ids[span[0] : span[1]]

    def logprobs(self, span: Span) -> npt.NDArray[np.float32]:
        """A view; good until the next addition."""
        return self._logprobs[span[0] : span[1]]

    def gather(self, spans: Sequence[Span]) -> Ids:
        """The ids of `spans`, one after the other."""
        if len(spans) == 1:
            return self.ids(spans[0])
        return np.concatenate([self.ids(span) for span in spans]) if spans else self._ids[:0]

    def pack(self, used: Iterable[Span]) -> Packed:
        """Only the ids of `used`, in the order they came in."""
        edges = np.zeros(self.size + 1, np.int64)
        for start, end in used:
            edges[start] += 1
            edges[end] -= 1
        keep = np.cumsum(edges[: self.size]) > 0
        places = np.zeros(self.size + 1, np.int64)
        np.cumsum(keep, out=places[1:])
        return Packed(
            TokenIds(self._ids[: self.size][keep].tobytes()),
            Logprobs(self._logprobs[: self.size][keep].tobytes()),
            places,
        )

    def _append(self, ids: Ids, logprobs: npt.NDArray[np.float32] | None) -> int:
        start, end = self.size, self.size + len(ids)
        if end > len(self._ids):
            self._ids = _grown(self._ids, self.size, end)
            self._logprobs = _grown(self._logprobs, self.size, end)
        self._ids[start:end] = ids
        self._logprobs[start:end] = np.nan if logprobs is None else logprobs
        self.size = end
        return start

    def _walk(self, ids: Ids, place: Place) -> Walk:
        node, before = place
        path: list[tuple[_Node, int]] = []
        done = 0
        while True:
            same = common_prefix(self._ids[node.start + before : node.end], ids[done:])
            done += same
            path.append((node, before + same))
            if done == len(ids) or before + same < node.end - node.start:
                break
            child = node.children.get(int(ids[done]))
            if child is None:
                break
            node, before = child, 0
        return Walk(path, done)

    def _attach(self, place: Place, start: int, end: int) -> Place:
        """Puts the run `start` to `end` behind `place`, which no child of it continues."""
        node, taken = place
        length = node.end - node.start
        if taken < length:
            self._split(node, taken)
        elif not node.children and node.end == start:
            node.end = end  # the conversation goes on where the array ends: still one node
            return Place(node, end - node.start)
        child = _Node(start, end, node.depth + taken)
        node.children[int(self._ids[start])] = child
        return Place(child, end - start)

    def _split(self, node: _Node, taken: int) -> None:
        tail = _Node(node.start + taken, node.end, node.depth + taken)
        tail.children, node.children = node.children, {}
        for name in ("prompts", "replies"):
            marks = getattr(node, name)
            setattr(node, name, [mark for mark in marks if mark[0] <= tail.depth])
            setattr(tail, name, [mark for mark in marks if mark[0] > tail.depth])
        node.end = tail.start
        node.children[int(self._ids[tail.start])] = tail


class Packed(NamedTuple):
    tokens: TokenIds
    logprobs: Logprobs
    places: npt.NDArray[np.int64]
    """New position of each old one."""

    def span(self, span: Span) -> Span:
        return int(self.places[span[0]]), int(self.places[span[1]])

    def spans(self, spans: Iterable[Span]) -> list[WireSpan]:
        return wire(joined(self.span(span) for span in spans))


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same positions with empty spans left out and neighbours made one."""
    found: list[Span] = []
    for start, end in spans:
        if start == end:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def skipped(spans: Iterable[Span], count: int) -> Iterator[Span]:
    """`spans` without their first `count` positions."""
    for start, end in spans:
        cut = min(count, end - start)
        count -= cut
        if start + cut < end:
            yield start + cut, end


def wire(spans: Iterable[Span]) -> list[WireSpan]:
    return [WireSpan(start=start, end=end) for start, end in spans]


def _grown(array: npt.NDArray[Any], used: int, needed: int) -> npt.NDArray[Any]:
    larger = np.empty(max(needed, 2 * len(array)), array.dtype)
    larger[:used] = array[:used]
    return larger
