"""What must not stop the leader: lost records, records that are too large, evaluators that nobody offers, floods."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from polar.schemas import (
    AttemptFenced,
    CancelRequest,
    FailureKind,
    GradeRevoked,
    GroupClosed,
    Phase,
    SessionClosed,
    SessionFinal,
    SessionGraded,
    SessionOpened,
    SessionRevoked,
    Status,
    TaskAccepted,
    TaskRejected,
    TaskResult,
)
from tests.submit.scheduler.cluster import COMMAND, Cluster, shell_task

PHASES = [
    Phase.QUEUED,
    Phase.ASSIGNED,
    Phase.READY,
    Phase.RUNNING,
    Phase.CLOSED,
    Phase.BUILT,
    Phase.GRADING,
    Phase.GRADED,
]


@pytest.mark.parametrize("phase", PHASES)
def test_a_session_whose_task_record_is_lost_ends_with_the_reason_wherever_it_was(phase: Phase) -> None:
    cluster = Cluster(gateways=0 if phase is Phase.QUEUED else 1, graders=0 if phase is Phase.BUILT else 1)
    cluster.submit(shell_task("t", evaluator=COMMAND))

    def reached() -> bool:
        return any(one.phase is phase for one in cluster.machine.world.leases.values())

    cluster.step_until(reached)
    graded = phase is Phase.GRADED
    cluster.restart_leader(frozenset({"t"}))
    cluster.settle()
    (accepted,) = cluster.of(TaskAccepted)
    for kind in (SessionOpened, SessionClosed, SessionGraded, SessionFinal):
        assert len(cluster.of(kind)) == 1, kind
    (closed,), (end,) = cluster.of(SessionClosed), cluster.of(SessionGraded)
    if phase in (Phase.QUEUED, Phase.ASSIGNED, Phase.READY, Phase.RUNNING):
        assert closed.outcome.status is Status.ERROR
        assert closed.outcome.failure is not None
        assert closed.outcome.failure.kind is FailureKind.INFRA
        assert "log starts at offset 9" in closed.outcome.failure.message
    if not graded:
        assert end.grade is None
        assert end.failure is not None
        assert "log starts at offset 9" in end.failure.message
    if phase in (Phase.ASSIGNED, Phase.READY, Phase.RUNNING):
        assert cluster.of(SessionRevoked)
    if phase is Phase.GRADING:
        assert cluster.of(GradeRevoked)
    assert not cluster.of(AttemptFenced)
    assert len(cluster.of(TaskResult)) == len(cluster.of(GroupClosed)) == 1
    assert not cluster.machine.world.leases
    assert not cluster.machine.world.doomed
    assert not any(gateway.rows for gateway in cluster.gateways.values()), "boxes left behind"
    assert accepted.count == 1


def test_other_tasks_go_on_beside_a_lost_one() -> None:
    cluster = Cluster()
    cluster.submit(shell_task("lost", 2))
    cluster.submit(shell_task("kept", 2))
    cluster.commit()
    cluster.restart_leader(frozenset({"lost"}))
    cluster.settle()
    results = {one.task_id: one for one in cluster.of(TaskResult)}
    assert results["lost"].counts.error == 2
    assert results["kept"].counts.completed == 2


def too_large(cluster: Cluster, about: str) -> None:
    """The shell's answer to a record that the log does not take: a new term which knows what it was about."""
    new, cluster._new = cluster._new, lambda: marked(new(), about)  # type: ignore[method-assign, assignment]
    cluster.restart_leader()


def marked(machine, about):  # type: ignore[no-untyped-def]
    machine.world.too_large = {about: "8400000 bytes, the limit is 8388608"}
    return machine


@pytest.mark.parametrize("phase", [one for one in PHASES if one is not Phase.GRADED])
def test_a_session_from_which_something_too_large_follows_ends_and_its_siblings_go_on(phase: Phase) -> None:
    cluster = Cluster(gateways=0 if phase is Phase.QUEUED else 2)
    if phase is Phase.BUILT:
        cluster.graders["e0"].up = False
        cluster.tick(6)
    cluster.submit(shell_task("t", 2, metadata={"large": "x" * 1000}))
    cluster.step_until(lambda: all(one.phase is phase for one in cluster.machine.world.leases.values()))
    victim, sibling = cluster.machine.world.leases
    too_large(cluster, victim)
    if phase is Phase.QUEUED:
        cluster.commit()
        (opened,) = cluster.of(SessionOpened, victim)
        assert opened.metadata == {}, "what made it too large is left out"
        assert opened.num_samples == 2
        assert cluster.machine.world.leases[sibling].phase is Phase.QUEUED
        return
    cluster.settle()
    (ended,) = cluster.of(SessionGraded, victim)
    assert ended.grade is None
    assert ended.failure is not None
    assert "8400000 bytes" in ended.failure.message
    (graded,) = cluster.of(SessionGraded, sibling)
    assert graded.grade is not None
    for kind in (SessionOpened, SessionClosed, SessionFinal):
        assert len(cluster.of(kind)) == 2
    assert not cluster.machine.world.leases


def test_a_task_from_which_something_too_large_follows_is_rejected() -> None:
    cluster = Cluster()
    marked(cluster.machine, "t")
    cluster.submit(shell_task("t"))
    cluster.commit()
    (rejected,) = cluster.of(TaskRejected)
    assert "8400000 bytes" in rejected.problems[0].message
    assert not cluster.of(TaskAccepted)
    assert not cluster.rows


def test_a_group_too_large_for_a_record_lists_who_ended_how() -> None:
    cluster = Cluster()
    cluster.submit(shell_task("t", 2))
    cluster.step_until(lambda: any(one.phase is Phase.GRADED for one in cluster.machine.world.leases.values()))
    too_large(cluster, "t")
    cluster.settle()
    (closed,) = cluster.of(GroupClosed)
    assert [one.outcome.failure for one in closed.members] == [None, None]
    assert len(closed.members) == 2


def test_a_session_whose_evaluator_nobody_offers_ends_as_not_available_after_grade_queue_ttl() -> None:
    cluster = Cluster(grade_queue_ttl=60)
    cluster.graders["e0"].evaluators = ["session_completed"]
    cluster.beat_all()
    cluster.submit(shell_task("t", evaluator=COMMAND))
    cluster.step_until(lambda: any(one.phase is Phase.BUILT for one in cluster.machine.world.leases.values()))
    for _ in range(40):
        cluster.tick()
        cluster.commit()
    assert not cluster.of(SessionGraded)
    cluster.settle()
    for _ in range(60):
        cluster.tick()
        cluster.commit()
    cluster.settle()
    (graded,) = cluster.of(SessionGraded)
    assert graded.grade is None
    assert graded.failure is not None
    assert graded.failure.kind is FailureKind.EVALUATOR
    assert graded.failure.detail == {"code": "not_available"}
    assert "`command`" in graded.failure.message
    assert not cluster.machine.world.leases


def test_graders_that_are_busy_are_waited_for() -> None:
    cluster = Cluster(grade_queue_ttl=10)
    cluster.graders["e0"].slots = 1
    cluster.submit(shell_task("t", 2))
    cluster.step_until(lambda: any(one.phase is Phase.GRADING for one in cluster.machine.world.leases.values()))
    for _ in range(100):  # the grade under way takes long; the other session waits
        cluster.tick()
        cluster.commit()
    cluster.settle()
    assert [one.failure for one in cluster.of(SessionGraded)] == [None, None]


def test_a_grader_that_comes_back_in_time_starts_the_wait_anew_for_nobody() -> None:
    cluster = Cluster(grade_queue_ttl=60)
    cluster.graders["e0"].up = False
    cluster.tick(6)
    cluster.submit(shell_task("t"))
    cluster.step_until(lambda: any(one.phase is Phase.BUILT for one in cluster.machine.world.leases.values()))
    for _ in range(40):
        cluster.tick()
        cluster.commit()
    cluster.settle()
    (graded,) = cluster.of(SessionGraded)
    assert graded.failure is None


def test_a_task_beyond_max_open_sessions_is_answered_with_busy_and_taken_later_as_it_is() -> None:
    cluster = Cluster(max_open_sessions=5)
    cluster.submit(shell_task("a", 4))
    cluster.submit(shell_task("b", 2))
    cluster.commit()
    (rejected,) = cluster.of(TaskRejected)
    assert rejected.task_id == "b"
    (problem,) = rejected.problems
    assert problem.code == "busy"
    assert "POLAR_SCHEDULER_MAX_OPEN_SESSIONS" in problem.message
    cluster.settle()
    cluster.submit(shell_task("b", 2))
    cluster.settle()
    assert [one.task_id for one in cluster.of(TaskAccepted)] == ["a", "b"]
    assert {one.task_id: one.counts.completed for one in cluster.of(TaskResult)} == {"a": 4, "b": 2}


def test_a_task_that_could_never_be_taken_is_not_told_to_come_again() -> None:
    cluster = Cluster(max_open_sessions=5)
    cluster.submit(shell_task("a", 6))
    cluster.commit()
    (rejected,) = cluster.of(TaskRejected)
    assert {one.code for one in rejected.problems} == {"invalid"}


def test_a_repeat_of_an_accepted_task_is_answered_though_no_more_are_taken() -> None:
    cluster = Cluster(max_open_sessions=2)
    request = shell_task("a", 2)
    cluster.submit(request)
    cluster.submit(request)
    cluster.cancel(CancelRequest(task_id="none"))
    cluster.commit()
    assert len(cluster.of(TaskAccepted)) == 2
    assert not cluster.of(TaskRejected)
    assert replace(request) == request
