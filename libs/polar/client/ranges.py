"""Reading stretches of the log that have an end: one partition from an offset to another, batch by batch.

Promises: records come in order, none below `start` or at `end` and beyond; what retention takes away under the reader
is skipped and told (`gone`), never passed over in silence; a broker that stands still for `delivery_timeout_s` is an
error.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from polar.bus import BrokerUnavailable, Bus, Reader, Record, RecordGone


class Bounds(NamedTuple):
    """What a partition holds: offsets from `start` on, below `end` (read committed: the last stable offset)."""

    start: int
    end: int


async def bounds(
    bus: Bus, topic: str, *, since_ms: int | None = None, partitions: Sequence[int] | None = None
) -> dict[int, Bounds]:
    """The bounds of `topic`'s partitions (all, unless some are named) at this moment.

    `since_ms`: start at the first record with a time stamp of at least that, and so after every record that is older
    than all that follow it.
    """
    wanted = list(range(bus.partitions(topic))) if partitions is None else sorted(set(partitions))
    if not wanted:
        return {}
    reader = await bus.reader(
        [topic], start="earliest" if since_ms is None else max(0, since_ms), partitions={topic: wanted}
    )
    try:
        starts, ends = reader.positions(), await reader.ends()
    finally:
        await reader.close()
    return {one: Bounds(min(starts[topic, one], ends[topic, one]), ends[topic, one]) for one in wanted}


class Stretch:
    """One partition of `topic` from `start` to `end`. Iterate `batches()` once."""

    def __init__(self, bus: Bus, topic: str, partition: int, start: int, end: int) -> None:
        self._bus = bus
        self._topic = topic
        self._partition = partition
        self._end = end
        self._reader: Reader | None = None
        self.position = start
        """Everything below has been handed out, skipped, or is gone."""
        self.gone = 0
        """Where the log begins, if it turned out to begin after a record that was wanted; 0: nothing was lost."""

    async def batches(self, *, max_records: int = 500) -> AsyncGenerator[list[Record]]:
        """Batches of records, also empty ones, each time the position has moved.

        Raises:
            BrokerUnavailable: nothing came for `delivery_timeout_s`.
        """
        if self.position >= self._end:
            return
        clock, limit_s = self._bus.clock, self._bus.settings.delivery_timeout_s
        try:
            self._reader = await self._opened()
            moved_at = clock.monotonic()
            while self.position < self._end:
                found = await self._poll(max_records)
                here = self._reader.positions()[self._topic, self._partition]
                if here == self.position:
                    if clock.monotonic() - moved_at > limit_s:
                        raise BrokerUnavailable(
                            f"reading `{self._topic}` stood still for {limit_s:g} s before its end at that time"
                        )
                    continue
                self.position, moved_at = here, clock.monotonic()
                yield [one for one in found if one.offset < self._end]
        finally:
            if self._reader is not None:
                await self._reader.close()

    def skip_to(self, offset: int) -> None:
        """Go on at `offset`, which is ahead."""
        assert self._reader is not None, "skip while iterating"
        if offset > self.position:
            self._reader.seek(self._topic, self._partition, offset)
            self.position = offset

    async def _opened(self) -> Reader:
        while True:
            try:
                return await self._bus.reader(
                    [self._topic],
                    partitions={self._topic: [self._partition]},
                    start={(self._topic, self._partition): self.position},
                )
            except RecordGone as error:
                self._lost(error)

    async def _poll(self, max_records: int) -> list[Record]:
        assert self._reader is not None
        try:
            return await self._reader.poll(max_records=max_records)
        except RecordGone as error:
            self._lost(error)
            self._reader.seek(self._topic, self._partition, self.position)
            return []

    def _lost(self, error: RecordGone) -> None:
        """Retention was faster: go on where the log begins now.

        Raises:
            RecordGone: it is not retention that took the record.
        """
        if error.log_start is None or error.log_start <= self.position:
            raise error
        self.position = self.gone = error.log_start
