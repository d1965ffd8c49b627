"""One segment: an append-only file of record batches, named by its first offset.

`<base>.log` is written by producers; `<base>-<end>.<generation>.log` is the compacted form of the segments in
`[base, end)` and supersedes them. Promises: batches lie whole and in offset order; reads return whole batches; a
look-up scans at most one index stride. Knows nothing of topics.
"""

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from polar.broker.batch import HEADER_SIZE, BatchHeader, read_header
from polar.broker.files import FilePool
from polar.broker.index import SparseIndex
from polar.broker.ledger import SegmentFacts

__all__ = ["Segment", "SegmentName", "read_batches"]

_WINDOW = 64 * 1024
_BASE_AND_LENGTH = struct.Struct(">qi")
_LAST_DELTA = struct.Struct(">i")
_LAST_DELTA_AT = 23
NO_TIMESTAMP = -1


@dataclass(frozen=True, slots=True)
class SegmentName:
    """What a file name says: offsets `[base, end)`; `end` is None for a segment still open at its end."""

    base: int
    end: int | None = None
    generation: int = 0

    _PATTERN = re.compile(r"(\d{20})(?:-(\d{20})\.(\d+))?\.log")

    @classmethod
    def parse(cls, name: str) -> "SegmentName | None":
        match = cls._PATTERN.fullmatch(name)
        if match is None:
            return None
        base, end, generation = match.groups()
        return cls(int(base)) if end is None else cls(int(base), int(end), int(generation))

    def __str__(self) -> str:
        suffix = "" if self.end is None else f"-{self.end:020d}.{self.generation}"
        return f"{self.base:020d}{suffix}.log"

    def supersedes(self, other: "SegmentName") -> bool:
        return self.end is not None and self.generation > other.generation and self.base <= other.base < self.end


@dataclass(slots=True)
class Segment:
    """The facts of one file that look-ups need; the bytes stay on disk."""

    path: Path
    name: SegmentName
    size: int = 0
    next_offset: int = 0
    first_timestamp: int = NO_TIMESTAMP
    max_timestamp: int = NO_TIMESTAMP
    index: SparseIndex | None = field(default_factory=SparseIndex)
    """None for a sealed segment whose index waits in the database."""

    @property
    def base_offset(self) -> int:
        return self.name.base

    @classmethod
    def new(cls, directory: Path, base_offset: int) -> "Segment":
        name = SegmentName(base_offset)
        return cls(directory / str(name), name, next_offset=base_offset)

    @classmethod
    def from_facts(cls, path: Path, name: SegmentName, facts: SegmentFacts) -> "Segment":
        return cls(path, name, facts.size, facts.next_offset, facts.first_timestamp, facts.max_timestamp, None)

    def facts(self, index: SparseIndex) -> SegmentFacts:
        """The row for the ledger. Raises `FileNotFoundError` when nothing was ever written."""
        return SegmentFacts(
            self.size,
            os.stat(self.path).st_mtime_ns,
            self.next_offset,
            self.first_timestamp,
            self.max_timestamp,
            index.to_bytes(),
        )

    def note(self, header: BatchHeader, base_offset: int) -> None:
        """Account for a batch written at the end of the file."""
        if self.index is not None:
            self.index.add(base_offset, self.size, self.max_timestamp)
        if self.first_timestamp == NO_TIMESTAMP:
            self.first_timestamp = header.max_timestamp
        self.max_timestamp = max(self.max_timestamp, header.max_timestamp)
        self.size += header.size
        self.next_offset = base_offset + header.last_offset_delta + 1

    def find(self, files: FilePool, index: SparseIndex, offset: int) -> int | None:
        """File position of the first batch that ends after `offset`; None when there is none."""
        for position, header in self.walk(files, index.position_of(offset)):
            if header.next_offset > offset:
                return position
        return None

    def walk(self, files: FilePool, position: int) -> Iterator[tuple[int, BatchHeader]]:
        """Positions and headers of the batches from `position` (the start of one) to the end."""
        while position < self.size:
            window = files.read(self.path, min(_WINDOW, self.size - position), position)
            within = 0
            while within + HEADER_SIZE <= len(window):
                header = read_header(window, within)
                yield position + within, header
                within += header.size
            if not within:
                return
            position += within

    def read(self, files: FilePool, position: int, max_bytes: int, upper: int, force: bool) -> tuple[bytes, int]:
        """Whole batches from `position` that start below offset `upper`, and the offset after the last of them.

        At most `max_bytes`, except that with `force` the first batch is returned whatever its size.
        """
        start = files.read(self.path, 12, position)
        if len(start) < 12:
            return b"", -1
        base, length = _BASE_AND_LENGTH.unpack(start)
        first = 12 + length
        if base >= upper or (first > max_bytes and not force):
            return b"", -1
        wanted = min(max(max_bytes, first), self.size - position)
        data = files.read(self.path, wanted, position)
        if position + len(data) == self.size and upper >= self.next_offset:
            return data, self.next_offset
        end, last = 0, 0
        while end + 12 <= len(data):
            base, length = _BASE_AND_LENGTH.unpack_from(data, end)
            if base >= upper or end + 12 + length > len(data):
                break
            last = end
            end += 12 + length
        if not end:
            return b"", -1
        base, _ = _BASE_AND_LENGTH.unpack_from(data, last)
        (delta,) = _LAST_DELTA.unpack_from(data, last + _LAST_DELTA_AT)
        return (data if end == len(data) else data[:end]), base + delta + 1


def read_batches(path: Path, start: int, end: int) -> Iterator[tuple[BatchHeader, bytes]]:
    """Whole batches of the first `end` bytes of a file from position `start`, for worker threads."""
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            head = file.read(HEADER_SIZE)
            if len(head) < HEADER_SIZE:
                return
            header = read_header(head)
            yield header, head + file.read(header.size - HEADER_SIZE)
            start += header.size
