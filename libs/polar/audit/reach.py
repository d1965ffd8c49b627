"""How far the log was read, and what follows from that: what is missing is an offence only where it must be there.

Each partition has three offsets. From `start` on it was read (retention took the rest, or it is older than asked for).
Up to `end` it was read. `mark` lies between: every transaction with a record below it was over before any `end` was
taken. So of a record below its `mark`, the source and the other records of its transaction are below their `end`;
a record at or above it serves as evidence, and what it lacks is not held against it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from .report import Place, TopicReach

SLACK_MS: Final = 600_000
"""Clocks of hosts may differ by so much when a time is compared with that of a partition's oldest record."""


class Extent(NamedTuple):
    """Of one partition."""

    start: int
    mark: int
    end: int


class Reach:
    def __init__(self, extents: Mapping[tuple[str, int], Extent], partition_of: Callable[[str, str], int]) -> None:
        """`partition_of`: the partition of a key of a topic."""
        self._extents = dict(extents)
        self._partition_of = partition_of
        self._oldest: dict[tuple[str, int], int] = {}
        self._records: dict[str, int] = {}

    def saw(self, topic: str, partition: int, timestamp_ms: int) -> None:
        """A record was read; the first one of each partition tells how old it is."""
        self._oldest.setdefault((topic, partition), timestamp_ms)
        self._records[topic] = self._records.get(topic, 0) + 1

    def chosen(self, topic: str, partition: int, from_ms: int) -> None:
        """It was the audit's choice to read a partition from that time on: from there it is whole."""
        self._oldest[topic, partition] = from_ms

    def starts_moved(self, starts: Mapping[tuple[str, int], int]) -> None:
        """Retention went on while the log was read."""
        for where, start in starts.items():
            before = self._extents[where]
            if start > before.start:
                self._extents[where] = before._replace(start=start)
                self._oldest.pop(where, None)  # how old what it begins with is, nobody has seen

    def judged(self, place: Place) -> bool:
        """Whether what this record lacks counts against it."""
        return place.offset < self._extents[place.topic, place.partition].mark

    def within(self, place: Place) -> bool:
        """Whether the place is below the end of what counts as read."""
        return place.offset < self._extents[place.topic, place.partition].end

    def expired(self, place: Place) -> bool:
        """Whether a record there would be below what was read."""
        extent = self._extents.get((place.topic, place.partition))
        return extent is not None and place.offset < extent.start

    def whole(self, topic: str, partition: int) -> bool:
        """Whether a partition was read from its first record."""
        return self._extents[topic, partition].start == 0

    def may_have_had(self, topic: str, key: str, since_ms: int) -> bool:
        """Whether a record of `key`, written at `since_ms` or later, may be one that was not read."""
        partition = self._partition_of(topic, key)
        if self._extents[topic, partition].start == 0:
            return False
        oldest = self._oldest.get((topic, partition))
        return oldest is None or since_ms - SLACK_MS <= oldest

    def topics(self) -> list[TopicReach]:
        found = []
        for topic in dict.fromkeys(topic for topic, _ in self._extents):
            late = [one for one in self._extents if one[0] == topic and self._extents[one].start > 0]
            ages = [self._oldest[one] for one in late if one in self._oldest]
            found.append(
                TopicReach(
                    topic=topic,
                    records=self._records.get(topic, 0),
                    removed=sum(self._extents[one].start for one in late),
                    from_ms=max(ages, default=None),
                )
            )
        return found
