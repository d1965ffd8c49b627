"""Records as bytes and back: MessagePack on the log, JSON for people and for foreign writers of `polar.tasks`."""

from __future__ import annotations

import difflib
import hashlib
import types
import typing
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, TypeVar

import msgspec

from .arrays import from_either, to_json, to_wire
from .base import Event, RecordRef
from .stages import Problem

MSGPACK = "application/msgpack"
JSON = "application/json"

MAX_UNKNOWN = 20
"""Unknown fields that are told of one request: looking for a near name takes a while."""

_encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)
_json_encoder = msgspec.json.Encoder(enc_hook=to_json)
_canonical = msgspec.json.Encoder(enc_hook=to_json, order="deterministic")

EventT = TypeVar("EventT", bound=Event)


class DecodeError(ValueError):
    """A record is not of the type it should be. `problem` names the field."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.field}: {problem.message}" if problem.field else problem.message)
        self.problem = problem


def encode(event: Event) -> bytes:
    """MessagePack; deterministic for the same value."""
    return _encoder.encode(event)


def decode(data: bytes, types_: Iterable[type[Event]]) -> Event:
    """One of `types_` from MessagePack; unknown fields, written by newer versions, are ignored.

    Raises:
        DecodeError: not MessagePack, an unknown type, a missing or mistyped field, nested too deep.
    """
    return _run(_decoder(tuple(types_)), data)


def decode_json(data: bytes | str, types_: Iterable[type[Event]]) -> Event:
    """As `decode`, from JSON."""
    return _run(_json_decoder(tuple(types_)), data)


def to_json_bytes(value: Any) -> bytes:
    """JSON for people: arrays as lists."""
    return _json_encoder.encode(value)


def to_builtins(value: Any) -> Any:
    """Dictionaries and lists, as they stand in JSON."""
    return msgspec.to_builtins(value, enc_hook=to_json)


def canonical(value: Any) -> bytes:
    """JSON with sorted keys: the same value gives the same bytes, whatever the order it was written in."""
    return _canonical.encode(value)


def sha256(value: Any) -> str:
    """Hex digest of bytes, text, or the canonical JSON of anything else."""
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        value = canonical(value)
    return hashlib.sha256(value).hexdigest()


def headers(
    event: Event, *, source: RecordRef | None = None, traceparent: str | None = None
) -> list[tuple[str, bytes]]:
    """The headers of a record; `source`: the record it derives from."""
    found = [("content-type", MSGPACK.encode()), ("polar-schema", f"{type(event).__name__}.v1".encode())]
    if source is not None:
        found.append(("source", f"{source.topic}/{source.partition}/{source.offset}".encode()))
    if traceparent is not None:
        found.append(("traceparent", traceparent.encode()))
    return found


@lru_cache(maxsize=256)
def _decoder(types_: tuple[type[Event], ...]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(typing.Union[types_], dec_hook=from_either)  # noqa: UP007 - built at run time


@lru_cache(maxsize=256)
def _json_decoder(types_: tuple[type[Event], ...]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(typing.Union[types_], dec_hook=from_either)  # noqa: UP007 - built at run time


def _run(decoder: Any, data: bytes | str) -> Event:
    try:
        event: Event = decoder.decode(data)
    except msgspec.ValidationError as error:
        raise DecodeError(problem_of(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(Problem(field="", message=f"not readable: {error}")) from None
    return event


def problem_of(error: msgspec.ValidationError) -> Problem:
    """The field and the reason out of msgspec's message."""
    message, _, path = str(error).partition(" - at `")
    field = path.rstrip("`").removeprefix("$").lstrip(".")
    missing = "missing required field `"
    if missing in message:
        name = message.split("`")[1]
        return Problem(field=f"{field}.{name}" if field else name, message="is required", code="missing")
    return Problem(field=field, message=message[:1].lower() + message[1:])


def unknown_fields(value: Any, kind: Any) -> list[Problem]:
    """Fields of a decoded JSON `value` that `kind` does not have, each with the nearest name it has; the first ones.

    The log ignores unknown fields, since a newer writer may know more; a person's misspelt field must not vanish so.
    """
    return list(islice(_unknown(value, kind, ""), MAX_UNKNOWN))


def _unknown(value: Any, kind: Any, path: str) -> Iterator[Problem]:
    if isinstance(value, list):
        inner = typing.get_args(kind)
        if typing.get_origin(kind) is list and inner:
            for i, item in enumerate(value):
                yield from _unknown(item, inner[0], f"{path}[{i}]")
        return
    struct = _struct_of(kind) if isinstance(value, dict) else None
    if struct is None:
        return
    known = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    tag = struct.__struct_config__.tag_field
    for name, item in value.items():
        here = f"{path}.{name}" if path else str(name)
        if name in known:
            yield from _unknown(item, known[name], here)
        elif name != tag:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            yield Problem(field=here, message=f"is not a field here{hint}", code="unknown_field")


def _struct_of(kind: Any) -> type[msgspec.Struct] | None:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        structs = [one for one in map(_struct_of, typing.get_args(kind)) if one is not None]
        return structs[0] if len(structs) == 1 else None
    return None
