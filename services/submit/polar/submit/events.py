"""The stream of stage changes for those who watch: a ring of the newest, and one bounded queue per watcher.

An event's id is a position on the log: the next offset of each partition of `stages`, joined by dots. So a watcher
that comes back with `Last-Event-ID` goes on where it was, at this process or another one, before or after a restart,
as long as the ring still holds what it missed; where it does not, it is told so (`Gap`) instead of guessing.

A watcher that reads too slowly is cut off, never waited for: the view must not stand still because of a browser.
No I/O here; `api.py` writes the bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from polar.schemas import StageChanged, TaskAccepted, TaskRejected

from .entries import Moved


class Told(NamedTuple):
    """One event of the stream."""

    moved: Moved
    id: str


class Gap(NamedTuple):
    """Events between the asked position and the next one told are no longer in memory."""

    message: str


class Cut(NamedTuple):
    """The stream ends here; `code` is `slow_client` or `shutdown`."""

    code: str
    message: str


class TooManyWatchers(RuntimeError):
    """The bound on watchers is reached."""


class Filter(NamedTuple):
    """Which events a watcher wants; None: all."""

    task_id: str | None = None
    session_id: str | None = None

    def takes(self, event: StageChanged | TaskAccepted | TaskRejected) -> bool:
        if self.task_id is not None and event.task_id != self.task_id:
            return False
        return self.session_id is None or getattr(event, "session_id", None) == self.session_id


class Watcher:
    """One reader of the stream. `get` waits; everything else is the hub's."""

    def __init__(self, wanted: Filter, capacity: int, start: str) -> None:
        self.wanted = wanted
        self.start = start
        """The position before the first item."""
        self._capacity = capacity
        self._queue: deque[Told | Gap] = deque()
        self._cut: Cut | None = None
        self._wake = asyncio.Event()

    def put(self, item: Told | Gap) -> None:
        if self._cut is not None:
            return
        if len(self._queue) >= self._capacity:
            self.cut(
                Cut(
                    "slow_client",
                    f"more than {self._capacity} events were waiting; connect again with Last-Event-ID to go on",
                )
            )
            return
        self._queue.append(item)
        self._wake.set()

    def cut(self, cut: Cut) -> None:
        """End the stream after what is queued."""
        if self._cut is None:
            self._cut = cut
        self._wake.set()

    async def get(self) -> Told | Gap | Cut:
        """The next item; after a `Cut` nothing follows."""
        while True:
            if self._queue:
                return self._queue.popleft()
            if self._cut is not None:
                return self._cut
            self._wake.clear()
            await self._wake.wait()


class EventHub:
    """Takes every `Moved` of the view and hands it to the watchers."""

    def __init__(self, partitions: int, *, kept: int, queue: int, watchers: int) -> None:
        """
        Args:
            partitions: of `stages`.
            kept: events of the ring.
            queue: events that may wait for one watcher, besides what it is handed when it comes back.
            watchers: at most so many at once.
        """
        self._kept = kept
        self._queue = queue
        self._limit = watchers
        self._ring: deque[Told] = deque()
        self._lost = [0] * partitions
        """Per partition: below this offset the ring holds nothing."""
        self._position = [0] * partitions
        self._watchers: set[Watcher] = set()
        self._closed: Cut | None = None

    def __len__(self) -> int:
        return len(self._watchers)

    @property
    def position(self) -> str:
        """The id of the newest event."""
        return ".".join(map(str, self._position))

    def publish(self, moved: Moved) -> None:
        ref = moved.ref
        if self._position[ref.partition] == 0:
            self._lost[ref.partition] = ref.offset  # what stood before has left the log
        self._position[ref.partition] = ref.offset + 1
        told = Told(moved, self.position)
        self._ring.append(told)
        while len(self._ring) > self._kept:
            gone = self._ring.popleft().moved.ref
            self._lost[gone.partition] = gone.offset + 1
        for watcher in self._watchers:
            if watcher.wanted.takes(moved.event):
                watcher.put(told)

    def watch(self, wanted: Filter, last_event_id: str | None) -> Watcher:
        """A new watcher; it begins after `last_event_id`, or now.

        Raises:
            TooManyWatchers: try again later.
        """
        if len(self._watchers) >= self._limit:
            raise TooManyWatchers(f"{self._limit} watchers are connected already")
        start, missed, gap = self._since(last_event_id)
        watcher = Watcher(wanted, self._queue + len(missed) + 1, start)
        if gap is not None:
            watcher.put(gap)
        for told in missed:
            if wanted.takes(told.moved.event):
                watcher.put(told)
        if self._closed is not None:
            watcher.cut(self._closed)
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def close(self) -> None:
        """The process stops: every watcher gets what is queued and then the reason."""
        self._closed = Cut("shutdown", "this process stops; connect again with Last-Event-ID to go on")
        for watcher in self._watchers:
            watcher.cut(self._closed)

    def _since(self, last_event_id: str | None) -> tuple[str, list[Told], Gap | None]:
        if not last_event_id:
            return self.position, [], None
        seen = parse_position(last_event_id, len(self._position))
        if seen is None:
            return self.position, [], Gap("the Last-Event-ID is no position of this stream; it goes on from now")
        missed = list(self._after(seen))
        if any(lost > offset for lost, offset in zip(self._lost, seen, strict=True)):
            return last_event_id, missed, Gap("older events are no longer kept; ask /tasks for what changed meanwhile")
        return last_event_id, missed, None

    def _after(self, seen: list[int]) -> Iterator[Told]:
        for told in self._ring:
            ref = told.moved.ref
            if ref.offset >= seen[ref.partition]:
                yield told


def parse_position(text: str, partitions: int) -> list[int] | None:
    """The offsets of an event id, or None where it is none for so many partitions."""
    parts = text.split(".")
    if len(parts) != partitions or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        return None
    return [int(part) for part in parts]
