"""Identifiers.

Made at the edge (tasks, calls): UUIDv7, from a clock and random bytes that are passed in. Derived (sessions,
trajectories): UUIDv5 over their cause, so that doing it again makes the same id. Ids that people choose (task, group,
node) are text that is safe in a path, a URL and a topic key.
"""

from __future__ import annotations

import re
import uuid

NAMESPACE = uuid.UUID("5d1b6c1e-7d0a-5b8e-9a43-2f3f7c6a9b10")

MAX_ID_LENGTH = 200
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]*\Z")


def uuid7(at_ms: int, randomness: bytes) -> str:
    """A UUIDv7 (RFC 9562, section 5.7).

    Args:
        at_ms: milliseconds since the epoch.
        randomness: ten bytes, of which 74 bits are used.
    """
    if len(randomness) != 10:
        raise ValueError(f"uuid7 takes 10 random bytes, got {len(randomness)}")
    noise = int.from_bytes(randomness, "big")
    value = (at_ms & (1 << 48) - 1) << 80
    value |= 0x7 << 76
    value |= (noise >> 62 & 0xFFF) << 64
    value |= 0b10 << 62
    value |= noise & (1 << 62) - 1
    return str(uuid.UUID(int=value))


def derived(*cause: str | int) -> str:
    """The UUIDv5 of a cause: the same parts in the same order give the same id."""
    return str(uuid.uuid5(NAMESPACE, "\x1f".join(str(part) for part in cause)))


def session_id(partition: int, offset: int, sample: int) -> str:
    """The session of sample `sample` of the task whose record is at that place of `polar.tasks`."""
    return derived("session", partition, offset, sample)


def trajectory_id(session: str, attempt: int, builder: str) -> str:
    """`builder` is the canonical text of the builder's specification."""
    return derived("trajectory", session, attempt, builder)


def id_problem(text: str) -> str | None:
    """Why `text` cannot be an id that a person chose, or None."""
    if not text:
        return "is empty"
    if len(text) > MAX_ID_LENGTH:
        return f"is longer than {MAX_ID_LENGTH} characters"
    if not _ID.match(text):
        return "may hold letters, digits and . _ : @ + - only, and starts with a letter or digit (no slashes or spaces)"
    return None
