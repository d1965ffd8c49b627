"""What the scheduler decides, case by case, as the design says."""

from __future__ import annotations

from polar.schemas import (
    AttemptFenced,
    BuildSummary,
    CancelRequest,
    ControlState,
    Failure,
    FailureKind,
    GradeAssigned,
    GroupClosed,
    Phase,
    SessionAssigned,
    SessionClosed,
    SessionControl,
    SessionFinal,
    SessionGraded,
    SessionOpened,
    SessionReleased,
    SessionRevoked,
    Stage,
    Status,
    TaskAccepted,
    TaskRejected,
    TaskResult,
)
from tests.submit.scheduler.cluster import COMMAND, Cluster, shell_task

INFRA = Failure(kind=FailureKind.INFRA, message="the box would not start", retryable=True)


def running(cluster: Cluster) -> bool:
    return all(lease.phase is Phase.RUNNING for lease in cluster.machine.world.leases.values())


def test_a_task_becomes_sessions_and_each_ends_once() -> None:
    cluster = Cluster()
    cluster.submit(shell_task("t", 8))
    cluster.settle()
    (accepted,) = cluster.of(TaskAccepted)
    assert accepted.count == 8
    assert len(accepted.sessions) == len(set(accepted.sessions)) == 8
    for session in accepted.sessions:
        (opened,) = cluster.of(SessionOpened, session)
        (closed,) = cluster.of(SessionClosed, session)
        (graded,) = cluster.of(SessionGraded, session)
        (_final,) = cluster.of(SessionFinal, session)
        assert opened.num_samples == 8
        assert closed.outcome.status is Status.COMPLETED
        assert graded.grade.reward == 1.0
    (group,) = cluster.of(GroupClosed)
    assert group.reason == "complete"
    assert sorted(group.selection) == sorted(accepted.sessions)
    (result,) = cluster.of(TaskResult)
    assert result.status == "completed"
    assert result.counts.finished == result.counts.accepted == 8
    assert cluster.machine.world.leases == {}
    assert all(not gateway.rows for gateway in cluster.gateways.values()), "boxes left behind"


def test_the_same_body_is_answered_again_and_another_is_a_conflict() -> None:
    cluster = Cluster()
    first = cluster.submit(shell_task("t", 2))
    again = cluster.submit(shell_task("t", 2))
    other = cluster.submit(shell_task("t", 3))
    cluster.commit()
    one, two = cluster.of(TaskAccepted)
    assert (one.answers, two.answers, two.source) == (first, again, first)
    assert two.sessions == one.sessions
    (rejected,) = cluster.of(TaskRejected)
    assert rejected.answers == other
    assert rejected.problems[0].code == "conflict"


def test_a_repeat_is_known_after_a_new_leader_and_after_the_task_has_finished() -> None:
    cluster = Cluster()
    cluster.submit(shell_task("t", 2))
    cluster.settle()
    cluster.restart_leader()
    cluster.submit(shell_task("t", 2))
    cluster.commit()
    assert len(cluster.of(TaskAccepted)) == 2
    assert len(cluster.of(SessionOpened)) == 2


def test_infrastructure_is_retried_and_the_attempt_fenced() -> None:
    cluster = Cluster(gateways=1, retry_backoff=0)
    cluster.submit(shell_task("t"))
    cluster.commit()
    (session,) = cluster.machine.world.leases
    cluster.exits[session] = INFRA
    cluster.settle()
    (fenced,) = cluster.of(AttemptFenced)
    assert fenced.attempt == 1
    assert [one.attempt for one in cluster.of(SessionAssigned)] == [1, 2]
    (closed,) = cluster.of(SessionClosed)
    assert (closed.attempt, closed.outcome.status) == (2, Status.COMPLETED)
    states = [(one.state, one.attempt) for one in cluster.of(SessionControl)]
    assert states == [(ControlState.FENCED, 1), (ControlState.CLOSED, 2)]


def test_retries_end_at_max_attempts_without_a_reward() -> None:
    cluster = Cluster(gateways=1, retry_backoff=0)
    cluster.submit(shell_task("t", max_attempts=2))
    cluster.commit()
    (session,) = cluster.machine.world.leases
    for _ in range(40):
        cluster.exits[session] = INFRA
        cluster.commit()
        cluster.work()
        cluster.deliver()
        cluster.tick()
    (closed,) = cluster.of(SessionClosed)
    assert closed.outcome.failure.kind is FailureKind.INFRA
    (graded,) = cluster.of(SessionGraded)
    assert graded.grade is None
    assert graded.failure.kind is FailureKind.INFRA
    assert not cluster.of(GradeAssigned)


def test_the_policys_own_failure_is_not_retried_and_is_graded() -> None:
    cluster = Cluster(gateways=1)
    cluster.submit(shell_task("t"))
    cluster.commit()
    (session,) = cluster.machine.world.leases
    cluster.exits[session] = Failure(kind=FailureKind.HARNESS, message="exit 3")
    cluster.settle()
    assert len(cluster.of(SessionAssigned)) == 1
    (graded,) = cluster.of(SessionGraded)
    assert graded.outcome.status is Status.ERROR
    assert graded.grade is not None


def test_a_timeout_is_graded_with_its_status() -> None:
    cluster = Cluster(gateways=1)
    cluster.submit(shell_task("t"))
    cluster.commit()
    (session,) = cluster.machine.world.leases
    cluster.exits[session] = Failure(kind=FailureKind.TIMEOUT, message="time is up")
    cluster.settle()
    (graded,) = cluster.of(SessionGraded)
    assert graded.outcome.status is Status.TIMEOUT
    assert graded.grade is not None


def test_nothing_captured_is_no_reward_not_reward_zero() -> None:
    cluster = Cluster(gateways=1)
    cluster.submit(shell_task("t"))
    cluster.commit()
    (session,) = cluster.machine.world.leases
    wiring = Failure(kind=FailureKind.NO_COMPLETIONS, message="no call was captured")
    cluster.summaries[session] = BuildSummary(
        captured=0, failed=0, traces=0, trained_tokens=0, prompt_tokens=0, failure=wiring
    )
    cluster.settle()
    (graded,) = cluster.of(SessionGraded)
    assert graded.grade is None
    assert graded.outcome.status is Status.ERROR
    assert graded.outcome.failure.kind is FailureKind.NO_COMPLETIONS


def test_a_cancel_while_queued_ends_the_session_without_a_node() -> None:
    cluster = Cluster(gateways=0)
    cluster.submit(shell_task("t"))
    cluster.commit()
    cluster.machine.on_cancel(CancelRequest(task_id="t", reason="changed my mind"))
    cluster.settle()
    assert not cluster.of(SessionAssigned)
    (_opened,) = cluster.of(SessionOpened)
    (closed,) = cluster.of(SessionClosed)
    assert closed.outcome.status is Status.CANCELLED
    (group,) = cluster.of(GroupClosed)
    assert group.selection == []


def test_a_cancel_that_overtakes_its_task_still_cancels_it() -> None:
    cluster = Cluster()
    cluster.machine.on_cancel(CancelRequest(task_id="t"))
    cluster.commit()
    cluster.restart_leader()
    cluster.submit(shell_task("t", 3))
    cluster.settle()
    assert not cluster.of(SessionAssigned)
    assert [one.outcome.status for one in cluster.of(SessionClosed)] == [Status.CANCELLED] * 3


def test_a_cancel_while_running_revokes_and_closes_once_the_processes_are_dead() -> None:
    cluster = Cluster(gateways=1)
    cluster.submit(shell_task("t"))
    cluster.step_until(lambda: running(cluster))
    (lease,) = cluster.machine.world.leases.values()
    assert lease.phase is Phase.RUNNING
    cluster.machine.on_cancel(CancelRequest(task_id="t"))
    cluster.commit()
    assert len(cluster.of(SessionRevoked)) == 1
    assert not cluster.of(SessionClosed), "closed before the gateway reported the death of its processes"
    cluster.settle()
    (closed,) = cluster.of(SessionClosed)
    assert closed.outcome.status is Status.CANCELLED


def test_a_silent_gateway_loses_its_sessions_and_takes_nothing_back() -> None:
    cluster = Cluster(gateways=2, retry_backoff=0)
    cluster.submit(shell_task("t", 2))
    cluster.step_until(lambda: running(cluster))
    silent = next(one for one in cluster.gateways.values() if one.rows)
    silent.up = False
    cluster.tick(6)
    cluster.commit()
    assert cluster.of(AttemptFenced)
    cluster.settle()  # it comes back with its old rows
    assert [one.outcome.status for one in cluster.of(SessionClosed)] == [Status.COMPLETED] * 2
    assert all(not gateway.rows for gateway in cluster.gateways.values())


def test_an_assignment_that_a_node_read_and_does_not_have_is_queued_again() -> None:
    cluster = Cluster(gateways=1, retry_backoff=0)
    cluster.submit(shell_task("t"))
    cluster.commit()
    gateway = cluster.gateways["g0"]
    cluster.read_assignments()
    gateway.rows.clear()
    cluster.tick(4)
    cluster.commit()
    assert len(cluster.of(AttemptFenced)) == 1
    cluster.settle()
    assert [one.attempt for one in cluster.of(SessionClosed)] == [2]


def test_an_outage_of_the_log_expires_nothing() -> None:
    cluster = Cluster(gateways=1)
    cluster.submit(shell_task("t"))
    cluster.step_until(lambda: running(cluster))
    cluster.now += 3_600_000  # an hour passes and no tick is read back
    cluster.machine.tick(cluster.now)
    cluster.commit()
    assert not cluster.of(AttemptFenced)


def test_a_session_that_no_node_takes_ends_at_queue_ttl() -> None:
    cluster = Cluster(gateways=0)
    cluster.submit(shell_task("t", queue_ttl=5))
    cluster.tick(6)
    cluster.settle()
    (closed,) = cluster.of(SessionClosed)
    assert closed.outcome.failure.kind is FailureKind.INFRA
    assert "queue_ttl" in closed.outcome.failure.message


def test_a_box_is_kept_for_its_grader_and_released_after() -> None:
    cluster = Cluster(gateways=1)
    cluster.submit(shell_task("t", evaluator=COMMAND))
    released_at: list[tuple[int, int]] = []
    for _ in range(12):
        cluster.commit()
        cluster.work()
        cluster.deliver()
        released_at.append((len(cluster.of(SessionGraded)), len(cluster.of(SessionReleased))))
    (grade,) = cluster.of(GradeAssigned)
    assert grade.box.url == "http://g0"
    assert grade.box.key.startswith("key-")
    assert all(released == 0 for graded, released in released_at if graded == 0)
    assert released_at[-1] == (1, 1)


def built_while_its_gateway_is_silent(box_patience: int) -> Cluster:
    cluster = Cluster(gateways=1, box_patience=box_patience)
    cluster.submit(shell_task("t", evaluator=COMMAND))
    cluster.step_until(lambda: bool(cluster.of(SessionClosed)))
    cluster.gateways["g0"].up = False
    cluster.tick(6)  # more than node_silence
    cluster.commit()
    cluster.deliver()
    cluster.commit()
    assert not cluster.of(SessionGraded)
    assert not cluster.of(GradeAssigned)
    return cluster


def test_a_box_is_waited_for_while_its_gateway_is_silent() -> None:
    cluster = built_while_its_gateway_is_silent(box_patience=50)
    cluster.settle()  # the gateway wakes, as it was
    (graded,) = cluster.of(SessionGraded)
    assert graded.grade.reward == 1.0
    assert not cluster.gateways["g0"].rows, "boxes left behind"


def test_a_box_is_waited_for_no_longer_than_the_patience() -> None:
    cluster = built_while_its_gateway_is_silent(box_patience=50)
    cluster.tick(51)
    cluster.commit()
    (graded,) = cluster.of(SessionGraded)
    assert graded.grade is None
    assert graded.failure.message == "the session's box was gone before it could be graded"


def test_a_box_is_not_waited_for_when_its_gateway_has_lost_its_state() -> None:
    cluster = built_while_its_gateway_is_silent(box_patience=50)
    gateway = cluster.gateways["g0"]
    gateway.rows.clear()
    gateway.boot = "boot-1"
    gateway.up = True
    cluster.settle()
    (graded,) = cluster.of(SessionGraded)
    assert graded.grade is None


def test_a_grade_that_started_in_the_sessions_box_is_not_tried_again() -> None:
    cluster = Cluster(gateways=1, graders=1)
    cluster.submit(shell_task("t", evaluator=COMMAND))
    cluster.step_until(lambda: bool(cluster.of(GradeAssigned)))
    (lease,) = cluster.machine.world.leases.values()
    cluster.reports.clear()
    cluster.reports.append(cluster._stage(lease.session_id, "t", 1, Stage.EVALUATING, assignment=lease.assignment_id))
    cluster.deliver()
    cluster.graders["e0"].rows.clear()
    cluster.graders["e0"].inbox.clear()
    cluster.graders["e0"].boot = "boot-1"
    cluster.settle()
    assert len(cluster.of(GradeAssigned)) == 1
    (graded,) = cluster.of(SessionGraded)
    assert graded.grade is None
    assert graded.failure.kind is FailureKind.EVALUATOR


def test_a_grade_without_a_box_is_tried_on_another_grader() -> None:
    cluster = Cluster(gateways=1, graders=1)
    cluster.submit(shell_task("t"))
    cluster.step_until(lambda: bool(cluster.of(GradeAssigned)))
    cluster.reports.clear()
    cluster.graders["e0"].rows.clear()
    cluster.graders["e0"].inbox.clear()
    cluster.graders["e0"].boot = "boot-1"
    cluster.settle()
    assert len(cluster.of(GradeAssigned)) == 2
    (graded,) = cluster.of(SessionGraded)
    assert graded.grade.reward == 1.0


def test_init_goes_on_filling_ready_while_run_is_full() -> None:
    cluster = Cluster(gateways=1)
    gateway = cluster.gateways["g0"]
    gateway.init, gateway.ready, gateway.run = 2, 3, 1
    cluster.beat(gateway)
    cluster.submit(shell_task("t", 8))
    for _ in range(6):
        cluster.commit()
        cluster.read_assignments()
        for one, row in gateway.rows.items():
            if row.stage == Stage.INITIALIZING:
                row.stage = Stage.READY
                cluster.reports.append(cluster._stage(row.session, "t", 1, Stage.READY, assignment=one))
        ready = [one for one, row in gateway.rows.items() if row.stage == Stage.READY]
        if ready and not any(row.stage == Stage.RUNNING for row in gateway.rows.values()):
            gateway.rows[ready[0]].stage = Stage.RUNNING
            row = gateway.rows[ready[0]]
            cluster.reports.append(cluster._stage(row.session, "t", 1, Stage.RUNNING, assignment=ready[0]))
        cluster.deliver()
    stages = sorted(row.stage for row in gateway.rows.values())
    assert stages == [Stage.READY] * 3 + [Stage.RUNNING]


def test_a_group_decides_by_quorum_and_lists_only_who_was_in_time() -> None:
    cluster = Cluster(gateways=1)
    cluster.gateways["g0"].run = cluster.gateways["g0"].init = 1
    cluster.gateways["g0"].ready = 0
    cluster.beat_all()
    cluster.submit(shell_task("t", 4, group_quorum=2))
    cluster.settle()
    (group,) = cluster.of(GroupClosed)
    assert group.reason == "quorum"
    assert len(group.selection) == 2
    assert len(cluster.of(SessionClosed)) == 4, "the rest still ends"


def test_a_group_decides_at_its_deadline() -> None:
    cluster = Cluster(gateways=0)
    cluster.submit(shell_task("t", 4, group_deadline=10))
    cluster.commit()
    cluster.tick(11)
    cluster.commit()
    (group,) = cluster.of(GroupClosed)
    assert (group.reason, group.members) == ("deadline", [])


def test_tasks_share_a_group_only_by_name_and_size() -> None:
    cluster = Cluster()
    cluster.submit(shell_task("a", metadata={"group_id": "g", "group_size": 2}))
    cluster.submit(shell_task("b", metadata={"group_id": "g", "group_size": 2}))
    cluster.submit(shell_task("c", metadata={"group_id": "g", "group_size": 2}))
    cluster.settle()
    (rejected,) = cluster.of(TaskRejected)
    assert (rejected.task_id, rejected.problems[0].field) == ("c", "metadata.group_id")
    (group,) = cluster.of(GroupClosed)
    assert (group.group_id, group.tasks, len(group.members)) == ("g", ["a", "b"], 2)
    cluster.submit(shell_task("d", metadata={"group_id": "g", "group_size": 2}))
    cluster.commit()
    assert cluster.of(TaskRejected)[-1].problems[0].code == "too_late"


def test_a_task_larger_than_a_group_gets_a_group_per_session() -> None:
    cluster = Cluster(gateways=1)
    cluster.gateways["g0"].init = cluster.gateways["g0"].run = 400
    cluster.graders["e0"].slots = 400
    cluster.beat_all()
    cluster.submit(shell_task("t", 300))
    cluster.settle()
    assert {one.group_id for one in cluster.of(GroupClosed)} == {one.session_id for one in cluster.of(SessionClosed)}


def test_a_group_of_eight_with_one_infrastructure_failure_lists_it_without_a_reward() -> None:
    cluster = Cluster()
    cluster.submit(shell_task("t", 8, max_attempts=1))
    cluster.commit()
    broken = min(cluster.machine.world.leases)
    cluster.exits[broken] = INFRA
    cluster.settle()
    (group,) = cluster.of(GroupClosed)
    rewards = {one.session_id: one.reward for one in group.members}
    assert len(rewards) == 8
    assert rewards.pop(broken) is None
    assert set(rewards.values()) == {1.0}
    assert broken not in group.selection
    assert len(group.selection) == 7
