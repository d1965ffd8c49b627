"""Delta prompts: what is written comes back, whatever came before; what cannot come back is a typed error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from polar.schemas import (
    Choice,
    CompletionCaptured,
    Engine,
    Logprobs,
    MediaPart,
    Prompt,
    PromptBase,
    Sampling,
    TokenIds,
    decode,
    encode,
    sha256,
)
from polar.schemas.prompts import MAX_CHAIN, BaseExpired, Captured, Prompts, delta, resolve

Ids = list[int]


def completion(name: str, prompt: Prompt, *choices: Choice) -> CompletionCaptured:
    return CompletionCaptured(
        completion_id=name,
        session_id="s",
        attempt=1,
        task_id="t",
        group_id="g",
        sample=0,
        call=0,
        started_ms=0,
        ended_ms=0,
        dialect="openai.chat",
        request_sha256="",
        prompt=prompt,
        choices=list(choices),
        sampling_asked=Sampling(),
        sampling=Sampling(),
        engine=Engine(model="m", endpoint="e"),
    )


def choice(ids: Ids, text: str, index: int = 0) -> Choice:
    message = {"role": "assistant", "content": text}
    return Choice(index=index, ids=TokenIds(ids), logprobs=Logprobs([-1.0] * len(ids)), message=message, finish="stop")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Log:
    """Writes completions as a proxy does, each against those before it."""

    def __init__(self, max_chain: int = MAX_CHAIN) -> None:
        self.max_chain = max_chain
        self.history: list[Captured] = []
        self.written: list[CompletionCaptured] = []
        self.whole: list[Prompt] = []

    def write(self, prompt: Prompt, *choices: Choice, known: int | None = None) -> Prompt:
        """`known`: how many of the completions so far are acknowledged; None: all."""
        draft = delta(prompt, self.history[:known], max_chain=self.max_chain)
        name = f"c{len(self.written)}"
        record = completion(name, draft.prompt, *choices)
        # as it comes from the log
        back = decode(encode(record), (CompletionCaptured,))
        assert isinstance(back, CompletionCaptured)
        self.written.append(back)
        self.whole.append(prompt)
        self.history.append(draft.captured(name, 10 * len(self.written), choices))
        return draft.prompt

    def read(self) -> list[Prompt]:
        prompts = Prompts()
        return [prompts.take(one) for one in self.written]


# a small alphabet, so that histories meet; equal to Python and different on the wire: 1, 1.0, True
values = st.sampled_from(["a", "b", "", 1, 1.0, True, None, 0.0, -0.0, ["a"], {"x": 1, "y": 2}, {"y": 2, "x": 1}])
messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": values})
tool_lists = st.none() | st.lists(st.fixed_dictionaries({"name": values}), max_size=2)
media = st.lists(
    st.builds(
        MediaPart,
        kind=st.just("image"),
        sha256=st.sampled_from(["x", "y"]),
        offset=st.integers(0, 6),
        length=st.integers(0, 3),
    ),
    max_size=3,
)
ids = st.lists(st.integers(0, 1), max_size=5)
choices = st.lists(st.builds(choice, ids, st.sampled_from(["a", "b"]), st.integers(0, 2)), max_size=3)


@st.composite
def calls(draw: st.DrawFn) -> list[tuple[Prompt, list[Choice], int]]:
    """Each call goes on from anywhere in an earlier one, or from nothing."""
    found: list[tuple[Prompt, list[Choice], int]] = []
    for number in range(draw(st.integers(1, 8))):
        before_ids: Ids = []
        before_messages: list[Any] = []
        before_media: list[MediaPart] = []
        before_tools = None
        goes_on: bool = draw(st.booleans())
        if found and goes_on:
            earlier, replies, _ = draw(st.sampled_from(found))
            reply = draw(st.sampled_from(replies)) if replies else None
            before_ids = [*earlier.ids, *(reply.ids if reply else ())]
            before_ids = before_ids[: draw(st.integers(0, len(before_ids)))]
            before_messages = [*earlier.messages, *([reply.message] if reply else [])]
            before_messages = before_messages[: draw(st.integers(0, len(before_messages)))]
            before_media, before_tools = list(earlier.media), earlier.tools
        tools = draw(st.sampled_from([before_tools, draw(tool_lists)]))
        prompt = Prompt(
            ids=TokenIds([*before_ids, *draw(ids)]),
            messages=[*before_messages, *draw(st.lists(messages, max_size=2))],
            tools=tools,
            tools_sha256=draw(st.sampled_from([None, "0", sha256(tools)])),
            media=[*before_media, *draw(media)] if draw(st.booleans()) else draw(media),
        )
        found.append((prompt, draw(choices), draw(st.integers(0, number))))
    return found


@settings(max_examples=500, deadline=None)
@given(calls(), st.sampled_from([1, 2, MAX_CHAIN]))
def test_what_is_written_comes_back_bit_for_bit(
    history: list[tuple[Prompt, list[Choice], int]], max_chain: int
) -> None:
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr("polar.schemas.prompts.REFERENCE_BYTES", 1)  # small prompts refer to each other too
        log = Log(max_chain)
        for prompt, replies, known in history:
            log.write(prompt, *replies, known=known)
    for read, prompt in zip(log.read(), log.whole, strict=True):
        assert encode(completion("c", read)) == encode(completion("c", prompt))
    assert all(one.chain <= max_chain for one in log.history)
    assert all(one.base is None or one.base.offset < one.offset for one in log.history)


LONG = list(range(100, 200))


def conversation(log: Log, turns: int) -> None:
    """Each turn goes on from the one before, as most harnesses do."""
    said: Ids = list(LONG)
    told = [user("x" * 400)]
    for turn in range(turns):
        reply = choice([turn] * 40, f"reply {turn}" * 20)
        log.write(Prompt(ids=TokenIds(said), messages=list(told)), reply)
        said += [*reply.ids, *[7] * 40]
        told += [reply.message, user(f"result {turn}" * 20)]


def test_a_conversation_is_written_as_what_is_new() -> None:
    log = Log()
    conversation(log, 4)
    bases = [one.prompt.base for one in log.written]
    assert bases[0] is None
    assert [one.completion_id for one in bases[1:] if one is not None] == ["c0", "c1", "c2"]
    assert [len(one.prompt.ids) for one in log.written[1:]] == [40, 40, 40], "the result alone"
    assert [len(one.prompt.messages) for one in log.written[1:]] == [1, 1, 1]
    assert bases[2] == PromptBase(completion_id="c1", offset=20, ids=220, messages=4)
    assert log.read() == log.whole


def hops(log: Log, number: int, start: int, end: int) -> int:
    """References followed, one after the other, to read ids `start` to `end` of a completion's sequence."""
    prompt = log.written[number].prompt
    longest, before = 0, 0
    for one in [] if prompt.base is None else [prompt.base, *prompt.more]:
        if max(start, before) < min(end, one.ids):
            there = hops(log, int(one.completion_id[1:]), max(start, before), min(end, one.ids))
            longest = max(longest, 1 + there)
        before = one.ids
    return longest


@pytest.mark.parametrize("limit", [1, 2, 5, MAX_CHAIN])
def test_a_chain_never_grows_beyond_its_limit_and_nothing_is_written_twice(limit: int) -> None:
    log = Log(limit)
    conversation(log, 150)
    longest = [hops(log, number, 0, len(prompt.ids)) for number, prompt in enumerate(log.whole)]
    assert max(longest) == max(one.chain for one in log.history) == limit
    assert [len(one.prompt.ids) for one in log.written[1:]] == [40] * 149
    assert [len(one.prompt.messages) for one in log.written[1:]] == [1] * 149
    assert log.read() == log.whole


def test_the_call_after_the_longest_chain_names_its_links() -> None:
    log = Log()
    conversation(log, MAX_CHAIN + 3)
    assert [bool(one.prompt.more) for one in log.written] == [*[False] * (MAX_CHAIN + 1), True, False]
    linked = log.written[-2].prompt
    assert linked.base is not None
    names = [one.completion_id for one in (linked.base, *linked.more)]
    assert names == [f"c{number}" for number in range(MAX_CHAIN + 1)]
    assert log.history[-2].chain == 1
    assert log.history[-1].chain == 2


def test_ids_and_messages_are_counted_apart() -> None:
    log = Log()
    log.write(Prompt(ids=TokenIds(LONG), messages=[user("a"), user("b")]), choice([1, 2], "said"))
    # the template renders the history anew, and the messages go on
    messages = [user("a"), user("b"), {"role": "assistant", "content": "said"}, user("c")]
    written = log.write(Prompt(ids=TokenIds([*LONG[:50], 5, 5]), messages=messages))
    assert written.base == PromptBase(completion_id="c0", offset=10, ids=50, messages=3)
    assert (written.ids, written.messages) == (TokenIds([5, 5]), [user("c")])
    assert log.read() == log.whole


def test_unchanged_tools_are_named_by_their_hash_and_reordered_ones_are_not() -> None:
    tools = [{"name": "run", "parameters": {"a": 1, "b": 2}}]
    other = [{"name": "run", "parameters": {"b": 2, "a": 1}}]
    log = Log()
    prompt = Prompt(ids=TokenIds(LONG), tools=tools, tools_sha256=sha256(tools))
    log.write(prompt, choice([1], "a"))
    assert log.write(prompt).tools is None
    assert sha256(other) == sha256(tools)
    assert log.write(replace(prompt, tools=other)).tools == other
    assert log.read() == log.whole


def test_another_image_in_the_same_place_is_not_taken_for_the_same() -> None:
    one, other = (MediaPart(kind="image", sha256=name, offset=60, length=10) for name in ("cat", "dog"))
    log = Log()
    log.write(Prompt(ids=TokenIds(LONG), media=[one]), choice([1], "a"))
    written = log.write(Prompt(ids=TokenIds([*LONG, 1, 2]), media=[other]))
    assert written.base is not None
    assert written.base.ids == 60
    assert log.write(Prompt(ids=TokenIds([*LONG, 1, 2]), media=[one])).media == []
    assert log.read() == log.whole


def test_small_prompts_are_written_whole() -> None:
    log = Log()
    log.write(Prompt(ids=TokenIds([1, 2, 3]), messages=[user("a")]), choice([1], "a"))
    assert log.write(Prompt(ids=TokenIds([1, 2, 3]), messages=[user("a")])).base is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"completion_id": "c9"}, "not known"),
        ({"ids": 10_000}, "it has 140 ids"),
        ({"messages": 3}, "and 2 messages"),
        ({"ids": -1}, "it has 140 ids"),
    ],
)
def test_a_base_that_is_not_there_is_a_typed_error(change: dict[str, Any], why: str) -> None:
    log = Log()
    conversation(log, 2)
    first, second = log.written
    assert second.prompt.base is not None
    prompts = Prompts()
    prompts.take(first)
    wrong = replace(second, prompt=replace(second.prompt, base=replace(second.prompt.base, **change)))
    with pytest.raises(BaseExpired, match=why) as caught:
        prompts.take(wrong)
    assert caught.value.completion_id == "c1"
    assert caught.value.base == wrong.prompt.base


def test_what_refers_to_an_unresolved_prompt_is_unresolved_too() -> None:
    log = Log()
    conversation(log, 3)
    prompts = Prompts()
    for one in log.written[1:]:
        with pytest.raises(BaseExpired):
            prompts.take(one)


def test_tools_that_the_base_has_not_are_an_error_and_not_a_guess() -> None:
    log = Log()
    conversation(log, 2)
    prompts = Prompts()
    prompts.take(log.written[0])
    second = log.written[1]
    with pytest.raises(BaseExpired, match="tools"):
        prompts.take(replace(second, prompt=replace(second.prompt, tools_sha256="0" * 64)))


def test_a_whole_prompt_needs_no_history() -> None:
    prompt = Prompt(ids=TokenIds([1]), messages=[user("a")])
    assert resolve(completion("c", prompt), lambda _: None) is prompt
