"""Google's conversation to Chat's: contents in, messages out, in the order in which they were sent.

Promises: the same history in another form gives the same messages, as one of streamed pieces and one of whole parts;
what a reply told and its client sent back gives the message that was captured; nothing that the model cannot be shown
is passed over silently (see `fields`). Pure.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...calls import Json, Media
from ...errors import BadRequest
from ..arguments import MALFORMED, as_input
from ..base import Limits
from ..budget import Unpacked
from ..quirks import SKIPPED_SIGNATURES, bare_call_id
from . import signatures
from .checks import fields, flag, listed, text, wrong

DATA = (
    "text",
    "inlineData",
    "fileData",
    "functionCall",
    "functionResponse",
    "executableCode",
    "codeExecutionResult",
    "toolCall",
    "toolResponse",
)
"""What a part is one of."""
OF_PROVIDERS = ("executableCode", "codeExecutionResult", "toolCall", "toolResponse")
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
Placed = tuple[str, Json]
"""A part and where it stands."""


@dataclass(slots=True)
class Reading:
    """What is found in a conversation beside its messages."""

    limits: Limits
    media: list[Media] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    unpacked: Unpacked = field(default_factory=Unpacked)


class _Open(NamedTuple):
    name: str
    id: str


class _Ids:
    """The ids of calls and of their responses, where a client leaves them out: by name, else by order."""

    def __init__(self) -> None:
        self._made = 0
        self._open: list[_Open] = []
        self._last: dict[str, str] = {}

    def called(self, name: str, told: str | None) -> str:
        """The id of a call."""
        identity = f"call_{self._made}" if told is None else told
        self._made += 1
        self._open.append(_Open(name, identity))
        self._last[name] = identity
        return identity

    def answered(self, name: str, told: str | None) -> str:
        """The id of the call that a response of the function `name` answers."""
        found = next((one for one in self._open if (one.id == told if told is not None else one.name == name)), None)
        if found is None:
            # a response that comes twice, or whose call is no longer told
            return told if told is not None else self._last.get(name, f"call_of_{name}")
        self._open.remove(found)
        return found.id


def conversation(system: Any, contents: Any, reading: Reading) -> list[Json]:
    """The messages of a request.

    Raises:
        BadRequest: a wrong or unknown part, or one that the model cannot be shown.
    """
    messages = _system(system, reading)
    ids = _Ids()
    turn: list[Placed] = []
    """Parts of the model's turn; clients that were streamed to may keep each piece as a content of its own."""
    in_turn = False
    for i, content in enumerate(listed(contents, "contents")):
        where = f"contents[{i}]"
        given = fields(content, where)
        parts = _placed(given.get("parts"), f"{where}.parts")
        match given.get("role", "user"):
            case "model":
                turn += parts
                in_turn = True
                continue
            case "user" | "function":
                if not parts:
                    raise wrong(f"{where}.parts", "contents.parts must not be empty.")
            case _:
                raise wrong(f"{where}.role", "Please use a valid role: user, model.")
        if in_turn:
            messages.append(_model(turn, ids, reading))
            turn, in_turn = [], False
        messages += _user(parts, ids, reading)
    if in_turn:
        messages.append(_model(turn, ids, reading))
    return messages


def _placed(parts: Any, where: str) -> list[Placed]:
    return [(f"{where}[{j}]", fields(part, f"{where}[{j}]")) for j, part in enumerate(listed(parts, where))]


def _system(system: Any, reading: Reading) -> list[Json]:
    if system is None:
        return []
    where = "systemInstruction"
    texts = []
    for at, part in _placed(fields(system, where).get("parts"), f"{where}.parts"):
        if _kind(part, at) != "text":
            raise wrong(at, "system instructions are text.")
        if said := text(part["text"], f"{at}.text"):
            texts.append(_text_part(said))
    return [{"role": "system", "content": _joined(texts)}] if texts else []


def _kind(part: Json, where: str) -> str | None:
    """What a part is; None: a signature alone."""
    found = [name for name in DATA if name in part]
    if len(found) > 1:
        raise wrong(where, "oneof field 'data' is already set.")
    if not found and "thoughtSignature" not in part:
        raise wrong(where, "required oneof field 'data' must have one initialized field.")
    return found[0] if found else None


def _user(parts: Sequence[Placed], ids: _Ids, reading: Reading) -> list[Json]:
    """A user's turn: function responses are messages of their own, in their place."""
    found: list[Json] = []
    shown: list[Json] = []
    for at, part in parts:
        kind = _kind(part, at)
        if kind == "functionCall":
            raise wrong(at, "function calls belong into turns of the role model.")
        if kind == "functionResponse":
            found += [{"role": "user", "content": _joined(shown)}] if shown else []
            found.append(_response(part["functionResponse"], f"{at}.functionResponse", ids, reading))
            shown = []
        elif kind is not None:
            shown += _shown(kind, part, at, reading)
    return found + ([{"role": "user", "content": _joined(shown)}] if shown else [])


def _response(value: Any, where: str, ids: _Ids, reading: Reading) -> Json:
    given = fields(value, where)
    name = text(given.get("name"), f"{where}.name")
    told = given.get("id")
    identity = ids.answered(name, None if told is None else bare_call_id(name, text(told, f"{where}.id")))
    response = given.get("response", {})
    if not isinstance(response, dict):
        raise wrong(f"{where}.response", "an object is expected")
    parts = [_text_part(_output(response))]
    for at, part in _placed(given.get("parts"), f"{where}.parts"):
        kind = _kind(part, at)
        if kind not in ("inlineData", "fileData"):
            raise wrong(at, "a part of a function response is inlineData or fileData.")
        parts += _shown(kind, part, at, reading)
    return {"role": "tool", "content": _joined(parts), "tool_call_id": identity}


def _output(response: Json) -> str:
    """A function's output; a response without `output` is one as a whole."""
    output: Any = response
    if response.keys() == {"output"}:
        output = response["output"]
    if isinstance(output, str):
        return output
    return json.dumps(output, ensure_ascii=False) if output else ""


def _model(parts: Sequence[Placed], ids: _Ids, reading: Reading) -> Json:
    shown: list[Json] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    reasoning: str | None = None
    foreign: str | None = None
    for at, part in parts:
        kind = _kind(part, at)
        kept = _kept(part.get("thoughtSignature"), f"{at}.thoughtSignature", reading)
        if kept is not None and kept.reasoning is not None:
            reasoning = kept.reasoning
        elif kept is None and part.get("thoughtSignature", "") not in ("", *SKIPPED_SIGNATURES):
            foreign = at
        match kind:
            case None:
                continue
            case "functionCall":
                calls.append(_call(part["functionCall"], f"{at}.functionCall", kept, ids))
            case "text" if flag(part.get("thought"), f"{at}.thought"):
                thoughts.append(text(part["text"], f"{at}.text"))
            case "functionResponse":
                raise wrong(at, "function responses belong into turns of the role user.")
            case _:
                shown += _shown(kind, part, at, reading)
    if reasoning is None:
        reasoning = "".join(thoughts)
        if foreign is not None and not reasoning:
            _leave_out("thoughtSignature", foreign, reading.limits.foreign_thinking, reading)
    return _assistant(shown, reasoning, calls)


def _assistant(shown: Sequence[Json], reasoning: str, calls: list[Json]) -> Json:
    told: str | list[Json] | None = list(shown)
    if all(part["type"] == "text" for part in shown):
        # pieces of one text
        told = "".join(part["text"] for part in shown)
    # as the engine tells it: no text beside a call is null
    if calls and isinstance(told, str) and not told.strip():
        told = None
    found: Json = {"role": "assistant", "content": told}
    if reasoning:
        found["reasoning"] = reasoning
    if calls:
        found["tool_calls"] = calls
    return found


def _kept(signature: Any, where: str, reading: Reading) -> signatures.Kept | None:
    if signature is None:
        return None
    try:
        found = signatures.read(text(signature, where))
        if found is not None:
            for held in (found.reasoning, found.id, found.arguments):
                reading.unpacked.take(held)
        return found
    except ValueError as error:
        raise wrong(where, f"Thought signature is not valid: {error}") from None


def _call(value: Any, where: str, kept: signatures.Kept | None, ids: _Ids) -> Json:
    given = fields(value, where)
    name = text(given.get("name"), f"{where}.name")
    if given.get("partialArgs"):
        raise wrong(f"{where}.partialArgs", "arguments are sent back whole.")
    args = given.get("args", {})
    if not isinstance(args, dict):
        raise wrong(f"{where}.args", "an object is expected")
    told = given.get("id")
    if told is not None:
        told = bare_call_id(name, text(told, f"{where}.id"))
    elif kept is not None:
        told = kept.id
    function = {"name": name, "arguments": _arguments(args, kept)}
    return {"id": ids.called(name, told), "type": "function", "function": function}


def _arguments(args: Json, kept: signatures.Kept | None) -> str:
    """The text of a call's arguments: as the model wrote it, where the client has not changed what it says."""
    if kept is not None and kept.arguments is not None and signatures.same(json.loads(as_input(kept.arguments)), args):
        return kept.arguments
    raw = args.get(MALFORMED) if len(args) == 1 else None
    # the spaces are those that models write
    return raw if isinstance(raw, str) else json.dumps(args, ensure_ascii=False)


# parts --------------------------------------------------------------------------------------------------------------


def _shown(kind: str, part: Json, where: str, reading: Reading) -> list[Json]:
    """What of a part is text or an image."""
    if kind == "text":
        return [_text_part(text(part["text"], f"{where}.text"))]
    if kind in OF_PROVIDERS:
        _leave_out(kind, where, reading.limits.provider_tools, reading)
        return []
    at = f"{where}.{kind}"
    given = fields(part[kind], at)
    mime = given.get("mimeType")
    if kind == "fileData":
        return [_by_address(given, mime, at, reading)]
    mime = text(mime, f"{at}.mimeType").lower()
    data = text(given.get("data", ""), f"{at}.data")
    try:
        raw = base64.b64decode(data.translate(signatures.URL_SAFE) + "=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise wrong(f"{at}.data", "Base64 decoding failed.") from None
    if mime.startswith("text/"):
        try:
            return [_text_part(raw.decode())]
        except UnicodeDecodeError:
            raise wrong(f"{at}.data", "the text is not UTF-8.") from None
    if mime not in IMAGE_TYPES:
        raise _cannot_show(mime, at)
    if not raw:
        raise wrong(f"{at}.data", "the image is empty.")
    reading.media.append(Media("image", hashlib.sha256(raw).hexdigest()))
    return [_image_part(f"data:{mime};base64,{base64.b64encode(raw).decode()}")]


def _by_address(given: Json, mime: Any, where: str, reading: Reading) -> Json:
    address = text(given.get("fileUri"), f"{where}.fileUri")
    if mime is not None and text(mime, f"{where}.mimeType").lower() not in IMAGE_TYPES:
        raise _cannot_show(mime, where)
    if reading.limits.image_urls == "refuse" or not address.startswith(("http://", "https://")):
        raise wrong(where, "there is no Files API here, and files are not fetched; send an image as inlineData.")
    reading.media.append(Media("image", hashlib.sha256(address.encode("utf-8", "surrogatepass")).hexdigest()))
    return _image_part(address)


def _cannot_show(mime: str, where: str) -> BadRequest:
    kinds = ", ".join(IMAGE_TYPES)
    return wrong(
        f"{where}.mimeType",
        f"Unsupported MIME type: {mime[:80]}. This model can be shown text and images ({kinds}).",
    )


def _leave_out(kind: str, where: str, limit: str, reading: Reading) -> None:
    if limit == "refuse":
        raise wrong(where, f"`{kind}` is of use to its provider only, and not available here.")
    reading.dropped.append(kind)


def _text_part(value: str) -> Json:
    return {"type": "text", "text": value}


def _image_part(url: str) -> Json:
    return {"type": "image_url", "image_url": {"url": url}}


def _joined(parts: Sequence[Json]) -> str | list[Json]:
    """One text is a string, so that clients which send it either way are told the same."""
    if len(parts) == 1 and parts[0]["type"] == "text":
        found: str = parts[0]["text"]
        return found
    return list(parts)
