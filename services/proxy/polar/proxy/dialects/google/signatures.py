"""Thought signatures: what makes a reply come back so that it renders to the same prompt.

Clients of this dialect give signatures back as they got them, leave thoughts out, and may leave out a call's id or
spell its numbers anew. So a signature holds what would be lost, compressed: the proxy keeps no conversation. Those of
others hold nothing that can be read here. Pure.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from typing import Any

import msgspec

MAGIC = b"polar\x01"
MOST_BYTES = 16 * 1024 * 1024
"""Of one signature unpacked; a small body must not become a large one."""
SAFE_INTEGER = 2**53
URL_SAFE = str.maketrans("-_", "+/")


class Kept(msgspec.Struct, omit_defaults=True, frozen=True):
    """What a signature holds."""

    reasoning: str | None = None
    """The thinking of the whole reply."""
    id: str | None = None
    """Of the call it stands on."""
    arguments: str | None = None
    """Of that call, as the model wrote them; None: an object survives as it is told."""


def sign(kept: Kept) -> str:
    """The signature that holds `kept`, in base64."""
    raw = json.dumps(msgspec.structs.asdict(kept)).encode()
    return base64.b64encode(MAGIC + zlib.compress(raw, 6)).decode()


def read(signature: str) -> Kept | None:
    """What a signature holds; None for one that is not ours.

    Raises:
        ValueError: it begins as one of ours and is damaged.
    """
    try:
        # SDKs write bytes in either alphabet, with padding or without
        raw = base64.b64decode(signature.translate(URL_SAFE) + "=" * (-len(signature) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None
    if not raw.startswith(MAGIC):
        return None
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(raw.removeprefix(MAGIC), MOST_BYTES)
        if not unpacking.eof:
            raise ValueError("it is cut short or too long")
        return msgspec.convert(json.loads(data), Kept)
    except (zlib.error, msgspec.ValidationError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError("it is damaged") from None


def survives(arguments: str) -> bool:
    """Whether `arguments` come back as they were from a client that reads them into an object and writes them anew.

    JavaScript knows no difference between 1.0 and 1, no large integers, and puts keys that are numbers first.
    """
    try:
        given = json.loads(arguments)
        return _plain(given) and json.dumps(given, ensure_ascii=False) == arguments
    except (ValueError, RecursionError):
        return False


def _plain(value: Any) -> bool:
    match value:
        case dict():
            return all(not key.isdigit() and _plain(one) for key, one in value.items())
        case list():
            return all(map(_plain, value))
        case bool():
            return True
        case int():
            return abs(value) <= SAFE_INTEGER
        case float():
            return False
        case _:
            return True


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal, however their numbers are spelt."""
    match one, other:
        case dict(), dict():
            return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
        case list(), list():
            return len(one) == len(other) and all(map(same, one, other))
        case (bool(), _) | (_, bool()):
            return one is other
        case int() | float(), int() | float():
            return bool(one == other) or _rounded(one) == _rounded(other)
        case _:
            return bool(one == other)


def _rounded(number: int | float) -> float:
    """As a client rounds a large integer."""
    try:
        return float(number)
    except OverflowError:
        return float("nan")  # equal to nothing
