"""Typed reads of request JSON, refused in Anthropic's words: a dotted path, then what is wrong with it."""

from __future__ import annotations

from typing import Any

import msgspec

from ...calls import Json
from ...errors import BadRequest


def wrong(where: str, what: str) -> BadRequest:
    """The refusal of the field at `where`."""
    return BadRequest(f"{where}: {what}", param=where)


def of_validation(error: msgspec.ValidationError) -> BadRequest:
    """A refusal in place of msgspec's error, which names types and paths and never values."""
    message, _, path = str(error).partition(" - at `")
    where = path.rstrip("`").removeprefix("$").lstrip(".").replace("[...]", "").replace("[", ".").replace("]", "")
    if "missing required field" in message:
        missing = message.split("`")[1]
        return wrong(f"{where}.{missing}" if where else missing, "Field required")
    return wrong(where or "body", message)


def text(value: Any, where: str) -> str:
    """A string."""
    if value is None:
        raise wrong(where, "Field required")
    if not isinstance(value, str):
        raise wrong(where, "Input should be a valid string")
    return value


def mapping(value: Any, where: str) -> Json:
    """An object."""
    if value is None:
        raise wrong(where, "Field required")
    if not isinstance(value, dict):
        raise wrong(where, "Input should be a valid dictionary")
    return value


def objects(value: Any, where: str) -> list[Json]:
    """A list of objects."""
    if not isinstance(value, list):
        raise wrong(where, "Input should be a valid list")
    return [mapping(one, f"{where}.{i}") for i, one in enumerate(value)]


def flag(value: Any, where: str) -> bool:
    """A boolean; null is false."""
    if value is None:
        return False
    if not isinstance(value, bool):
        raise wrong(where, "Input should be a valid boolean")
    return value


def one_of(value: Any, allowed: tuple[str, ...], where: str) -> str:
    """One of several words."""
    if value not in allowed:
        raise wrong(where, f"Input should be {', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}")
    return str(value)
