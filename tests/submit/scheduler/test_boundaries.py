"""Where the scheduler meets what it does not control: dead halves, old beats, stopped clocks, foreign values."""

from __future__ import annotations

import pytest

from polar.schemas import (
    AgentSpec,
    AttemptFenced,
    CancelRequest,
    Failure,
    FailureKind,
    Grade,
    GradeAssigned,
    GradeRevoked,
    GroupClosed,
    Phase,
    PrepareAction,
    RecordRef,
    RuntimeSpec,
    SessionAssigned,
    SessionClosed,
    SessionGraded,
    SessionRevoked,
    Stage,
    Status,
    TaskAccepted,
    TaskRejected,
    encode,
)
from polar.schemas.validation import Limits, Refused
from tests.submit.scheduler.cluster import COMMAND, Cluster, Grader, shell_task


def running(cluster: Cluster) -> bool:
    return all(lease.phase is Phase.RUNNING for lease in cluster.machine.world.leases.values())


def test_a_node_whose_run_half_is_dead_is_given_nothing_and_burns_no_attempts() -> None:
    cluster = Cluster(gateways=1, retry_backoff=0)
    gateway = cluster.gateways["g0"]
    gateway.halves = {"init", "run"}
    cluster.beat_all()
    gateway.halves = {"init"}
    cluster.tick(5)
    cluster.submit(shell_task("t"))
    for _ in range(20):
        cluster.commit()
        cluster.work()
        cluster.deliver()
        cluster.tick()
    assert not cluster.of(SessionAssigned)
    cluster.settle()
    assert [one.attempt for one in cluster.of(SessionClosed)] == [1]


def test_a_new_leader_gives_nothing_to_nodes_that_it_only_knows_from_hearsay() -> None:
    cluster = Cluster(gateways=1, graders=1)
    cluster.gateways["g0"].up = cluster.graders["e0"].up = False
    cluster.submit(shell_task("t"))
    cluster.machine.world.take_out()
    cluster.restart_leader()
    cluster.commit()
    assert not cluster.of(SessionAssigned), "its last beat may be a week old"
    cluster.settle()
    assert [one.attempt for one in cluster.of(SessionClosed)] == [1]


def test_beats_of_former_boots_do_not_lose_what_unread_reports_explain() -> None:
    cluster = Cluster(gateways=1)
    cluster.submit(shell_task("t"))
    cluster.step_until(lambda: running(cluster))
    gateway = cluster.gateways["g0"]
    cluster.work()  # its end is reported and not read
    old = dict(cluster.nodes_topic)
    gateway.rows.clear()
    gateway.boot = "boot-1"
    new = cluster._beat(gateway)
    cluster.nodes_topic = {"before": old["g0"], "g0": new}  # not compacted yet
    cluster.restart_leader()
    cluster.settle()
    assert not cluster.of(AttemptFenced)
    assert [one.outcome.status for one in cluster.of(SessionClosed)] == [Status.COMPLETED]


def test_a_node_that_is_gone_for_good_is_forgotten() -> None:
    cluster = Cluster(gateways=2, node_memory=60)
    cluster.gateways["g1"].up = False
    cluster.tick(70)
    cluster.commit()
    assert "g1" not in cluster.machine.world.nodes
    assert "g1" not in cluster.nodes_topic, "the topic is told"
    assert "g0" in cluster.machine.world.nodes


def test_a_grade_whose_report_waits_for_the_log_is_not_given_up_by_the_clock() -> None:
    cluster = Cluster(gateways=1, graders=1)
    cluster.submit(shell_task("t", evaluation_timeout=10))
    cluster.step_until(lambda: bool(cluster.of(GradeAssigned)))
    cluster.work()
    assert cluster.reports, "the grade is on the log and not read"
    cluster.now += 3_600_000
    cluster.tick()
    cluster.commit()
    assert not cluster.of(SessionGraded)
    cluster.settle()
    (graded,) = cluster.of(SessionGraded)
    assert graded.grade.reward == 1.0


def test_a_leader_that_comes_late_places_before_it_expires() -> None:
    cluster = Cluster(gateways=1)
    cluster.submit(shell_task("t", queue_ttl=5))
    cluster.machine.world.take_out()
    for key, row in cluster.machine.world.take_dirty():
        cluster.rows[key] = row
    cluster.inputs.clear()
    cluster.now += 3_600_000
    cluster.restart_leader()
    cluster.tick()
    cluster.settle()
    assert [one.outcome.status for one in cluster.of(SessionClosed)] == [Status.COMPLETED]


def test_a_silent_grader_that_comes_back_is_told_to_stop() -> None:
    cluster = Cluster(gateways=1, graders=2)
    cluster.submit(shell_task("t", evaluator=COMMAND))
    cluster.step_until(lambda: bool(cluster.of(GradeAssigned)))
    cluster.read_assignments()
    first = next(one for one in cluster.graders.values() if one.rows)
    first.up = False
    cluster.tick(6)
    cluster.commit()
    assert len(cluster.of(GradeAssigned)) == 2
    first.up = True
    cluster.tick(4)
    cluster.commit()
    revoked = cluster.of(GradeRevoked)
    assert {(one.node, one.grade_id) for one in revoked} == {(first.node_id, cluster.of(GradeAssigned)[0].grade_id)}
    cluster.settle()
    assert len(cluster.of(SessionGraded)) == 1


def test_an_adapter_of_ones_own_is_placed_where_it_is_offered() -> None:
    cluster = Cluster(gateways=1)
    cluster.limits = Limits(import_paths=frozenset({"mine:Agent"}))
    cluster.machine.limits = cluster.limits
    cluster.gateways["g0"].harnesses = ["shell", "mine:Agent"]
    cluster.beat_all()
    cluster.submit(shell_task("t", agent=AgentSpec(import_path="mine:Agent")))
    cluster.settle()
    assert [one.outcome.status for one in cluster.of(SessionClosed)] == [Status.COMPLETED]


def test_a_repeat_is_answered_with_all_sessions_also_when_some_are_done() -> None:
    cluster = Cluster(gateways=1)
    cluster.gateways["g0"].init = cluster.gateways["g0"].run = 1
    cluster.gateways["g0"].ready = 0
    cluster.beat_all()
    cluster.submit(shell_task("t", 4))
    cluster.commit()
    for _ in range(60):
        if len(cluster.machine.world.leases) < 4:
            break
        cluster.commit()
        cluster.work()
        cluster.deliver()
        cluster.tick()
    assert 0 < len(cluster.machine.world.leases) < 4
    cluster.submit(shell_task("t", 4))
    cluster.commit()
    one, two = cluster.of(TaskAccepted)
    assert two.sessions == one.sessions


def test_a_grade_that_fits_no_record_is_a_failure_of_the_grader() -> None:
    cluster = Cluster(gateways=1)
    cluster.submit(shell_task("t"))
    cluster.step_until(lambda: bool(cluster.of(GradeAssigned)))
    (lease,) = cluster.machine.world.leases.values()
    for grade in (Grade(reward=1.0, report={"said": "x" * 1_000_000}), Grade(reward=float("nan"))):
        cluster.reports[:] = [
            cluster._stage(lease.session_id, "t", 1, Stage.GRADED, assignment=lease.assignment_id, grade=grade)
        ]
        cluster.deliver()
    cluster.settle()
    (graded,) = cluster.of(SessionGraded)
    assert graded.grade is None
    assert graded.failure.kind is FailureKind.EVALUATOR


def test_a_group_lists_failures_without_their_output() -> None:
    cluster = Cluster()
    cluster.submit(shell_task("t", 8))
    cluster.commit()
    for session in cluster.machine.world.leases:
        cluster.exits[session] = Failure(
            kind=FailureKind.HARNESS, message="exit 3" * 1000, detail={"output_tail": "x" * 200_000}
        )
    cluster.settle()
    (group,) = cluster.of(GroupClosed)
    assert len(encode(group)) < 20_000
    assert len(encode(cluster.of(SessionGraded)[0])) > 200_000, "the session itself keeps it"


def test_a_group_whose_other_tasks_never_come_is_decided_when_its_tasks_are_forgotten() -> None:
    cluster = Cluster(task_memory=100.0)
    cluster.submit(shell_task("a", metadata={"group_id": "g", "group_size": 2}))
    cluster.settle()
    cluster.tick(400)
    cluster.commit()
    (group,) = cluster.of(GroupClosed)
    assert (group.reason, len(group.members), group.size) == ("deadline", 1, 2)
    assert cluster.machine.world.groups == {}
    assert cluster.machine.world.tasks == {}


def test_an_attempt_whose_end_its_gateway_never_tells_is_given_up() -> None:
    cluster = Cluster(gateways=1, retry_backoff=0, overdue_margin=5.0)
    cluster.submit(shell_task("t", timeout_seconds=10))
    cluster.step_until(lambda: running(cluster))
    cluster.now += 86_400_000
    cluster.tick(14)
    cluster.commit()
    assert not cluster.of(AttemptFenced), "an outage counts for nothing"
    cluster.tick(4)
    cluster.commit()
    assert len(cluster.of(AttemptFenced)) == len(cluster.of(SessionRevoked)) == 1
    cluster.settle()
    assert [one.attempt for one in cluster.of(SessionClosed)] == [2]


def test_a_gateway_full_of_ungraded_boxes_is_given_no_more() -> None:
    cluster = Cluster(gateways=1, graders=0, kept_boxes=3)
    cluster.submit(shell_task("t", 20, evaluator=COMMAND))
    for _ in range(30):
        cluster.commit()
        cluster.work()
        cluster.deliver()
        cluster.tick()
    assert 3 <= len(cluster.gateways["g0"].rows) < 10
    cluster.graders["e0"] = Grader("e0")
    cluster.settle(rounds=100)
    assert len(cluster.of(SessionGraded)) == 20


def test_ids_and_reasons_that_are_none_are_refused_not_remembered() -> None:
    cluster = Cluster()
    for request in (
        CancelRequest(task_id="x" * 5_000_000),
        CancelRequest(task_id="a/b"),
        CancelRequest(task_id="t", reason="why " * 1000),
    ):
        with pytest.raises(Refused):
            cluster.machine.on_cancel(request)
    assert cluster.machine.world.cancels == {}


def test_a_rejection_fits_a_record_whatever_it_quotes() -> None:
    cluster = Cluster()
    huge = "x" * 3_000_000
    steps = [PrepareAction(type=huge) for _ in range(100)]
    cluster.submit(shell_task("t", agent=AgentSpec(harness=huge), runtime=RuntimeSpec(prepare=steps)))
    cluster.machine.reject(RecordRef(topic="tasks", partition=0, offset=9), huge, [])
    cluster.commit()
    assert len(cluster.of(TaskRejected)) == 2
    assert all(len(encode(one)) < 100_000 for one in cluster.of(TaskRejected))
