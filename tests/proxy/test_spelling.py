"""Arguments as the model wrote them, found again in the text of its tokens."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polar.proxy.spelling import spelled

CALL = '<tool_call>\n{"name": "look", "arguments": %s}\n</tool_call>'
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=4)


def engines(written: str) -> str:
    """As vLLM tells arguments in a whole answer."""
    return json.dumps(json.loads(written), ensure_ascii=False)


def test_spaces_numbers_and_escapes_stay_as_they_were() -> None:
    for written in ('{"a":1}', '{"a" : 1.50}', '{"a": "\\u00e9"}', "{ }", '{"a": {"b":[1,2]},"c":null}'):
        assert spelled([engines(written)], f"Let me see. {CALL % written}<|im_end|>") == [written]


def test_each_call_is_found_after_the_one_before() -> None:
    written = ['{"a":1}', '{"a": 1}', '{"a" :1}']
    said = "".join(CALL % one for one in written)
    assert spelled([engines(one) for one in written], said) == written


def test_text_before_a_call_may_hold_braces() -> None:
    said = 'if (x) { y } and {"a": 2} [{{ ' + CALL % '{"a":1}'
    assert spelled(['{"a": 1}'], said) == ['{"a":1}']


def test_what_is_not_found_or_no_object_stays_as_the_engine_tells_it() -> None:
    assert spelled(['{"a": 1}', '{"b": 2}'], "<a>1</a><b>2</b>") == ['{"a": 1}', '{"b": 2}']
    assert spelled(['{"a": 1', "[1]", '{"b": 2}'], CALL % '{"b":2}') == ['{"a": 1', "[1]", '{"b":2}']


def test_braces_without_end_do_not_take_for_ever() -> None:
    assert spelled(['{"a": 1}'], "{" * 50_000) == ['{"a": 1}']


@given(
    st.lists(st.tuples(OBJECTS, st.sampled_from([(",", ":"), (", ", ": "), (" ,", " : ")]), st.booleans()), max_size=3)
)
def test_whatever_was_written_comes_back(calls: list[tuple[Any, tuple[str, str], bool]]) -> None:
    written = [json.dumps(one, separators=marks, ensure_ascii=escaped) for one, marks, escaped in calls]
    found = spelled([engines(one) for one in written], "".join(CALL % one for one in written))
    assert [json.loads(one) for one in found] == [one for one, _, _ in calls]
    assert found == written
