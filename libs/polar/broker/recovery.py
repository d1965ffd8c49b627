"""Reading a partition's directory back after any kind of stop.

Promises: every batch that was written whole is kept; a torn or corrupt end is cut off its segment, said in the log
and, where it is more than a torn tail, kept beside it as `*.corrupt`. Segments whose size and time are as the
ledger noted are trusted without reading; all others are read and their checksums verified.
"""

import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from polar.broker.batch import ABORT, COMMIT, HEADER_SIZE, BatchHeader, control_type, crc_matches, read_header
from polar.broker.ledger import LogLedger
from polar.broker.producers import ProducerStates
from polar.broker.segment import Segment, SegmentName, read_batches

__all__ = ["Recovered", "recover"]

logger = logging.getLogger(__name__)

TEMPORARY = ".tmp"
CORRUPT = ".corrupt"
_SMALLEST_LENGTH = HEADER_SIZE - 12

OnBatch = Callable[[BatchHeader, int | None], None]


@dataclass(slots=True)
class Recovered:
    """A partition as found on disk: segments in offset order and the producers at the end of the log."""

    segments: list[Segment]
    producers: ProducerStates
    lost_bytes: int


def recover(directory: Path, ledger: LogLedger, name: str) -> Recovered:
    """Load the segments of `directory`; `name` is for the log lines."""
    names = _current_names(directory)
    saved_at, saved = ledger.producers()
    producers = ProducerStates.from_bytes(saved) if saved is not None else ProducerStates()

    def replay(header: BatchHeader, kind: int | None) -> None:
        if header.base_offset >= saved_at:
            _replay(producers, ledger, header, kind)

    segments: list[Segment] = []
    lost = 0
    for position, segment_name in enumerate(names):
        path = directory / str(segment_name)
        facts = ledger.segment(path.name)
        stat = path.stat()
        if facts is not None and (facts.size, facts.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            segment = Segment.from_facts(path, segment_name, facts)
            if segment.next_offset > saved_at:
                for header, batch in read_batches(path, 0, segment.size):
                    replay(header, control_type(batch) if header.is_control else None)
        else:
            # The last good batch of the segment before bounds what this one may hold.
            limit = names[position + 1].base if position + 1 < len(names) else None
            segment, bad = _scan(path, segment_name, limit, replay)
            if bad:
                lost += bad
                _cut(path, segment.size, bad, is_last=position + 1 == len(names), name=name)
        segments.append(segment)
    return Recovered(segments, producers, lost)


def _current_names(directory: Path) -> list[SegmentName]:
    names = []
    for entry in sorted(os.listdir(directory)):
        if entry.endswith(TEMPORARY):
            (directory / entry).unlink()
            continue
        name = SegmentName.parse(entry)
        if name is not None:
            names.append(name)
    current = [name for name in names if not any(other.supersedes(name) for other in names)]
    for name in set(names) - set(current):
        (directory / str(name)).unlink()
    return sorted(current, key=lambda name: name.base)


def _scan(path: Path, name: SegmentName, limit: int | None, on_batch: OnBatch) -> tuple[Segment, int]:
    """The good prefix of a file as a segment, and how many bytes follow it."""
    segment = Segment(path, name, next_offset=name.base)
    size = path.stat().st_size
    if not size:
        segment.next_offset = name.end or name.base
        return segment, 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        try:
            while segment.size + HEADER_SIZE <= size:
                header = read_header(view, segment.size)
                if (
                    header.magic != 2
                    or header.length < _SMALLEST_LENGTH
                    or segment.size + header.size > size
                    or not _follows(header, segment, limit)
                    or not crc_matches(view, segment.size, header)
                ):
                    break
                kind = control_type(view, segment.size) if header.is_control else None
                on_batch(header, kind)
                segment.note(header, header.base_offset)
        finally:
            view.release()
    if name.end is not None:
        # Compaction may have removed the last records; their offsets stay taken.
        segment.next_offset = name.end
    return segment, size - segment.size


def _follows(header: BatchHeader, segment: Segment, limit: int | None) -> bool:
    """Whether a batch's offsets, which its checksum does not cover, fit those before it; compaction leaves gaps."""
    if segment.name.end is None:
        return header.base_offset == segment.next_offset and (limit is None or header.next_offset <= limit)
    return segment.next_offset <= header.base_offset and header.next_offset <= segment.name.end


def _replay(producers: ProducerStates, ledger: LogLedger, header: BatchHeader, kind: int | None) -> None:
    if not header.has_producer:
        return
    if kind is None:
        if header.base_sequence >= 0:
            producers.record(header, header.base_offset, header.max_timestamp)
    elif kind in (ABORT, COMMIT):
        aborted = producers.complete(
            header.producer_id, header.producer_epoch, kind, header.base_offset, header.max_timestamp
        )
        if aborted is not None:
            ledger.add_aborted(aborted)


def _cut(path: Path, size: int, bad: int, *, is_last: bool, name: str) -> None:
    if is_last:
        logger.warning("%s: cut %d bytes of a torn or corrupt end off %s", name, bad, path.name)
    else:
        logger.error(
            "%s: %s is corrupt from byte %d on: %d bytes of records are lost, later segments are kept",
            name,
            path.name,
            size,
            bad,
        )
    aside = path.with_name(path.name + CORRUPT)
    with path.open("r+b") as file:
        file.seek(size)
        with aside.open("wb") as kept:
            while chunk := file.read(1 << 20):
                kept.write(chunk)
        file.truncate(size)
