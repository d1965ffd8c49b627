"""Who may join whom: calls whose clients did not get all of their reply, and the requests that come after them.

A request joins an earlier call only if

- that call's connection was closed before its reply was complete, and nobody else's is open for it now;
- its body, its path, its session's attempt and what its client says of itself are equal;
- it comes within the window after the connection closed;
- the call runs or is captured. One that failed is not told again: its error was of its moment, and a new generation may
  well succeed; that one is then its retry.

While a connection is open, equal requests are calls of their own: twins of a harness, best of n.

Bounded: replies by bytes, of one attempt and of all, and calls by number; beyond, the one left longest ago is forgotten
first, a reply before the knowledge that there was one. Pure: times are passed in and never go back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Key(NamedTuple):
    """What equal requests have in common."""

    session_id: str
    attempt: int
    dialect: str
    path: str
    """With its query, as it came: there stand Google's model, and how a stream is told."""
    client: tuple[str | None, ...]
    """What its client says of itself: sub-agents may send equal bodies."""
    body: str
    """SHA-256 of the raw body."""


class Phase(Enum):
    RUNNING = auto()
    CAPTURED = auto()
    LOST = auto()
    """It failed, or its reply is not kept."""


class Joined(NamedTuple, Generic[T]):
    """A call that a request has joined."""

    phase: Phase
    call: T


@dataclass(slots=True)
class _Entry(Generic[T]):
    completion_id: str
    key: Key
    call: T | None
    phase: Phase = Phase.RUNNING
    size: int = 0
    left: float | None = None
    """When its connection closed; None: one is open."""

    @property
    def kept(self) -> int:
        """Bytes that count."""
        return self.size if self.left is not None and self.phase is Phase.CAPTURED else 0


@dataclass(slots=True)
class _Attempt(Generic[T]):
    open: dict[str, _Entry[T]] = field(default_factory=dict)
    left: OrderedDict[str, _Entry[T]] = field(default_factory=OrderedDict)
    """By the time of leaving."""
    size: int = 0


class Unanswered(Generic[T]):
    """The calls whose clients have not got all of their reply.

    A call is `begin`-`told`, or `begin`-`left`; meanwhile, or after it was left, it is `captured` or `lost`. An id that
    was forgotten is passed over.
    """

    def __init__(self, *, window: float, calls: int, attempt_bytes: int, total_bytes: int) -> None:
        self._window = window
        self._most = calls
        self._attempt_bytes = attempt_bytes
        self._total_bytes = total_bytes
        self._attempts: dict[tuple[str, int], _Attempt[T]] = {}
        self._entries: dict[str, _Entry[T]] = {}
        self._left: OrderedDict[str, _Entry[T]] = OrderedDict()
        """By the time of leaving."""
        self.size = 0
        """Bytes of the replies that are kept, about."""

    def __len__(self) -> int:
        """Calls whose clients have left."""
        return len(self._left)

    def begin(self, completion_id: str, key: Key, call: T | None = None) -> None:
        """A client's connection is open for a new call; None: nobody may join it."""
        entry = self._entries[completion_id] = _Entry(completion_id, key, call)
        self._attempts.setdefault((key.session_id, key.attempt), _Attempt()).open[completion_id] = entry

    def captured(self, completion_id: str, size: int, now: float) -> None:
        """The call's reply is on the log and may be told; it takes `size` bytes."""
        self.expire(now)
        entry = self._entries.get(completion_id)
        if entry is not None and entry.phase is Phase.RUNNING:
            entry.phase, entry.size = Phase.CAPTURED, size
            self._count(entry, entry.kept)
            self._bound(entry)

    def lost(self, completion_id: str) -> None:
        """There is no reply, or not any more."""
        entry = self._entries.get(completion_id)
        if entry is not None:
            self._lose(entry)

    def told(self, completion_id: str) -> None:
        """The client has all of its reply."""
        entry = self._entries.get(completion_id)
        if entry is not None:
            self._forget(entry)

    def left(self, completion_id: str, now: float) -> None:
        """The client's connection has closed before it had all of its reply."""
        self.expire(now)
        entry = self._entries.get(completion_id)
        if entry is None or entry.left is not None:
            return
        attempt = self._attempt(entry)
        del attempt.open[completion_id]
        attempt.left[completion_id] = self._left[completion_id] = entry
        entry.left = now
        self._count(entry, entry.kept)
        self._bound(entry)

    def join(self, key: Key, now: float) -> Joined[T] | None:
        """The call that a request of `key` joins, the first left first; its connection is the call's now."""
        self.expire(now)
        for entry in self._equal(key):
            if entry.call is not None and entry.phase is not Phase.LOST:
                self._count(entry, -entry.kept)
                attempt = self._attempt(entry)
                del attempt.left[entry.completion_id], self._left[entry.completion_id]
                entry.left = None
                attempt.open[entry.completion_id] = entry
                return Joined(entry.phase, entry.call)
        return None

    def retried(self, key: Key, now: float) -> str | None:
        """The call that a new generation for `key` takes the place of, which is forgotten with this."""
        self.expire(now)
        for entry in self._equal(key):
            if entry.phase is Phase.LOST:
                self._forget(entry)
                return entry.completion_id
        return None

    def close(self, session_id: str, attempt: int) -> None:
        """Forget the attempts of a session up to `attempt`, which are over."""
        for number in range(attempt + 1):
            known = self._attempts.get((session_id, number))
            for entry in [] if known is None else [*known.open.values(), *known.left.values()]:
                self._forget(entry)

    def expire(self, now: float) -> None:
        """Forget those that were left too long ago."""
        while self._left:
            entry = next(iter(self._left.values()))
            assert entry.left is not None
            if now - entry.left <= self._window:
                return
            self._forget(entry)

    def _equal(self, key: Key) -> Iterator[_Entry[T]]:
        attempt = self._attempts.get((key.session_id, key.attempt))
        for entry in [] if attempt is None else list(attempt.left.values()):
            if entry.key == key:
                yield entry

    def _bound(self, entry: _Entry[T]) -> None:
        """Within its bounds again after `entry` may have taken more."""
        attempt = self._attempt(entry)
        for limit, group in ((self._attempt_bytes, attempt), (self._total_bytes, self)):
            left = attempt.left if group is attempt else self._left
            for one in list(left.values()) if group.size > limit else ():
                self._lose(one) if one.kept else None
                if group.size <= limit:
                    break
        while len(self._left) > self._most:
            self._forget(next(iter(self._left.values())))

    def _lose(self, entry: _Entry[T]) -> None:
        self._count(entry, -entry.kept)
        entry.phase, entry.call, entry.size = Phase.LOST, None, 0

    def _forget(self, entry: _Entry[T]) -> None:
        self._lose(entry)
        del self._entries[entry.completion_id]
        self._left.pop(entry.completion_id, None)
        attempt = self._attempt(entry)
        attempt.left.pop(entry.completion_id, None)
        attempt.open.pop(entry.completion_id, None)
        if not attempt.open and not attempt.left:
            del self._attempts[entry.key.session_id, entry.key.attempt]

    def _attempt(self, entry: _Entry[T]) -> _Attempt[T]:
        return self._attempts[entry.key.session_id, entry.key.attempt]

    def _count(self, entry: _Entry[T], change: int) -> None:
        self._attempt(entry).size += change
        self.size += change
