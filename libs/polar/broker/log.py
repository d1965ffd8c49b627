"""The log of one partition: appending, reading, looking up, and what may be read.

Promises: offsets are given in order and never twice; what `append` returned is written (and, with `fsync`, shown to
readers only once it is on disk); a repeated batch is stored once; a reader sees whole batches below the high
watermark, or below the last stable offset when it reads committed. All methods run on the event loop's thread and
do not wait; `retention` and `compaction` change the list of segments through `replace` and `remove_front`.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from polar.broker import batch as batches
from polar.broker.batch import BatchHeader
from polar.broker.configs import TopicConfig
from polar.broker.errors import ErrorCode, KafkaError
from polar.broker.files import FilePool
from polar.broker.index import SparseIndex
from polar.broker.ledger import LogLedger
from polar.broker.producers import AbortedTransaction
from polar.broker.recovery import recover
from polar.broker.segment import NO_TIMESTAMP, Segment

__all__ = ["Appended", "FoundOffset", "PartitionLog", "Watcher"]

logger = logging.getLogger(__name__)

_HINTS = 16
"""Read positions remembered per log: as many sequential readers go on without a look-up."""
_INDEX_CACHE = 8
"""Indexes of sealed segments held per log."""


class Watcher(Protocol):
    """Whoever waits for a log to grow."""

    def grown(self, log: "PartitionLog", size: int) -> None:
        """`size` bytes became readable to those who read uncommitted."""

    def stabilised(self) -> None:
        """The last stable offset moved."""

    def closed(self) -> None:
        """The log is gone."""


class Appended(NamedTuple):
    """Where a batch lies. `append_time_ms` is set when the broker's clock replaced the client's."""

    base_offset: int
    append_time_ms: int | None
    repeated: bool


class FoundOffset(NamedTuple):
    timestamp: int
    offset: int


class PartitionLog:
    """One partition. `clock` gives Unix milliseconds. Raises `KafkaError` for what a client did wrong."""

    def __init__(
        self,
        topic: str,
        partition: int,
        directory: Path,
        config: TopicConfig,
        ledger: LogLedger,
        files: FilePool,
        clock: Callable[[], int],
        *,
        fsync: bool,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.directory = directory
        self.config = config
        self.ledger = ledger
        self.watchers: set[Watcher] = set()
        self.is_closed = False
        self._files = files
        self._clock = clock
        self._fsync = fsync
        directory.mkdir(parents=True, exist_ok=True)
        found = recover(directory, ledger, f"{topic}-{partition}")
        self.producers = found.producers
        self.recovered_loss = found.lost_bytes
        saved_start = ledger.start_offset()
        self.segments: list[Segment] = found.segments or [Segment.new(directory, saved_start)]
        self.start_offset = max(saved_start, self.segments[0].base_offset)
        # What was acknowledged may have been cut off below a start that moved: never reuse those offsets. And a
        # compacted segment takes no appends.
        if self.active.next_offset < self.start_offset or self.active.name.end is not None:
            following = max(self.active.next_offset, self.start_offset)
            self.segments.append(Segment.new(directory, following))
        self.end_offset = self.active.next_offset
        self.high_watermark = self.end_offset
        self._last_aborted = ledger.last_aborted()
        self._hints: OrderedDict[int, tuple[Segment, int]] = OrderedDict()
        self._indexes: OrderedDict[str, SparseIndex] = OrderedDict()
        self._unsynced: dict[Path, None] = {}
        if self.active.index is None:
            self.active.index = self._index(self.active)

    @property
    def active(self) -> Segment:
        return self.segments[-1]

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def last_stable_offset(self) -> int:
        """The end of what a read-committed reader may see."""
        first = self.producers.first_unstable
        stable = self.high_watermark if first is None else min(first, self.high_watermark)
        return max(stable, self.start_offset)

    # Writing

    def append(self, batch: bytes) -> Appended:
        """Append a client's batch. The caller has checked the producer's transaction."""
        header = self._checked(batch)
        if header.has_producer:
            known = self.producers.check(header)
            if known is not None:
                return Appended(known.base_offset, known.timestamp if self.config.append_time else None, True)
        now = self._clock()
        if self.config.append_time:
            batch, header = batches.with_append_time(batch, header, now)
        base = self.end_offset
        prefix = batches.placed_prefix(header, base)
        self._write(header, [prefix, memoryview(batch)[len(prefix) :]], base, now)
        if header.has_producer:
            self.producers.record(header, base, now)
        self._grown(header.size)
        return Appended(base, now if self.config.append_time else None, False)

    def append_marker(self, producer_id: int, epoch: int, kind: int) -> None:
        """End the producer's transaction here with a control batch."""
        now = self._clock()
        base = self.end_offset
        batch = batches.control_batch(producer_id, epoch, kind, base, now)
        header = batches.read_header(batch)
        self._write(header, [batch], base, now)
        aborted = self.producers.complete(producer_id, epoch, kind, base, now)
        if aborted is not None:
            self.ledger.add_aborted(aborted)
            self._last_aborted = base
        self._grown(header.size)
        for watcher in list(self.watchers):
            watcher.stabilised()

    def _checked(self, batch: bytes) -> BatchHeader:
        if len(batch) < batches.HEADER_SIZE:
            raise KafkaError(ErrorCode.invalid_record, "a produce request holds exactly one record batch")
        header = batches.read_header(batch)
        if header.magic != 2:
            raise KafkaError(ErrorCode.unsupported_for_message_format, f"message format {header.magic} is not 2")
        if header.size > self.config.max_message_bytes:
            raise KafkaError(
                ErrorCode.message_too_large,
                f"the batch has {header.size} bytes, max.message.bytes is {self.config.max_message_bytes}",
            )
        if header.size != len(batch) or header.record_count <= 0 or header.last_offset_delta != header.record_count - 1:
            raise KafkaError(ErrorCode.invalid_record, "a produce request holds exactly one whole record batch")
        if not batches.crc_matches(batch, 0, header):
            raise KafkaError(ErrorCode.corrupt_message, "the checksum of the batch does not match")
        if header.is_control:
            raise KafkaError(ErrorCode.invalid_record, "clients may not write control batches")
        if header.has_producer and (header.producer_epoch < 0 or header.base_sequence < 0):
            raise KafkaError(ErrorCode.invalid_record, "a batch with a producer id needs an epoch and a sequence")
        if not self.config.append_time:
            self._check_time(header)
        if self.config.compact:
            _, records = batches.records_of(batch, header)
            if any(record.key is None for record in records):
                raise KafkaError(ErrorCode.invalid_record, "a compacted topic takes no record without a key")
        return header

    def _check_time(self, header: BatchHeader) -> None:
        now = self._clock()
        if header.max_timestamp - now > self.config.timestamp_after_max_ms or (
            header.base_timestamp >= 0 and now - header.base_timestamp > self.config.timestamp_before_max_ms
        ):
            raise KafkaError(ErrorCode.invalid_timestamp, "a record's timestamp is outside message.timestamp.*.max.ms")

    def _write(self, header: BatchHeader, parts: list[bytes | memoryview], base: int, now: int) -> None:
        segment = self.active
        if segment.size and (
            segment.size + header.size > self.config.segment_bytes or self._is_old(segment, header, now)
        ):
            segment = self.roll()
        try:
            self._files.write(segment.path, parts, segment.size)
        except OSError as error:
            raise KafkaError(ErrorCode.kafka_storage_error, f"cannot write: {error}") from error
        segment.note(header, base)
        self.end_offset = segment.next_offset
        if self._fsync:
            self._unsynced[segment.path] = None

    def _is_old(self, segment: Segment, header: BatchHeader, now: int) -> bool:
        reference = header.max_timestamp if header.max_timestamp >= 0 else now
        return segment.first_timestamp != NO_TIMESTAMP and reference - segment.first_timestamp > self.config.segment_ms

    def _grown(self, size: int) -> None:
        if self._fsync:
            return
        self.high_watermark = self.end_offset
        for watcher in list(self.watchers):
            watcher.grown(self, size)

    def roll(self) -> Segment:
        """Seal the active segment, if it holds anything, and start the next."""
        sealed = self.active
        if not sealed.size:
            return sealed
        self.save()
        if sealed.index is not None:
            self._remember_index(sealed, sealed.index)
        sealed.index = None
        self.segments.append(Segment.new(self.directory, self.end_offset))
        return self.active

    def save(self) -> None:
        """Note the active segment and the producers in the ledger, so that a start need not read them again."""
        segment = self.active
        if segment.size and segment.index is not None:
            self.ledger.save_segment(segment.path.name, segment.facts(segment.index))
        self.ledger.save_producers(self.end_offset, self.producers.to_bytes())

    # Durability, with fsync

    def take_unsynced(self) -> tuple[list[Path], int]:
        """Files that need an fsync, and the offset up to which the log is on disk after it."""
        paths = list(self._unsynced)
        self._unsynced.clear()
        return paths, self.end_offset

    def synced(self, end_offset: int) -> None:
        """Everything below `end_offset` is on disk: show it to readers."""
        if end_offset <= self.high_watermark:
            return
        self.high_watermark = end_offset
        for watcher in list(self.watchers):
            # Bytes were not counted while they waited: let the watcher look.
            watcher.grown(self, 1 << 62)

    # Reading

    def read(self, offset: int, max_bytes: int, upper: int, *, force: bool) -> bytes:
        """Whole batches from the one that holds `offset`, none at or past offset `upper`.

        The first batch may begin below `offset`; clients skip those records. Raises OFFSET_OUT_OF_RANGE.
        """
        if offset < self.start_offset or offset > self.end_offset:
            raise KafkaError(ErrorCode.offset_out_of_range)
        if offset >= upper:
            return b""
        segment, position = self._locate(offset)
        if segment is None:
            return b""
        data, following = segment.read(self._files, position, max_bytes, upper, force)
        if data:
            self._hint(following, segment, position + len(data))
        return data

    def aborted(self, start: int, upper: int) -> list[AbortedTransaction]:
        """Aborted transactions that a read-committed reader of `[start, upper)` has to skip."""
        return self.ledger.aborted(start, upper) if self._last_aborted >= start else []

    def _locate(self, offset: int) -> tuple[Segment | None, int]:
        hint = self._hints.get(offset)
        if hint is not None and hint[1] < hint[0].size:
            return hint
        for segment in self._segments_from(offset):
            position = segment.find(self._files, self._index(segment), offset)
            if position is not None:
                return segment, position
        return None, 0

    def _hint(self, offset: int, segment: Segment, position: int) -> None:
        if position >= segment.size and segment is not self.active:
            return
        self._hints[offset] = (segment, position)
        if len(self._hints) > _HINTS:
            self._hints.popitem(last=False)

    def _segments_from(self, offset: int) -> list[Segment]:
        low, high = 0, len(self.segments)
        while low < high:
            middle = (low + high) // 2
            if self.segments[middle].next_offset <= offset:
                low = middle + 1
            else:
                high = middle
        return self.segments[low:]

    def _index(self, segment: Segment) -> SparseIndex:
        if segment.index is not None:
            return segment.index
        name = segment.path.name
        index = self._indexes.get(name)
        if index is None:
            facts = self.ledger.segment(name)
            if facts is not None:
                index = SparseIndex.from_bytes(facts.index)
            else:
                index = SparseIndex()
                longest = NO_TIMESTAMP
                for position, header in segment.walk(self._files, 0):
                    index.add(header.base_offset, position, longest)
                    longest = max(longest, header.max_timestamp)
        self._remember_index(segment, index)
        return index

    def _remember_index(self, segment: Segment, index: SparseIndex) -> None:
        self._indexes[segment.path.name] = index
        self._indexes.move_to_end(segment.path.name)
        if len(self._indexes) > _INDEX_CACHE:
            self._indexes.popitem(last=False)

    def offset_for_time(self, timestamp: int) -> FoundOffset | None:
        """The first record at or after `timestamp`, also inside a batch; None past the last."""
        for segment in self.segments:
            if segment.max_timestamp < timestamp or segment.next_offset <= self.start_offset:
                continue
            for position, header in segment.walk(self._files, self._index(segment).position_of_time(timestamp)):
                if header.max_timestamp >= timestamp and header.next_offset > self.start_offset:
                    found = self._record_at_time(segment, position, header, timestamp)
                    if found is not None:
                        return found
        return None

    def _record_at_time(
        self, segment: Segment, position: int, header: BatchHeader, timestamp: int
    ) -> FoundOffset | None:
        data = self._files.read(segment.path, header.size, position)
        _, records = batches.records_of(data, header)
        for record in records:
            time = header.max_timestamp if header.is_append_time else header.base_timestamp + record.timestamp_delta
            offset = header.base_offset + record.offset_delta
            if time >= timestamp and offset >= self.start_offset:
                return FoundOffset(time, offset)
        return None

    def latest_time(self) -> FoundOffset | None:
        """The record with the largest timestamp (the first of them)."""
        longest = max((segment.max_timestamp for segment in self.segments), default=NO_TIMESTAMP)
        return self.offset_for_time(longest) if longest != NO_TIMESTAMP else None

    # Shortening

    def delete_before(self, offset: int) -> int:
        """Raise the start of the log to `offset` (-1: the high watermark) and return it."""
        if offset == -1:
            offset = self.high_watermark
        if offset < 0 or offset > self.high_watermark:
            raise KafkaError(ErrorCode.offset_out_of_range)
        if offset > self.start_offset:
            self.start_offset = offset
            self.ledger.set_start_offset(offset)
        return self.start_offset

    def remove_front(self, count: int) -> list[Path]:
        """Drop the first `count` segments, which are not the active one; returns the files to unlink."""
        gone, self.segments = self.segments[:count], self.segments[count:]
        self.start_offset = max(self.start_offset, self.segments[0].base_offset)
        self.ledger.set_start_offset(self.start_offset)
        self.ledger.forget_aborted(self.start_offset)
        return self._release(gone)

    def replace(self, sources: list[Segment], merged: Segment, index: SparseIndex) -> list[Path]:
        """Put a compacted segment in the place of its sources; returns the files to unlink."""
        at = self.segments.index(sources[0])
        self.ledger.save_segment(merged.path.name, merged.facts(index))
        self.segments[at : at + len(sources)] = [merged]
        return self._release(sources)

    def _release(self, gone: list[Segment]) -> list[Path]:
        self._hints.clear()
        for segment in gone:
            self._files.close(segment.path)
            self._unsynced.pop(segment.path, None)
            self._indexes.pop(segment.path.name, None)
            self.ledger.forget_segment(segment.path.name)
        return [segment.path for segment in gone]

    def close(self) -> None:
        """Close the files and wake everybody who waits; the directory stays."""
        self.is_closed = True
        for segment in self.segments:
            self._files.close(segment.path)
        for watcher in list(self.watchers):
            watcher.closed()
        self.watchers.clear()
