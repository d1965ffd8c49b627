"""The message pool: every distinct message once, as it came, and numbers for those that say the same.

What says the same is the normal form's to say (`polar.schemas.messages`). It must not know tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from polar.schemas.messages import Message, encoded, normal

from .pool import Span

Tools = list[dict[str, Any]]

_encode = msgspec.msgpack.Encoder().encode


def text_of(message: Message) -> str:
    """What a message says in words; images and calls left out."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "\n".join(part for part in parts if isinstance(part, str))
    return ""


class MessagePool:
    """Distinct messages and distinct tool lists of one session, by number in the order they came."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.tools: list[Tools] = []
        self._by_text: dict[bytes, tuple[int, int]] = {}
        self._normals: dict[bytes, int] = {}
        self._tools_by_text: dict[bytes, int] = {}
        self._paths: dict[tuple[int, int], int] = {}

    def add(self, message: Message) -> tuple[int, int]:
        """The message's number and the number of its normal form."""
        text = _encode(message)
        known = self._by_text.get(text)
        if known is None:
            form = self._normals.setdefault(encoded(normal(message)), len(self._normals))
            known = self._by_text[text] = len(self.messages), form
            self.messages.append(message)
        return known

    def path(self, before: int, normal: int) -> int:
        """The number of a conversation: that of number `before` (-1: none yet), then a message of this normal form.

        Two conversations have the same number exactly where their messages say the same.
        """
        return self._paths.setdefault((before, normal), len(self._paths))

    @property
    def path_count(self) -> int:
        """Conversations there are."""
        return len(self._paths)

    def add_tools(self, tools: Tools) -> int:
        text = _encode(tools)
        known = self._tools_by_text.setdefault(text, len(self.tools))
        if known == len(self.tools):
            self.tools.append(tools)
        return known


def runs(numbers: npt.NDArray[np.int32]) -> list[Span]:
    """Numbers as half-open runs, in their order."""
    if not len(numbers):
        return []
    breaks = (numbers[1:] - numbers[:-1] != 1).nonzero()[0]
    starts = [numbers.item(0), *numbers[breaks + 1].tolist()]
    ends = [*numbers[breaks].tolist(), numbers.item(-1)]
    return [(start, end + 1) for start, end in zip(starts, ends, strict=True)]
