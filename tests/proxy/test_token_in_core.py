"""The pure core of token-in: which call a request goes on from, what is new in it, and by how much ids differ."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.proxy.token_in.compare import drift, same_reply, skeleton
from polar.proxy.token_in.conversation import Conversation, setting
from polar.proxy.token_in.splice import NO_END, REWROTE, New, added, beyond
from polar.proxy.token_in.turns import Canonical, Marks, Turns
from polar.schemas import (
    Choice,
    CompletionCaptured,
    Engine,
    Logprobs,
    Prompt,
    Sampling,
    TokenIds,
)
from polar.schemas.messages import normal
from polar.schemas.prompts import Captured, delta

ids = st.lists(st.integers(0, 5), max_size=40)
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calling(arguments: str, identity: str = "c1") -> list[dict[str, Any]]:
    return [{"id": identity, "type": "function", "function": {"name": "look", "arguments": arguments}}]


# drift ----------------------------------------------------------------------------------------------------------------


@given(ids, ids)
def test_drift_is_zero_exactly_for_a_beginning(sampled: list[int], prompt: list[int]) -> None:
    found = drift(TokenIds(sampled), TokenIds(prompt))
    assert (found == 0) == (prompt[: len(sampled)] == sampled)
    assert 0 <= found <= max(len(sampled), len(prompt))


@given(ids, ids)
def test_drift_does_not_count_what_comes_after(sampled: list[int], new: list[int]) -> None:
    assert drift(TokenIds(sampled), TokenIds([*sampled, *new])) == 0


@pytest.mark.parametrize(
    ("sampled", "prompt", "apart"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6, 7], 1),
        ([1, 2, 30, 31, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7], 2),  # two ids for one
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 30, 31, 4, 5, 6, 7], 2),  # one for two
        ([1, 2, 3, 4, 5], [1, 9, 2, 3, 4, 5], 1),  # one more
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 8, 9, 9], 5),  # five are gone, the end of the turn is there
        ([1, 2, 3], [1, 7, 7, 7], 2),  # nothing more in common
        ([1, 2, 3], [], 3),
        ([1, 7, 3, 4, 5, 6, 8, 9, 10, 11, 12], [1, 2, 3, 4, 5, 6, 0, 9, 10, 11, 12], 2),  # two places
    ],
)
def test_drift_counts_the_ids_of_what_differs(sampled: list[int], prompt: list[int], apart: int) -> None:
    assert drift(TokenIds(sampled), TokenIds(prompt)) == apart


def test_drift_of_a_long_prompt_is_local() -> None:
    sampled = list(range(30_000))
    prompt = [*sampled[:20_000], 7, 7, 7, *sampled[20_002:]]
    assert drift(TokenIds(sampled), TokenIds(prompt)) == 3
    assert drift(TokenIds(sampled), TokenIds([*sampled[:20_000], *sampled[23_000:]])) == 3_000
    assert drift(TokenIds(sampled), TokenIds([*sampled[:20_000], *sampled[26_000:]])) == 10_000


# texts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "rendered", "options", "same"),
    [
        ("Yes.", "Yes.", {}, True),
        (" Yes.\n", "Yes.", {}, True),  # templates trim
        ("Yes.", "No.", {}, False),
        ("<think>x</think>Yes.", "Yes.", {}, False),
        ("Yes. STOP", "Yes.", {"stop": "STOP"}, True),
        ("Yes. STO", "Yes.", {"stop": "STOP"}, False),
        ("naï\N{REPLACEMENT CHARACTER}", "naï", {"whole": False}, True),  # half a character, never told
        ('{"a":1.0}', '{"a": 1}', {"tools": True}, True),
        ('{"a":1.0}', '{"a": 1}', {}, False),
        ('<tool_call>{"n": "x"}</tool_call>', '<tool_call>\n{"n":"x"}\n</tool_call>', {"tools": True}, True),
        ('go\n{"a": [1, {"b": true}]}', 'go {"a":[1,{"b":true}]}', {"tools": True}, True),
        ('{"a": true}', '{"a": 1}', {"tools": True}, False),
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', {"tools": True}, True),
        ('{"a": 1}', '{"a": 2}', {"tools": True}, False),
        ('{"a": 1', '{"a":  1', {"tools": True}, True),
    ],
)
def test_texts_of_one_reply(sampled: str, rendered: str, options: dict[str, Any], same: bool) -> None:
    values: dict[str, Any] = {"stop": None, "whole": True, "tools": False, **options}
    assert same_reply(sampled, rendered, **values) is same


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4))
def test_spacing_of_json_makes_no_difference(value: dict[str, Any]) -> None:
    tight, loose = json.dumps(value, separators=(",", ":")), json.dumps(value, indent=2)
    assert skeleton(f"a {tight} b") == skeleton(f"a  {loose}\nb")


@given(st.text(alphabet='{}[]",: ab1', max_size=60))
def test_any_text_has_a_skeleton(text: str) -> None:
    assert skeleton(text) == skeleton(f" {text} ") or '"' in text


# conversations --------------------------------------------------------------------------------------------------------


class Memory:
    """One attempt's calls, by their messages."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.known: list[Captured] = []

    def call(self, messages: list[dict[str, Any]], *replies: dict[str, Any], prompt: list[int] | None = None) -> None:
        choices = [
            Choice(index=i, ids=TokenIds([9, i]), logprobs=Logprobs([-1.0, -1.0]), message=reply, finish="stop")
            for i, reply in enumerate(replies)
        ]
        whole = Prompt(ids=TokenIds(prompt or [1, 2, len(self.known)]), messages=messages)
        draft = delta(whole, self.known)
        captured = draft.captured(f"c{len(self.known)}", len(self.known), choices)
        self.known.append(captured)
        record = CompletionCaptured(
            completion_id=f"c{len(self.known)}",
            session_id="s",
            attempt=1,
            task_id="t",
            group_id="g",
            sample=0,
            call=0,
            started_ms=0,
            ended_ms=0,
            dialect="d",
            request_sha256="",
            prompt=draft.prompt,
            choices=choices,
            sampling_asked=Sampling(),
            sampling=Sampling(),
            engine=Engine(model="m", endpoint="e"),
        )
        tools, told = setting("m", None, {})
        self.turns.add(Marks(Conversation(messages), tools, told), captured, record, draft.length)

    def look(self, *messages: dict[str, Any]) -> tuple[int | None, str | None, bool]:
        """How many messages are known, the kind, and whether their thinking is."""
        conversation = Conversation(messages)
        found = self.turns.find(conversation)
        kind = self.turns.kind(conversation, found)
        return (None, kind, False) if found is None else (found.messages, kind, found.thinking)


@pytest.fixture
def memory() -> Memory:
    made = Memory()
    made.call([SYSTEM, user("a")], said("b"))
    made.call([SYSTEM, user("a"), said("b"), user("c")], said("d"))
    return made


def test_the_longest_call_is_gone_on_from(memory: Memory) -> None:
    assert memory.look(SYSTEM, user("a"), said("b"), user("c"), said("d"), user("e")) == (5, "append", True)
    assert memory.look(SYSTEM, user("a"), said("b"), user("other")) == (3, "append", True)


def test_a_changed_history_is_a_rewrite(memory: Memory) -> None:
    assert memory.look(SYSTEM, user("a"), said("b"), user("c"), said("D!"), user("e")) == (3, "rewrite", True)
    assert memory.look(SYSTEM, user("a"), said("B!"), user("e")) == (None, "rewrite", False)
    assert memory.look({"role": "system", "content": "New."}, user("a"), said("b"), user("c"))[1] == "rewrite"


def test_a_new_conversation_is_fresh_and_so_is_the_same_again(memory: Memory) -> None:
    assert memory.look(SYSTEM, user("other")) == (None, "fresh", False)
    assert memory.look(SYSTEM, user("a")) == (None, "fresh", False)


def test_what_is_not_remembered_is_not_known(memory: Memory) -> None:
    assert memory.look(SYSTEM, user("other"), said("b"), user("c")) == (None, None, False)
    assert Memory().look(user("a"), said("b"), user("c")) == (None, None, False)


def test_every_choice_can_be_gone_on_from() -> None:
    memory = Memory()
    memory.call([user("a")], said("one"), said("two"))
    conversation = Conversation([user("a"), said("two"), user("c")])
    found = memory.turns.find(conversation)
    assert found is not None
    assert [one.array.tolist() for one in found.turn.ids()] == [[1, 2, 0], [9, 1]]
    assert found.turn.ended == 1


def test_thinking_that_was_left_out_is_noticed() -> None:
    memory = Memory()
    memory.call([user("a")], said("b", reasoning="hm"))
    assert memory.look(user("a"), said("b", reasoning="hm"), user("c")) == (2, "append", True)
    assert memory.look(user("a"), said("b", reasoning_content="hm"), user("c")) == (2, "append", True)
    assert memory.look(user("a"), said("b"), user("c")) == (2, "rewrite", False)


def test_trimmed_thinking_is_the_same_thinking() -> None:
    memory = Memory()
    memory.call([user("a")], said("b", reasoning="\nhm, hm\n"))
    assert memory.look(user("a"), said("b", reasoning_content="hm, hm"), user("c")) == (2, "append", True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (said(None, tool_calls=calling('{"a": 1.0}')), said("", tool_calls=calling('{"a":1}', "other"))),
        (said(" \n", tool_calls=calling("{}")), said(None, tool_calls=calling(""))),
        (said("x", refusal=None, annotations=None), said([{"type": "text", "text": "x"}])),
        (said("x\n"), said("x")),
        (said(None, tool_calls=calling(' {"a": ')), said(None, tool_calls=calling('{"a":'))),
        (said(None, tool_calls=calling('{"a": 1, "b": [2.0]}')), said(None, tool_calls=calling('{"b":[2],"a":1}'))),
    ],
)
def test_what_no_prompt_shows_makes_no_difference(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert Conversation([user("a"), one]).whole == Conversation([user("a"), other]).whole


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (said(None, tool_calls=calling('{"a": 1}')), said(None, tool_calls=calling('{"a": true}'))),
        (said(None, tool_calls=calling('{"a": 1.5}')), said(None, tool_calls=calling('{"a": 1}'))),
        (said("x"), said("y")),
        (user("x"), said("x")),
        (user("x "), user("x")),
        (said("x"), said("x", tool_calls=calling("{}"))),
    ],
)
def test_what_a_prompt_shows_does(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert Conversation([user("a"), one]).whole != Conversation([user("a"), other]).whole


def test_arguments_of_any_size_have_a_normal_form() -> None:
    for arguments in ("1" * 400, '{"a": 1e999}', "[" * 5_000, '{"a": "\\ud800"}', "\udfff"):
        assert normal(said(None, tool_calls=calling(arguments)))
        assert Conversation([said(None, tool_calls=calling(arguments))]).whole


def test_tools_and_what_a_template_is_told_are_told_apart() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    plain = setting("m", None, {})
    assert setting("m", [tool], {})[0] != plain[0]
    assert setting("m", [tool], {})[1] == plain[1]
    assert setting("m", None, {"chat_template_kwargs": {"enable_thinking": False}})[1] != plain[1]
    assert setting("other", None, {})[1] != plain[1]
    assert setting("m", None, {"stop_token_ids": [1]}) == plain


# what is new ----------------------------------------------------------------------------------------------------------

END, BREAK, ASK, ANSWER = 90, 91, 92, 93
words = st.lists(st.integers(0, 9), max_size=6)
replies = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def rendered(turns: list[tuple[int, list[int]]], *, prompt: bool) -> list[int]:
    """A ChatML of numbers."""
    found = [one for role, text in turns for one in (role, *text, END, BREAK)]
    return [*found, ANSWER] if prompt else found


@given(words, replies, words, st.booleans())
def test_what_is_new_after_a_reply(asked: list[int], reply: list[int], more: list[int], ended: bool) -> None:
    history = [(ASK, asked), (ANSWER, reply)]
    whole = rendered([*history, (ASK, more)], prompt=True)
    shown = rendered(history, prompt=False)
    end = np.array([END, BREAK], np.int32)
    new = added(np.array(shown), np.array(whole), ended=END if ended else None, turn_end=end)
    assert isinstance(new, New)
    sampled = [*rendered(history[:1], prompt=True), *reply, *([END] if ended else [])]
    assert [*sampled, *new.ids.tolist()] == whole
    assert shown[: new.upto] == [*rendered(history[:1], prompt=True), *reply]


@given(words, replies, replies, words, st.booleans())
def test_what_follows_a_reply_that_the_template_cut(
    asked: list[int], thought: list[int], reply: list[int], more: list[int], ended: bool
) -> None:
    marker = [70, 71, 72]
    whole = rendered([(ASK, asked), (ANSWER, reply), (ASK, more)], prompt=True)
    marked = rendered([(ASK, asked), (ANSWER, marker), (ASK, more)], prompt=True)
    end = np.array([END, BREAK], np.int32)
    new = beyond(np.array(marked), np.array(whole), ended=END if ended else None, turn_end=end)
    assert isinstance(new, New)
    rest = [END, BREAK, *rendered([(ASK, more)], prompt=True)]
    assert new.ids.tolist() == (rest[1:] if ended else rest)
    assert marked[: new.upto][-3:] == marker


def test_a_history_that_is_rendered_otherwise_is_not_gone_on_from() -> None:
    one = np.array([1, 2, 3], np.int32)
    end = np.array([END], np.int32)
    assert added(one, np.array([1, 2, 4, 5]), ended=3, turn_end=end) == REWROTE
    assert added(one, one, ended=3, turn_end=end) == REWROTE
    assert added(one, np.array([1, 2, 3, 4]), ended=7, turn_end=end) == NO_END
    assert added(one, np.array([1, 2, 3, 4]), ended=None, turn_end=end) == NO_END
    assert added(one, np.array([1, 2, 3, 4]), ended=None, turn_end=end[:0]) == NO_END
    assert beyond(one, np.array([4, 5]), ended=3, turn_end=end) == NO_END
    assert beyond(one, one, ended=None, turn_end=end[:0]) == NO_END


def test_a_canonical_prompt_is_known_by_length_and_digest() -> None:
    assert Canonical.of(TokenIds([1, 2])) == Canonical.of(TokenIds([1, 2]))
    assert Canonical.of(TokenIds([1, 2])) != Canonical.of(TokenIds([1, 3]))


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=12), st.integers(1, 4))
def test_a_captured_sequence_is_the_whole_prompt_and_reply(
    calls: list[tuple[list[int], list[int]]], chain: int
) -> None:
    known: list[Captured] = []
    for number, (prompt, reply) in enumerate(calls):
        before = [] if not known or number % 3 == 0 else known[-1].sequence().array.tolist()
        whole = Prompt(ids=TokenIds([*before * 30, *prompt]))
        choice = Choice(ids=TokenIds(reply), logprobs=Logprobs([-1.0] * len(reply)), message={}, finish="stop")
        if len(whole.ids) > 20_000:
            return
        draft = delta(whole, known, max_chain=chain)
        known.append(draft.captured(f"c{number}", number, [choice]))
        assert draft.length == len(whole.ids)
        assert known[-1].sequence() == TokenIds.concat([whole.ids, choice.ids])
