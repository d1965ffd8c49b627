"""The normal form in which messages are compared."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.schemas.messages import NESTED, encoded, normal, plain, thinking

json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def said(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calling(arguments: Any, identity: str = "c1") -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return said(None, tool_calls=[{"id": identity, "type": "function", "function": function}])


def form(message: dict[str, Any]) -> bytes:
    return encoded(normal(message))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (calling('{"a": 1.0}'), calling('{"a":1}', "another id")),
        (calling('{"a": 1, "b": [2.0]}'), calling('{"b":[2],"a":1}')),
        (calling('{"a": "\\u00e4"}'), calling('{"a": "ä"}')),
        (calling('{"a": 1}'), calling({"a": 1})),
        (calling(" \n"), calling("{}")),
        (calling(None), calling({})),
        (calling(' {"a": '), calling('{"a":')),
        (calling("{}"), {**calling("{}"), "content": ""}),
        (said("x", refusal=None, annotations=None, reasoning=""), said([{"type": "text", "text": "x"}])),
        (said("a\nb"), said([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
        (said("\n\nx\n"), said("x")),
        (said("x", reasoning="\nhm\n"), said("x", reasoning_content="hm")),
        ({"content": "x"}, said("x")),
    ],
)
def test_what_harnesses_change_on_the_way_makes_no_difference(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert form(one) == form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (calling('{"a": 1}'), calling('{"a": true}')),
        (calling('{"a": 1}'), calling('{"a": "1"}')),
        (calling('{"a": 1.5}'), calling('{"a": 1}')),
        (calling('{"a": " x"}'), calling('{"a": "x"}')),
        (calling("null"), calling("{}")),
        (calling("{}"), said(None)),
        (said("x"), said("y")),
        (said("x y"), said("x  y")),
        (said("x", reasoning="hm"), said("x")),
        (said("x"), {"role": "user", "content": "x"}),
        ({"role": "user", "content": "x "}, {"role": "user", "content": "x"}),
        ({"role": "tool", "content": "x\n"}, {"role": "tool", "content": "x"}),
    ],
)
def test_what_a_prompt_shows_makes_one(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert form(one) != form(other)


def test_a_message_can_be_compared_without_its_thinking() -> None:
    assert normal(said("x", reasoning="hm"), reasoning=False) == normal(said("x"))
    assert thinking(said("x", reasoning=" hm\n")) == "hm"
    assert thinking(said("x")) == ""


@given(json_values)
def test_arguments_of_any_kind_have_a_form_that_spelling_does_not_change(value: Any) -> None:
    indented = json.dumps(value, indent=1, ensure_ascii=False)
    assert form(calling(json.dumps(value))) == form(calling(indented))


@pytest.mark.parametrize(
    "arguments",
    ["1" * 400, '{"a": 1e999}', '{"a": NaN}', '{"a": "\\ud800"}', "\udfff", "[" * 90 + "]" * 90, "[" * 5_000],
)
def test_arguments_that_no_schema_foresees_have_a_form_too(arguments: str) -> None:
    assert form(calling(arguments)) == form(calling(f" {arguments} "))
    assert form(calling(arguments)) != form(calling("{}"))


@pytest.mark.parametrize("depth", [NESTED, NESTED + 1, 900, 100_000])
def test_the_depth_beyond_which_json_is_text_does_not_hang_on_the_stack(depth: int) -> None:
    text = "[" * depth + " " + "]" * depth

    def deeper(left: int) -> bytes:
        return deeper(left - 1) if left else form(calling(text))

    assert deeper(0) == deeper(300)
    assert (form(calling(text)) == form(calling(text.replace(" ", "")))) == (depth <= NESTED)


def test_whole_numbers_are_integers_as_far_as_floats_tell_them_apart() -> None:
    assert plain({"a": [1.0, -0.0, 2.0**53, 0.5]}) == {"a": [1, 0, 2.0**53, 0.5]}
    assert isinstance(plain(2.0**53), float)
    with pytest.raises(RecursionError):
        plain([[1]], nested=1)
