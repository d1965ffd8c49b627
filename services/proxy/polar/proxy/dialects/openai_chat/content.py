"""Chat's messages in one form: the same history in another form gives the same messages. Pure.

Nothing that the model cannot be shown is passed over silently (see `fields`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...calls import Json, Media
from ...errors import BadRequest
from ..base import Limits

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


@dataclass(slots=True)
class Reading:
    """What is found in messages beside their text."""

    limits: Limits
    media: list[Media] = field(default_factory=list)


def conversation(messages: Sequence[Json], reading: Reading) -> list[Json]:
    """The messages of a request, normalized.

    Raises:
        BadRequest: a wrong field, or a part that the model cannot be shown.
    """
    return [_message(message, f"messages[{i}]", reading) for i, message in enumerate(messages)]


def _message(message: Json, where: str, reading: Reading) -> Json:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRequest(f"`{where}.role` is one of {', '.join(sorted(ROLES))}.", param=f"{where}.role")
    found: Json = {"role": "system" if role == "developer" else role}
    content = _content(message.get("content"), where, reading)
    if content is None and role == "assistant":
        found["content"] = message["refusal"] if isinstance(message.get("refusal"), str) else None
    elif content is None:
        raise BadRequest(f"`{where}.content` is required.", param=f"{where}.content")
    else:
        found["content"] = content
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    if role == "assistant":
        found |= _said(message, where)
    elif role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise BadRequest(f"`{where}.tool_call_id` is required.", param=f"{where}.tool_call_id")
        found["tool_call_id"] = message["tool_call_id"]
    return found


def _said(message: Json, where: str) -> Json:
    """What of an assistant's message is no content."""
    for name, instead in (("function_call", "use `tool_calls`"), ("audio", "send what was said as text")):
        if message.get(name) is not None:
            raise _unsupported(f"{where}.{name}", instead)
    found: Json = {}
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str):
        found["reasoning"] = reasoning
    if message.get("tool_calls"):
        found["tool_calls"] = _calls(message["tool_calls"], where)
    return found


def _calls(calls: Any, where: str) -> list[Json]:
    found = []
    for j, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(call.get("id"), str)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments"), str)
        ):
            raise BadRequest(
                "A tool call has an `id` and a `function` with `name` and `arguments`.",
                param=f"{where}.tool_calls[{j}]",
            )
        bare = {"name": function["name"], "arguments": function["arguments"]}
        found.append({"id": call["id"], "type": "function", "function": bare})
    return found


# parts --------------------------------------------------------------------------------------------------------------


def _content(content: Any, where: str, reading: Reading) -> str | list[Json] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"`{where}.content` is text or a list of parts.", param=f"{where}.content")
    # marks of caches move from message to message each turn and say nothing to the model: they stay behind
    parts = [one for j, part in enumerate(content) for one in _part(part, f"{where}.content[{j}]", reading)]
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def _part(part: Any, where: str, reading: Reading) -> list[Json]:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise BadRequest("A content part is an object with a `type`.", param=where)
    match part["type"]:
        case "text" | "refusal" as kind:
            if not isinstance(part.get(kind), str):
                raise BadRequest(f"A {kind} part has a `{kind}`.", param=f"{where}.{kind}")
            return [{"type": "text", "text": part[kind]}]
        case "image_url":
            return [_image(part.get("image_url"), f"{where}.image_url", reading)]
        case "file":
            return _file(part.get("file"), f"{where}.file")
        case kind:
            raise _unsupported(where, f"a part of type {kind[:80]!r} cannot be shown to this model")


def _image(image: Any, where: str, reading: Reading) -> Json:
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str):
        raise BadRequest("An image part has an `image_url` with a `url`.", param=f"{where}.url")
    if url[:5].lower() != "data:":
        if reading.limits.image_urls == "refuse":
            raise _unsupported(where, "images by URL are not fetched here; send the image as a data URL")
        reading.media.append(Media("image", hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()))
        return {"type": "image_url", "image_url": {"url": url}}
    kind, raw = _data(url, where)
    if kind not in IMAGE_TYPES:
        raise BadRequest(f"An image is one of {', '.join(IMAGE_TYPES)}.", param=where)
    if not raw:
        raise BadRequest("The image is empty.", param=where)
    reading.media.append(Media("image", hashlib.sha256(raw).hexdigest()))
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(raw).decode()}"}}


def _file(file: Any, where: str) -> list[Json]:
    """A file of text is shown as such, with its name; others the model cannot be shown."""
    given = file if isinstance(file, dict) else {}
    if given.get("file_id") is not None:
        raise _unsupported(f"{where}.file_id", "there is no Files API here; send the file's text")
    url, name = given.get("file_data"), given.get("filename")
    if not isinstance(url, str) or not (name is None or isinstance(name, str)):
        raise BadRequest("A file has `file_data` and perhaps a `filename`.", param=f"{where}.file_data")
    kind, raw = _data(url, f"{where}.file_data") if url[:5].lower() == "data:" else ("application/octet-stream", b"")
    if not kind.startswith("text/"):
        raise _unsupported(f"{where}.file_data", f"a file of type {kind[:80]!r} cannot be shown; send its text")
    try:
        said = raw.decode()
    except UnicodeDecodeError:
        raise BadRequest("The file's text is not UTF-8.", param=f"{where}.file_data") from None
    return [{"type": "text", "text": text} for text in (name, said) if text is not None]


def _data(url: str, where: str) -> tuple[str, bytes]:
    """Media type and bytes of a data URL."""
    head, comma, data = url[5:].partition(",")
    kind, *parameters = head.split(";")
    if not comma or parameters[-1:] != ["base64"]:
        raise BadRequest("Expected a data URL with base64.", param=where)
    try:
        return kind.lower(), base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest("The base64 is damaged.", param=where) from None


def _unsupported(where: str, why: str) -> BadRequest:
    return BadRequest(f"`{where}` is not supported: {why}.", param=where, code="unsupported_parameter")
