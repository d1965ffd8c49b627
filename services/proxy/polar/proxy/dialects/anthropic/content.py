"""Anthropic's conversation to Chat's: blocks in, messages out, in the order in which they were sent.

Promises: the same history in another form gives the same messages; what a reply told and its client sent back gives the
message that was captured; nothing that the model cannot be shown is passed over silently (see `fields`). Pure.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...calls import Json, Media
from ...errors import BadRequest
from ..arguments import MALFORMED
from ..base import Limits
from ..budget import Unpacked
from ..fields import Action
from ..quirks import cut_system, in_call_order, known_role
from .checks import flag, mapping, objects, one_of, text, wrong
from .fields import FIELDS
from .thinking import kept
from .tools import ToolChange

IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
BLOCKS = tuple(one for one in FIELDS if one.path.startswith("block<") and one.path.endswith(">"))
NO_TEXT_ERROR = "Error"
"""Of a tool result that says nothing but that it is one."""


@dataclass(slots=True)
class Reading:
    """What is found in a conversation beside its messages."""

    limits: Limits
    media: list[Media] = field(default_factory=list)
    changes: list[ToolChange] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    marks: dict[str, str] = field(default_factory=dict)
    unpacked: Unpacked = field(default_factory=Unpacked)


def conversation(system: Any, messages: Sequence[Json], reading: Reading) -> list[Json]:
    """The messages of a request.

    Raises:
        BadRequest: a wrong or unknown block, or one that the model cannot be shown.
    """
    found = _system(system, "system", reading)
    roles = [known_role(message.get("role")) for message in messages]
    last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
    for i, (role, message) in enumerate(zip(roles, messages, strict=True)):
        where = f"messages.{i}"
        content = message.get("content")
        match role:
            case "user":
                called = found[-1].get("tool_calls") if found else None
                found += _user(content, f"{where}.content", reading, [call["id"] for call in called or ()])
            case "assistant":
                found.append(_assistant(content, f"{where}.content", reading))
            case "system":
                until = one_of(message.get("clear_at") or "never", ("next_user_message", "never"), f"{where}.clear_at")
                shown = _system(content, f"{where}.content", reading)
                if until == "never" or last_user < i:
                    found += shown
            case _:
                raise wrong(f"{where}.role", "Input should be 'user', 'assistant' or 'system'")
    return found


def _system(content: Any, where: str, reading: Reading) -> list[Json]:
    if content is None:
        return []
    texts = []
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else objects(content, where)
    for j, block in enumerate(blocks):
        kind, at = block.get("type"), f"{where}.{j}"
        if kind in ("tool_addition", "tool_removal"):
            _tool_change(block, kind == "tool_addition", at, reading)
            continue
        if kind != "text":
            raise _unknown(kind, at)
        said, marks = cut_system(text(block.get("text"), f"{at}.text"))
        reading.marks.update(marks)
        if said:
            texts.append(_text_part(said))
    return [{"role": "system", "content": _joined(texts)}] if texts else []


def _tool_change(block: Json, shown: bool, where: str, reading: Reading) -> None:
    tool = mapping(block.get("tool"), f"{where}.tool")
    match tool.get("type"):
        case "tool_reference":
            reading.changes.append(ToolChange(shown, text(tool.get("name"), f"{where}.tool.name")))
        case "tool_definition":
            definition = mapping(tool.get("definition"), f"{where}.tool.definition")
            if definition.get("type") in (None, "custom"):
                reading.changes.append(ToolChange(shown, definition=definition))
            else:
                _drop(str(definition.get("type")), where, reading)
        case kind:
            _drop(str(kind), where, reading)


def _user(content: Any, where: str, reading: Reading, called: Sequence[str]) -> list[Json]:
    """A user's turn: tool results are messages of their own, in their place. `called`: the calls before it."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    found: list[Json] = []
    parts: list[Json] = []
    blocks = objects(content, where)
    if not blocks:
        raise wrong(where, "user messages must have non-empty content")
    for j, block in in_call_order(blocks, called):
        at = f"{where}.{j}"
        if block.get("type") == "tool_result":
            found += _flushed(parts)
            found.append(_tool_result(block, at, reading))
            parts = []
        else:
            parts += _parts(block, at, reading)
    return found + _flushed(parts)


def _flushed(parts: list[Json]) -> list[Json]:
    return [{"role": "user", "content": _joined(parts)}] if parts else []


def _tool_result(block: Json, where: str, reading: Reading) -> Json:
    content = block.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        found = objects(content, f"{where}.content")
        content = _joined(
            [part for j, one in enumerate(found) for part in _parts(one, f"{where}.content.{j}", reading)]
        )
    if flag(block.get("is_error"), f"{where}.is_error") and not content:
        content = NO_TEXT_ERROR
    return {"role": "tool", "content": content, "tool_call_id": text(block.get("tool_use_id"), f"{where}.tool_use_id")}


def _assistant(content: Any, where: str, reading: Reading) -> Json:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    parts: list[Json] = []
    thinking: list[str] = []
    calls: list[Json] = []
    for j, block in enumerate(objects(content, where)):
        at = f"{where}.{j}"
        match block.get("type"):
            case "thinking":
                thinking.append(_thinking(block, at, reading))
            case "redacted_thinking":
                _foreign("redacted_thinking", at, reading)
            case "tool_use":
                calls.append(_call(block, at))
            case _:
                parts += _parts(block, at, reading)
    told: str | list[Json] | None = _joined(parts)
    # as the engine tells it: no text beside a call is null
    if calls and isinstance(told, str) and not told.strip():
        told = None
    found: Json = {"role": "assistant", "content": told}
    if reasoning := "".join(thinking):
        found["reasoning"] = reasoning
    if calls:
        found["tool_calls"] = calls
    return found


def _thinking(block: Json, where: str, reading: Reading) -> str:
    shown = text(block.get("thinking"), f"{where}.thinking")
    signature = block.get("signature")
    if shown or not signature:
        return shown
    try:
        found = kept(text(signature, f"{where}.signature"))
        reading.unpacked.take(found)
    except ValueError as error:
        raise wrong(f"{where}.signature", f"Invalid `signature` in `thinking` block: {error}") from None
    if found is None:
        _foreign("thinking", where, reading)
    return found or ""


def _foreign(kind: str, where: str, reading: Reading) -> None:
    if reading.limits.foreign_thinking == "refuse":
        raise wrong(where, f"{kind!r} of another provider cannot be read here.")
    reading.dropped.append(kind)


def _call(block: Json, where: str) -> Json:
    given = mapping(block.get("input"), f"{where}.input")
    raw = given.get(MALFORMED) if len(given) == 1 else None
    # the spaces are those that models write
    arguments = raw if isinstance(raw, str) else json.dumps(given, ensure_ascii=False)
    function = {"name": text(block.get("name"), f"{where}.name"), "arguments": arguments}
    return {"id": text(block.get("id"), f"{where}.id"), "type": "function", "function": function}


# parts --------------------------------------------------------------------------------------------------------------


def _parts(block: Json, where: str, reading: Reading) -> list[Json]:
    """What of a block is text or an image."""
    match block.get("type"):
        case "text":
            return [_text_part(text(block.get("text"), f"{where}.text"))]
        case "image":
            return [_image(block, where, reading)]
        case "document":
            return _document(block, where, reading)
        case "search_result":
            inner = objects(block.get("content"), f"{where}.content")
            said = [part["text"] for j, one in enumerate(inner) for part in _texts(one, f"{where}.content.{j}")]
            head = [text(block.get(name), f"{where}.{name}") for name in ("title", "source")]
            return [_text_part("\n".join([*head, *said]))]
        case "tool_reference":
            name = text(block.get("tool_name"), f"{where}.tool_name")
            reading.changes.append(ToolChange(True, name))
            return [_text_part(f"Tool loaded: {name}")]
        case kind:
            match _becomes(kind) if isinstance(kind, str) else None:
                case Action.SETTING:
                    _drop(str(kind), where, reading)
                    return []
                case Action.IGNORED:
                    return []
                case Action.REFUSED:
                    raise wrong(where, f"`{kind}` blocks are not supported here.")
            raise _unknown(kind, where)


def _becomes(kind: str) -> Action | None:
    path = f"block<{kind}>"
    return next((one.action for one in BLOCKS if one.covers(path)), None)


def _drop(kind: str, where: str, reading: Reading) -> None:
    if reading.limits.provider_tools == "refuse":
        raise wrong(where, f"`{kind[:80]}` belongs to a tool of the provider's, which is not available here.")
    reading.dropped.append(kind)


def _unknown(kind: object, where: str) -> BadRequest:
    if kind is None:
        return wrong(f"{where}.type", "Field required")
    return wrong(where, f"Input tag {str(kind)[:80]!r} found using 'type' does not match any of the expected tags")


def _texts(block: Json, where: str) -> list[Json]:
    if block.get("type") != "text":
        raise _unknown(block.get("type"), where)
    return [_text_part(text(block.get("text"), f"{where}.text"))]


def _document(block: Json, where: str, reading: Reading) -> list[Json]:
    source = mapping(block.get("source"), f"{where}.source")
    head = [_text_part(text(block[name], f"{where}.{name}")) for name in ("title", "context") if block.get(name)]
    match source.get("type"):
        case "text":
            return [*head, _text_part(text(source.get("data"), f"{where}.source.data"))]
        case "content":
            inner = source.get("content")
            if isinstance(inner, str):
                return [*head, _text_part(inner)]
            at = f"{where}.source.content"
            return head + [
                part for j, one in enumerate(objects(inner, at)) for part in _parts(one, f"{at}.{j}", reading)
            ]
        case kind:
            raise wrong(
                f"{where}.source",
                f"a document of type {str(kind)[:80]!r} cannot be shown to this model; send its text.",
            )


def _image(block: Json, where: str, reading: Reading) -> Json:
    source = mapping(block.get("source"), f"{where}.source")
    match source.get("type"):
        case "base64":
            kind = one_of(source.get("media_type"), IMAGE_TYPES, f"{where}.source.base64.media_type")
            data = text(source.get("data"), f"{where}.source.base64.data")
            try:
                raw = base64.b64decode(data, validate=True)
            except (binascii.Error, ValueError):
                raise wrong(f"{where}.source.base64.data", "invalid base64 data") from None
            if not raw:
                raise wrong(f"{where}.source.base64.data", "image cannot be empty")
            reading.media.append(Media("image", hashlib.sha256(raw).hexdigest()))
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case "url" if reading.limits.image_urls == "allow":
            url = text(source.get("url"), f"{where}.source.url")
            reading.media.append(Media("image", hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()))
            return {"type": "image_url", "image_url": {"url": url}}
        case "url":
            raise wrong(f"{where}.source", "images by URL are not fetched here; send the image as base64.")
        case kind:
            raise wrong(
                f"{where}.source", f"an image of type {str(kind)[:80]!r} is not available here; send it as base64."
            )


def _text_part(value: str) -> Json:
    return {"type": "text", "text": value}


def _joined(parts: Sequence[Json]) -> str | list[Json]:
    """One text is a string, so that clients which send it either way are told the same."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        found: str = parts[0]["text"]
        return found
    return list(parts)
