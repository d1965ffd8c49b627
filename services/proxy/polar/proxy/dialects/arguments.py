"""A tool call's arguments where a dialect wants an object and the model wrote text. Pure."""

from __future__ import annotations

import msgspec

MALFORMED = "malformed_arguments"
"""The one key of the object that stands for arguments which are no JSON object; its value is their text."""


def as_input(arguments: str) -> str:
    """JSON text of an object: the arguments as the model wrote them, or an object that holds what is none.

    An empty one would run a tool as if nothing had been asked of it, a repaired one with what the model never said.
    This one fails a tool's own check, in words that show the model what it wrote.
    """
    if not arguments.strip():
        return "{}"
    try:
        given = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        given = None
    if isinstance(given, dict):
        return arguments
    return msgspec.json.encode({MALFORMED: arguments}).decode()
