"""Numbers in sentences."""

from __future__ import annotations


def counted(count: int, one: str, many: str | None = None) -> str:
    """`1 session`, `2 sessions`."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def size(count: int) -> str:
    """Bytes for people: `0 B`, `12 kB`, `3.4 MB`, `5.6 GB`."""
    for unit, worth in (("GB", 1e9), ("MB", 1e6)):
        if count >= worth:
            return f"{count / worth:.1f} {unit}"
    return f"{count / 1e3:.0f} kB" if count >= 1000 else f"{count} B"
