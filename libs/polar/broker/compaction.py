"""Compaction: of each key only the last record is kept.

Promises: offsets, order, timestamps and compression stay; records of open transactions are not touched, those of
aborted ones go; a tombstone and a transaction marker are kept for `delete.retention.ms` after the first pass over
them, so that a reader that is underway sees them. A kill at any moment leaves either the old segments or the new.
`plan` and `install` run on the event loop's thread, `run` in a worker thread over files that no longer change.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from polar.broker.batch import BatchHeader, read_header, records_of, rewrite
from polar.broker.index import SparseIndex
from polar.broker.log import PartitionLog
from polar.broker.producers import AbortedTransaction
from polar.broker.recovery import TEMPORARY
from polar.broker.segment import NO_TIMESTAMP, Segment, SegmentName, read_batches

__all__ = ["Compacted", "Plan", "install", "plan", "run"]

_DIGEST = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """One pass over a log: `sources` in order, of which those from `dirty_from` on were never compacted."""

    sources: list[Segment]
    dirty_from: int
    horizon: int
    """Tombstones and markers below it have been seen long enough."""
    aborted: list[AbortedTransaction]
    segment_bytes: int
    max_keys: int
    fsync: bool


@dataclass(frozen=True, slots=True)
class Merged:
    sources: list[Segment]
    segment: Segment
    index: SparseIndex
    temporary: Path


@dataclass(frozen=True, slots=True)
class Compacted:
    merged: list[Merged]
    cleaned_to: int
    horizon: int


def plan(log: PartitionLog, now_ms: int, max_keys: int, *, fsync: bool) -> Plan | None:
    """What to compact now; None while too little of the log is new."""
    config = log.config
    if not config.compact:
        return None
    active = log.active
    if active.size and active.first_timestamp != NO_TIMESTAMP and _is_overdue(log, active, now_ms):
        log.roll()
    sources: list[Segment] = []
    stable = log.last_stable_offset
    for segment in log.segments[:-1]:
        if segment.next_offset > stable or now_ms - segment.max_timestamp < config.min_compaction_lag_ms:
            break
        sources.append(segment)
    dirty_from = max(log.ledger.cleaned_to(), log.start_offset)
    dirty = [segment for segment in sources if segment.next_offset > dirty_from and segment.size]
    if not dirty:
        return None
    total = sum(segment.size for segment in sources)
    ratio = sum(segment.size for segment in dirty) / total
    if ratio <= config.min_cleanable_dirty_ratio and not any(_is_overdue(log, each, now_ms) for each in dirty):
        return None
    return Plan(
        sources=sources,
        dirty_from=dirty_from,
        horizon=log.ledger.delete_horizon(now_ms - config.delete_retention_ms),
        aborted=log.ledger.aborted(0, sources[-1].next_offset),
        segment_bytes=config.segment_bytes,
        max_keys=max_keys,
        fsync=fsync,
    )


def _is_overdue(log: PartitionLog, segment: Segment, now_ms: int) -> bool:
    return now_ms - segment.first_timestamp > log.config.max_compaction_lag_ms


def run(work: Plan) -> Compacted:
    """Write the compacted files beside the old ones. Raises `OSError`, also when the topic was deleted meanwhile."""
    aborted = _AbortedRanges(work.aborted)
    latest, cleaned_to = _latest_offsets(work, aborted)
    merged = []
    for sources in _grouped([each for each in work.sources if each.base_offset < cleaned_to], work.segment_bytes):
        merged.append(_merge(sources, latest, aborted, work))
    return Compacted(merged, cleaned_to, work.horizon)


def install(log: PartitionLog, done: Compacted, now_ms: int) -> list[Path]:
    """Put the new files in the place of the old; returns the files to unlink.

    Nothing happens when the log was closed or shortened while the pass ran.
    """
    sources = [segment for each in done.merged for segment in each.sources]
    if log.is_closed or not all(any(segment is each for each in log.segments) for segment in sources):
        return [each.temporary for each in done.merged]
    # The records of these were removed by the pass that set the horizon; only their markers go now.
    log.ledger.forget_aborted(done.horizon)
    obsolete: list[Path] = []
    for each in done.merged:
        os.replace(each.temporary, each.segment.path)
        obsolete += log.replace(each.sources, each.segment, each.index)
    log.ledger.add_cleaning(done.cleaned_to, now_ms)
    return obsolete


class _AbortedRanges:
    """Whether a batch belongs to an aborted transaction."""

    def __init__(self, aborted: list[AbortedTransaction]) -> None:
        self._by_producer: dict[int, list[AbortedTransaction]] = {}
        for each in aborted:
            self._by_producer.setdefault(each.producer_id, []).append(each)

    def holds(self, header: BatchHeader) -> bool:
        if not header.is_transactional or header.is_control:
            return False
        return any(
            each.first_offset <= header.base_offset <= each.last_offset
            for each in self._by_producer.get(header.producer_id, ())
        )


def _latest_offsets(work: Plan, aborted: _AbortedRanges) -> tuple[dict[bytes, int], int]:
    """The last offset of each key in the new part, and the offset up to which that is known."""
    latest: dict[bytes, int] = {}
    for segment in work.sources:
        if segment.next_offset <= work.dirty_from:
            continue
        for header, batch in read_batches(segment.path, 0, segment.size):
            if header.next_offset <= work.dirty_from or header.is_control or aborted.holds(header):
                continue
            if len(latest) >= work.max_keys:
                return latest, header.base_offset
            _, records = records_of(batch, header)
            for record in records:
                if record.key is not None:
                    latest[_short(record.key)] = header.base_offset + record.offset_delta
    return latest, work.sources[-1].next_offset


def _grouped(sources: list[Segment], limit: int) -> Iterator[list[Segment]]:
    """Neighbours that together fit one segment."""
    group: list[Segment] = []
    size = 0
    for segment in sources:
        if group and size + segment.size > limit:
            yield group
            group, size = [], 0
        group.append(segment)
        size += segment.size
    if group:
        yield group


def _merge(sources: list[Segment], latest: dict[bytes, int], aborted: _AbortedRanges, work: Plan) -> Merged:
    generation = 1 + max(segment.name.generation for segment in sources)
    name = SegmentName(sources[0].base_offset, sources[-1].next_offset, generation)
    path = sources[0].path.with_name(str(name))
    temporary = path.with_name(path.name + TEMPORARY)
    segment = Segment(path, name, next_offset=name.base)
    with temporary.open("wb") as out:
        for source in sources:
            for header, batch in read_batches(source.path, 0, source.size):
                kept = _kept(header, batch, latest, aborted, work.horizon)
                if kept is not None:
                    out.write(kept)
                    segment.note(read_header(kept), header.base_offset)
        out.flush()
        if work.fsync:
            os.fsync(out.fileno())
    segment.next_offset = sources[-1].next_offset
    index, segment.index = segment.index or SparseIndex(), None
    return Merged(sources, segment, index, temporary)


def _kept(
    header: BatchHeader, batch: bytes, latest: dict[bytes, int], aborted: _AbortedRanges, horizon: int
) -> bytes | None:
    if header.is_control:
        return None if header.base_offset < horizon else batch
    if aborted.holds(header):
        return None
    payload, records = records_of(batch, header)
    kept = []
    for record in records:
        offset = header.base_offset + record.offset_delta
        if record.key is None or latest.get(_short(record.key), -1) > offset:
            continue
        if record.is_tombstone and offset < horizon:
            continue
        kept.append(record)
    if not kept:
        return None
    return batch if len(kept) == header.record_count else rewrite(header, payload, kept)


def _short(key: bytes) -> bytes:
    return key if len(key) <= _DIGEST else blake2b(key, digest_size=_DIGEST).digest()
