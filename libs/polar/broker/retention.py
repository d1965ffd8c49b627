"""Which whole segments at the front of a log may go, by time, by size and by its start offset.

Promises: only what is below the high watermark; the record that keeps a segment alive is its youngest. A pure
decision and its application; unlinking the files is the caller's, in a worker thread.
"""

import os
from pathlib import Path

from polar.broker.log import PartitionLog
from polar.broker.segment import NO_TIMESTAMP

__all__ = ["apply_retention", "expired_segments"]


def expired_segments(log: PartitionLog, now_ms: int) -> int:
    """How many segments at the front are beyond the topic's retention."""
    config = log.config
    by_time = config.retention_ms if config.delete else -1
    surplus = log.size - config.retention_bytes if config.delete and config.retention_bytes >= 0 else 0
    count = 0
    for segment in log.segments:
        if segment.next_offset > log.high_watermark or not (segment.size or segment is not log.active):
            break
        is_before_start = segment.next_offset <= log.start_offset
        is_old = by_time >= 0 and now_ms - _newest(segment.path, segment.max_timestamp) > by_time
        is_surplus = surplus >= segment.size > 0
        if not (is_before_start or is_old or is_surplus):
            break
        surplus -= segment.size
        count += 1
    return count


def apply_retention(log: PartitionLog, now_ms: int) -> list[Path]:
    """Drop what is expired from the log; returns the files to unlink. An expired active segment is rolled first."""
    count = expired_segments(log, now_ms)
    if not count:
        return []
    if count == len(log.segments):
        log.roll()
    return log.remove_front(count)


def _newest(path: Path, max_timestamp: int) -> int:
    if max_timestamp != NO_TIMESTAMP:
        return max_timestamp
    return os.stat(path).st_mtime_ns // 1_000_000
