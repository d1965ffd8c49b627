"""Which engine a session's calls go to: the highest of the session's hashes with each (rendezvous hashing). Pure.

Every replica chooses alike without a word to the others; when an engine goes, only its own sessions move, each to its
second choice, and they are back when it is; so prefix caches stay warm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

ChoiceT = TypeVar("ChoiceT")


def weight(name: str, session_id: str) -> bytes:
    """How much a session wants an engine."""
    return hashlib.blake2b(f"{name}\n{session_id}".encode(), digest_size=8).digest()


def choose(
    among: Sequence[ChoiceT], session_id: str, *, name: Callable[[ChoiceT], str], usable: Callable[[ChoiceT], bool]
) -> ChoiceT:
    """The session's engine among those that are usable; among all where none is, for it may be back."""
    return max(among, key=lambda one: (usable(one), weight(name(one), session_id)))
