"""A session from its place in the queue to its one outcome, as functions over the `World`.

A gateway only reports; the outcome is decided here, once per accepted session, and written to the session's own
partition of `polar.completions`, where builders and replays find it in log order.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from polar.schemas import (
    RETRYABLE_BY_DEFAULT,
    AttemptFenced,
    Budgets,
    ControlState,
    Failure,
    FailureKind,
    Lease,
    Outcome,
    Phase,
    SessionAssigned,
    SessionClosed,
    SessionControl,
    SessionFinal,
    SessionOpened,
    SessionReleased,
    SessionRevoked,
    Stage,
    StageChanged,
    Status,
)
from polar.schemas.catalog import EVALUATORS
from polar.schemas.ids import derived

from .settings import SchedulerSettings
from .world import ON_NODE, World

MAX_FAILURE_BYTES = 1024 * 1024
"""Of a reported failure, encoded; it goes into several records of the session."""
TOKEN_SLACK_MS = 4 * 3_600_000
"""Beyond the agent's time, for a key of an attempt that is over: its gateway's margin, and a gateway that was cut off
and began the attempt only after it was fenced."""


def assign(world: World, lease: Lease, node: str, boot: str) -> None:
    """Give a queued session's attempt to a node; the first time, open the session."""
    request = world.request(lease)
    _open(world, lease)
    assignment = derived("assignment", lease.session_id, lease.attempt)
    world.emit(
        "assignments",
        node,
        SessionAssigned(
            assignment_id=assignment,
            node=node,
            boot=boot,
            session_id=lease.session_id,
            attempt=lease.attempt,
            task_id=lease.task_id,
            group_id=lease.group_id,
            sample=lease.sample,
            task=request,
        ),
    )
    world.change(
        lease,
        phase=Phase.ASSIGNED,
        opened=True,
        node=node,
        boot=boot,
        assignment_id=assignment,
        assigned_offset=-1,
        box_held=True,
        retry_at_ms=None,
        timing_ms={"queue": float(world.now_ms - lease.queued_at_ms)},
    )


def end_attempt(world: World, settings: SchedulerSettings, lease: Lease, failure: Failure) -> None:
    """An attempt failed: fence it and queue another, or close the session."""
    request = world.request(lease)
    if lease.cancel is not None:
        close(world, settings, lease, cancelled(lease.cancel))
        return
    again = failure.retryable and failure.kind in RETRYABLE_BY_DEFAULT and lease.attempt < request.max_attempts
    if not again:
        close(world, settings, lease, Outcome(status=Status.ERROR, failure=failure))
        return
    release(world, lease)
    world.emit(
        "completions",
        lease.session_id,
        AttemptFenced(session_id=lease.session_id, attempt=lease.attempt, failure=failure, at_ms=world.now_ms),
    )
    _control(world, lease, ControlState.FENCED)
    wait = min(settings.retry_backoff * 2 ** (lease.attempt - 1), settings.retry_backoff_max)
    following = replace(
        lease,
        phase=Phase.QUEUED,
        attempt=lease.attempt + 1,
        queued_at_ms=world.now_ms,
        node=None,
        boot=None,
        assignment_id=None,
        assigned_offset=-1,
        box_held=False,
        failure=failure,
        retry_at_ms=world.now_ms + int(wait * 1000),
        artifacts=[],
        timing_ms={},
    )
    world.put(following)
    _report(world, following, Stage.REGISTERED, failure=failure)


def close(world: World, settings: SchedulerSettings, lease: Lease, outcome: Outcome) -> None:
    """Decide the session's outcome. Exactly once: the callers see to it by the lease's phase."""
    _open(world, lease)
    world.emit(
        "completions",
        lease.session_id,
        SessionClosed(session_id=lease.session_id, attempt=lease.attempt, outcome=outcome, at_ms=world.now_ms),
    )
    _control(world, lease, ControlState.CANCELLED if outcome.status is Status.CANCELLED else ControlState.CLOSED)
    world.final_wait[lease.session_id] = settings.final_grace
    lease = world.change(
        lease,
        phase=Phase.CLOSED,
        opened=True,
        outcome=outcome,
        closed_at_ms=world.now_ms,
        final_in=1,
        failure=outcome.failure,
    )
    _report(world, lease, Stage.CLOSED, outcome=outcome, failure=outcome.failure)
    if not needs_own_box(world, lease):
        release(world, lease)


def needs_own_box(world: World, lease: Lease) -> bool:
    """Whether the session's grader works in the session's own box."""
    evaluator = world.request(lease).evaluator
    entry = EVALUATORS.resolve(evaluator.strategy)
    return entry is not None and entry.own_box and not evaluator.refresh_runtime


def release(world: World, lease: Lease) -> Lease:
    """Let the node tear the box down, where it still has it."""
    lease = world.leases[lease.session_id]
    if not lease.box_held or lease.node is None or lease.boot is None:
        return lease
    node = world.nodes.get(lease.node)
    if node is not None and node.boot == lease.boot:
        world.emit(
            "assignments",
            lease.node,
            SessionReleased(node=lease.node, boot=lease.boot, session_id=lease.session_id, attempt=lease.attempt),
        )
        node.released[lease.session_id, lease.attempt] = world.ticks
    return world.change(lease, box_held=False)


def cancel(world: World, settings: SchedulerSettings, lease: Lease, reason: str) -> None:
    """A cancel reaches a session: at once where nothing runs, through its gateway where something does."""
    if lease.phase is Phase.QUEUED:
        close(world, settings, lease, cancelled(reason))
    elif lease.phase in ON_NODE and lease.cancel is None:
        lease = world.change(lease, cancel=reason)
        _control(world, lease, ControlState.CANCELLED)
        revoke(world, lease, reason)


def revoke(world: World, lease: Lease, reason: str) -> None:
    """Let the gateway stop the attempt that it has."""
    assert lease.node is not None
    assert lease.boot is not None
    world.emit(
        "assignments",
        lease.node,
        SessionRevoked(
            node=lease.node, boot=lease.boot, session_id=lease.session_id, attempt=lease.attempt, reason=reason
        ),
    )


def cancelled(reason: str) -> Outcome:
    return Outcome(
        status=Status.CANCELLED, failure=Failure(kind=FailureKind.CANCELLED, message=reason, retryable=False)
    )


def on_report(world: World, settings: SchedulerSettings, event: StageChanged) -> None:
    """A gateway's report on the attempt it has. Reports on other attempts are history."""
    lease = world.leases.get(event.session_id)
    if lease is None or lease.phase not in ON_NODE or event.assignment != lease.assignment_id:
        return
    if (doom := world.doomed.get(event.session_id)) is not None:
        event = replace(event, artifacts=[], timing_ms={}, failure=doom)
    if event.stage is Stage.READY:
        if lease.phase is Phase.ASSIGNED:
            world.change(lease, phase=Phase.READY)
    elif event.stage is Stage.RUNNING:
        world.change(lease, phase=Phase.RUNNING)
    elif event.stage is Stage.ENDED:
        lease = world.change(lease, artifacts=event.artifacts, timing_ms={**lease.timing_ms, **event.timing_ms})
        failure, code = bounded(event.failure), event.exit.exit_code if event.exit else None
        if lease.cancel is not None:
            # whatever the exit: from the cancel on its calls were refused
            close(world, settings, lease, cancelled(lease.cancel))
        elif failure is None:
            close(world, settings, lease, Outcome(status=Status.COMPLETED, exit_code=code))
        elif failure.kind is FailureKind.TIMEOUT:
            close(world, settings, lease, Outcome(status=Status.TIMEOUT, failure=failure, exit_code=code))
        elif failure.kind in RETRYABLE_BY_DEFAULT:
            end_attempt(world, settings, lease, failure)
        else:
            close(world, settings, lease, Outcome(status=Status.ERROR, failure=failure, exit_code=code))


def bounded(failure: Failure | None) -> Failure | None:
    """A reported failure, without its details where they would burst the records it goes into."""
    if failure is None or len(msgspec.msgpack.encode(failure)) <= MAX_FAILURE_BYTES:
        return failure
    return replace(failure, message=failure.message[:1000], detail=None)


def end_doomed(world: World, settings: SchedulerSettings, lease: Lease, failure: Failure) -> None:
    """Close a session that cannot go on, wherever it is before its close; its node, if any, stops and lets go."""
    if lease.phase in ON_NODE:
        revoke(world, lease, failure.message)
    elif lease.phase is not Phase.QUEUED:
        return
    close(world, settings, lease, Outcome(status=Status.ERROR, failure=failure))


def finalize(world: World, session: str) -> None:
    """Write `SessionFinal`; the lease goes with it if the session is finished."""
    lease = world.leases[session]
    world.final_wait.pop(session, None)
    world.emit("completions", session, SessionFinal(session_id=session, attempt=lease.attempt, at_ms=world.now_ms))
    lease = world.change(lease, final_in=0)
    if lease.phase is Phase.FINISHED:
        world.drop(lease)


def _open(world: World, lease: Lease) -> None:
    if lease.opened:
        return
    request, task = world.request(lease), world.tasks[lease.task_id]
    world.emit(
        "completions",
        lease.session_id,
        SessionOpened(
            session_id=lease.session_id,
            task_id=lease.task_id,
            group_id=lease.group_id,
            sample=lease.sample,
            num_samples=request.num_samples,
            source=task.source,
            harness=request.agent.harness or request.agent.import_path or "",
            builder=request.builder,
            evaluator=request.evaluator,
            model_name=request.agent.model_name,
            tenant=request.tenant,
            metadata=request.metadata,
            budgets=Budgets(
                queue_ttl=request.queue_ttl,
                init_timeout=request.init_timeout,
                timeout_seconds=request.timeout_seconds,
                evaluation_timeout=request.evaluation_timeout,
            ),
            at_ms=world.now_ms,
        ),
        task.source,
    )


def _control(world: World, lease: Lease, state: ControlState) -> None:
    agent_s = world.request(lease).timeout_seconds
    world.emit(
        "control",
        lease.session_id,
        SessionControl(
            session_id=lease.session_id,
            state=state,
            attempt=lease.attempt,
            at_ms=world.now_ms,
            until_ms=world.now_ms + int(agent_s * 1000) + TOKEN_SLACK_MS,
        ),
    )


def _report(
    world: World, lease: Lease, stage: Stage, *, outcome: Outcome | None = None, failure: Failure | None = None
) -> None:
    world.emit(
        "stages",
        lease.session_id,
        StageChanged(
            session_id=lease.session_id,
            task_id=lease.task_id,
            attempt=lease.attempt,
            stage=stage,
            at_ms=world.now_ms,
            node=lease.node,
            outcome=outcome,
            failure=failure,
        ),
    )
