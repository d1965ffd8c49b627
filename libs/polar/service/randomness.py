"""Randomness as an object that is passed in, and the ids made from it."""

from __future__ import annotations

import os
import random
from typing import Protocol

from polar.schemas.ids import uuid7

from .clock import Clock


class Randomness(Protocol):
    def bytes(self, n: int) -> bytes:
        """`n` random bytes."""
        ...


class SystemRandomness:
    """The operating system's, fit for keys and ids."""

    def bytes(self, n: int) -> bytes:
        return os.urandom(n)


class SeededRandomness:
    """The same bytes for the same seed. For tests; never for keys."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def bytes(self, n: int) -> bytes:
        return self._random.randbytes(n)


def new_id(clock: Clock, randomness: Randomness) -> str:
    """A new UUIDv7: sorts by the time it was made."""
    return uuid7(clock.now_ms(), randomness.bytes(10))
