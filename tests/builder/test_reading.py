"""Reading costs what is new, and gives what reading everything anew would give."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from polar.builder import Verdict, build, rebuild
from polar.builder.pool import begins, joined, taken
from polar.builder.samples import CONVERSATIONS, Sample, read
from polar.builder.session import SessionState
from polar.schemas import BuilderSpec, CompletionCaptured, SessionOpened, encode
from polar.schemas.prompts import Prompts
from tests.builder.toy import Message, Session, say, system, user

runs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=4)


@given(runs, runs, st.one_of(st.none(), st.integers(0, 10)))
def test_begins(one: list[tuple[int, int]], other: list[tuple[int, int]], count: int | None) -> None:
    spans = joined((start, start + length) for start, length in one)
    first = joined((start, start + length) for start, length in other) if count is None else taken(spans, count)
    positions, wanted = ([at for run in some for at in range(*run)] for some in (spans, first))
    assert begins(spans, first) is (positions[: len(wanted)] == wanted)


def completions(session: Session) -> list[CompletionCaptured]:
    return [one.event for one in session.records if isinstance(one.event, CompletionCaptured)]


def talk(conversations: int, *, delta: bool) -> Session:
    """Conversations that go on by turns."""
    session = Session(delta=delta)
    histories: list[list[Message]] = [[system("a" * (1 + number)), user("b")] for number in range(conversations)]
    for _ in range(4):
        for number, history in enumerate(histories):
            reply = say("abc", session.chance)
            session.call(history, reply)
            histories[number] = [*history, reply.message, user("cab")]
    session.close()
    return session


def numbers(samples: list[Sample]) -> list[Any]:
    return [
        (one.messages.tolist(), one.normals.tolist(), one.paths.tolist(), one.said, one.reply_message)
        for one in samples
    ]


def test_whole_prompts_give_the_numbers_that_deltas_give() -> None:
    for conversations in (1, CONVERSATIONS, CONVERSATIONS + 2):
        written = completions(talk(conversations, delta=True))
        prompts = Prompts()
        whole = [replace(one, prompt=prompts.take(one)) for one in written]
        assert numbers(read(written).samples) == numbers(read(whole).samples)


def test_messages_that_are_equal_in_python_only_are_told_apart() -> None:
    session = Session()
    for value in ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": True, "b": 2}, {"a": 1.0, "b": 2}, {"a": 1, "b": 2}):
        part: Message = {"role": "user", "content": [{"type": "data", "value": value}]}
        session.call([system("a"), user("b")], say("ab", session.chance))
        written = session.records[-1]
        assert isinstance(written.event, CompletionCaptured)
        prompt = replace(written.event.prompt, messages=[system("a"), part])
        session.records[-1] = written._replace(event=replace(written.event, prompt=prompt))
    found = [one.messages.tolist()[1] for one in read(completions(session)).samples]
    assert len(set(found)) == 4
    assert found[0] == found[-1]


def test_reading_as_records_come_is_reading_them_at_the_end() -> None:
    session = talk(2, delta=True)
    lost = Session()
    lost.call([system("a"), user("b")], say("ab", lost.chance))
    lost.fence()
    lost.call([system("a"), user("b")], say("abc", lost.chance))
    lost.call([system("a"), user("b")], say("cab", lost.chance))
    lost.close()
    lost.final()
    for one in (session, lost):
        first = one.records[0]
        assert isinstance(first.event, SessionOpened)
        state = SessionState(first.ref, first.event)
        bodies = []
        for entry in one.records[1:]:
            verdict = state.observe(entry)
            if isinstance(entry.event, CompletionCaptured):
                bodies.append(entry.event)
            if verdict is Verdict.BUILD:
                break
        for strategy in ("prefix_merging", "per_request", "prefix_tree"):
            spec = BuilderSpec(strategy=strategy)
            assert encode(rebuild(one.records, spec)) == encode(build(state.account(), bodies, spec))
