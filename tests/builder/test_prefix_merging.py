"""The rules of `prefix_merging`, one case each, over the toy tokenizer."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from polar.builder import rebuild
from polar.schemas import (
    BuilderSpec,
    ClientHints,
    CompletionCaptured,
    Context,
    Engine,
    Label,
    Logprobs,
    LogprobsMode,
    MediaPart,
    PolicySpan,
    Sampling,
    Status,
    Trace,
    Trajectory,
)
from tests.builder.toy import END, NEWLINE, Reply, Session, canonical, decode, render, say, system, tool, user


@pytest.fixture
def chance() -> random.Random:
    return random.Random(5)


def built(session: Session) -> Trajectory:
    session.close()
    trajectory = rebuild(session.records)
    assert trajectory.error is None, trajectory.error
    return trajectory


def whole(trajectory: Trajectory, trace: Trace) -> str:
    view = trajectory.view(trace)
    return decode([*view.prompt_ids, *view.response_ids])


def names(trace: Trace) -> list[str]:
    return [turn.completion_id.removeprefix("s-1-") for turn in trace.turns]


def test_a_linear_session_is_one_exact_trace(chance: random.Random) -> None:
    session = Session()
    messages = [system("abc"), user("a b")]
    for text in ("cab", "abcabc", "dd"):
        reply = say(text, chance, exact=True)
        session.call(messages, reply)
        messages = [*messages, reply.message, tool("ab")]
    trajectory = built(session)
    (trace,) = trajectory.traces
    assert names(trace) == ["c0", "c1", "c2"]
    assert [turn.context for turn in trace.turns] == [Context.EXACT] * 3
    assert trace.break_reason is None
    assert trace.drift == []
    view = trajectory.view(trace)
    assert [*view.prompt_ids, *view.response_ids] == [*session.truth[-1].prompt, *session.truth[-1].ids]
    assert view.loss_mask.sum() == sum(len(one.ids) for one in session.truth)
    assert trace.segments[0].start == 0
    assert len(trace.segments) == 1
    assert [one["role"] for one in trajectory.messages(trace.response_messages)] == [
        "assistant", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip


def test_a_reply_rendered_as_other_ids_of_the_same_text_merges_with_the_sampled_ids() -> None:
    session = Session()
    first = Reply([*canonical("a"), *canonical("b"), *canonical("c"), END], {"role": "assistant", "content": "abc"})
    session.call([user("d")], first)
    second = say("dd", random.Random(0), exact=True)
    session.call([user("d"), first.message, user("e")], second)
    trajectory = built(session)
    (trace,) = trajectory.traces
    assert [turn.context for turn in trace.turns] == [Context.EXACT, Context.RETOKENIZED]
    (drift,) = trace.drift
    assert (drift.turn, drift.position, drift.sampled, drift.canonical) == (0, 0, 3, 1)
    assert whole(trajectory, trace) == decode([*session.truth[1].prompt, *second.ids])
    view = trajectory.view(trace)
    assert view.response_ids[:4].tolist() == first.ids
    assert all(turn.trainable for turn in trace.turns)


@pytest.mark.parametrize(
    ("on_drift", "traces", "reason", "trained"),
    [("keep", 1, None, [True, True]), ("mask", 1, None, [True, False]), ("break", 2, "drift", [True, True])],
)
def test_on_drift_is_the_users_choice(on_drift: str, traces: int, reason: str | None, trained: list[bool]) -> None:
    session = Session(builder=BuilderSpec(config={"on_drift": on_drift}))
    first = Reply([*canonical("a"), *canonical("bc"), END], {"role": "assistant", "content": "abc"})
    session.call([user("d")], first)
    session.call([user("d"), first.message, user("e")], say("f", random.Random(0)))
    trajectory = built(session)
    assert len(trajectory.traces) == traces
    assert trajectory.traces[0].break_reason == reason
    assert [turn.trainable for trace in trajectory.traces for turn in trace.turns] == trained


def test_a_cut_turn_is_closed_by_a_masked_end_nobody_sampled(chance: random.Random) -> None:
    session = Session()
    ended = say("b", chance)
    session.call([user("a")], ended)
    cut = Reply([*canonical("a"), *canonical("b")], {"role": "assistant", "content": "ab"}, "length")
    messages = [user("a"), ended.message, user("c")]
    session.call(messages, cut)
    session.call([*messages, cut.message, user("d")], say("e", chance))
    trajectory = built(session)
    (trace,) = trajectory.traces
    assert [turn.truncated for turn in trace.turns] == [False, True, False]
    assert all(turn.trainable for turn in trace.turns)  # a length limit is no reason not to train
    view = trajectory.view(trace)
    end = trace.turns[1].end - trace.prompt_length
    assert view.response_ids[end : end + 2].tolist() == [END, NEWLINE]
    assert view.loss_mask[end : end + 2].tolist() == [0, 0]


def test_without_a_known_end_of_turn_the_chain_breaks_and_says_so() -> None:
    session = Session()
    cut = Reply([*canonical("a"), *canonical("b")], {"role": "assistant", "content": "ab"}, "length")
    session.call([user("a")], cut)
    again = Reply(canonical("e"), {"role": "assistant", "content": "e"}, "length")
    session.call([user("a"), cut.message, user("d")], again)
    trajectory = built(session)
    assert [trace.break_reason for trace in trajectory.traces] == ["no_end_of_turn", None]
    assert [names(trace) for trace in trajectory.traces] == [["c0"], ["c1"]]


def test_an_end_of_turn_written_in_the_text_is_not_taken_for_one() -> None:
    session = Session()
    # the policy spelled the end-of-turn token's name; the template's tokenizer makes the token of it
    reply = Reply([*canonical("a"), *canonical("bb"), *canonical("cc"), END], {"role": "assistant", "content": "abbcc"})
    session.call([user("d")], reply)
    prompt = [*render([user("d")]), *canonical("ab"), END, *canonical("bcc"), END, NEWLINE, *render([user("e")])]
    session.call([user("d"), reply.message, user("e")], say("f", random.Random(0)), prompt=prompt)
    trajectory = built(session)
    (trace,) = trajectory.traces
    view = trajectory.view(trace)
    assert view.response_ids[: len(reply.ids) + 2].tolist() == [*reply.ids, NEWLINE, 1]


def test_a_rewritten_reply_breaks_the_chain_and_nothing_is_lost(chance: random.Random) -> None:
    session = Session()
    first = say("abc", chance)
    session.call([user("a")], first)
    rewritten = [user("a"), {"role": "assistant", "content": "abd"}, user("b")]
    second = say("c", chance)
    session.call(rewritten, second)
    session.call([*rewritten, second.message, user("d")], say("e", chance))
    trajectory = built(session)
    assert [names(trace) for trace in trajectory.traces] == [["c0"], ["c1", "c2"]]
    assert [trace.break_reason for trace in trajectory.traces] == ["history_changed", None]


def test_a_template_that_drops_the_call_breaks_the_chain() -> None:
    session = Session()
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "a", "arguments": '{"b": 1}'}}],
    }
    reply = Reply([*canonical('{"a": 1}'), END], message, "tool_calls")
    session.call([user("d")], reply)
    prompt = [*render([user("d")]), END, NEWLINE, *render([tool("e")])]
    session.call([user("d"), message, tool("e")], say("f", random.Random(0)), prompt=prompt)
    trajectory = built(session)
    assert [trace.break_reason for trace in trajectory.traces] == ["history_changed", None]


def test_respaced_tool_arguments_merge_as_retokenized() -> None:
    session = Session()
    arguments = '{"a":1}'
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "b", "arguments": arguments}}],
    }
    reply = Reply(
        [*canonical('{"name": "b", "arguments": {"a":1}}'.replace("name", "a").replace("arguments", "c")), END], message
    )
    session.call([user("d")], reply)
    again = {**message, "tool_calls": [{**message["tool_calls"][0], "id": "other"}]}
    again["tool_calls"][0]["function"] = {"name": "b", "arguments": '{"a": 1}'}
    prompt = [*render([user("d")]), *canonical('{"a": "b", "c": {"a": 1}}'), END, NEWLINE, *render([tool("e")])]
    session.call([user("d"), again, tool("e")], say("f", random.Random(0)), prompt=prompt)
    trajectory = built(session)
    (trace,) = trajectory.traces
    assert [turn.context for turn in trace.turns] == [Context.EXACT, Context.RETOKENIZED]
    assert (trace.drift[0].sampled, trace.drift[0].canonical) == (0, 1)


def test_dropped_thinking_breaks_the_chain(chance: random.Random) -> None:
    session = Session()
    message = {"role": "assistant", "content": "b", "reasoning": "a"}
    session.call([user("d")], Reply([*canonical("ab"), END], message))
    messages = [user("d"), message, user("e")]
    session.call(messages, say("f", chance), prompt=render(messages, think=False))
    assert [trace.break_reason for trace in built(session).traces] == ["history_changed", None]


def test_kept_thinking_merges_exactly(chance: random.Random) -> None:
    session = Session()
    message = {"role": "assistant", "content": "ad", "reasoning": "abc"}
    session.call([user("d")], Reply([*canonical("abcad"), END], message))
    messages = [user("d"), message, user("e")]
    session.call(messages, say("f", chance), prompt=render(messages))
    (trace,) = built(session).traces
    assert [turn.context for turn in trace.turns] == [Context.EXACT] * 2


def test_changed_tools_break_the_chain(chance: random.Random) -> None:
    session = Session()
    first = say("a", chance)
    session.call([user("a")], first, tools="aa")
    session.call([user("a"), first.message, user("b")], say("b", chance), tools="bb")
    trajectory = built(session)
    assert [trace.break_reason for trace in trajectory.traces] == ["tools_changed", None]
    assert [trajectory.pool.tools[trace.turns[0].tools or 0][0]["function"]["name"] for trace in trajectory.traces] == [
        "aa",
        "bb",
    ]


def test_a_fresh_conversation_is_a_new_trace(chance: random.Random) -> None:
    session = Session()
    session.call([system("a"), user("a")], say("a", chance))
    session.call([system("a"), user("b")], say("b", chance))
    assert [trace.break_reason for trace in built(session).traces] == ["new_conversation", None]


def test_a_template_that_renders_old_messages_otherwise_breaks_the_chain(chance: random.Random) -> None:
    session = Session()
    first = say("a", chance)
    session.call([user("abc")], first)
    messages = [user("abc"), first.message, user("b")]
    prompt = render(messages)
    session.call(messages, say("b", chance), prompt=[NEWLINE, *prompt])
    assert [trace.break_reason for trace in built(session).traces] == ["history_changed", None]


def test_the_retry_from_which_the_session_went_on_continues_the_chain(chance: random.Random) -> None:
    session = Session()
    zero = say("abcd", chance, exact=True)
    session.call([user("a")], zero)
    messages = [user("a"), zero.message, user("b")]
    lost, kept = say("c", chance), say("d", chance)
    session.call(messages, lost)
    session.call(messages, kept)
    session.call([*messages, kept.message, user("e")], say("f", chance))
    trajectory = built(session)
    assert [names(trace) for trace in trajectory.traces] == [["c0", "c2", "c3"], ["c1"]]
    assert [trace.break_reason for trace in trajectory.traces] == [None, None]
    alone = trajectory.view(trajectory.traces[1])
    assert alone.loss_mask.tolist() == [1] * len(lost.ids)  # the shared history is its prompt, masked


def test_siblings_can_be_set_aside(chance: random.Random) -> None:
    session = Session(builder=BuilderSpec(config={"siblings": "set_aside"}))
    kept = say("d", chance)
    session.call([user("a")], say("c", chance))
    session.call([user("a")], kept)
    session.call([user("a"), kept.message, user("e")], say("f", chance))
    trajectory = built(session)
    assert [names(trace) for trace in trajectory.traces] == [["c1", "c2"]]
    assert [(one.completion_id, one.reason) for one in trajectory.set_aside] == [("s-1-c0", "sibling")]


def test_a_call_that_the_proxy_saw_retried_is_set_aside(chance: random.Random) -> None:
    session = Session()
    session.call([user("a")], say("c", chance))
    session.call([user("a")], say("d", chance), retry_of="s-1-c0")
    trajectory = built(session)
    assert [names(trace) for trace in trajectory.traces] == [["c1"]]
    assert [(one.completion_id, one.reason) for one in trajectory.set_aside] == [("s-1-c0", "retry")]


def test_twin_sub_agents_each_keep_their_own_chain(chance: random.Random) -> None:
    session = Session()
    one, other = say("ab", chance), say("cd", chance)
    session.call([user("a")], one)
    session.call([user("a")], other)
    session.call([user("a"), other.message, user("b")], say("e", chance))
    session.call([user("a"), one.message, user("c")], say("f", chance))
    assert [names(trace) for trace in built(session).traces] == [["c0", "c3"], ["c1", "c2"]]


def test_each_choice_is_a_trace_and_the_chosen_one_goes_on(chance: random.Random) -> None:
    session = Session()
    one, other = say("ab", chance), say("cd", chance)
    session.call([user("a")], one, other)
    session.call([user("a"), other.message, user("b")], say("e", chance))
    trajectory = built(session)
    assert [names(trace) for trace in trajectory.traces] == [["c0"], ["c0", "c1"]]
    assert len({trace.trace_id for trace in trajectory.traces}) == 2


def test_a_fork_from_an_earlier_turn_shares_that_prefix_as_masked_context(chance: random.Random) -> None:
    session = Session()
    first, second = say("abcd", chance, exact=True), say("b", chance)
    session.call([user("a")], first)
    session.call([user("a"), first.message, user("b")], second)
    session.call([user("a"), first.message, user("c")], say("d", chance))
    trajectory = built(session)
    assert [names(trace) for trace in trajectory.traces] == [["c0", "c1"], ["c2"]]
    assert [trace.break_reason for trace in trajectory.traces] == ["forked", None]
    assert trajectory.view(trajectory.traces[1]).loss_mask.all()
    assert len(trajectory.pool.tokens) < sum(
        sum(one.end - one.start for one in trace.segments) for trace in trajectory.traces
    )


def test_labels_come_from_the_harness_and_decide_what_trains(chance: random.Random) -> None:
    session = Session()
    main = say("ab", chance, exact=True)
    session.call([user("a")], main)
    session.call([user("h")], say("c", chance), hints=ClientHints(request_kind="title"))
    session.call([user("g")], say("d", chance), hints=ClientHints(subagent="explorer"))
    session.call([user("a"), main.message, user("f")], say("e", chance), hints=ClientHints(request_kind="compaction"))
    trajectory = built(session)
    assert [(names(one), one.label, one.trainable) for one in trajectory.traces] == [
        (["c0"], Label.MAIN, True),
        (["c1"], Label.SIDE, False),
        (["c2"], Label.SUBAGENT, True),
        (["c3"], Label.COMPACTION, True),
    ]
    assert trajectory.traces[0].break_reason == "compaction"
    assert not trajectory.view(trajectory.traces[1]).loss_mask.any()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"sampling": Sampling(temperature=0.0)}, "temperature_0"),
        ({"constraints": ["grammar"]}, "constrained"),
        ({"complete": False}, "aborted"),
        (
            {
                "sampling": Sampling(temperature=0.7),
                "engine": Engine(model="toy", endpoint="e", logprobs_mode=LogprobsMode.RAW),
            },
            "logprobs_mode",
        ),
    ],
)
def test_what_is_not_the_policys_free_choice_is_kept_and_masked(
    chance: random.Random, more: dict[str, object], reason: str
) -> None:
    session = Session()
    session.call([user("a")], say("abc", chance), **more)
    trajectory = built(session)
    (turn,) = trajectory.traces[0].turns
    assert (turn.trainable, turn.untrainable) == (False, reason)
    view = trajectory.view(trajectory.traces[0])
    assert not view.loss_mask.any()
    assert view.response_logprobs.tolist() == session.truth[0].logprobs


def test_one_missing_log_probability_costs_one_token(chance: random.Random) -> None:
    session = Session()
    session.call([user("a")], say("abcdabcd", chance))
    entry = session.records[-1]
    assert isinstance(entry.event, CompletionCaptured)
    choice = entry.event.choices[0]
    numbers = choice.logprobs.array.copy()
    numbers[2] = float("nan")
    session.records[-1] = entry._replace(
        event=replace(entry.event, choices=[replace(choice, logprobs=Logprobs(numbers))])
    )
    trajectory = built(session)
    mask = trajectory.view(trajectory.traces[0]).loss_mask.tolist()
    assert mask == [1, 1, 0, *[1] * (len(numbers) - 3)]
    assert [turn.untrainable for turn in trajectory.traces[0].turns] == [None, "no_logprob", None]
    assert [turn.finish for turn in trajectory.traces[0].turns] == [None, None, "stop"]


def test_tokens_of_an_unknown_policy_version_are_masked_and_exact_spans_train(chance: random.Random) -> None:
    session = Session()
    session.call([user("a")], Reply([*canonical("a b c d"), END], {"role": "assistant", "content": "a b c d"}))
    entry = session.records[-1]
    assert isinstance(entry.event, CompletionCaptured)
    spans = [
        PolicySpan(start=0, end=2, version="v1", exact=True),
        PolicySpan(start=2, end=4, version="v2", exact=False),
    ]
    choice = replace(entry.event.choices[0], spans=spans)
    session.records[-1] = entry._replace(event=replace(entry.event, choices=[choice]))
    turns = built(session).traces[0].turns
    assert [(one.end - one.start, one.untrainable) for one in turns][:2] == [(2, None), (2, "policy_version")]
    assert [span.version for one in turns for span in one.policy] == ["v1", "v2"]


def test_other_media_under_the_same_ids_are_no_continuation(chance: random.Random) -> None:
    session = Session()
    first = say("abcd", chance, exact=True)
    session.call([user("a")], first)
    session.call([user("a"), first.message, user("b")], say("c", chance))
    for place, digest in ((2, "one"), (4, "other")):
        entry = session.records[place]
        assert isinstance(entry.event, CompletionCaptured)
        media = [MediaPart(kind="image", sha256=digest, offset=3, length=1)]
        prompt = replace(entry.event.prompt, media=media)
        session.records[place] = entry._replace(event=replace(entry.event, prompt=prompt))
    assert [trace.break_reason for trace in built(session).traces] == ["media_changed", None]


def test_token_in_sessions_without_messages_merge_exactly(chance: random.Random) -> None:
    session = Session()
    first = say("ab", chance)
    session.call([], first, prompt=canonical("abc"))
    session.call([], say("c", chance), prompt=[*canonical("abc"), *first.ids, *canonical("dd")])
    (trace,) = built(session).traces
    assert [turn.context for turn in trace.turns] == [Context.EXACT] * 2


def test_a_stop_string_ends_a_turn(chance: random.Random) -> None:
    session = Session()
    ended = say("b", chance, exact=True)
    session.call([user("a")], ended)
    messages = [user("a"), ended.message, user("c")]
    stopped = Reply([*canonical("ab"), *canonical("gh")], {"role": "assistant", "content": "ab"}, "stop", "gh")
    session.call(messages, stopped)
    session.call([*messages, stopped.message, user("d")], say("e", chance))
    (trace,) = built(session).traces
    assert [turn.context for turn in trace.turns] == [Context.EXACT, Context.EXACT, Context.RETOKENIZED]


def test_a_wrong_config_is_an_error_without_traces_that_names_the_field() -> None:
    session = Session(builder=BuilderSpec(config={"on_drfit": "keep"}))
    session.call([user("a")], say("b", random.Random(0)))
    session.close()
    trajectory = rebuild(session.records)
    assert trajectory.status is Status.ERROR
    assert trajectory.traces == []
    assert trajectory.error is not None
    assert "on_drfit" in trajectory.error.message
    assert [one.reason for one in trajectory.set_aside] == ["not_built"]
