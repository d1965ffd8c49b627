"""Frames of the Kafka protocol to kio's structs and back, for every version the broker speaks.

Promises: a request is parsed with exactly the version its header names; an answer is a plain mapping that is shaped
into that version's struct, so that handlers are written once for all versions. Knows nothing of what requests mean.
"""

import io
import struct
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

from polar.broker.codecs import (
    ErrorCode,
    SerialError,
    entity_reader,
    entity_writer,
    load_request_schema,
    load_response_schema,
)

__all__ = ["MalformedRequest", "RequestHead", "encode_response", "parse_request", "read_head"]

_HEAD = struct.Struct(">hhi")
_SIZE = struct.Struct(">i")

Answer = Mapping[str, Any]
"""Field names of kio's response struct to values; nested structs are mappings, arrays are iterables of them."""


class MalformedRequest(Exception):
    """The bytes are no request of the version they claim; the connection cannot go on."""


class RequestHead(NamedTuple):
    """What the first bytes of every request say."""

    api_key: int
    version: int
    correlation_id: int


def read_head(frame: bytes) -> RequestHead:
    """Raises `MalformedRequest` when the frame is too short."""
    try:
        return RequestHead(*_HEAD.unpack_from(frame))
    except struct.error as error:
        raise MalformedRequest(f"a frame of {len(frame)} bytes is no request") from error


def parse_request(frame: bytes, head: RequestHead) -> tuple[Any, str | None]:
    """kio's request struct and the client id. Raises `MalformedRequest`."""
    header_reader, reader = _readers(head.api_key, head.version)
    try:
        header, position = header_reader(frame, 0)
        request, _ = reader(frame, position)
    except (SerialError, ValueError) as error:
        raise MalformedRequest(f"cannot read request {head.api_key} v{head.version}: {error!r}") from error
    return request, header.client_id


def encode_response(head: RequestHead, answer: Answer) -> bytes:
    """The whole frame, size prefix included."""
    shape, write, flexible_header = _writer(head.api_key, head.version)
    buffer = io.BytesIO()
    buffer.write(b"\x00\x00\x00\x00")
    buffer.write(_SIZE.pack(head.correlation_id))
    if flexible_header:
        buffer.write(b"\x00")  # no tagged fields
    write(buffer, shape(answer))
    with buffer.getbuffer() as view:
        _SIZE.pack_into(view, 0, len(view) - 4)
    return buffer.getvalue()


@cache
def _readers(api_key: int, version: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    schema = load_request_schema(api_key, version)
    return entity_reader(schema.__header_schema__), entity_reader(schema)


@cache
def _writer(api_key: int, version: int) -> tuple[Callable[[Answer], Any], Callable[..., None], bool]:
    schema = load_response_schema(api_key, version)
    return _shaper(schema), entity_writer(schema), schema.__header_schema__.__flexible__


@cache
def _shaper(schema: type) -> Callable[[Answer], Any]:
    """A function from a mapping to the struct: unknown names are dropped, absent ones take their default."""
    hints = get_type_hints(schema)
    plan: list[tuple[str, Any, Callable[[Any], Any] | None]] = []
    for field in fields(schema):
        hint = hints[field.name]
        options = get_args(hint) if type(None) in get_args(hint) else (hint,)
        convert: Callable[[Any], Any] | None = None
        for option in options:
            inner = get_args(option)
            if inner and is_dataclass(inner[0]):
                convert = _array(_shaper(inner[0]))  # type: ignore[arg-type]
            elif inner:
                convert = _plain_array
            elif is_dataclass(option):
                convert = _optional(_shaper(option))  # type: ignore[arg-type]
        plan.append((field.name, _default(field.name, field.default, hint), convert))

    def shape(answer: Answer) -> Any:
        values = {}
        for name, default, convert in plan:
            if name in answer:
                value = answer[name]
                values[name] = convert(value) if convert is not None else value
            elif default is MISSING:
                raise KeyError(f"{schema.__module__}.{schema.__name__} needs {name}")
            else:
                values[name] = default
        return schema(**values)

    return shape


def _default(name: str, default: Any, hint: Any) -> Any:
    if default is not MISSING:
        return default
    if name == "throttle_time":
        return timedelta(0)
    if name == "error_code":
        return ErrorCode.none
    if type(None) in get_args(hint):
        return None
    return MISSING


def _array(shape: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda values: None if values is None else tuple([shape(value) for value in values])


def _plain_array(values: Any) -> Any:
    return None if values is None else tuple(values)


def _optional(shape: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else shape(value)
