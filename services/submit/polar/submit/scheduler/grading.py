"""From the build to the decided grade, as functions over the `World`.

Grading is leased like running. Graders only report; `SessionGraded` of revision 0 is written here, once per session:
the first report, or no reward with the failure where there is nothing to grade or the tries are used up. A grade is
never tried again in a box in which one has started, since it may have changed it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from polar.schemas import (
    UNGRADED,
    BoxAccess,
    Failure,
    FailureKind,
    Grade,
    GradeAssigned,
    GradeRevoked,
    Lease,
    Outcome,
    Phase,
    SessionGraded,
    Stage,
    StageChanged,
    Status,
)
from polar.schemas.ids import derived

from .sessions import bounded, needs_own_box, release
from .settings import SchedulerSettings
from .world import World

SignBox = Callable[[str, int, int], str]
"""(session, attempt, not after in ms) → a key for that session's box."""


def on_built(world: World, event: StageChanged) -> None:
    lease = world.leases.get(event.session_id)
    if lease is None or lease.phase is not Phase.CLOSED or event.attempt != lease.attempt:
        return
    if event.built is None or event.summary is None:
        return
    assert lease.outcome is not None
    outcome, summary, doom = lease.outcome, event.summary, world.doomed.get(lease.session_id)
    if doom is not None:
        event, summary = replace(event, timing_ms={}), replace(summary, set_aside={}, failure=None)
    if summary.failure is not None:
        # what the calls alone show: the wiring was broken, the model was away, the builder failed
        outcome = Outcome(status=Status.ERROR, failure=bounded(summary.failure), exit_code=outcome.exit_code)
    timing = {**lease.timing_ms, **event.timing_ms}
    lease = world.change(
        lease, built=event.built, summary=summary, outcome=outcome, phase=Phase.BUILT, timing_ms=timing
    )
    failure = doom or outcome.failure
    if doom is not None:
        decide(world, lease, None, doom)
    elif (
        failure is not None and (failure.kind in UNGRADED or failure.kind is FailureKind.EVALUATOR)
    ) or summary.captured == 0:
        decide(world, lease, None, failure)


def box_awaited(world: World, settings: SchedulerSettings, lease: Lease) -> bool:
    """Whether the grade needs a box whose gateway is silent and may come back with it: a pause loses no box."""
    gateway = world.nodes.get(lease.node or "")
    if gateway is None or gateway.alive or gateway.boot != lease.boot or gateway.gone > settings.box_patience:
        return False
    return lease.box_held and needs_own_box(world, lease)


def assign_grade(world: World, lease: Lease, node: str, boot: str, settings: SchedulerSettings, sign: SignBox) -> None:
    """Give a built session to a grader."""
    assert lease.built is not None
    assert lease.outcome is not None
    request = world.request(lease)
    own_box = needs_own_box(world, lease)
    access = None
    if own_box:
        gateway = world.nodes.get(lease.node or "")
        if not lease.box_held or gateway is None or not gateway.alive or gateway.runtime_api is None:
            gone = Failure(
                kind=FailureKind.EVALUATOR,
                stage=Stage.EVALUATING,
                message="the session's box was gone before it could be graded",
            )
            decide(world, lease, None, gone)
            return
        good_for = request.evaluation_timeout + settings.box_key_life
        key = sign(lease.session_id, lease.attempt, world.now_ms + int(good_for * 1000))
        access = BoxAccess(url=gateway.runtime_api, key=key, workdir=request.runtime.workdir)
    number = lease.grade_attempt + 1
    grade_id = derived("grade", lease.session_id, lease.attempt, number)
    world.emit(
        "assignments",
        node,
        GradeAssigned(
            grade_id=grade_id,
            node=node,
            boot=boot,
            session_id=lease.session_id,
            attempt=lease.attempt,
            task_id=lease.task_id,
            evaluator=request.evaluator,
            instruction_ref=world.tasks[lease.task_id].source,
            outcome=lease.outcome,
            built=lease.built,
            box=access,
            timeout_s=request.evaluation_timeout,
        ),
    )
    world.change(
        lease,
        phase=Phase.GRADING,
        assignment_id=grade_id,
        assigned_offset=-1,
        grader=node,
        grader_boot=boot,
        grade_attempt=number,
        grade_started=False,
        grade_deadline_ms=world.now_ms + int((request.evaluation_timeout + settings.grade_margin) * 1000),
    )


def on_report(world: World, settings: SchedulerSettings, event: StageChanged) -> None:
    lease = world.leases.get(event.session_id)
    if lease is None or lease.phase is not Phase.GRADING or event.assignment != lease.assignment_id:
        return
    if (doom := world.doomed.get(lease.session_id)) is not None:
        event = replace(event, grade=None, timing_ms={}, failure=doom)
    if event.stage is Stage.EVALUATING:
        world.change(lease, grade_started=True)
    elif event.stage is Stage.GRADED:
        timing = {**lease.timing_ms, **event.timing_ms}
        lease = world.change(lease, timing_ms=timing)
        if event.grade is not None and (reason := _unfit(event.grade, settings)) is None:
            decide(world, lease, event.grade, bounded(event.failure))
        else:
            if event.grade is None:
                reason = "the grader reported neither a grade nor a failure"
            failure = Failure(kind=FailureKind.EVALUATOR, message=reason or "", stage=Stage.EVALUATING)
            lost(world, settings, lease, bounded(event.failure) or failure)


def _unfit(grade: Grade, settings: SchedulerSettings) -> str | None:
    """Why a grade cannot be taken: what a check prints must stop neither this session nor all others."""
    numbers = (grade.reward, *grade.rewards.values(), *grade.trace_rewards.values())
    if any(one is not None and not math.isfinite(one) for one in numbers):
        return "the grader reported a reward that is no finite number"
    size = len(msgspec.msgpack.encode(grade))
    if size > settings.max_grade_bytes:
        return f"the grade takes {size} bytes and may take {settings.max_grade_bytes} (POLAR_SCHEDULER_MAX_GRADE_BYTES)"
    return None


def end_doomed(world: World, settings: SchedulerSettings, lease: Lease, failure: Failure) -> None:
    """Decide without a reward what is built and cannot go on; a grade under way is taken back."""
    if lease.phase not in (Phase.BUILT, Phase.GRADING):
        return
    small = None if lease.summary is None else replace(lease.summary, set_aside={})
    lease = world.change(lease, artifacts=[], timing_ms={}, summary=small)
    if lease.phase is Phase.GRADING:
        lost(world, settings, lease, failure, revoke=True)
    else:
        decide(world, lease, None, failure)


def lost(world: World, settings: SchedulerSettings, lease: Lease, failure: Failure, *, revoke: bool = False) -> None:
    """A grade came to nothing: try elsewhere if that is allowed, else decide without a reward."""
    if revoke and lease.grader is not None and lease.grader_boot is not None and lease.assignment_id is not None:
        world.emit(
            "assignments",
            lease.grader,
            GradeRevoked(
                grade_id=lease.assignment_id,
                node=lease.grader,
                boot=lease.grader_boot,
                session_id=lease.session_id,
                reason=failure.message,
            ),
        )
    touched = needs_own_box(world, lease) and lease.grade_started
    if failure.retryable and not touched and lease.grade_attempt < settings.grade_attempts:
        world.change(
            lease,
            phase=Phase.BUILT,
            assignment_id=None,
            assigned_offset=-1,
            grader=None,
            grader_boot=None,
            grade_started=False,
            grade_deadline_ms=None,
        )
        return
    decide(world, lease, None, failure)


def decide(world: World, lease: Lease, grade: Grade | None, failure: Failure | None) -> None:
    """Write the session's one grade of revision 0."""
    assert lease.built is not None
    assert lease.outcome is not None
    request = world.request(lease)
    world.emit(
        "graded",
        lease.session_id,
        SessionGraded(
            session_id=lease.session_id,
            attempt=lease.attempt,
            task_id=lease.task_id,
            group_id=lease.group_id,
            outcome=lease.outcome,
            built=lease.built,
            grade=grade,
            failure=failure,
            evaluator=request.evaluator,
            artifacts=lease.artifacts,
            timing_ms=lease.timing_ms,
            node=lease.node,
            at_ms=world.now_ms,
        ),
        lease.built,
    )
    lease = release(world, lease)
    world.change(
        lease,
        phase=Phase.GRADED,
        grade=None if grade is None else Grade(reward=grade.reward),  # the rest is in `graded`
        assignment_id=None,
        assigned_offset=-1,
        grader=None,
        grader_boot=None,
        grade_deadline_ms=None,
    )
