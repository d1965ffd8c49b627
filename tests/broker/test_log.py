"""One partition's log against simple models: reading, recovery, retention and compaction. Embedded only."""

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.broker import compaction
from polar.broker.batch import COMMIT, read_header, records_of
from polar.broker.configs import TopicConfig, config_specs
from polar.broker.database import Database
from polar.broker.files import FilePool
from polar.broker.ledger import LogLedger
from polar.broker.log import PartitionLog
from polar.broker.retention import apply_retention
from polar.broker.settings import BrokerSettings
from tests.broker.test_cores import built

DEFAULTS = TopicConfig.of(config_specs(BrokerSettings(directory=Path())), {})
SMALL = replace(DEFAULTS, segment_bytes=2000, timestamp_before_max_ms=1 << 60, timestamp_after_max_ms=1 << 60)


class Bench:
    """Opens the same log again and again, as a broker does over restarts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "p"
        self.database = Database(directory / "broker.db")
        self.files = FilePool(4)
        self.now = 1_000_000
        self._topic = uuid4()

    def open(self, config: TopicConfig = SMALL) -> PartitionLog:
        self.files.close_all()
        ledger = LogLedger(self.database, self._topic, 0)
        return PartitionLog("t", 0, self.directory, config, ledger, self.files, lambda: self.now, fsync=False)

    def close(self) -> None:
        self.files.close_all()
        self.database.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def contents(log: PartitionLog, start: int | None = None, step: int = 500) -> list[tuple[int, bytes | None]]:
    """(offset, key) of every record from `start`, read as a consumer would."""
    offset = log.start_offset if start is None else start
    found = []
    while offset < log.high_watermark:
        data = log.read(offset, step, log.high_watermark, force=True)
        if not data:
            break
        position = 0
        while position < len(data):
            header = read_header(data, position)
            if not header.is_control:
                _, records = records_of(data[position : position + header.size], header)
                found += [
                    (header.base_offset + each.offset_delta, each.key)
                    for each in records
                    if header.base_offset + each.offset_delta >= offset
                ]
            position += header.size
            following = header.next_offset
        offset = following
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=40), step=st.integers(100, 3000), reopen=st.booleans())
def test_every_record_is_read_from_wherever_one_starts(
    tmp_path: Path, sizes: list[int], step: int, reopen: bool
) -> None:
    directory = tmp_path / uuid4().hex
    directory.mkdir()
    bench = Bench(directory)
    log = bench.open()
    for size in sizes:
        log.append(built([(b"%d" % index, b"v" * 50) for index in range(size)]))
    if reopen:
        log = bench.open()
    total = sum(sizes)
    assert log.end_offset == total
    assert [offset for offset, _ in contents(log, step=step)] == list(range(total))
    for start in {0, total // 2, total - 1}:
        assert [offset for offset, _ in contents(log, start, step)] == list(range(start, total))
    bench.close()
    shutil.rmtree(directory)


@pytest.mark.parametrize("saved", [False, True], ids=["killed", "stopped"])
def test_a_file_cut_at_any_byte_keeps_the_whole_batches_before(bench: Bench, saved: bool) -> None:
    log = bench.open()
    ends = []
    for index in range(6):
        log.append(built([(b"%d" % index, b"v" * 30)]))
        ends.append(log.active.size)
    assert len(log.segments) == 1
    if saved:
        log.save()
    path = log.active.path
    whole = path.read_bytes()
    for cut in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:cut])
        again = bench.open()
        kept = sum(end <= cut for end in ends)
        assert again.end_offset == kept
        assert [offset for offset, _ in contents(again)] == list(range(kept))
        assert again.append(built([(b"next", b"v")])).base_offset == kept


def test_flipped_bytes_are_found_and_cut(bench: Bench) -> None:
    log = bench.open()
    for index in range(6):
        log.append(built([(b"%d" % index, b"v" * 30)]))
    path, size = log.active.path, log.active.size // 6
    whole = path.read_bytes()
    for position in range(8, len(whole), 11):
        if 12 <= position % size < 16:
            continue  # the leader epoch is not part of the checksum, and not used
        broken = bytearray(whole)
        broken[position] ^= 0x55
        path.write_bytes(bytes(broken))
        assert bench.open().end_offset <= 6
        kept = [offset for offset, _ in contents(bench.open())]
        assert kept == list(range(position // size))


def test_offsets_are_never_used_again_when_everything_was_deleted(bench: Bench) -> None:
    log = bench.open()
    for _ in range(10):
        log.append(built([(b"k", b"v")]))
    assert log.delete_before(-1) == 10
    bench.now += 10**12
    for path in apply_retention(log, bench.now):
        path.unlink()
    log = bench.open()
    assert (log.start_offset, log.end_offset) == (10, 10)
    assert log.append(built([(b"k", b"v")])).base_offset == 10


def test_retention_by_size_keeps_at_least_what_was_asked_for(bench: Bench) -> None:
    log = bench.open(replace(SMALL, retention_bytes=5000, retention_ms=-1))
    for _ in range(100):
        log.append(built([(b"k", b"v" * 100)]))
    for path in apply_retention(log, bench.now):
        path.unlink()
    assert 5000 <= log.size < 5000 + 2 * 2000
    assert contents(log)[0][0] == log.start_offset > 0


def test_a_time_is_found_over_segments(bench: Bench) -> None:
    log = bench.open()
    for index in range(50):
        log.append(built([(b"k", b"v" * 50)] * 3, base_time=index * 1000))
    assert len(log.segments) > 3
    for timestamp, offset in ((0, 0), (1, 1), (20_000, 60), (20_011, 62), (20_021, 63), (49_020, 149)):
        found = log.offset_for_time(timestamp)
        assert found is not None
        assert found.offset == offset
    assert log.offset_for_time(49_021) is None
    log.delete_before(70)
    found = log.offset_for_time(0)
    assert found is not None
    assert found.offset == 70


def compact(bench: Bench, log: PartitionLog, max_keys: int = 1000) -> bool:
    work = compaction.plan(log, bench.now, max_keys, fsync=False)
    if work is None:
        return False
    for path in compaction.install(log, compaction.run(work), bench.now):
        path.unlink(missing_ok=True)
    return True


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**9), codec=st.integers(0, 4), max_keys=st.sampled_from([3, 1000]))
def test_compaction_leaves_what_a_dictionary_would(tmp_path: Path, seed: int, codec: int, max_keys: int) -> None:
    directory = tmp_path / uuid4().hex
    directory.mkdir()
    bench = Bench(directory)
    dice = random.Random(seed)
    config = replace(SMALL, compact=True, min_cleanable_dirty_ratio=0.0)
    log = bench.open(config)
    latest: dict[bytes, tuple[int, bool]] = {}
    for turn in range(4):
        for _ in range(30):
            entries = [
                (b"k%d" % dice.randrange(8), None if dice.random() < 0.1 else b"v" * dice.randrange(200))
                for _ in range(dice.randrange(1, 6))
            ]
            base = log.append(built(entries, codec)).base_offset
            for index, (key, value) in enumerate(entries):
                latest[key] = (base + index, value is None)
        log.roll()
        for _ in range(100):
            if not compact(bench, log, max_keys):
                break
        if dice.random() < 0.5:
            log = bench.open(config)
        assert contents(log) == sorted((offset, key) for key, (offset, _) in latest.items()), turn
    bench.now += config.delete_retention_ms + 1
    log.append(built([(b"last", b"v")]))
    log.roll()
    for _ in range(100):
        if not compact(bench, log, max_keys):
            break
    alive = {key: offset for key, (offset, tombstone) in latest.items() if not tombstone}
    assert [key for _, key in contents(log)] == [*sorted(alive, key=lambda key: alive[key]), b"last"]
    assert log.append(built([(b"next", b"v")])).base_offset == contents(bench.open(config))[-1][0]
    bench.close()
    shutil.rmtree(directory)


def test_a_kill_between_the_new_files_and_the_removal_of_the_old_leaves_one_of_them(bench: Bench) -> None:
    config = replace(SMALL, compact=True, min_cleanable_dirty_ratio=0.0)
    log = bench.open(config)
    for index in range(60):
        log.append(built([(b"k%d" % (index % 3), b"v" * 50)]))
    log.roll()
    work = compaction.plan(log, bench.now, 1000, fsync=False)
    assert work is not None
    done = compaction.run(work)
    before = contents(bench.open(config))
    assert len(before) == 60, "files that were not put in place are nothing"
    done = compaction.run(work)
    compaction.install(log, done, bench.now)  # and the old files are still there
    assert [offset for offset, _ in contents(bench.open(config))] == [57, 58, 59]
    assert len(list(bench.directory.glob("*.log"))) == len(done.merged)


def test_compaction_is_dropped_when_the_log_was_shortened_meanwhile(bench: Bench) -> None:
    config = replace(SMALL, compact=True, min_cleanable_dirty_ratio=0.0)
    log = bench.open(config)
    for index in range(60):
        log.append(built([(b"k%d" % index, b"v" * 50)]))
    log.roll()
    work = compaction.plan(log, bench.now, 1000, fsync=False)
    assert work is not None
    done = compaction.run(work)
    log.delete_before(30)
    apply_retention(log, bench.now)
    leftovers = compaction.install(log, done, bench.now)
    assert all(path.name.endswith(".tmp") for path in leftovers)
    assert contents(log)[0][0] == 30


def test_markers_are_appended_and_read_back_as_control_batches(bench: Bench) -> None:
    log = bench.open()
    log.append_marker(5, 0, COMMIT)
    assert (log.end_offset, contents(log)) == (1, [])
    assert read_header(log.read(0, 1000, 1, force=True)).is_control
