"""What all records share. No I/O."""

from __future__ import annotations

import msgspec

Json = msgspec.Raw
"""Raw JSON or MessagePack that is passed through undecoded."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A piece of a record. A new field has a default; a field is never renamed or retyped."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, tag_field="type"):
    """A record of a topic, tagged by its class name. A new field has a default; a field is never renamed or retyped."""


class RecordRef(Part, frozen=True, kw_only=True):
    """Where a record stands on the log."""

    topic: str
    """Without the prefix, e.g. `tasks`."""
    partition: int
    offset: int


class Claim(Part, frozen=True, kw_only=True):
    """A part too large for a record, kept in the blob store; written before the record that names it."""

    sha256: str
    size: int
    """Bytes."""
    uri: str
    """Relative to the blob store, so that the store can move."""
    content_type: str = "application/octet-stream"
