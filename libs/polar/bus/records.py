"""Records as the services see them, and as Kafka does. Pure: no client, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from polar.schemas.base import Event, RecordRef
from polar.schemas.stages import Problem
from polar.schemas.topics import Service, TopicSpec, topic
from polar.schemas.wire import JSON, DecodeError, decode, decode_json, encode, headers

RECORD_SLACK = 1024
"""Bytes of a batch that are not key, value or headers (61 of the batch, about 20 of the record, zstd's on what cannot
be compressed), rounded up: what the broker measures is the batch."""


class Record(msgspec.Struct, frozen=True):
    """One record as read. A struct, since it is made for every record of every topic: a dataclass takes ten times as
    long to make."""

    topic: str
    """Without the prefix."""
    partition: int
    offset: int
    timestamp_ms: int
    key: str | None
    value: Event | None
    """None: a tombstone, or, where `error` is set, not readable."""
    error: DecodeError | None = None
    raw: bytes | None = None
    """The value as it stands on the log; None: a tombstone. Drop the record when you keep the value for long."""
    headers: Mapping[str, bytes] = {}

    @property
    def ref(self) -> RecordRef:
        return RecordRef(topic=self.topic, partition=self.partition, offset=self.offset)


@dataclass(frozen=True, slots=True)
class Out:
    """One record to write."""

    topic: str
    """Without the prefix."""
    key: str | None
    value: Event | None
    """None: a tombstone."""
    partition: int | None = None
    """None: the key's."""
    source: RecordRef | None = None
    """The record this one derives from; becomes a header."""


_JSON = JSON.encode()


class Encoded(NamedTuple):
    """What goes to the broker."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]

    @property
    def size(self) -> int:
        """Bytes, with framing."""
        size = RECORD_SLACK
        for part in (self.key, self.value):
            if part is not None:
                size += len(part) + 5
        for name, value in self.headers:
            size += len(name.encode()) + len(value) + 10
        return size


def encode_out(out: Out, service: Service) -> Encoded:
    """The bytes of a record that `service` writes.

    Raises:
        TypeError: `service` may not write the topic, or the value is none of the topic's: a programming error.
        KeyError: no such topic.
    """
    spec = topic(out.topic)
    if service not in spec.writers:
        raise TypeError(f"{service} does not write `{spec.name}`; its writers are {', '.join(spec.writers)}")
    value: bytes | None = None
    if out.value is None:
        if out.key is None or not spec.compacted:
            raise TypeError(f"a tombstone needs a key and a compacted topic; `{spec.name}`, key {out.key!r}")
        key: bytes | None = out.key.encode()
        found: list[tuple[str, bytes]] = []
    else:
        if not isinstance(out.value, spec.values):
            names = ", ".join(one.__name__ for one in spec.values)
            raise TypeError(f"`{spec.name}` takes {names}, not {type(out.value).__name__}")
        if out.key is None and (out.partition is None or spec.compacted):
            raise TypeError(f"a record of `{spec.name}` needs a key")
        key = None if out.key is None else out.key.encode()
        value = encode(out.value)
        found = headers(out.value, source=out.source)
    return Encoded(key, value, found)


def decode_record(spec: TopicSpec, message: Any) -> Record:
    """A `Record` of an aiokafka `ConsumerRecord`. Never raises: what cannot be read has `error` set."""
    found: dict[str, bytes] = dict(message.headers)
    if None in found.values():
        found = {name: value or b"" for name, value in found.items()}
    value: Event | None = None
    error: DecodeError | None = None
    key: str | None = None
    try:
        key = None if message.key is None else str(message.key, "utf-8")
    except UnicodeDecodeError:
        error = DecodeError(Problem(field="", message="the key is not UTF-8 text"))
    if message.value is not None and error is None:
        # a foreign writer of `tasks` sends JSON, with or without the header; MessagePack maps never start with `{`
        is_json = message.value[:1] == b"{" or found.get("content-type", b"").startswith(_JSON)
        try:
            value = decode_json(message.value, spec.values) if is_json else decode(message.value, spec.values)
        except DecodeError as failed:
            error = failed
    return Record(
        topic=spec.name,
        partition=message.partition,
        offset=message.offset,
        timestamp_ms=message.timestamp,
        key=key,
        value=value,
        error=error,
        raw=message.value,
        headers=found,
    )
