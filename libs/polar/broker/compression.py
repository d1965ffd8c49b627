"""The five codecs of record batches: none, gzip, snappy, lz4, zstd.

Promises: pure functions over bytes. The broker decompresses only to look inside a batch (time look-ups,
compaction, null keys in compacted topics); produce and fetch pass batches through untouched.
"""

import struct

import cramjam

from polar.broker.errors import ErrorCode, KafkaError

__all__ = ["compress", "decompress"]

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)

# The framing of the Java snappy library, which every Kafka client writes and reads.
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK = 32 * 1024


def decompress(codec: int, payload: bytes) -> bytes:
    """The records of a batch as plain bytes. Raises `KafkaError` (CORRUPT_MESSAGE) when they cannot be read."""
    try:
        if codec == NONE:
            return payload
        if codec == GZIP:
            return bytes(cramjam.gzip.decompress(payload))
        if codec == SNAPPY:
            return _unsnappy(payload)
        if codec == LZ4:
            return bytes(cramjam.lz4.decompress(payload))
        if codec == ZSTD:
            return bytes(cramjam.zstd.decompress(payload))
    except (cramjam.DecompressionError, struct.error) as error:
        raise KafkaError(ErrorCode.corrupt_message, f"cannot decompress the batch: {error}") from error
    raise KafkaError(ErrorCode.unsupported_compression_type, f"unknown codec {codec}")


def compress(codec: int, payload: bytes) -> bytes:
    """The inverse of `decompress`, at the libraries' default levels."""
    if codec == NONE:
        return payload
    if codec == GZIP:
        return bytes(cramjam.gzip.compress(payload))
    if codec == SNAPPY:
        return _snappy(payload)
    if codec == LZ4:
        return bytes(cramjam.lz4.compress(payload))
    if codec == ZSTD:
        return bytes(cramjam.zstd.compress(payload))
    raise KafkaError(ErrorCode.unsupported_compression_type, f"unknown codec {codec}")


def _snappy(payload: bytes) -> bytes:
    out = bytearray(_XERIAL_HEADER)
    for start in range(0, len(payload), _XERIAL_BLOCK):
        block = bytes(cramjam.snappy.compress_raw(payload[start : start + _XERIAL_BLOCK]))
        out += struct.pack(">i", len(block)) + block
    return bytes(out)


def _unsnappy(payload: bytes) -> bytes:
    if not payload.startswith(_XERIAL_MAGIC):
        return bytes(cramjam.snappy.decompress_raw(payload))
    out = bytearray()
    position = len(_XERIAL_HEADER)
    while position < len(payload):
        (size,) = struct.unpack_from(">i", payload, position)
        position += 4
        out += bytes(cramjam.snappy.decompress_raw(payload[position : position + size]))
        position += size
    return bytes(out)
