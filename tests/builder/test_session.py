"""When a session is built, and how each of its calls is accounted for."""

from __future__ import annotations

import random

import pytest

from polar.builder import Entry, SessionState, Verdict, rebuild, summarize
from polar.schemas import (
    BuilderSpec,
    Failure,
    FailureKind,
    Outcome,
    RecordRef,
    SessionOpened,
    Status,
    Trajectory,
)
from tests.builder.toy import Session, say, user


def verdicts(session: Session) -> list[Verdict]:
    state = state_of(session)
    return [state.observe(entry) for entry in session.records[1:]]


def state_of(session: Session) -> SessionState:
    opening = session.records[0]
    assert isinstance(opening.event, SessionOpened)
    return SessionState(opening.ref, opening.event)


def reasons(trajectory: Trajectory) -> dict[str, str]:
    return {one.completion_id.removeprefix("s-1-"): one.reason for one in trajectory.set_aside}


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def chance() -> random.Random:
    return random.Random(1)


def test_the_close_builds_where_no_call_is_open(session: Session, chance: random.Random) -> None:
    session.call([user("a")], say("b", chance))
    session.close()
    assert verdicts(session)[-1] is Verdict.BUILD
    assert rebuild(session.records).closing == session.records[-1].ref


def test_the_end_of_the_last_open_call_builds_where_one_is_open(session: Session, chance: random.Random) -> None:
    first, second = session.start(), session.start()
    session.close()
    session.capture(first, [user("a")], say("b", chance))
    session.fail(second)
    session.final()
    found = verdicts(session)
    assert found[2:] == [Verdict.KEPT, Verdict.KEPT, Verdict.BUILD, Verdict.ENDED]
    trajectory = rebuild(session.records)
    assert trajectory.closing == session.records[-2].ref
    assert (trajectory.captured, trajectory.failed) == (1, 1)
    assert reasons(trajectory) == {"c1": "failed"}


def test_a_call_that_never_ends_is_unfinished_when_the_session_is_final(
    session: Session, chance: random.Random
) -> None:
    session.start()
    session.call([user("a")], say("b", chance))
    session.close()
    session.final()
    assert verdicts(session)[-1] is Verdict.BUILD
    trajectory = rebuild(session.records)
    assert reasons(trajectory) == {"c0": "unfinished"}
    assert len(trajectory.traces) == 1


def test_a_call_started_after_the_close_opens_nothing(session: Session, chance: random.Random) -> None:
    waited = session.start()
    session.close()
    late = session.start()
    session.capture(late, [user("a")], say("c", chance))
    session.capture(waited, [user("a")], say("b", chance))
    session.start()
    session.final()
    assert verdicts(session)[2:] == [Verdict.LATE, Verdict.LATE, Verdict.BUILD, Verdict.LATE, Verdict.ENDED]
    trajectory = rebuild(session.records)
    assert reasons(trajectory) == {"c1": "late"}
    assert trajectory.captured == 1


def test_another_attempts_calls_are_fenced_and_keep_nobody_waiting(session: Session, chance: random.Random) -> None:
    session.call([user("a")], say("b", chance))
    hanging = session.start()
    session.fence()
    session.call([user("a")], say("c", chance))
    session.close()
    session.capture(hanging, [user("a")], say("d", chance))
    assert verdicts(session)[-2:] == [Verdict.BUILD, Verdict.LATE]
    trajectory = rebuild(session.records)
    assert trajectory.attempt == 2
    assert reasons(trajectory) == {"c0": "fenced", "c1": "fenced"}
    assert [turn.completion_id for trace in trajectory.traces for turn in trace.turns] == ["s-1-c2"]


def test_a_session_that_never_ran_has_its_trajectory_too(session: Session) -> None:
    failure = Failure(kind=FailureKind.CANCELLED, message="cancelled by request")
    session.close(Outcome(status=Status.CANCELLED, failure=failure))
    trajectory = rebuild(session.records)
    assert (trajectory.status, trajectory.traces, trajectory.set_aside) == (Status.CANCELLED, [], [])


def test_the_closing_record_again_gives_the_same_answer(session: Session, chance: random.Random) -> None:
    session.call([user("a")], say("b", chance))
    session.close()
    state = state_of(session)
    for entry in session.records[1:]:
        state.observe(entry)
    assert state.observe(session.records[-1]) is Verdict.BUILD


def test_a_second_record_of_a_completion_is_dropped(session: Session, chance: random.Random) -> None:
    name = session.start()
    session.capture(name, [user("a")], say("b", chance))
    once = session.records[-1]
    session.fail(name)
    session.records.append(Entry(RecordRef(topic="completions", partition=3, offset=900), once.event))
    session.close()
    assert verdicts(session)[2:4] == [Verdict.DUPLICATE, Verdict.DUPLICATE]
    trajectory = rebuild(session.records)
    assert (trajectory.captured, trajectory.failed, len(trajectory.traces)) == (1, 0, 1)


def test_final_without_a_close_still_ends_the_session(session: Session) -> None:
    session.start()
    session.final()
    trajectory = rebuild(session.records)
    assert trajectory.status is Status.ERROR
    assert reasons(trajectory) == {"c0": "unfinished"}


def test_an_open_session_cannot_be_built(session: Session) -> None:
    session.start()
    with pytest.raises(ValueError, match="not closed"):
        rebuild(session.records)


COMPLETED = Outcome(status=Status.COMPLETED, exit_code=0)
TIMEOUT = Outcome(status=Status.TIMEOUT, failure=Failure(kind=FailureKind.TIMEOUT, message="time"))
CRASHED = Outcome(status=Status.ERROR, failure=Failure(kind=FailureKind.HARNESS, message="exit 1"), exit_code=1)


@pytest.mark.parametrize(
    ("calls", "outcome", "failure"),
    [
        ([], COMPLETED, FailureKind.NO_COMPLETIONS),
        ([], TIMEOUT, FailureKind.NO_COMPLETIONS),
        ([], CRASHED, None),
        ([FailureKind.PROVIDER], COMPLETED, FailureKind.PROVIDER),
        ([FailureKind.CANCELLED], COMPLETED, FailureKind.NO_COMPLETIONS),
        (["ok"], COMPLETED, None),
        (["ok", FailureKind.PROVIDER], COMPLETED, None),
        (["ok", FailureKind.PROVIDER], CRASHED, FailureKind.PROVIDER),
        ([FailureKind.PROVIDER, "ok"], CRASHED, None),
    ],
)
def test_what_the_calls_alone_show(
    calls: list[str], outcome: Outcome, failure: FailureKind | None, session: Session, chance: random.Random
) -> None:
    for call in calls:
        if isinstance(call, FailureKind):
            session.fail(session.start(), call)
        else:
            session.call([user("a")], say("b", chance))
    session.close(outcome)
    state = state_of(session)
    for entry in session.records[1:]:
        state.observe(entry)
    summary = summarize(rebuild(session.records), state.account())
    assert (summary.failure and summary.failure.kind) == failure


def test_a_strategy_must_be_allowed_by_name(session: Session, chance: random.Random) -> None:
    session.call([user("a")], say("b", chance))
    session.close()
    own = BuilderSpec(strategy="tests.builder.own:Reversed")
    refused = rebuild(session.records, own)
    assert refused.error is not None
    assert "POLAR_BUILDER_ALLOW" in refused.error.message
    assert [trace.turns[0].completion_id for trace in rebuild(session.records, own, allowed={own.strategy}).traces] == [
        "s-1-c0"
    ]


@pytest.mark.parametrize("name", ["Raises", "Loses", "Doubles"])
def test_a_strategy_that_fails_gives_an_error_without_traces(
    name: str, session: Session, chance: random.Random
) -> None:
    session.call([user("a")], say("b", chance))
    session.close()
    spec = BuilderSpec(strategy=f"tests.builder.own:{name}")
    trajectory = rebuild(session.records, spec, allowed={spec.strategy})
    assert (trajectory.status, trajectory.traces) == (Status.ERROR, [])
    assert trajectory.error is not None
    assert reasons(trajectory) == {"c0": "not_built"}
