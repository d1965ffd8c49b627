"""Delta prompts in a build: what resolves gives what whole prompts give; what does not is set aside, and no more is."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from polar.builder import Entry, rebuild
from polar.schemas import BuilderSpec, CompletionCaptured, Logprobs, PromptBase, Trajectory, encode
from polar.schemas.prompts import Prompts
from tests.builder.toy import Message, Reply, Session, say, tool, user

OPENING = user("abcd" * 50)


def played(calls: int, *, delta: bool = True, strategy: str = "prefix_merging", result: str = "cd" * 20) -> Session:
    """A linear session, not closed yet."""
    session = Session(delta=delta, builder=BuilderSpec(strategy=strategy))
    messages: list[Message] = [OPENING]
    for _ in range(calls):
        reply = say("abc" * 9, session.chance)
        session.call(messages, reply)
        messages = [*messages, reply.message, tool(result)]
    return session


def reasons(trajectory: Trajectory) -> dict[str, str]:
    return {one.completion_id: one.reason for one in trajectory.set_aside}


def changed(session: Session, number: int, **base: Any) -> list[Entry]:
    """The session's records with another base in its capture `number`."""
    records = list(session.records)
    places = [at for at, one in enumerate(records) if isinstance(one.event, CompletionCaptured)]
    entry = records[places[number]]
    assert isinstance(entry.event, CompletionCaptured)
    prompt = entry.event.prompt
    assert prompt.base is not None
    event = replace(entry.event, prompt=replace(prompt, base=replace(prompt.base, **base)))
    records[places[number]] = Entry(entry.ref, event)
    return records


@pytest.mark.parametrize("strategy", ["prefix_merging", "per_request"])
def test_a_base_that_is_not_there_is_set_aside_with_what_refers_to_it(strategy: str) -> None:
    session = played(5, strategy=strategy)
    session.close()
    trajectory = rebuild(changed(session, 3, completion_id="elsewhere"))
    assert trajectory.error is None
    assert trajectory.captured == 5
    assert reasons(trajectory) == {"s-1-c3": "base_expired", "s-1-c4": "base_expired"}
    assert "elsewhere" in (trajectory.set_aside[0].detail or "")
    assert sum(len(one.turns) for one in trajectory.traces) == 3


@pytest.mark.parametrize("change", [{"ids": 10**6}, {"messages": 99}, {"ids": -1}])
def test_a_base_that_holds_less_than_it_is_said_to_is_set_aside(change: dict[str, int]) -> None:
    session = played(3)
    session.close()
    assert reasons(rebuild(changed(session, 2, **change))) == {"s-1-c2": "base_expired"}


def test_a_base_of_another_attempt_is_not_known() -> None:
    session = played(2)
    before = session.started[0]
    session.fence()
    session.call([OPENING], say("abc", session.chance))
    reply = say("ab", session.chance)
    session.call([OPENING, reply.message, user("d")], reply)
    session.close()
    trajectory = rebuild(session.records)
    assert set(reasons(trajectory).values()) == {"fenced"}
    wrong = rebuild(changed(session, 3, completion_id=before))
    assert reasons(wrong)[session.started[3]] == "base_expired"


def test_a_first_choice_that_is_no_sample_is_part_of_the_sequence_all_the_same() -> None:
    """What the log says counts, also where a reply cannot be trained."""
    sessions = []
    for delta in (True, False):
        session = Session(delta=delta)
        said, other = say("abcabc" * 9, random.Random(1)), say("cba" * 9, random.Random(2))
        event = session.call([OPENING], said, other)
        # the numbers of the first choice were lost
        first = replace(event.choices[0], logprobs=Logprobs())
        records = session.records
        broken = records[-1].event
        assert isinstance(broken, CompletionCaptured)
        records[-1] = Entry(records[-1].ref, replace(broken, choices=[first, broken.choices[1]]))
        session.call([OPENING, said.message, user("d")], say("ab", random.Random(3)))
        session.close()
        sessions.append(session)
    second = sessions[0].records[-2].event
    assert isinstance(second, CompletionCaptured)
    assert second.prompt.base is not None
    assert second.prompt.base.messages == 2
    trajectory = rebuild(sessions[0].records)
    assert reasons(trajectory) == {"s-1-c0": "incomplete"}
    assert encode(trajectory) == encode(rebuild(sessions[1].records))


def test_calls_without_choices_or_ids_can_be_bases_too() -> None:
    trajectories = []
    for delta in (True, False):
        session = Session(delta=delta)
        session.call([OPENING])
        session.call([OPENING, user("d")], say("ab", random.Random(1)))
        session.call([OPENING, user("d")], Reply([], {"role": "assistant", "content": ""}))
        session.call([OPENING, user("d"), {"role": "assistant", "content": ""}, user("a")], say("b", random.Random(2)))
        session.close()
        trajectories.append(rebuild(session.records))
    assert reasons(trajectories[0]) == {"s-1-c0": "empty", "s-1-c2": "empty"}
    assert encode(trajectories[0]) == encode(trajectories[1])


def test_the_log_alone_gives_the_prompts_that_the_builder_sees() -> None:
    session = played(40)
    prompts = Prompts()
    taken = [prompts.take(one.event) for one in session.records if isinstance(one.event, CompletionCaptured)]
    assert [[*one.ids] for one in taken] == [one.prompt for one in session.truth]


def test_a_long_session_is_resolved_in_memory_of_its_distinct_tokens() -> None:
    calls = 300
    session = played(calls, result="abcd" * 240)
    session.close()
    whole_bytes = 4 * sum(len(one.prompt) for one in session.truth)
    tracemalloc.start()
    trajectory = rebuild(session.records)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert trajectory.captured == calls
    assert whole_bytes > 60_000_000
    assert peak < whole_bytes / 2


def test_a_base_says_where_its_record_stands() -> None:
    session = played(3)
    captures = [one for one in session.records if isinstance(one.event, CompletionCaptured)]
    for before, after in pairwise(captures):
        assert isinstance(after.event, CompletionCaptured)
        assert isinstance(before.event, CompletionCaptured)
        assert isinstance(after.event.prompt.base, PromptBase)
        assert after.event.prompt.base.offset == before.ref.offset
        assert after.event.prompt.base.completion_id == before.event.completion_id
