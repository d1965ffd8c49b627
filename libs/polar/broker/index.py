"""A sparse index of one segment: from an offset or a time to a file position at or before it.

Promises: at most `MAX_ENTRIES` entries however large the segment grows (the stride doubles when it is full), so the
memory of an index is bounded at about 25 KB. Pure data; the segment does the reading.
"""

from array import array
from bisect import bisect_left, bisect_right

__all__ = ["SparseIndex"]

MAX_ENTRIES = 1024
FIRST_STRIDE = 16 * 1024
"""Bytes of log between two entries at first: what a look-up scans at most in a small segment."""


class SparseIndex:
    """Entries of (offset, file position, largest timestamp before that position), all ascending."""

    __slots__ = ("_offsets", "_positions", "_stride", "_times")

    def __init__(self) -> None:
        self._offsets = array("q")
        self._positions = array("q")
        self._times = array("q")
        self._stride = FIRST_STRIDE

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, offset: int, position: int, max_timestamp_before: int) -> None:
        """Offer the batch that starts at `position`; it is kept when a stride has passed since the last entry."""
        if self._positions and position - self._positions[-1] < self._stride:
            return
        if len(self._offsets) >= MAX_ENTRIES:
            self._offsets, self._positions, self._times = self._offsets[::2], self._positions[::2], self._times[::2]
            self._stride *= 2
        self._offsets.append(offset)
        self._positions.append(position)
        self._times.append(max_timestamp_before)

    def position_of(self, offset: int) -> int:
        """A position at or before the batch that holds `offset`."""
        entry = bisect_right(self._offsets, offset) - 1
        return self._positions[entry] if entry >= 0 else 0

    def position_of_time(self, timestamp: int) -> int:
        """A position at or before the first batch whose largest timestamp reaches `timestamp`."""
        entry = bisect_left(self._times, timestamp) - 1
        return self._positions[entry] if entry >= 0 else 0

    def to_bytes(self) -> bytes:
        """Machine-local form for the broker's own database."""
        return array("q", [self._stride, len(self._offsets)]).tobytes() + b"".join(
            column.tobytes() for column in (self._offsets, self._positions, self._times)
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "SparseIndex":
        """The inverse of `to_bytes`."""
        values = array("q")
        values.frombytes(data)
        index = cls()
        index._stride, count = values[0], values[1]
        index._offsets = values[2 : 2 + count]
        index._positions = values[2 + count : 2 + 2 * count]
        index._times = values[2 + 2 * count : 2 + 3 * count]
        return index
