"""Which earlier call a request goes on with, told from messages alone. Pure.

Messages are compared in the normal form that the builder compares them in (`polar.schemas.messages`). Each becomes a
digest, and each beginning of a conversation another, so that the longest earlier call is found by look-ups; nothing of
a conversation's text is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import msgspec

from polar.schemas.messages import encoded, normal, thinking

from ..calls import Json

Digest = bytes
DIGEST_BYTES: Final = 16
START: Final = b"\0" * DIGEST_BYTES
NOT_THE_TALK: Final = ("system", "developer")

_encode = msgspec.json.Encoder(order="sorted").encode


def digest(*parts: bytes) -> Digest:
    return hashlib.blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def setting(model: str, tools: Sequence[Json] | None, extras: Json) -> tuple[Digest, Digest]:
    """What else a prompt is made of: its tools; and the engine's model with what the request tells the template."""
    template = {name: extras[name] for name in ("chat_template_kwargs", "reasoning_effort") if name in extras}
    # key order stays: a template shows it
    return digest(msgspec.json.encode(tools)), digest(_encode([model, template]))


class Conversation:
    """The messages of one prompt. `strict[i]`, `loose[i]`: the first `i` of them, with and without their thinking."""

    def __init__(self, messages: Sequence[Json]) -> None:
        self.messages = messages
        self.strict: list[Digest] = [START]
        self.loose: list[Digest] = [START]
        for message in messages:
            strict, loose = _digests(message)
            self.strict.append(digest(self.strict[-1], strict))
            self.loose.append(digest(self.loose[-1], loose))

    def __len__(self) -> int:
        return len(self.messages)

    def reply(self, message: Json) -> tuple[Digest, Digest]:
        """The conversation with `message` after it, strict and loose."""
        strict, loose = _digests(message)
        return digest(self.strict[-1], strict), digest(self.loose[-1], loose)

    @property
    def whole(self) -> Digest:
        return self.strict[-1]

    @cached_property
    def opening(self) -> Digest | None:
        """Its first message that is no instruction of the harness."""
        found = next((one for one in self.messages if one.get("role") not in NOT_THE_TALK), None)
        return None if found is None else _digests(found)[0]

    def shows_media(self) -> bool:
        """Whether a message has parts that are no text."""
        contents = [message.get("content") for message in self.messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        return any(not isinstance(part, dict) or part.get("type") != "text" for part in parts)

    def replies(self, start: int = 0) -> bool:
        """Whether it has a reply among its messages from `start` on."""
        return any(message.get("role") == "assistant" for message in self.messages[start:])


def _digests(message: Json) -> tuple[Digest, Digest]:
    strict = digest(encoded(normal(message)))
    return strict, digest(encoded(normal(message, reasoning=False))) if thinking(message) else strict
