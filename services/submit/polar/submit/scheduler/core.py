"""The one decider: a pure state machine over events, clock and seed.

It is fed records in log order and ticks, and leaves behind what to write: decisions in `world.out`, its own changed
rows in `world.take_dirty()`. The shell writes both, with the cursors, in one transaction. If that fails the machine is
thrown away and rebuilt from the log, so nothing here needs to be undone.
"""

from __future__ import annotations

from msgspec.structs import replace

from polar.schemas import (
    CancelMemory,
    CancelRequest,
    Failure,
    FailureKind,
    GroupState,
    Lease,
    NodeHeartbeat,
    Notice,
    Outcome,
    Phase,
    Problem,
    RecordRef,
    Stage,
    StageChanged,
    Status,
    TaskAccepted,
    TaskCounts,
    TaskRejected,
    TaskRequest,
    TaskState,
)
from polar.schemas.ids import MAX_ID_LENGTH, derived, id_problem, session_id
from polar.schemas.tasks import DEFAULT_QUEUE_TTL
from polar.schemas.validation import Limits, Refused, check, check_cancel, group_of

from . import grading, groups, placement, sessions
from .nodes import Nodes
from .settings import SchedulerSettings
from .world import World

FORGET_EVERY = 60
"""Ticks between two looks for what is past its memory: those tables hold days of tasks."""

PROBLEMS, PROBLEM_TEXT = 50, 500
"""Of a rejection: so many problems, with so many characters of field and message each."""

PAUSE_TICKS = 5
"""A tick that comes so many ticks late: the process, its clock or the log stood still."""


class Scheduler:
    def __init__(self, settings: SchedulerSettings, limits: Limits, sign_box: grading.SignBox) -> None:
        self.settings = settings
        self.limits = limits
        self.world = World()
        self.caught_up = False
        """False while a new leader reads what it missed: a node's books are not compared with leases that lag."""
        self._nodes = Nodes(self.world, settings)
        self._sign_box = sign_box
        self._running: dict[str, int] = {}
        """Assignment → the tick at which it was first seen running."""
        self._ungraded: dict[str, int] = {}
        """Built session → the tick since which no living grader has offered its evaluator."""
        self._ticked_ms: int | None = None
        self._patience = settings.lost_after
        """Ticks for which no budget runs out: reports of what happened meanwhile come first."""

    def catch_up(self) -> None:
        """What was on the log at the start is read: from here on nodes are compared with leases, and budgets count."""
        self.caught_up = True
        self._be_patient()
        self._nodes.catch_up()

    # tasks

    def on_task(self, ref: RecordRef, request: TaskRequest, body_sha256: str) -> None:
        """A task's record. `request.instruction` is already a claim if it is long; the hash is of the original body."""
        if request.task_id is None:
            request = replace(request, task_id=derived("task", ref.partition, ref.offset))
        task_id = request.task_id
        assert task_id is not None
        known = self.world.tasks.get(task_id)
        if known is not None:
            if known.body_sha256 == body_sha256:
                source = known.source
                made = [session_id(source.partition, source.offset, one) for one in range(known.counts.accepted)]
                self._accepted(known, ref, made, [])
            else:
                message = "this id was used for another task; choose a new one"
                self.reject(ref, task_id, [Problem(field="task_id", message=message, code="conflict")])
            return
        try:
            if task_id in self.world.too_large:
                message = f"what follows from it cannot be written: {self.world.too_large[task_id]}"
                raise Refused([Problem(field="", message=message)], task_id)
            request, notices = check(request, self.limits)
            self._admit(request)
            self._accept(ref, request, body_sha256, notices)
        except Refused as refused:
            self.reject(ref, task_id, refused.problems)

    def reject(self, ref: RecordRef, task_id: str | None, problems: list[Problem]) -> None:
        """Answer a record of `polar.tasks` that is not taken."""
        # what is quoted came from outside and may be as long as a record
        shown = [
            replace(one, field=one.field[:PROBLEM_TEXT], message=one.message[:PROBLEM_TEXT])
            for one in problems[: 1 if task_id in self.world.too_large else PROBLEMS]
        ]
        named = None if task_id is None else task_id[:MAX_ID_LENGTH]
        rejected = TaskRejected(task_id=named, answers=ref, problems=shown, at_ms=self.world.now_ms)
        # what cannot be an id cannot be a key either
        usable = task_id is not None and id_problem(task_id) is None
        self.world.emit("stages", task_id if usable else derived("task", ref.partition, ref.offset), rejected, ref)

    def _accept(self, ref: RecordRef, request: TaskRequest, body_sha256: str, notices: list[Notice]) -> None:
        world, task_id = self.world, request.task_id
        assert task_id is not None
        made = [session_id(ref.partition, ref.offset, sample) for sample in range(request.num_samples)]
        group_id, size = group_of(request, made[0], self.limits)
        single = group_id == made[0]
        for group in made if single else [group_id]:
            self._join(group, size, task_id, request)
        state = world.put_task(
            TaskState(
                task_id=task_id,
                body_sha256=body_sha256,
                source=ref,
                group_id=task_id if single else group_id,
                counts=TaskCounts(accepted=len(made)),
                accepted_at_ms=world.now_ms,
            )
        )
        world.requests[task_id] = request
        for sample, session in enumerate(made):
            world.put(
                Lease(
                    session_id=session,
                    task_id=task_id,
                    group_id=session if single else group_id,
                    sample=sample,
                    phase=Phase.QUEUED,
                    queued_at_ms=world.now_ms,
                )
            )
        self._accepted(state, ref, made, notices)
        memory = world.cancels.get(task_id)
        if memory is not None:
            world.drop_cancel(task_id)
            self._cancel(task_id, memory.session_id, memory.reason)

    def _admit(self, request: TaskRequest) -> None:
        """
        Raises:
            Refused: so many sessions are open that it has to come again later.
        """
        most, there = self.settings.max_open_sessions, len(self.world.leases)
        if request.num_samples > most:
            message = f"at most {most} sessions may be open at once (POLAR_SCHEDULER_MAX_OPEN_SESSIONS)"
            raise Refused([Problem(field="num_samples", message=message)], request.task_id)
        if there + request.num_samples > most:
            message = (
                f"{there} sessions are open and {most} may be (POLAR_SCHEDULER_MAX_OPEN_SESSIONS); send the same task "
                "again when some have finished"
            )
            raise Refused([Problem(field="num_samples", message=message, code="busy")], request.task_id)

    def _join(self, group_id: str, size: int, task_id: str, request: TaskRequest) -> None:
        """Make the group or add a task to it.

        Raises:
            Refused: the group is decided, full, or of another size.
        """
        world = self.world
        group = world.groups.get(group_id)
        if group_id in world.too_large:
            message = f"group `{group_id}` takes no more: {world.too_large[group_id]}"
            raise Refused([Problem(field="metadata.group_id", message=message, code="too_late")], task_id)
        if group is None:
            deadline = request.group_deadline
            world.put_group(
                GroupState(
                    group_id=group_id,
                    size=size,
                    tasks=[task_id],
                    opened_at_ms=world.now_ms,
                    deadline_ms=None if deadline is None else world.now_ms + int(deadline * 1000),
                    quorum=request.group_quorum,
                )
            )
            return
        field = "metadata.group_id"
        if group.decided_at_ms is not None:
            message = f"group `{group_id}` is already decided"
            raise Refused([Problem(field=field, message=message, code="too_late")], task_id)
        taken = sum(self.world.tasks[one].counts.accepted for one in group.tasks if one in self.world.tasks)
        if "group_size" not in request.metadata or group.size != size or taken + request.num_samples > size:
            message = (
                f"group `{group_id}` holds {taken} of {group.size} sessions and cannot take {request.num_samples}; "
                "tasks that share a group each name it with the same `metadata.group_size`"
            )
            raise Refused([Problem(field=field, message=message, code="conflict")], task_id)
        world.put_group(replace(group, tasks=[*group.tasks, task_id]))

    def _accepted(self, state: TaskState, answers: RecordRef, made: list[str], notices: list[Notice]) -> None:
        request = self.world.requests.get(state.task_id)  # gone once the task has finished
        self.world.emit(
            "stages",
            state.task_id,
            TaskAccepted(
                task_id=state.task_id,
                count=state.counts.accepted,
                group_id=state.group_id,
                source=state.source,
                answers=answers,
                at_ms=self.world.now_ms,
                sessions=made,
                warnings=notices,
                harness=None if request is None else request.agent.harness or request.agent.import_path,
            ),
            answers,
        )

    def on_cancel(self, request: CancelRequest) -> None:
        """A cancel's record.

        Raises:
            Refused: its ids can be none, or its reason is too long.
        """
        check_cancel(request)
        if request.task_id in self.world.tasks:
            self._cancel(request.task_id, request.session_id, request.reason)
            return
        # the task may stand in another partition of polar.tasks and not have been read yet
        before = self.world.cancels.get(request.task_id)
        if before is not None and before.session_id is None:
            return  # all of it is cancelled already
        until = self.world.now_ms + int(DEFAULT_QUEUE_TTL * 1000)
        self.world.put_cancel(
            CancelMemory(task_id=request.task_id, session_id=request.session_id, reason=request.reason, until_ms=until)
        )

    def _cancel(self, task_id: str, session: str | None, reason: str) -> None:
        for one in list(self.world.sessions_of.get(task_id, ())):
            if session is None or one == session:
                sessions.cancel(self.world, self.settings, self.world.leases[one], reason)

    # reports

    def on_stage(self, event: StageChanged) -> None:
        match event.stage:
            case Stage.INITIALIZING | Stage.READY | Stage.RUNNING | Stage.ENDED:
                sessions.on_report(self.world, self.settings, event)
            case Stage.BUILT:
                grading.on_built(self.world, event)
            case Stage.EVALUATING | Stage.GRADED:
                grading.on_report(self.world, self.settings, event)
            case Stage.FINISHED:
                groups.on_finished(self.world, event)
            case Stage.REGISTERED | Stage.CLOSED:
                pass  # its own

    # nodes

    def on_heartbeat(self, beat: NodeHeartbeat) -> None:
        self._nodes.on_heartbeat(beat)

    def on_own_tick(self) -> None:
        """A tick of this leader was read back: the log is alive, so silence counts."""
        self._nodes.on_own_tick()

    # time

    def advance(self, now_ms: int) -> None:
        """The clock's word; it never goes back."""
        self.world.now_ms = max(self.world.now_ms, now_ms)

    def tick(self, now_ms: int) -> None:
        """A tick's worth of time has passed."""
        pause_ms = PAUSE_TICKS * self.settings.tick_seconds * 1000
        late = self._ticked_ms is not None and now_ms - self._ticked_ms > pause_ms
        self._ticked_ms = now_ms
        self.advance(now_ms)
        world = self.world
        world.ticks += 1
        self._nodes.forget_doubts()
        for session, left in list(world.final_wait.items()):
            if left > 1:
                world.final_wait[session] = left - 1
            else:
                sessions.finalize(world, session)
        self._give_up_overdue()
        if self.caught_up:
            self._give_up_ungraded()
        if late:
            self._be_patient()
        elif self._patience > 0:
            self._patience -= 1
        elif self.caught_up:
            self._expire()
        if world.ticks % FORGET_EVERY == 0:
            self._forget()

    def _be_patient(self) -> None:
        """After an outage, a take-over or a step of the clock: what happened meanwhile is read before it is judged."""
        self._patience = self.settings.lost_after
        least = self.world.now_ms + int(self.settings.grade_margin * 1000)
        for lease in self.world.in_phase(Phase.GRADING):
            if lease.grade_deadline_ms is not None and lease.grade_deadline_ms < least:
                self.world.change(lease, grade_deadline_ms=least)

    def _expire(self) -> None:
        """End what has outlived its budget by the clock."""
        world = self.world
        for lease in world.in_phase(Phase.QUEUED):
            request = world.request(lease)
            if world.now_ms - lease.queued_at_ms >= request.queue_ttl * 1000:
                message = f"no node took the session within queue_ttl ({request.queue_ttl:g} s)"
                if lease.failure is not None:
                    message += f"; its last attempt failed: {lease.failure.message}"
                failure = Failure(kind=FailureKind.INFRA, message=message, stage=Stage.REGISTERED)
                sessions.close(world, self.settings, lease, Outcome(status=Status.ERROR, failure=failure))
        for lease in world.in_phase(Phase.GRADING):
            if lease.grade_deadline_ms is not None and world.now_ms >= lease.grade_deadline_ms:
                message = "the grader was silent beyond evaluation_timeout"
                failure = Failure(kind=FailureKind.EVALUATOR, message=message, stage=Stage.EVALUATING)
                grading.lost(world, self.settings, lease, failure, revoke=True)
        for group in list(world.groups.values()):
            if group.decided_at_ms is None and group.deadline_ms is not None:
                groups.consider(world, group)

    def _give_up_overdue(self) -> None:
        """An attempt whose gateway lives and never says that it has ended. In ticks, so no outage counts."""
        world, running = self.world, {}
        for lease in world.in_phase(Phase.RUNNING):
            assert lease.assignment_id is not None
            since = running[lease.assignment_id] = self._running.get(lease.assignment_id, world.ticks)
            limit = world.request(lease).timeout_seconds + self.settings.overdue_margin
            if (world.ticks - since) * self.settings.tick_seconds > limit:
                message = "its gateway did not tell the attempt's end long after timeout_seconds"
                sessions.revoke(world, lease, message)
                self._nodes.lost(lease, grading_here=False, message=message)
        self._running = running

    def _give_up_ungraded(self) -> None:
        """Built sessions whose evaluator nobody offers. In ticks of this leader, so no outage or take-over counts."""
        world, waiting = self.world, {}
        offered = placement.evaluators_offered(world)
        for lease in world.in_phase(Phase.BUILT):
            name = placement.evaluator_name(world, lease)
            if name in offered:
                continue
            since = waiting[lease.session_id] = self._ungraded.get(lease.session_id, world.ticks)
            if (world.ticks - since) * self.settings.tick_seconds >= self.settings.grade_queue_ttl:
                message = (
                    f"no grader that offers evaluator `{name}` was there within grade_queue_ttl "
                    f"({self.settings.grade_queue_ttl:g} s); start one"
                )
                failure = Failure(
                    kind=FailureKind.EVALUATOR,
                    message=message,
                    stage=Stage.EVALUATING,
                    detail={"code": "not_available"},
                )
                grading.decide(world, lease, None, failure)
        self._ungraded = waiting

    def _forget(self) -> None:
        """End what is past its memory."""
        world, memory_ms = self.world, self.settings.task_memory * 1000
        for group in list(world.groups.values()):
            if group.decided_at_ms is None:
                if not any(one in world.tasks for one in group.tasks):
                    groups.consider(world, group, over=True)  # its missing members were never submitted
            elif world.now_ms - group.decided_at_ms >= memory_ms:
                world.drop_group(group.group_id)
        for task in list(world.tasks.values()):
            done = task.finished_at_ms is not None and task.task_id not in world.sessions_of
            if done and world.now_ms - (task.finished_at_ms or 0) >= memory_ms:
                world.drop_task(task.task_id)
        for memory in list(world.cancels.values()):
            if world.now_ms >= memory.until_ms:
                world.drop_cancel(memory.task_id)

    def decide(self) -> None:
        """End what cannot go on, and hand out what can be handed out."""
        self._end_doomed()
        placement.place_sessions(self.world, self.settings)
        placement.place_grades(self.world, self.settings, self._sign_box)

    def _end_doomed(self) -> None:
        world = self.world
        for session, failure in list(world.doomed.items()):
            sessions.end_doomed(world, self.settings, world.leases[session], failure)
            grading.end_doomed(world, self.settings, world.leases[session], failure)

    def assigned_at(self, assignment_id: str, session: str, offset: int) -> None:
        """The broker's offset of an assignment, known before its lease is written."""
        lease = self.world.leases.get(session)
        if lease is not None and lease.assignment_id == assignment_id:
            self.world.change(lease, assigned_offset=offset)

    def restored(self) -> None:
        """All rows are read: wait the whole grace again for sessions whose `SessionFinal` is due."""
        self.world.doom_too_large()
        for lease in self.world.leases.values():
            if lease.final_in == 1:
                self.world.final_wait[lease.session_id] = self.settings.final_grace
