"""How much of one request may come of what was compressed: a small body must not become a large one. Pure."""

from __future__ import annotations

MOST_CHARACTERS = 16 * 1024 * 1024
"""Of all that a request's signatures and ids hold together; more than any model takes."""


class Unpacked:
    """Counts what was unpacked for one request."""

    def __init__(self) -> None:
        self._characters = 0

    def take(self, text: str | None) -> None:
        """Raises `ValueError`: it is more than one request may hold."""
        self._characters += 0 if text is None else len(text)
        if self._characters > MOST_CHARACTERS:
            raise ValueError("there is too much that is compressed")
