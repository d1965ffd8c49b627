"""What a live stream may tell before the broker's acknowledgement."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from polar.proxy.calls import Delta, ToolDelta
from polar.proxy.gate import Closing, Gate

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def pieces(text: str, cuts: list[int]) -> list[str]:
    marks = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(marks)] or [""]


@st.composite
def turns(draw: st.DrawFn) -> tuple[str, list[tuple[str, str]], list[Delta]]:
    """A text, calls after it, and deltas that tell them."""
    text = draw(st.text(alphabet=" \nab{}", max_size=12))
    arguments = draw(st.lists(st.dictionaries(st.text(max_size=4), json_values, max_size=3), max_size=3))
    cuts = draw(st.lists(st.integers(0, 50), max_size=6))
    deltas = [Delta(index=0, content=piece) for piece in pieces(text, cuts) if piece]
    calls = []
    for i, value in enumerate(arguments):
        dumped = json.dumps(value, ensure_ascii=False)
        calls.append((f"f{i}", dumped))
        deltas.append(Delta(index=0, tools=[ToolDelta(i, f"id{i}", f"f{i}")]))
        deltas += [Delta(index=0, tools=[ToolDelta(i, arguments=piece)]) for piece in pieces(dumped, cuts)]
    return text, calls, deltas


def joined(deltas: list[Delta]) -> tuple[str, list[list[str]]]:
    text, calls = "", []
    for delta in deltas:
        text += delta.content
        for tool in delta.tools:
            if tool.name is not None:
                calls.append([tool.name, ""])
                assert tool.index == len(calls) - 1
            calls[tool.index][1] += tool.arguments
    return text, calls


@given(turns())
def test_what_goes_out_and_what_is_held_are_the_whole_turn_in_order(turn: tuple) -> None:
    text, calls, deltas = turn
    gate = Gate(1)
    told = [passed for delta in deltas if (passed := gate.admit(delta)) is not None]
    whole, found = joined([*told, *gate.rest()])
    assert found == [list(call) for call in calls]
    assert whole == (text if text.strip() or not calls else "")


@given(turns())
def test_no_call_is_closed_and_no_text_is_followed_before_the_acknowledgement(turn: tuple) -> None:
    gate = Gate(1)
    told = [passed for delta in turn[2] if (passed := gate.admit(delta)) is not None]
    text, calls = joined(told)
    assert len(calls) <= (0 if text else 1)
    for _, arguments in calls:
        try:
            json.loads(arguments)
        except json.JSONDecodeError:
            continue
        raise AssertionError("whole arguments went out")


def test_text_goes_out_as_it_comes() -> None:
    gate = Gate(2)
    for index in (1, 0, 1):
        delta = Delta(index=index, content="word ")
        assert gate.admit(delta) == delta
    assert gate.rest() == []


def test_reasoning_goes_out_and_content_may_follow_it() -> None:
    gate = Gate(1)
    assert gate.admit(Delta(index=0, reasoning="hm")) is not None
    assert gate.admit(Delta(index=0, content="so")) is not None


def test_a_bare_value_as_arguments_is_held_at_once() -> None:
    assert Closing().split("12") == 0
    assert Closing().split(' "text"') == 1


def test_a_brace_in_a_string_closes_nothing() -> None:
    closing = Closing()
    assert closing.split('{"a": "}\\"}') == len('{"a": "}\\"}')
    assert closing.split('"}') == 1
