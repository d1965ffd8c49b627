"""What tells a partition that stands still from one that has nothing to do. Pure: a clock's numbers in, a verdict out.

A partition stands still when records wait and, for the whole limit, either nothing at all has moved, or it has been
opened again and again without getting past where it was. Time in which the log could not be asked does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

from .partition import Progress

FLAPS = 3
"""So many openings without anything processed are no progress, however much of the state was rebuilt in them."""


@dataclass(slots=True)
class _Seen:
    moved: tuple[int | None, ...]
    moved_at: float
    done: tuple[int, ...]
    done_at: float
    opened: int
    last_opened: int = 0
    restarts: int = 0


class Watchdog:
    """Looks at the partitions of one worker."""

    def __init__(self, limit_s: float, restarts: int) -> None:
        """`restarts`: how often in a row a partition may be started anew before it is given up."""
        self._limit_s = limit_s
        self._most = restarts
        self._seen: dict[int, _Seen] = {}

    def unknown(self, now: float) -> None:
        """The log could not be asked."""
        for seen in self._seen.values():
            seen.moved_at = seen.done_at = now

    def keep(self, partitions: set[int]) -> None:
        """Others are no longer this worker's."""
        self._seen = {one: seen for one, seen in self._seen.items() if one in partitions}

    def stands_still(self, partition: int, progress: Progress, end: int, now: float) -> bool:
        """Whether to start the partition anew. `end`: of its log, read committed. `now`: in seconds, monotonic."""
        done = (progress.furthest, progress.processed, progress.dead)
        moved = (*done, progress.next, progress.replayed, progress.opened)
        seen = self._seen.get(partition)
        if seen is None:
            seen = self._seen[partition] = _Seen(moved, now, done, now, progress.opened)
        idle = progress.next is not None and progress.live and progress.next >= end
        if done != seen.done or idle:
            seen.restarts = 0
            seen.done, seen.done_at, seen.opened = done, now, progress.opened
        if moved != seen.moved or idle:
            seen.moved, seen.moved_at = moved, now
        seen.last_opened = progress.opened
        flapping = now - seen.done_at >= self._limit_s and progress.opened - seen.opened >= FLAPS
        return flapping or now - seen.moved_at >= self._limit_s

    def restarted(self, partition: int, now: float) -> int:
        """It is started anew and keeps its `Progress`; how often in a row now."""
        seen = self._seen[partition]
        seen.restarts += 1
        seen.moved_at = seen.done_at = now
        seen.opened = seen.last_opened
        return seen.restarts

    def given_up(self, partition: int) -> bool:
        """Whether it has been started anew as often as it may."""
        return self._seen[partition].restarts >= self._most
