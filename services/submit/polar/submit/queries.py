"""What stands after the question mark, read strictly: a mistyped value is refused by name, not ignored. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from aiohttp import web

from .entries import TaskFilter
from .errors import Invalid

MAX_LIMIT = 1_000
STATUSES = ("running", "completed", "failed")
MAX_REASON = 500


def task_filter(request: web.Request) -> TaskFilter:
    """`GET /tasks?status&harness&since&limit`.

    Raises:
        Invalid: with the parameter's name.
    """
    only_known(request, ("status", "harness", "since", "limit"))
    status = request.query.get("status")
    if status is not None and status not in STATUSES:
        raise Invalid.field("status", f"is none of {', '.join(STATUSES)}")
    text = request.query.get("limit", "100")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_LIMIT):
        raise Invalid.field("limit", f"must be a number from 1 to {MAX_LIMIT}")
    since = request.query.get("since")
    return TaskFilter(status, request.query.get("harness"), None if since is None else time_of(since), int(text))


def time_of(text: str) -> int:
    """Milliseconds since the epoch, of such a number or of an ISO 8601 time (UTC where it names no zone).

    Raises:
        Invalid: it is neither.
    """
    if text.isascii() and text.isdigit() and len(text) <= 15:
        return int(text)
    try:
        # a plus in a query is a space by the time it arrives
        moment = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
    except ValueError:
        raise Invalid.field("since", "is neither milliseconds since the epoch nor an ISO 8601 time") from None
    return round((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def seconds_of(request: web.Request, name: str, default: float) -> float:
    """
    Raises:
        Invalid: not a number of seconds, or negative.
    """
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise Invalid.field(name, "must be a number of seconds, 0 or more")
    return value


def flag_of(request: web.Request, name: str) -> bool:
    """
    Raises:
        Invalid: neither yes nor no.
    """
    text = request.query.get(name, "0").lower()
    if text not in ("0", "1", "true", "false"):
        raise Invalid.field(name, "must be 1 or 0")
    return text in ("1", "true")


def only_known(request: web.Request, names: tuple[str, ...]) -> None:
    """
    Raises:
        Invalid: a parameter that means nothing here.
    """
    for name in request.query:
        if name not in names:
            raise Invalid.field(name, f"is no parameter here; known: {', '.join(names)}", "unknown_field")


def text_of(text: str | None) -> str | None:
    """A person's remark, cut to a length that fits every record it ends up in."""
    return None if text is None else text[:MAX_REASON]
