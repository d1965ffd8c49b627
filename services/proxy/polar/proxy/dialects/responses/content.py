"""What an item says, as parts of a Chat message: texts, images, files of text. Pure.

Nothing that the model cannot be shown is passed over silently.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...calls import Json, Media
from ...errors import BadRequest
from .checks import missing, objects, text, unsupported, wrong
from .reading import Reading

IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Parts that are text, and the field that holds it."""


class Data(NamedTuple):
    """A data URL."""

    kind: str
    """Its media type, without parameters."""
    raw: bytes


def told(content: Any, where: str, reading: Reading, *, words_only: bool = False) -> str | list[Json]:
    """The content of a message or of a tool's output: one text is a string, however it was sent.

    `words_only`: of a message that can hold nothing but text.
    """
    if isinstance(content, str):
        return content
    parts: list[Json] = []
    for i, part in enumerate(objects(content, where)):
        at = f"{where}[{i}]"
        kind = part.get("type")
        if isinstance(kind, str) and kind in TEXTS:
            name = TEXTS[kind]
            parts.append({"type": "text", "text": text(part.get(name), f"{at}.{name}")})
        elif kind == "input_image" and not words_only:
            parts.append(_image(part, at, reading))
        elif kind == "input_file" and not words_only:
            parts += _file(part, at)
        elif kind is None:
            raise missing(f"{at}.type")
        else:
            raise unknown(kind, f"{at}.type")
    return joined(parts)


def joined(parts: Sequence[Json]) -> str | list[Json]:
    """One text is a string, so that clients which send it either way are told the same."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        found: str = parts[0]["text"]
        return found
    return list(parts)


def unknown(kind: object, where: str) -> BadRequest:
    """The refusal of a type that nobody here knows, or that does not belong there."""
    return wrong(where, f"{str(kind)[:80]!r} is not supported here.")


def _image(part: Json, where: str, reading: Reading) -> Json:
    if part.get("file_id") is not None:
        raise unsupported(f"{where}.file_id", "there is no Files API here; send the image as a data URL")
    at = f"{where}.image_url"
    url = text(part.get("image_url"), at)
    if url[:5].lower() != "data:":
        if reading.limits.image_urls == "refuse":
            raise unsupported(at, "images by URL are not fetched here; send the image as a data URL")
        reading.media.append(Media("image", hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()))
        return {"type": "image_url", "image_url": {"url": url}}
    data = _data(url, at)
    if data.kind not in IMAGE_TYPES:
        raise wrong(at, f"supported media types are {', '.join(IMAGE_TYPES)}.", "unsupported_image_media_type")
    if not data.raw:
        raise wrong(at, "the image is empty.", "empty_image_file")
    reading.media.append(Media("image", hashlib.sha256(data.raw).hexdigest()))
    encoded = base64.b64encode(data.raw).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{data.kind};base64,{encoded}"}}


def _file(part: Json, where: str) -> list[Json]:
    for name, why in (("file_id", "there is no Files API here"), ("file_url", "files by URL are not fetched here")):
        if part.get(name) is not None:
            raise unsupported(f"{where}.{name}", f"{why}; send its text")
    at = f"{where}.file_data"
    url = text(part.get("file_data"), at)
    data = _data(url, at) if url[:5].lower() == "data:" else Data("application/octet-stream", b"")
    if not data.kind.startswith("text/"):
        raise unsupported(at, f"a file of type {data.kind[:80]!r} cannot be shown to this model; send its text")
    try:
        said = data.raw.decode()
    except UnicodeDecodeError:
        raise wrong(at, "the text is not UTF-8.") from None
    title = part.get("filename")
    head: list[Json] = [] if title is None else [{"type": "text", "text": text(title, f"{where}.filename")}]
    return [*head, {"type": "text", "text": said}]


def _data(url: str, where: str) -> Data:
    head, comma, data = url[5:].partition(",")
    kind, *parameters = head.split(";")
    if not comma or parameters[-1:] != ["base64"]:
        raise wrong(where, "expected a data URL with base64.", "invalid_base64_image")
    try:
        return Data(kind.lower(), base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError):
        raise wrong(where, "the base64 is damaged.", "invalid_base64_image") from None
