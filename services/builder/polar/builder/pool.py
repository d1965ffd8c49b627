"""The token pool: every distinct run of ids once, and which sequences begin alike.

A session's prompts repeat each other almost wholly. The pool keeps the ids of all sequences in one growing array and a
radix tree over it. A prompt is taken in as an earlier sequence and ids after it (nothing and all of them, where it came
whole): that costs array comparisons along what of those ids is known and an append of what is new; where it ends, the
tree tells which earlier prompts and which earlier prompts-with-reply it begins with. A conversation that only grows is
one node and one span, however many calls it has; nodes split where sequences part.

Sampled ids always get a run of their own, since each carries its own log-probability, even where the ids were seen
before. Spans are half-open `(start, end)` positions in the array. It must not know what a completion is.
"""

from __future__ import annotations

from bisect import bisect_right, insort
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
    """A run of ids in the tree. Marks are `(depth, -who)`, sorted, with `depth` within this node's reach."""

    __slots__ = ("children", "depth", "end", "parent", "prompts", "replies", "start")

    def __init__(self, start: int, end: int, depth: int, parent: _Node | None) -> None:
        self.start = start
        self.end = end
        self.depth = depth
        """Ids before this run."""
        self.parent = parent
        self.children: dict[int, _Node] = {}
        """By their first id."""
        self.prompts: list[tuple[int, int]] = []
        self.replies: list[tuple[int, int]] = []


class Place(NamedTuple):
    """A position in the tree: after the first `taken` ids of `node`. Good until the next addition."""

    node: _Node
    taken: int

    @property
    def depth(self) -> int:
        """Ids of the sequence up to here."""
        return self.node.depth + self.taken

    def prompts(self, most: int) -> tuple[int, ...]:
        """Who put in a prompt with which the sequence up to here begins: longest first, then oldest; `most` of them."""
        return self._marks("prompts", most)

    def replies(self, most: int) -> tuple[int, ...]:
        """Who put in a prompt with a reply with which the sequence up to here begins: as `prompts`."""
        return self._marks("replies", most)

    def _marks(self, name: str, most: int) -> tuple[int, ...]:
        node: _Node | None = self.node
        reach = (self.depth, 0)
        found: list[int] = []
        while node is not None and len(found) < most:
            marks: list[tuple[int, int]] = getattr(node, name)
            if marks:
                end = bisect_right(marks, reach)
                found += [-who for _, who in marks[max(0, end - most + len(found)) : end][::-1]]
            node = node.parent
        return tuple(found)


class TokenPool:
    """Ids and log-probabilities of one session's sequences."""

    def __init__(self) -> None:
        self.size = 0
        self._ids = np.empty(4096, TokenIds.dtype)
        self._logprobs = np.empty(4096, Logprobs.dtype)
        self._root = _Node(0, 0, 0, None)
        self._starts = [0]
        self._nodes = [self._root]
        """In the order of their runs, which do not overlap."""

    def add_given(self, before: Sequence[Span], ids: Ids) -> tuple[list[Span], Place]:
        """Takes ids in that were given after the sequence `before`, itself as given back from here.

        The spans of the whole, and its end. Costs the new ids, not those before.
        """
        place = self._end_of(before)
        walk = self._walk(ids, place)
        spans, place = walk.spans, walk.place
        if walk.length < len(ids):
            start = self._append(ids[walk.length :], None)
            spans.append((start, self.size))
            place = self._attach(place, start, self.size)
        return joined(spans, before), place

    def add_reply(
        self, before: Sequence[Span], ids: Ids, logprobs: npt.NDArray[np.float32], who: int
    ) -> tuple[Span, list[Span]]:
        """Takes ids in that were sampled after the prompt `before`, and marks both ends as `who`'s.

        The run of their own, and the spans of prompt and reply as a later prompt has them.
        """
        after = self._end_of(before)
        insort(after.node.prompts, (after.depth, -who))
        start = self._append(ids, logprobs)
        end = self.size
        walk = self._walk(ids, after)
        spans, place = walk.spans, walk.place
        if walk.length < len(ids):
            spans.append((start + walk.length, end))
            place = self._attach(place, start + walk.length, end)
        insort(place.node.replies, (place.depth, -who))
        return (start, end), joined(spans, before)

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

    def pack(self, used: Sequence[Span]) -> Packed:
        """Only the ids of `used`, in the order they came in."""
        starts, ends = np.array(used, np.int64).reshape(-1, 2).T
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        first = np.ones(len(starts), np.bool_)
        first[1:] = starts[1:] > ends[:-1]
        starts, ends = starts[first], ends[np.roll(first, -1)]
        kept = list(zip(starts.tolist(), ends.tolist(), strict=True))
        return Packed(
            TokenIds(b"".join(self.ids(span).tobytes() for span in kept)),
            Logprobs(b"".join(self.logprobs(span).tobytes() for span in kept)),
            starts,
            np.cumsum(ends - starts) - ends,
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

    def _end_of(self, spans: Sequence[Span]) -> Place:
        """Where a sequence that is known wholly ends."""
        if not spans:
            return Place(self._root, 0)
        last = spans[-1][1]
        node = self._nodes[bisect_right(self._starts, last - 1) - 1]
        return Place(node, last - node.start)

    def _walk(self, ids: Ids, place: Place) -> _Walk:
        node, before = place
        spans: list[Span] = []
        done = 0
        while True:
            start = node.start + before
            same = common_prefix(self._ids[start : node.end], ids[done:])
            done += same
            spans.append((start, start + same))
            if done == len(ids) or start + same < node.end:
                return _Walk(spans, Place(node, before + same), done)
            child = node.children.get(int(ids[done]))
            if child is None:
                return _Walk(spans, Place(node, before + same), done)
            node, before = child, 0

    def _attach(self, place: Place, start: int, end: int) -> Place:
        """Puts the run `start` to `end` behind `place`, which no child of it continues."""
        node, taken = place
        length = node.end - node.start
        if taken < length:
            self._split(node, taken)
        elif not node.children and node.end == start:
            node.end = end  # the conversation goes on where the array ends: still one node
            return Place(node, end - node.start)
        child = _Node(start, end, node.depth + taken, node)
        node.children[int(self._ids[start])] = child
        self._keep(child)
        return Place(child, end - start)

    def _split(self, node: _Node, taken: int) -> None:
        tail = _Node(node.start + taken, node.end, node.depth + taken, node)
        tail.children, node.children = node.children, {}
        for child in tail.children.values():
            child.parent = tail
        for name in ("prompts", "replies"):
            marks = getattr(node, name)
            setattr(node, name, [mark for mark in marks if mark[0] <= tail.depth])
            setattr(tail, name, [mark for mark in marks if mark[0] > tail.depth])
        node.end = tail.start
        node.children[int(self._ids[tail.start])] = tail
        self._keep(tail)

    def _keep(self, node: _Node) -> None:
        at = bisect_right(self._starts, node.start)
        self._starts.insert(at, node.start)
        self._nodes.insert(at, node)


class _Walk(NamedTuple):
    """How far a sequence is known."""

    spans: list[Span]
    place: Place
    length: int


class Packed(NamedTuple):
    tokens: TokenIds
    logprobs: Logprobs
    starts: npt.NDArray[np.int64]
    """Of the runs that were kept, in order: old positions."""
    shifts: npt.NDArray[np.int64]
    """What each run's old positions are moved by."""

    def spans(self, spans: Sequence[Span]) -> list[WireSpan]:
        """New positions of what was kept."""
        places = np.array(spans, np.int64).reshape(-1, 2)
        runs = np.searchsorted(self.starts, places[:, 0], side="right") - 1
        return wire(joined((places + self.shifts[runs][:, None]).tolist()))


def joined(spans: Iterable[Span], before: Sequence[Span] = ()) -> list[Span]:
    """The positions of `before`, which are joined already, and of `spans`: without empty ones, neighbours made one."""
    found: list[Span] = list(before)
    for start, end in spans:
        if start == end:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def shared(one: Sequence[Span], other: Sequence[Span]) -> int:
    """How many positions both begin with. Of two prompts of one pool: how many ids, since the pool holds a beginning
    that several prompts have in one place."""
    length = 0
    for here, there in zip(one, other, strict=False):
        if here[0] != there[0]:
            break
        length += min(here[1], there[1]) - here[0]
        if here[1] != there[1]:
            break
    return length


def begins(spans: Sequence[Span], first: Sequence[Span]) -> bool:
    """Whether the positions `spans` begin with all of `first`; both joined."""
    if not first:
        return True
    last = len(first) - 1
    if last >= len(spans) or spans[:last] != first[:last]:
        return False
    return spans[last][0] == first[last][0] and spans[last][1] >= first[last][1]


def skipped(spans: Iterable[Span], count: int) -> Iterator[Span]:
    """`spans` without their first `count` positions."""
    for start, end in spans:
        cut = min(count, end - start)
        count -= cut
        if start + cut < end:
            yield start + cut, end


def taken(spans: Sequence[Span], count: int) -> list[Span]:
    """The first `count` positions of `spans`."""
    if count <= 0:
        return []
    for at, (start, end) in enumerate(spans):
        count -= end - start
        if count <= 0:
            return [*spans[:at], (start, end + count)]
    return list(spans)


def wire(spans: Iterable[Span]) -> list[WireSpan]:
    return [WireSpan(start=start, end=end) for start, end in spans]


def _grown(array: npt.NDArray[Any], used: int, needed: int) -> npt.NDArray[Any]:
    larger = np.empty(max(needed, 2 * len(array)), array.dtype)
    larger[:used] = array[:used]
    return larger
