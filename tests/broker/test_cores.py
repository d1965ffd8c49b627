"""The pure parts of the embedded broker: index, batches, codecs, producers, segment names."""

import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from polar.broker.batch import (
    ABORT,
    COMMIT,
    BatchHeader,
    control_batch,
    control_type,
    crc_matches,
    placed_prefix,
    read_header,
    records_of,
    rewrite,
    with_append_time,
)
from polar.broker.compression import compress, decompress
from polar.broker.errors import KafkaError
from polar.broker.index import MAX_ENTRIES, SparseIndex
from polar.broker.producers import AbortedTransaction, ProducerStates
from polar.broker.segment import SegmentName

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
Entry = tuple[bytes | None, bytes | None]


def built(entries: Sequence[Entry], codec: int = 0, base_time: int = 1000) -> bytes:
    """A batch made by aiokafka; the n-th record's timestamp is `base_time + 10 n`."""
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=codec, is_transactional=0, producer_id=-1, producer_epoch=-1, base_sequence=-1,
        batch_size=1 << 30,
    )  # fmt: skip
    for index, (key, value) in enumerate(entries):
        builder.append(index, base_time + 10 * index, key, value, [("h", b"x")])
    return bytes(builder.build())


entries = st.lists(
    st.tuples(st.none() | st.binary(max_size=40), st.none() | st.binary(max_size=300)), min_size=1, max_size=30
)


@given(entries, st.sampled_from(list(CODECS.values())))
def test_records_are_found_in_batches_of_every_codec(wanted: list[Entry], codec: int) -> None:
    batch = built(wanted, codec)
    header = read_header(batch)
    assert crc_matches(batch, 0, header)
    assert (header.size, header.record_count, header.codec) == (len(batch), len(wanted), codec)
    _, records = records_of(batch, header)
    found = [(each.key, each.is_tombstone, each.timestamp_delta, each.offset_delta) for each in records]
    assert found == [(key, value is None, 10 * index, index) for index, (key, value) in enumerate(wanted)]


@given(entries, st.sampled_from(list(CODECS.values())), st.data())
def test_a_rewritten_batch_reads_as_the_original_without_what_was_dropped(
    wanted: list[Entry], codec: int, data: st.DataObject
) -> None:
    batch = built(wanted, codec)
    header = read_header(batch)
    payload, records = records_of(batch, header)
    kept = data.draw(st.sets(st.integers(0, len(wanted) - 1), min_size=1))
    smaller = rewrite(header, payload, [each for each in records if each.offset_delta in kept])
    assert crc_matches(smaller, 0, read_header(smaller))
    parsed = list(DefaultRecordBatch(smaller))
    assert [(each.offset, each.timestamp, each.key, each.value) for each in parsed] == [
        (index, 1000 + 10 * index, *wanted[index]) for index in sorted(kept)
    ]
    assert read_header(smaller).next_offset == header.next_offset


@given(entries, st.integers(0, 1 << 60))
def test_a_batch_keeps_its_checksum_when_it_is_given_its_place(wanted: list[Entry], base: int) -> None:
    batch = built(wanted)
    header = read_header(batch)
    prefix = placed_prefix(header, base)
    placed = prefix + batch[len(prefix) :]
    assert read_header(placed).base_offset == base
    assert crc_matches(placed, 0, read_header(placed))
    assert DefaultRecordBatch(placed).validate_crc()


def test_append_time_replaces_the_clients_time() -> None:
    batch = built([(b"k", b"v")])
    changed, header = with_append_time(batch, read_header(batch), 99_999)
    assert crc_matches(changed, 0, header)
    (record,) = DefaultRecordBatch(changed)
    assert (record.timestamp, record.timestamp_type) == (99_999, 1)


@pytest.mark.parametrize("kind", [ABORT, COMMIT])
def test_a_marker_is_a_control_batch_that_clients_understand(kind: int) -> None:
    marker = control_batch(7, 3, kind, 41, 1234)
    header = read_header(marker)
    assert (header.is_control, header.is_transactional, header.next_offset) == (True, True, 42)
    assert control_type(marker) == kind
    parsed = DefaultRecordBatch(marker)
    assert (parsed.is_control_batch, parsed.validate_crc(), parsed.producer_id) == (True, True, 7)
    (record,) = parsed
    assert struct.unpack(">hh", record.key) == (0, kind)


@given(st.binary(max_size=100_000), st.sampled_from(list(CODECS.values())))
def test_what_was_compressed_is_decompressed(data: bytes, codec: int) -> None:
    assert decompress(codec, compress(codec, data)) == data


@given(st.binary(min_size=1, max_size=100), st.sampled_from([1, 2, 3, 4]))
def test_garbage_is_an_error_and_never_a_crash(data: bytes, codec: int) -> None:
    # Some garbage happens to be a valid frame; nothing but the broker's own error may come out of the rest.
    with suppress(KafkaError):
        decompress(codec, data)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(100, 60_000), st.integers(0, 1000)), min_size=1, max_size=400))
def test_an_index_never_points_past_what_is_looked_for(steps: list[tuple[int, int, int]]) -> None:
    index = SparseIndex()
    offset, position, longest = 0, 0, -1
    starts: list[tuple[int, int, int]] = []
    for count, size, timestamp in steps:
        index.add(offset, position, longest)
        starts.append((offset, position, timestamp))
        offset, position, longest = offset + count, position + size, max(longest, timestamp)
    restored = SparseIndex.from_bytes(index.to_bytes())
    for each in (index, restored):
        for batch_offset, batch_position, _ in starts:
            assert each.position_of(batch_offset) <= batch_position
        for wanted in range(0, 1001, 50):
            first = next((place for _, place, timestamp in starts if timestamp >= wanted), None)
            if first is not None:
                assert each.position_of_time(wanted) <= first


def test_an_index_stays_small_however_long_the_segment() -> None:
    index = SparseIndex()
    for number in range(200_000):
        index.add(number, number * 20_000, number)
    assert len(index) <= MAX_ENTRIES
    assert index.position_of(150_000) <= 150_000 * 20_000
    assert 150_000 * 20_000 - index.position_of(150_000) < 200_000 * 20_000 / MAX_ENTRIES * 4


def header(producer: int, epoch: int, sequence: int, count: int = 1, *, transactional: bool = False) -> BatchHeader:
    return BatchHeader(0, 100, 0, 2, 0, 0x10 * transactional, count - 1, 0, 0, producer, epoch, sequence, count)


def test_sequences_wrap_to_zero() -> None:
    states = ProducerStates()
    states.record(header(1, 0, (1 << 31) - 2, 2), 0, 0)
    assert states.check(header(1, 0, 0)) is None
    with pytest.raises(KafkaError):
        states.check(header(1, 0, 1))


def test_an_open_transaction_holds_the_stable_offset_until_its_marker() -> None:
    states = ProducerStates()
    states.record(header(1, 0, 0, transactional=True), 10, 0)
    states.record(header(2, 0, 0, transactional=True), 12, 0)
    states.record(header(1, 0, 1, transactional=True), 14, 0)
    unstable = [states.first_unstable]
    assert states.complete(1, 0, COMMIT, 16, 0) is None
    unstable.append(states.first_unstable)
    assert states.complete(2, 0, ABORT, 17, 0) == AbortedTransaction(2, 12, 17)
    unstable.append(states.first_unstable)
    assert unstable == [10, 12, None]
    assert states.complete(3, 0, ABORT, 18, 0) is None, "a marker without records aborted nothing"


def test_producers_are_the_same_after_they_were_saved() -> None:
    states = ProducerStates()
    for sequence in range(8):
        states.record(header(1, 2, sequence), sequence, 50)
    states.record(header(2, 0, 0, transactional=True), 8, 10)
    states.record(header(3, 0, 0), 9, 10)
    restored = ProducerStates.from_bytes(states.to_bytes())
    assert restored.first_unstable == 8
    assert restored.check(header(1, 2, 7)) == states.check(header(1, 2, 7))
    assert restored.check(header(1, 2, 8)) is None
    with pytest.raises(KafkaError):
        restored.check(header(1, 1, 8))
    restored.expire(20)
    assert len(restored) == 2, "the silent one is forgotten, the one with an open transaction is not"


@given(st.integers(0, 10**19), st.integers(0, 10**19), st.integers(1, 999))
def test_segment_names_are_read_back_and_supersede_what_they_cover(base: int, end: int, generation: int) -> None:
    plain, compacted = SegmentName(base), SegmentName(base, max(base, end), generation)
    assert SegmentName.parse(str(plain)) == plain
    assert SegmentName.parse(str(compacted)) == compacted
    assert compacted.supersedes(plain) == (base < max(base, end))
    assert not plain.supersedes(compacted)
    assert SegmentName.parse(Path(str(plain)).stem) is None
