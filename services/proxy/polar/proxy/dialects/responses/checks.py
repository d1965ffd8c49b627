"""Typed reads of request JSON, refused in OpenAI's words: what is wrong, then the parameter by its path."""

from __future__ import annotations

from typing import Any

import msgspec

from ...calls import Json
from ...errors import BadRequest


def missing(where: str) -> BadRequest:
    """The refusal of a request without the field at `where`."""
    return BadRequest(f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")


def wrong(where: str, what: str, code: str = "invalid_value") -> BadRequest:
    """The refusal of the field at `where`."""
    return BadRequest(f"Invalid value for '{where}': {what}", param=where, code=code)


def unsupported(where: str, why: str) -> BadRequest:
    """The refusal of something that the provider has and this endpoint has not."""
    return BadRequest(f"Unsupported parameter: '{where}': {why}.", param=where, code="unsupported_parameter")


def of_validation(error: msgspec.ValidationError) -> BadRequest:
    """A refusal in place of msgspec's error, which names types and paths and never values."""
    message, _, path = str(error).partition(" - at `")
    where = path.rstrip("`").removeprefix("$").lstrip(".").replace("[...]", "")
    if "missing required field" in message:
        name = message.split("`")[1]
        return missing(f"{where}.{name}" if where else name)
    return BadRequest(f"Invalid type for '{where}': {message}.", param=where, code="invalid_type")


def _typed(value: Any, kind: type, name: str, where: str) -> Any:
    if value is None:
        raise missing(where)
    if not isinstance(value, kind):
        raise BadRequest(f"Invalid type for '{where}': expected {name}.", param=where, code="invalid_type")
    return value


def text(value: Any, where: str) -> str:
    """A string."""
    found: str = _typed(value, str, "a string", where)
    return found


def mapping(value: Any, where: str) -> Json:
    """An object."""
    found: Json = _typed(value, dict, "an object", where)
    return found


def listed(value: Any, where: str) -> list[Any]:
    """A list."""
    found: list[Any] = _typed(value, list, "an array", where)
    return found


def objects(value: Any, where: str) -> list[Json]:
    """A list of objects."""
    return [mapping(one, f"{where}[{i}]") for i, one in enumerate(listed(value, where))]


def flag(value: Any, where: str) -> bool:
    """A boolean; null is false."""
    return value is not None and bool(_typed(value, bool, "a boolean", where))


def one_of(value: Any, allowed: tuple[str, ...], where: str) -> str:
    """One of several words."""
    if value is None:
        raise missing(where)
    if value not in allowed:
        raise wrong(where, f"supported values are {', '.join(map(repr, allowed))}.")
    return str(value)
