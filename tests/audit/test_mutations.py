"""Each way to falsify a log is found, by its kind and with the id of what it concerns.

The log is `MODEL`'s; a mutation changes one thing in it and says whom it concerns. What is changed may be an offence in
more than one way, so others are allowed beside the expected one, but none of a session that was not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from polar.audit import KINDS, AuditOptions, Check, Offence
from polar.schemas import (
    AttemptFenced,
    CallStarted,
    CompletionCaptured,
    CompletionFailed,
    DeadLetter,
    DeadResolved,
    GroupClosed,
    GroupState,
    Lease,
    Logprobs,
    RecordRef,
    SessionClosed,
    SessionFinal,
    SessionGraded,
    SessionOpened,
    SessionResult,
    SetAside,
    Status,
    TaskAccepted,
    TaskRequest,
    TaskResult,
    TaskState,
    TokenIds,
    Trajectory,
)
from tests.audit.model import CallPlan, Life, LogModel, Rec, SessionPlan, TaskPlan, audited

C = CallPlan
RICH = SessionPlan(
    attempts=(
        (C(), C(ending="late_end")),
        (C(), C(), C(choices=2), C(ending="failed"), C(ending="open"), C(), C(ending="late_end")),
    ),
    late_calls=1,
    reward=0.5,
)
PLAIN = SessionPlan(attempts=((C(), C(), C()),))
MODEL = [
    TaskPlan(sessions=(RICH, PLAIN, SessionPlan(attempts=(), status=Status.CANCELLED, reward=None), PLAIN)),
    TaskPlan(sessions=(RICH, PLAIN), deadline=True),
    TaskPlan(sessions=(SessionPlan(until="queued"), SessionPlan(until="running"), SessionPlan(until="graded"))),
    TaskPlan(rejected=True),
]


SEEDS = [1, 2]


class Log:
    """A right log to be falsified, with one session of it as the victim."""

    def __init__(self, seed: int) -> None:
        self.model = LogModel(MODEL, seed).run()
        self.records = list(self.model.records)
        lives = {(one.task, one.sample): one for one in self.model.lives}
        self.rich, self.plain, self.never, self.other = (lives["task-0", sample] for sample in range(4))
        self.queued, self.running, self.ungraded = (lives["task-2", sample] for sample in range(3))

    def find(self, kind: type[Any], life: Life | None = None, number: int = 0, **fields: Any) -> Rec:
        """The `number`th record of a kind, of a session, with these fields."""
        return self.all(kind, life, **fields)[number]

    def all(self, kind: type[Any], life: Life | None = None, *, topic: str | None = None, **fields: Any) -> list[Rec]:
        found = [
            one
            for one in self.records
            if isinstance(one.value, kind)
            and (life is None or getattr(one.value, "session_id", None) == life.session)
            and (topic is None or one.topic == topic)
            and all(getattr(one.value, name) == value for name, value in fields.items())
        ]
        assert found, f"the log holds no {kind.__name__} of {fields}"
        return found

    def built(self, life: Life) -> Rec:
        return self.find(Trajectory, life, topic="built")

    def published(self, life: Life) -> Rec:
        return self.find(Trajectory, life, topic="trajectories")

    def drop(self, one: Rec) -> None:
        self.records.remove(one)

    def change(self, one: Rec, **fields: Any) -> None:
        one.value = replace(one.value, **fields)  # type: ignore[type-var]

    def append(self, one: Rec, value: Any = None, **fields: Any) -> Rec:
        """A record like `one` at the end of its partition."""
        ends = [other.offset for other in self.records if (other.topic, other.partition) == (one.topic, one.partition)]
        value = replace(value or one.value, **fields)
        made = Rec(one.topic, one.partition, max(ends) + 1, one.key, value, one.source, one.at_ms)
        self.records.append(made)
        return made

    def both(self, life: Life, **fields: Any) -> None:
        """Changes the trajectory as built and as published."""
        for one in (self.built(life), self.published(life)):
            self.change(one, **fields)


class Mutation(NamedTuple):
    kind: str
    mutate: Callable[[Log], Any]
    whose: Callable[[Log], str]
    """Session, task or group that the offence has to name."""


def session(name: str) -> Callable[[Log], str]:
    return lambda log: str(getattr(log, name).session)


def task(number: int) -> Callable[[Log], str]:
    return lambda log: f"task-{number}"


def group(number: int) -> Callable[[Log], str]:
    return lambda log: f"group-{number}"


def moved(ref: RecordRef, by: int) -> RecordRef:
    return replace(ref, offset=ref.offset + by)


# what each mutation does ----------------------------------------------------------------------------------------------


def one_more(kind: type[Any], whose: str = "plain", **fields: Any) -> Callable[[Log], Any]:
    return lambda log: log.append(log.find(kind, getattr(log, whose), **fields))


def one_less(kind: type[Any], whose: str = "plain", **fields: Any) -> Callable[[Log], Any]:
    return lambda log: log.drop(log.find(kind, getattr(log, whose), **fields))


def swapped(kind: type[Any], **fields: Any) -> Callable[[Log], Any]:
    """Another session's source."""

    def mutate(log: Log) -> None:
        one, other = log.find(kind, log.plain, **fields), log.find(kind, log.other, **fields)
        one.source = other.source

    return mutate


def sourced(kind: type[Any], offset: int, **fields: Any) -> Callable[[Log], Any]:
    """A source at an offset where nothing stands."""

    def mutate(log: Log) -> None:
        one = log.find(kind, log.plain, **fields)
        assert one.source is not None
        one.source = replace(one.source, offset=offset)

    return mutate


def unsourced(log: Log) -> None:
    log.find(SessionGraded, log.plain).source = None


def opened_elsewhere(log: Log) -> None:
    log.both(log.plain, opening=log.find(SessionFinal, log.plain).ref)


def forgotten(log: Log) -> None:
    """The scheduler has forgotten a queued session."""
    for one in log.all(Lease, log.queued):
        log.drop(one)


def unaccepted(log: Log) -> None:
    """The last session of a task is not among those that were accepted."""
    one = log.find(TaskAccepted, task_id="task-0")
    log.change(one, sessions=one.value.sessions[:-1])  # type: ignore[union-attr]
    for one in [one for one in log.records if one.topic == "leases" and one.key == log.other.session]:
        log.drop(one)


def token_changed(log: Log, topic: str = "trajectories") -> None:
    one = log.find(Trajectory, log.plain, topic=topic)
    pool, turn = one.value.pool, one.value.traces[0].turns[0]  # type: ignore[union-attr]
    ids = pool.tokens.array.copy()
    (segment, *_) = one.value.traces[0].segments  # type: ignore[union-attr]
    ids[segment.start + turn.start] += 1
    log.change(one, pool=replace(pool, tokens=TokenIds(ids)))


def logprob_changed(log: Log) -> None:
    for one in (log.built(log.plain), log.published(log.plain)):
        pool = one.value.pool  # type: ignore[union-attr]
        values = pool.logprobs.array.copy()
        values[~np.isnan(values)] *= 2
        log.change(one, pool=replace(pool, logprobs=Logprobs(values)))


def turn_moved(log: Log) -> None:
    """A turn one id further on than what was sampled."""
    one = log.published(log.plain)
    first, *rest = one.value.traces  # type: ignore[union-attr]
    turn, *turns = first.turns
    moved_ = replace(turn, start=turn.start - 1, end=turn.end - 1)
    log.change(one, traces=[replace(first, turns=[moved_, *turns]), *rest])


def trained_twice(log: Log) -> None:
    traces = log.published(log.plain).value.traces  # type: ignore[union-attr]
    log.both(log.plain, traces=[*traces, traces[0]])


def turn_lost(log: Log) -> None:
    traces = log.published(log.plain).value.traces  # type: ignore[union-attr]
    log.both(log.plain, traces=[replace(one, turns=one.turns[:-1]) for one in traces])


def aside_changed(before: str, after: str | None) -> Callable[[Log], Any]:
    def mutate(log: Log) -> None:
        asides = log.published(log.rich).value.set_aside  # type: ignore[union-attr]
        found = next(one for one in asides if one.reason == before)
        rest = [one for one in asides if one is not found]
        log.both(log.rich, set_aside=rest if after is None else [*rest, replace(found, reason=after)])

    return mutate


def aside_invented(log: Log) -> None:
    asides = log.published(log.rich).value.set_aside  # type: ignore[union-attr]
    log.both(log.rich, set_aside=[*asides, SetAside(completion_id="call-0", reason="retry", attempt=2)])


def fenced_call_traced(log: Log) -> None:
    """A trace goes on with a reply of the attempt before."""
    published = log.published(log.rich).value
    assert isinstance(published, Trajectory)
    fenced = next(one for one in published.set_aside if one.reason == "fenced").completion_id
    trace, *rest = published.traces
    turns = [replace(trace.turns[0], completion_id=fenced), *trace.turns[1:]]
    log.both(log.rich, traces=[replace(trace, turns=turns), *rest])


def called_after_final(log: Log) -> None:
    """A capture that a trajectory holds is moved behind `SessionFinal`."""
    one = log.find(CompletionCaptured, log.plain, number=2)
    log.drop(one)
    log.append(one)


def closed_elsewhere(log: Log) -> None:
    final = log.find(SessionFinal, log.plain)
    for one in (log.built(log.plain), log.published(log.plain)):
        log.change(one, closing=final.ref)
    log.built(log.plain).source = final.ref


def captured_of_another(log: Log) -> None:
    """A capture is written with another session's id."""
    one = log.find(CompletionCaptured, log.plain)
    log.change(one, session_id=log.other.session)
    one.key = log.other.session


def members(change: Callable[[Log, list[Any]], list[Any]], number: int = 0) -> Callable[[Log], Any]:
    def mutate(log: Log) -> None:
        one = log.find(GroupClosed, group_id=f"group-{number}")
        log.change(one, members=change(log, one.value.members))  # type: ignore[union-attr]

    return mutate


def member_before(log: Log) -> None:
    """The group is closed before a member is published."""
    close = log.find(GroupClosed, group_id="group-0")
    last = max(
        (one for one in log.all(Trajectory, topic="trajectories", group_id="group-0")), key=lambda one: one.offset
    )
    close.offset, last.offset = last.offset, close.offset


def based(change: Callable[[Log, Any], Any]) -> Callable[[Log], Any]:
    def mutate(log: Log) -> None:
        one = next(one for one in log.all(CompletionCaptured, log.plain) if one.value.prompt.base is not None)  # type: ignore[union-attr]
        prompt = one.value.prompt  # type: ignore[union-attr]
        log.change(one, prompt=replace(prompt, base=change(log, prompt.base)))

    return mutate


def buried(log: Log) -> None:
    """The builder could not take a session's record."""
    one = log.find(CallStarted, log.running) if log.running.plan.attempts else log.find(SessionOpened, log.running)
    letter = DeadLetter(origin=one.ref, service="builder", error="bad", key=log.running.session.encode(), at_ms=0)
    place = f"completions/{one.partition}/{one.offset}"
    log.records.append(Rec("dead", 0, 99, place, letter, one.ref, 0))


def counts(kind: type[Any], **fields: Any) -> Callable[[Log], Any]:
    def mutate(log: Log) -> None:
        one = log.all(kind, task_id="task-0")[-1]
        log.change(one, counts=replace(one.value.counts, **fields))  # type: ignore[union-attr]

    return mutate


def lease_ahead(log: Log) -> None:
    """The scheduler has a session as finished that is not published."""
    log.append(log.all(Lease, log.ungraded)[-1], phase="finished")


def group_forgotten(log: Log) -> None:
    log.drop(log.find(GroupClosed, group_id="group-0"))
    for one in log.all(GroupState, group_id="group-0"):
        log.drop(one)


def in_json(field: str) -> Callable[[Log], Any]:
    def mutate(log: Log) -> None:
        one = log.published(log.plain)
        log.change(one, **{field: "other"})

    return mutate


def renamed(log: Log) -> None:
    log.published(log.plain).key = "group-1"


def later_attempt(kind: type[Any], **fields: Any) -> Callable[[Log], Any]:
    def mutate(log: Log) -> None:
        one = log.find(kind, log.plain, **fields)
        log.change(one, attempt=one.value.attempt + 1)  # type: ignore[union-attr]

    return mutate


TABLE = [
    # one of each
    Mutation("opened_twice", one_more(SessionOpened), session("plain")),
    Mutation("closed_twice", one_more(SessionClosed), session("plain")),
    Mutation("final_twice", one_more(SessionFinal), session("plain")),
    Mutation("fenced_twice", one_more(AttemptFenced, "rich"), session("rich")),
    Mutation("built_twice", one_more(Trajectory, topic="built"), session("plain")),
    Mutation("graded_twice", one_more(SessionGraded), session("plain")),
    Mutation("published_twice", one_more(Trajectory, topic="trajectories"), session("plain")),
    Mutation("result_twice", one_more(SessionResult), session("plain")),
    # none without the one before
    Mutation("not_opened", one_less(SessionOpened), session("plain")),
    Mutation("not_opened", one_less(SessionOpened, "running"), session("running")),
    Mutation("not_closed", one_less(SessionClosed), session("plain")),
    Mutation("not_final", one_less(SessionFinal), session("plain")),
    Mutation("not_built", one_less(Trajectory, topic="built"), session("plain")),
    Mutation("not_built", one_less(Trajectory, "ungraded", topic="built"), session("ungraded")),
    Mutation("not_graded", one_less(SessionGraded), session("plain")),
    Mutation("not_graded", one_less(SessionGraded, "ungraded"), session("ungraded")),
    Mutation("not_published", one_less(Trajectory, topic="trajectories"), session("plain")),
    Mutation("not_published", lease_ahead, session("ungraded")),
    Mutation("no_result", one_less(SessionResult), session("plain")),
    Mutation("attempts_wrong", one_less(AttemptFenced, "rich"), session("rich")),
    Mutation("attempt_differs", later_attempt(SessionFinal), session("plain")),
    Mutation("attempt_differs", later_attempt(SessionGraded), session("plain")),
    Mutation("attempt_differs", later_attempt(SessionResult), session("plain")),
    Mutation("attempt_differs", later_attempt(CallStarted), session("plain")),
    Mutation("ids_differ", in_json("task_id"), session("plain")),
    Mutation("ids_differ", lambda log: log.change(log.find(CompletionCaptured, log.plain), sample=9), session("plain")),
    Mutation("ids_differ", lambda log: log.change(log.find(SessionResult, log.plain), sample=9), session("plain")),
    Mutation("ids_differ", lambda log: log.change(log.find(SessionGraded, log.plain), group_id="x"), session("plain")),
    Mutation("id_not_derived", lambda log: log.change(log.find(SessionOpened, log.plain), sample=9), session("plain")),
    Mutation("id_not_derived", in_json("trajectory_id"), session("plain")),
    Mutation("published_differs", token_changed, session("plain")),
    Mutation("published_differs", lambda log: log.change(log.published(log.plain), reward=7.0), session("plain")),
    Mutation("published_differs", lambda log: log.change(log.published(log.rich), traces=[]), session("rich")),
    # the accounting
    Mutation("lost", forgotten, session("queued")),
    Mutation("not_accepted", unaccepted, session("other")),
    # sources
    Mutation("source_wrong", swapped(SessionGraded), session("plain")),
    Mutation("source_wrong", swapped(SessionResult), session("plain")),
    Mutation("source_wrong", swapped(Trajectory, topic="trajectories"), session("plain")),
    Mutation("source_missing", sourced(Trajectory, 10_000, topic="trajectories"), session("plain")),
    Mutation("source_missing", sourced(SessionResult, 10_000), session("plain")),
    Mutation("source_missing", one_less(SessionGraded), session("plain")),
    Mutation(
        "source_missing", lambda log: setattr(log.find(SessionGraded, log.plain), "source", None), session("plain")
    ),
    Mutation("source_missing", lambda log: log.drop(log.find(TaskRequest, task_id="task-0")), task(0)),
    Mutation("source_wrong", lambda log: log.change(log.find(TaskRequest, task_id="task-0"), task_id="x"), task(0)),
    Mutation(
        "reference_wrong",
        lambda log: log.change(log.find(SessionResult, log.plain), trajectory=log.published(log.other).ref),
        session("plain"),
    ),
    Mutation(
        "reference_wrong",
        lambda log: log.change(log.find(SessionGraded, log.plain), built=moved(log.built(log.plain).ref, 1)),
        session("plain"),
    ),
    Mutation(
        "reference_wrong",
        lambda log: log.both(log.plain, opening=log.find(SessionFinal, log.plain).ref),
        session("plain"),
    ),
    Mutation("key_wrong", renamed, session("plain")),
    # calls
    Mutation("end_without_start", one_less(CallStarted), session("plain")),
    Mutation("end_without_start", captured_of_another, session("other")),
    Mutation("call_twice", lambda log: log.append(log.find(CallStarted, log.plain), at_ms=1), session("plain")),
    Mutation(
        "ends_differ", lambda log: log.append(log.find(CompletionCaptured, log.plain), ended_ms=1), session("plain")
    ),
    Mutation("closing_wrong", one_less(CompletionCaptured), session("plain")),
    Mutation("closing_wrong", closed_elsewhere, session("plain")),
    Mutation("closing_wrong", called_after_final, session("plain")),
    Mutation("counts_differ", lambda log: log.both(log.plain, captured=9), session("plain")),
    Mutation("counts_differ", lambda log: log.both(log.rich, failed=0), session("rich")),
    Mutation("call_unaccounted", turn_lost, session("plain")),
    Mutation("call_unaccounted", aside_changed("unfinished", None), session("rich")),
    Mutation("call_unaccounted", aside_changed("late", None), session("rich")),
    Mutation("aside_wrong", aside_changed("fenced", "unfinished"), session("rich")),
    Mutation("aside_wrong", aside_changed("failed", "fenced"), session("rich")),
    Mutation("unknown_call", aside_invented, session("rich")),
    Mutation("trace_wrong", fenced_call_traced, session("rich")),
    # tokens
    Mutation("tokens_differ", token_changed, session("plain")),
    Mutation("tokens_differ", turn_moved, session("plain")),
    Mutation("logprobs_differ", logprob_changed, session("plain")),
    Mutation("sampled_twice", trained_twice, session("plain")),
    # delta prompts
    Mutation("base_unknown", based(lambda log, base: replace(base, completion_id="call-0")), session("plain")),
    Mutation("base_misplaced", based(lambda log, base: replace(base, offset=base.offset + 1)), session("plain")),
    Mutation("base_too_long", based(lambda log, base: replace(base, ids=base.ids + 1)), session("plain")),
    Mutation("base_too_long", based(lambda log, base: replace(base, messages=base.messages + 1)), session("plain")),
    # groups
    Mutation("group_closed_twice", lambda log: log.append(log.find(GroupClosed, group_id="group-0")), group(0)),
    Mutation("group_not_closed", lambda log: log.drop(log.find(GroupClosed, group_id="group-0")), group(0)),
    Mutation("group_not_closed", group_forgotten, group(0)),
    Mutation("group_incomplete", members(lambda log, ones: ones[:-1]), group(0)),
    Mutation("member_twice", members(lambda log, ones: [*ones, ones[0]]), group(0)),
    Mutation(
        "member_not_ended",
        members(lambda log, ones: [replace(ones[0], session_id=log.queued.session), *ones[1:]]),
        session("queued"),
    ),
    Mutation("member_not_ended", member_before, group(0)),
    Mutation("member_differs", members(lambda log, ones: [replace(one, reward=7.0) for one in ones]), group(0)),
    Mutation(
        "selection_wrong",
        lambda log: log.change(log.find(GroupClosed, group_id="group-0"), selection=["nobody"]),
        group(0),
    ),
    # tasks
    Mutation("accepted_twice", lambda log: log.append(log.find(TaskAccepted, task_id="task-0")), task(0)),
    Mutation("unanswered", lambda log: log.drop(log.find(TaskAccepted, task_id="task-2")), task(2)),
    Mutation("task_result_twice", lambda log: log.append(log.find(TaskResult, task_id="task-0")), task(0)),
    Mutation("no_task_result", lambda log: log.drop(log.find(TaskResult, task_id="task-0")), task(0)),
    Mutation("task_result_wrong", counts(TaskResult, completed=0), task(0)),
    Mutation("task_result_wrong", counts(TaskResult, reward_sum=9.0), task(0)),
    Mutation("task_result_wrong", counts(TaskState, finished=5), task(0)),
    # dead letters
    Mutation("left_open", buried, session("running")),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mutation", TABLE, ids=[f"{number}-{one.kind}" for number, one in enumerate(TABLE)])
def test_a_falsified_log_is_found_out(mutation: Mutation, seed: int) -> None:
    log = Log(seed)
    mutation.mutate(log)
    report = audited(log.records)
    whose = mutation.whose(log)
    named = [one for one in report.offences if one.kind == mutation.kind and whose in ids(one)]
    assert named, f"{mutation.kind} of {whose} is not among {report.offences}"
    assert all(one.offset is not None for one in named), "an offence says where it shows"
    assert not report.clean
    if any(one.session_id == whose and one.check is not Check.GROUPS for one in named):
        touched = {None, whose, log.plain.session, log.other.session}
        assert {one.session_id for one in report.offences} <= touched, "nobody else is suspected"


@pytest.mark.parametrize("seed", SEEDS)
def test_before_it_is_falsified_the_log_is_clean(seed: int) -> None:
    report = audited(Log(seed).records)
    assert report.clean, report.offences


def ids(one: Offence) -> set[str | None]:
    return {one.session_id, one.task_id, one.group_id}


def test_every_kind_of_offence_has_a_mutation() -> None:
    elsewhere = {"unreadable", "chain_too_long", "out_of_order"}  # below
    assert set(KINDS) == {one.kind for one in TABLE} | elsewhere


def test_a_fence_after_the_close_is_out_of_order() -> None:
    log = Log(1)
    log.append(
        log.find(SessionClosed, log.plain), log.find(AttemptFenced, log.rich).value, session_id=log.plain.session
    )
    found = audited(log.records).offences
    assert ("out_of_order", log.plain.session) in {(one.kind, one.session_id) for one in found}


def test_a_final_before_the_close_is_out_of_order() -> None:
    log = Log(1)
    final, closed = log.find(SessionFinal, log.never), log.find(SessionClosed, log.never)
    final.offset, closed.offset = closed.offset, final.offset
    found = audited(log.records).offences
    assert ("out_of_order", log.never.session) in {(one.kind, one.session_id) for one in found}


def test_a_chain_of_prompts_that_is_too_long_is_named() -> None:
    model = LogModel([TaskPlan(sessions=(SessionPlan(attempts=((C(),) * 36,)),))], gaps=False).run()
    report = audited(model.records)
    assert report.found == {"chain_too_long": 3}


def test_a_record_that_cannot_be_read_is_named() -> None:
    log = Log(1)
    one = log.find(CallStarted, log.plain)
    bad = Rec(one.topic, one.partition, 10_000, one.key, None, None, 0, raw=b"\xc1")
    log.records.append(bad)
    (found,) = audited(log.records).offences
    assert (found.kind, found.topic, found.offset, found.session_id) == (
        "unreadable",
        "completions",
        10_000,
        log.plain.session,
    )


def test_a_record_that_died_as_it_should_is_no_offence() -> None:
    log = Log(1)
    one = log.find(CallStarted, log.plain)
    bad = Rec(one.topic, one.partition, 10_000, one.key, None, None, 0, raw=b"\xc1")
    log.records.append(bad)
    letter = DeadLetter(origin=bad.ref, service="builder", error="bad", key=log.plain.session.encode(), at_ms=0)
    log.records.append(Rec("dead", 0, 99, "", letter, None, 0))
    report = audited(log.records)
    assert report.clean, report.offences
    assert [(one.session_id, one.open) for one in report.dead if one.offset == 99] == [(log.plain.session, False)]


def test_a_grade_that_was_retried_is_the_same_grade_and_its_letter_is_resolved() -> None:
    log = Log(1)
    grade = log.find(SessionGraded, log.plain)
    letter = DeadLetter(origin=grade.ref, service="finisher", error="no", key=log.plain.session.encode(), at_ms=0)
    log.records.append(Rec("dead", 0, 98, "", letter, None, 0))
    known = len(audited(log.records).dead)
    again = log.append(grade)
    again.extra["polar-retry-of"] = f"graded/{grade.partition}/{grade.offset}".encode()
    resolved = DeadResolved(
        origin=grade.ref,
        letter=RecordRef(topic="dead", partition=0, offset=98),
        action="retried",
        published=again.ref,
        at_ms=0,
    )
    log.records.append(Rec("dead", 0, 99, "", resolved, None, 0))
    report = audited(log.records)
    assert report.clean, report.offences
    assert len(report.dead) == known - 1


def test_an_end_sent_again_as_it_is_is_counted_and_no_offence() -> None:
    log = Log(1)
    log.append(log.find(CompletionCaptured, log.plain))
    log.append(log.find(CompletionFailed, log.rich))
    report = audited(log.records)
    assert report.clean, report.offences
    assert report.counts["ends_repeated"] == 2


def test_a_source_below_the_start_of_the_log_is_expired_and_no_offence() -> None:
    log = Log(1)
    grade = log.find(SessionGraded, log.plain)
    report = audited(log.records, starts={("graded", grade.partition): grade.offset + 1})
    assert report.clean, report.offences
    assert report.counts["source_expired"] >= 1
    assert sum(one.unjudged for one in report.checks) >= 1


def test_a_missing_record_is_an_offence_where_retention_cannot_have_taken_it() -> None:
    log = Log(1)
    log.drop(log.built(log.plain))
    first = min((one for one in log.records if one.topic == "built"), key=lambda one: one.at_ms)
    for one in log.records:
        if one.topic == "built":
            one.at_ms -= 3_600_000  # everything that is left is older than the session
    report = audited(log.records, starts={("built", first.partition): 1})
    assert ("not_built", log.plain.session) in {(one.kind, one.session_id) for one in report.offences}


def test_filters_leave_out_what_was_not_asked_for() -> None:
    log = Log(1)
    for life in (log.plain, log.other):
        log.append(log.published(life))
    only = audited(log.records, AuditOptions(sessions=frozenset({log.plain.session})))
    assert {one.session_id for one in only.offences} == {log.plain.session}
    assert only.counts["accepted"] == 1
    elsewhere = audited(log.records, AuditOptions(tasks=frozenset({"task-1"})))
    assert elsewhere.clean, elsewhere.offences
    assert elsewhere.counts["accepted"] == 2
    here = audited(log.records, AuditOptions(tasks=frozenset({"task-0"})))
    assert here.found["published_twice"] == 2
    later = audited(log.records, AuditOptions(since_ms=log.model.now))
    assert later.clean
    assert later.counts.get("accepted", 0) == 0


def test_offences_beyond_the_limit_are_counted() -> None:
    log = Log(1)
    for life in (log.plain, log.other, log.rich):
        log.append(log.published(life))
    report = audited(log.records, AuditOptions(keep=1))
    assert len(report.offences) == 1
    assert report.found["published_twice"] == 3


def test_without_tokens_a_changed_one_goes_unseen() -> None:
    """What the option gives up, so that nobody takes the rest for it."""
    log = Log(1)
    token_changed(log)
    token_changed(log, "built")
    assert audited(log.records, AuditOptions(tokens=False)).clean
    assert audited(log.records).found == {"tokens_differ": 1}
