"""Record batches (message format v2): reading their headers, looking inside, and writing control batches.

A batch is opaque to the broker: it is stored with its base offset and leader epoch rewritten, both of which lie
outside the checksum. Promises: pure functions over bytes; nothing here touches a file.
Source: https://kafka.apache.org/documentation/#recordbatch
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from crc32c import crc32c

from polar.broker.compression import compress, decompress
from polar.broker.errors import ErrorCode, KafkaError

__all__ = [
    "ABORT",
    "COMMIT",
    "HEADER_SIZE",
    "BatchHeader",
    "RecordView",
    "control_batch",
    "control_type",
    "crc_matches",
    "iter_records",
    "placed_prefix",
    "read_header",
    "rewrite",
    "with_append_time",
]

Bytes = bytes | bytearray | memoryview

_HEADER = struct.Struct(">qiibIhiqqqhii")
HEADER_SIZE = _HEADER.size  # 61
PREFIX_SIZE = 16
"""Base offset, length and leader epoch: what a broker may rewrite without touching the checksum."""
_PREFIX = struct.Struct(">qii")
_CRC_AT, _CRC_FROM = 17, 21

ABORT, COMMIT = 0, 1
NO_PRODUCER = -1

_CODEC_MASK = 0x07
_LOG_APPEND_TIME = 0x08
_TRANSACTIONAL = 0x10
_CONTROL = 0x20


class BatchHeader(NamedTuple):
    """The fixed 61 bytes at the start of a batch, in wire order. Times are Unix milliseconds."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        """Bytes of the whole batch, header included."""
        return 12 + self.length

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def last_sequence(self) -> int:
        """Sequence of the last record; sequences wrap from 2**31 - 1 to 0."""
        return (self.base_sequence + self.last_offset_delta) & 0x7FFFFFFF

    @property
    def codec(self) -> int:
        return self.attributes & _CODEC_MASK

    @property
    def is_append_time(self) -> bool:
        return bool(self.attributes & _LOG_APPEND_TIME)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & _CONTROL)

    @property
    def has_producer(self) -> bool:
        return self.producer_id > NO_PRODUCER


class RecordView(NamedTuple):
    """One record inside a decompressed payload; `start:end` are its bytes there, length prefix included."""

    start: int
    end: int
    timestamp_delta: int
    offset_delta: int
    key: bytes | None
    is_tombstone: bool


def read_header(data: Bytes, position: int = 0) -> BatchHeader:
    """The header at `position`. Raises `struct.error` when fewer than 61 bytes are left."""
    return BatchHeader._make(_HEADER.unpack_from(data, position))


def crc_matches(data: Bytes, position: int, header: BatchHeader) -> bool:
    """Whether the checksum over everything after it holds."""
    with memoryview(data) as view:
        return crc32c(view[position + _CRC_FROM : position + header.size]) == header.crc


def placed_prefix(header: BatchHeader, base_offset: int) -> bytes:
    """The 16 bytes that replace the start of a client's batch once its place in the log is known."""
    return _PREFIX.pack(base_offset, header.length, 0)


def with_append_time(batch: bytes, header: BatchHeader, now_ms: int) -> tuple[bytes, BatchHeader]:
    """The batch with the broker's time as its timestamp (`message.timestamp.type=LogAppendTime`)."""
    header = header._replace(attributes=header.attributes | _LOG_APPEND_TIME, max_timestamp=now_ms)
    return _seal(header, batch[HEADER_SIZE:])


def rewrite(header: BatchHeader, payload: bytes, kept: list[RecordView]) -> bytes:
    """The same batch with only the records of `kept`; `payload` is decompressed. Offsets and times stay."""
    body = b"".join([payload[record.start : record.end] for record in kept])
    sealed, _ = _seal(header._replace(record_count=len(kept)), compress(header.codec, body))
    return sealed


def iter_records(payload: bytes, count: int) -> Iterator[RecordView]:
    """The records of a decompressed payload. Raises `KafkaError` (INVALID_RECORD) when it is malformed."""
    position = 0
    try:
        for _ in range(count):
            start = position
            length, position = _varint(payload, position)
            end = position + length
            if length < 0 or end > len(payload):
                raise KafkaError(ErrorCode.invalid_record, "a record is longer than its batch")
            timestamp_delta, position = _varint(payload, position + 1)
            offset_delta, position = _varint(payload, position)
            key_size, position = _varint(payload, position)
            key = None
            if key_size >= 0:
                key = payload[position : position + key_size]
                position += key_size
            value_size, _ = _varint(payload, position)
            yield RecordView(start, end, timestamp_delta, offset_delta, key, value_size < 0)
            position = end
    except IndexError as error:
        raise KafkaError(ErrorCode.invalid_record, "a record ends early") from error


def records_of(batch: bytes, header: BatchHeader) -> tuple[bytes, Iterator[RecordView]]:
    """The decompressed payload of a whole batch and its records."""
    payload = decompress(header.codec, batch[HEADER_SIZE : header.size])
    return payload, iter_records(payload, header.record_count)


def control_batch(producer_id: int, producer_epoch: int, kind: int, base_offset: int, now_ms: int) -> bytes:
    """A transaction marker (`ABORT` or `COMMIT`), which takes one offset."""
    key = struct.pack(">hh", 0, kind)
    value = struct.pack(">hi", 0, 0)
    record = b"\x00\x00\x00" + _zigzag(len(key)) + key + _zigzag(len(value)) + value + _zigzag(0)
    header = BatchHeader(
        base_offset=base_offset,
        length=0,
        leader_epoch=0,
        magic=2,
        crc=0,
        attributes=_TRANSACTIONAL | _CONTROL,
        last_offset_delta=0,
        base_timestamp=now_ms,
        max_timestamp=now_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=-1,
        record_count=1,
    )
    sealed, _ = _seal(header, _zigzag(len(record)) + record)
    return sealed


def control_type(batch: Bytes, position: int = 0) -> int:
    """`ABORT` or `COMMIT` for a marker, another number for control batches of other kinds."""
    # Length varint (1 byte: the record is short), attributes, two deltas and the key's length, then the key.
    (kind,) = struct.unpack_from(">h", batch, position + HEADER_SIZE + 7)
    return int(kind)


def _seal(header: BatchHeader, body: bytes) -> tuple[bytes, BatchHeader]:
    header = header._replace(length=HEADER_SIZE - 12 + len(body), crc=0)
    data = bytearray(_HEADER.pack(*header))
    data += body
    crc = crc32c(memoryview(data)[_CRC_FROM:])
    struct.pack_into(">I", data, _CRC_AT, crc)
    return bytes(data), header._replace(crc=crc)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    byte = data[position]
    position += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), position
    value = byte & 0x7F
    shift = 7
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), position
        shift += 7


def _zigzag(number: int) -> bytes:
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
