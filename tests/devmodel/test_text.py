"""From tokens to what a client sees: decoding, stop strings, tool calls and reasoning, in any cutting."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.devmodel.chat import ChatTokenizer
from polar.devmodel.choice import Burst, Choice, Sampled
from polar.devmodel.errors import ApiError
from polar.devmodel.parse import CallStream, ReasoningStream, read_calls, split_reasoning
from polar.devmodel.request import Sampling, read_chat

CHAT = ChatTokenizer.small()
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": "é"}}\n</tool_call>'


def run(ids, **sampling):
    """The whole text, the finish and the ids of a turn fed one token at a time."""
    choice = Choice(0, Sampling(**sampling), 1000, CHAT)
    text = ""
    for token in ids:
        delta = choice.feed(Burst([Sampled(token, -1.0)]))
        text += delta.content
        if delta.finish:
            break
    return text, choice.finish, choice.ids


@given(st.text())
def test_ids_decode_to_the_text_they_encode(text):
    assert CHAT.decode(CHAT.encode(text)) == text


@given(st.text(), st.integers(1, 5))
def test_a_stream_of_any_chunks_tells_the_whole_text(text, size):
    ids = CHAT.encode(text)
    stream = CHAT.stream(skip_special=False)
    told = "".join(stream.step(token) for token in ids)
    # what ends in the replacement character may be half a character, and is held
    assert told == text or text.startswith(told)
    assert told == text or "\N{REPLACEMENT CHARACTER}" in text
    choice = Choice(0, Sampling(), 10_000, CHAT)
    bursts = [ids[at : at + size] for at in range(0, len(ids), size)]
    parts = [choice.feed(Burst([Sampled(token, -1.0) for token in burst])).content for burst in bursts]
    assert "".join(parts) == CHAT.decode(ids, skip_special=True)[: len("".join(parts))]


@given(st.text(alphabet="ab<", min_size=1, max_size=40), st.text(alphabet="ab<", min_size=1, max_size=4))
def test_a_stop_string_is_found_wherever_tokens_end(text, stop):
    ids = [*CHAT.encode(text), CHAT.eos_id]
    told, finish, sampled = run(ids, stop=(stop,))
    at = text.find(stop)
    assert finish == "stop"
    assert told == (text if at < 0 else text[:at])
    assert sampled == ids[: len(sampled)]


@given(st.text(max_size=20), st.integers(0, 100))
def test_splitting_a_token_keeps_its_bytes(text, pick):
    ids = CHAT.encode(text)
    splits = [(i, pair) for i, token in enumerate(ids) if (pair := CHAT.split(token))]
    if splits:
        at, pair = splits[pick % len(splits)]
        assert CHAT.decode([*ids[:at], *pair, *ids[at + 1 :]]) == text


def test_a_character_in_several_tokens_is_told_with_its_last_one():
    ids = CHAT.encode("😀")
    assert len(ids) > 1
    stream = CHAT.stream(skip_special=True)
    assert [stream.step(token) for token in ids] == ["", *[""] * (len(ids) - 2), "😀"]


def test_a_turn_cut_inside_a_character_never_tells_it():
    ids = CHAT.encode("a😀")[:-1]
    choice = Choice(0, Sampling(top_logprobs=0), len(ids), CHAT)
    choice.feed(Burst([Sampled(token, -1.0) for token in ids]))
    assert (choice.message()["content"], choice.finish, len(choice.entries)) == ("a", "length", len(ids))


def test_min_tokens_lets_a_turn_go_on():
    eos = CHAT.eos_id
    assert run([eos, eos, eos], min_tokens=2)[2] == [eos, eos]
    assert run([eos, 50, 51], ignore_eos=True)[1] is None


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", []),
        (CALL, None, [("get", {"a": "é"})]),
        (f"Sure.\n{CALL}\n{CALL}", "Sure.\n", [("get", {"a": "é"})] * 2),
        (f"  \n{CALL}", None, [("get", {"a": "é"})]),
        (CALL.removesuffix("</tool_call>"), None, [("get", {"a": "é"})]),
        ('<tool_call>\n{"name": "get"}\n</tool_call>', '<tool_call>\n{"name": "get"}\n</tool_call>', []),
        ("<tool_call>\nnot json", "<tool_call>\nnot json", []),
    ],
)
def test_a_whole_answer_is_read_as_vllm_reads_it(text, content, calls):
    told, found = read_calls(text)
    assert told == content
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found] == calls


@given(st.lists(st.integers(1, 12), min_size=1))
def test_a_streamed_call_is_the_same_in_any_cutting(sizes):
    text, at = f"Sure <b.\n{CALL}\n{CALL}", 0
    stream, content, arguments, names = CallStream(), "", {}, {}
    while at < len(text):
        size = sizes[at % len(sizes)]
        more, deltas = stream.feed(text[at : at + size])
        content, at = content + more, at + size
        for delta in deltas:
            names.setdefault(delta["index"], delta["function"].get("name"))
            arguments[delta["index"]] = arguments.get(delta["index"], "") + delta["function"].get("arguments", "")
    assert content == "Sure <b.\n"
    assert names == {0: "get", 1: "get"}
    assert arguments == {0: '{"a": "é"}', 1: '{"a": "é"}'}


def test_a_broken_call_in_a_stream_has_told_its_name():
    stream = CallStream()
    content, deltas = stream.feed('a <tool_call>\n{"name": "get", "argu')
    assert (content, [delta["function"] for delta in deltas]) == ("a ", [{"name": "get"}])
    assert stream.any_call


@given(st.integers(1, 9))
def test_reasoning_is_split_off_in_any_cutting(size):
    text = "<think>\nhm <b> ok\n</think>\n\nSo: <think>"
    stream, reasoning, rest = ReasoningStream(), "", ""
    for at in range(0, len(text), size):
        one, two = stream.feed(text[at : at + size])
        reasoning, rest = reasoning + one, rest + two
    assert (reasoning, rest) == split_reasoning(text) == ("\nhm <b> ok\n", "\n\nSo: <think>")


def test_history_renders_arguments_anew_and_refuses_media():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b":1,"a":"<é"}'}}
    ids = CHAT.render([{"role": "assistant", "content": "", "tool_calls": [call]}], add_generation_prompt=False)
    assert '<tool_call>\n{"name": "f", "arguments": {"b": 1, "a": "<é"}}\n</tool_call><|im_end|>' in CHAT.decode(ids)
    for broken in ("{bad", "[1]", ""):
        spoiled = {**call, "function": {"name": "f", "arguments": broken}}
        assert '"arguments": {}}' in CHAT.decode(CHAT.render([{"role": "assistant", "tool_calls": [spoiled]}]))
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(ApiError, match="not a multimodal model"):
        CHAT.render([{"role": "user", "content": [image]}])


def test_a_final_message_can_be_continued():
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    text = CHAT.decode(CHAT.render(asked, add_generation_prompt=False, continue_final_message=True))
    assert text.endswith("<|im_start|>assistant\nyo")


def test_null_fields_are_defaults():
    body = {"messages": [{"role": "user", "content": "a"}], "temperature": None, "n": None, "stop": None, "tools": None}
    request = read_chat(body)
    assert request.sampling == replace(Sampling(), max_tokens=None)
    assert (request.n, request.stream, request.tool_choice) == (1, False, "none")
