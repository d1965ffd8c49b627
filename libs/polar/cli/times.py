"""Moments and rates as people type them; whatever cannot be read ends with exit code 2 and the option's name."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

from .output import BAD_INPUT, fail

SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])\Z")
RATE = re.compile(r"(\d+(?:\.\d+)?)(?:/([smh]))?\Z")
UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class Window(NamedTuple):
    """In ms since the epoch; None: open at that side."""

    since_ms: int | None
    until_ms: int | None

    def __str__(self) -> str:
        """For people, in UTC."""
        if self.since_ms is None and self.until_ms is None:
            return "at any time"
        if self.until_ms is None:
            return f"since {_shown(self.since_ms)}"
        if self.since_ms is None:
            return f"until {_shown(self.until_ms)}"
        return f"from {_shown(self.since_ms)} until {_shown(self.until_ms)}"


def window(since: str | None, until: str | None, now_ms: int) -> Window:
    """The time between two options; `until` itself is outside."""
    found = Window(
        None if since is None else moment(since, now_ms, "--since"),
        None if until is None else moment(until, now_ms, "--until"),
    )
    if found.since_ms is not None and found.until_ms is not None and found.since_ms >= found.until_ms:
        fail(f"--until {until} is not after --since {since}", code=BAD_INPUT)
    return found


def moment(text: str, now_ms: int, option: str) -> int:
    """A span before now (`2h`, `3d`), or an ISO 8601 time with its zone, in ms since the epoch."""
    span = SPAN.match(text)
    if span is not None:
        return max(0, now_ms - round(float(span[1]) * UNITS[span[2]] * 1000))
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        fail(
            f"{option} {text!r} is neither a span like 30m, 2h or 3d nor a time like 2026-05-01T12:00Z", code=BAD_INPUT
        )
    if found.tzinfo is None:
        fail(f"{option} {text!r} names no time zone", code=BAD_INPUT, hint=f"for UTC: {found.isoformat()}Z")
    try:
        return max(0, round(found.timestamp() * 1000))
    except (OverflowError, OSError):
        fail(f"{option} {text!r} is out of range", code=BAD_INPUT)


def rate(text: str, option: str) -> float:
    """`50/s`, `50`, `600/m`: so many a second."""
    found = RATE.match(text)
    value = float(found[1]) / UNITS[found[2] or "s"] if found is not None else 0.0
    if value <= 0:
        fail(f"{option} {text!r} is no rate like 50/s or 600/m", code=BAD_INPUT)
    return value


def _shown(ms: int | None) -> str:
    assert ms is not None
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
