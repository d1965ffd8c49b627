"""Which earlier call a request goes on with, told from messages alone. Pure.

A reply that a harness sends back is the reply it was sent although call ids, spacing of JSON arguments, `1.0` for `1`,
empty and absent fields differ: what no chat template shows, or shows alike, is left out of the comparison. Each
message becomes a digest, and each beginning of a conversation one number, so that the longest earlier call is found by
look-ups; nothing of a conversation's text is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import msgspec

from ..calls import Json

Digest = bytes
DIGEST_BYTES: Final = 16
START: Final = b"\0" * DIGEST_BYTES
EXACT_FLOATS: Final = 2.0**53
"""Whole numbers below are the same as float and as integer."""
NOT_THE_TALK: Final = ("system", "developer")

_encode = msgspec.json.Encoder(order="sorted").encode


def normal(message: Json, *, reasoning: bool = True) -> Json:
    """What of `message` a prompt can show; `reasoning`: its thinking too."""
    role = message.get("role") or "assistant"
    found: Json = {"role": role}
    content = message.get("content")
    if isinstance(content, list):
        content = _parts(content)
    if isinstance(content, str) and role == "assistant":
        content = content.strip()  # harnesses trim replies; what was sampled is known anyway
    if content:
        found["content"] = content
    if reasoning and (thought := thinking(message)):
        found["reasoning"] = thought
    calls = message.get("tool_calls")
    if calls:
        found["tool_calls"] = [_call(one) for one in calls]
    for name in ("name", "refusal"):
        if message.get(name):
            found[name] = message[name]
    return found


def thinking(message: Json) -> str:
    """The thinking of a reply as harnesses send it back: Qwen Code trims it; empty where there is none."""
    return str(message.get("reasoning") or message.get("reasoning_content") or "").strip()


def _parts(parts: Sequence[Any]) -> Any:
    """Text parts as the one text that engines make of them; others as they are."""
    if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return "\n".join(str(part.get("text") or "") for part in parts)
    return list(parts)


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    return {"name": function.get("name"), "arguments": _value(arguments) if isinstance(arguments, str) else arguments}


def _value(text: str) -> Any:
    """JSON as the value it is; what is none, as text."""
    try:
        value = plain(msgspec.json.decode(text or "{}"))
        _encode(value)
    except (msgspec.DecodeError, OverflowError, ValueError, RecursionError):
        return text.strip()
    return value


def plain(value: Any) -> Any:
    """A JSON value in which 1.0 is 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT_FLOATS:
        return int(value)
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value


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
    strict = digest(_encoded(normal(message)))
    return strict, digest(_encoded(normal(message, reasoning=False))) if thinking(message) else strict


def _encoded(value: Json) -> bytes:
    try:
        return _encode(value)
    except (OverflowError, UnicodeEncodeError):
        return repr(value).encode("utf-8", "surrogatepass")
