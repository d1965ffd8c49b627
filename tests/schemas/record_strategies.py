"""Hypothesis strategies for every record: made from the types themselves, so that a new field is tested as it comes."""

import enum
import types
import typing
from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st

from polar.schemas import Event, Logprobs, TokenIds
from polar.schemas.topics import TABLE

EVENTS: list[type[Event]] = sorted({kind for spec in TABLE for kind in spec.values}, key=lambda kind: kind.__name__)

_texts = st.text(max_size=12)
# what JSON and MessagePack both hold: 64-bit integers, finite numbers, no surrogates
_integers = st.integers(-(2**63), 2**63 - 1)
_floats = st.floats(allow_nan=False, allow_infinity=False)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _floats | _texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_texts, inner, max_size=2),
    max_leaves=3,
)

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(TokenIds)
logprobs = st.lists(st.floats(max_value=0, allow_infinity=False, width=32) | st.just(float("nan")), max_size=20).map(
    Logprobs
)


@cache
def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    simple: dict[Any, st.SearchStrategy[Any]] = {
        str: _texts,
        int: _integers,
        float: _floats,
        bool: st.booleans(),
        bytes: st.binary(max_size=20),
        type(None): st.none(),
        Any: _json,
        TokenIds: token_ids,
        Logprobs: logprobs,
    }
    if kind in simple:
        return simple[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(one) for one in inner])
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin is list:
        return st.lists(values(inner[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=2)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    raise AssertionError(f"no strategy for {kind!r}; a new kind of field needs one here")


@cache
def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Any value of a Struct, optional fields sometimes left out."""
    required, optional = {}, {}
    for field in msgspec.structs.fields(kind):
        (required if field.required else optional)[field.name] = st.deferred(lambda field=field: values(field.type))
    return st.fixed_dictionaries(required, optional=optional).map(lambda given: kind(**given))
