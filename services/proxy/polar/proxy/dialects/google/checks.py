"""Typed reads of request JSON as Google takes it, refused by the field's path.

Names come in camelCase or snake_case, null is absent, and one value may stand for a list of one.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ...calls import Json
from ...errors import BadRequest

SNAKE = re.compile(r"(?<=[a-z0-9])_([a-z])")


def wrong(where: str, what: str) -> BadRequest:
    """The refusal of the field at `where`."""
    return BadRequest(f"Invalid value at '{where}': {what}", param=where)


def of_validation(error: msgspec.ValidationError, at: str) -> BadRequest:
    """A refusal in place of msgspec's error, which names types and paths and never values."""
    message, _, path = str(error).partition(" - at `$")
    return wrong(f"{at}{path.rstrip('`')}", message)


def camel(name: str) -> str:
    """A field's name as the JSON form has it."""
    return SNAKE.sub(lambda found: found[1].upper(), name)


def fields(value: Any, where: str) -> Json:
    """An object's fields by their camelCase names, without those that are null."""
    if not isinstance(value, dict):
        raise wrong(where, "an object is expected")
    found = {camel(name): given for name, given in value.items() if given is not None}
    # where both spellings are given, the JSON form's own wins
    return found | {name: value[name] for name in found if value.get(name) is not None}


def listed(value: Any, where: str) -> list[Any]:
    """A list; one object is a list of it, nothing an empty one."""
    if value is None:
        return []
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise wrong(where, "a list is expected")
    return value


def text(value: Any, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise wrong(where, "a string is expected")
    return value


def flag(value: Any, where: str) -> bool:
    """A boolean; null is false."""
    if value is not None and not isinstance(value, bool):
        raise wrong(where, "true or false is expected")
    return bool(value)


def one_of(value: Any, allowed: tuple[str, ...], where: str) -> str:
    """One of several words."""
    if value not in allowed:
        raise wrong(where, f"one of {', '.join(allowed)} is expected")
    return str(value)
