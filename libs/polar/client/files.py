"""Trajectories in files, as `polar rebuild --to-file` writes them.

`.jsonl`: a JSON object per line, for people and other languages. `.msgpack`: the records' values byte for byte, each as
one MessagePack byte string (bin 32: 0xC6, four bytes of length, the value), so that any MessagePack library can walk
the file and one that is cut off shows it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from polar.schemas import GroupClosed, Trajectory, decode, decode_json

_HEAD: Final = struct.Struct(">BI")
_BIN32: Final = 0xC6


def frame(value: bytes) -> bytes:
    """A record's value as it stands in a `.msgpack` file."""
    return _HEAD.pack(_BIN32, len(value)) + value


def read_values(path: Path) -> Iterator[bytes]:
    """The values in a `.msgpack` file, in order.

    Raises:
        ValueError: the file is cut off, or is another kind of file.
    """
    with path.open("rb") as file:
        while head := file.read(_HEAD.size):
            kind, size = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
            value = file.read(size) if kind == _BIN32 else b""
            if kind != _BIN32 or len(value) != size:
                raise ValueError(f"{path} is cut off, or no file of trajectories")
            yield value


def read_trajectories(path: Path) -> Iterator[Trajectory | GroupClosed]:
    """What a `.jsonl` or `.msgpack` file holds, in order, one at a time.

    Raises:
        ValueError: the file is cut off, or of another kind.
        DecodeError: a value is no trajectory that this version can read.
    """
    if path.suffix == ".msgpack":
        for value in read_values(path):
            yield _checked(decode(value, (Trajectory, GroupClosed)))
        return
    with path.open("rb") as file:
        for line in file:
            yield _checked(decode_json(line, (Trajectory, GroupClosed)))


def _checked(event: object) -> Trajectory | GroupClosed:
    assert isinstance(event, Trajectory | GroupClosed)
    return event
