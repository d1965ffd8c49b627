"""Finished sessions, tasks and groups, as functions over the `World`.

A group is decided when all its sessions have ended, by quorum where the task allows it, or at its deadline; whatever
comes later is `late`. `GroupClosed` is written after the finisher's report on each member was read committed, so it
stands behind their trajectories.
"""

from __future__ import annotations

from msgspec.structs import replace

from polar.schemas import (
    GroupClosed,
    GroupMember,
    GroupState,
    Member,
    Outcome,
    Phase,
    StageChanged,
    Status,
    TaskResult,
    TaskState,
)

from .world import World

MEMBER_MESSAGE = 300
"""Characters."""


def on_finished(world: World, event: StageChanged) -> None:
    """The finisher published a session's trajectory."""
    lease = world.leases.get(event.session_id)
    if lease is None or lease.phase is not Phase.GRADED:
        return
    outcome, reward = lease.outcome, lease.grade.reward if lease.grade else None
    assert outcome is not None
    lease = world.change(lease, phase=Phase.FINISHED)
    member = Member(
        session_id=lease.session_id,
        task_id=lease.task_id,
        attempt=lease.attempt,
        # a group too large for a record lists who ended how, and no why
        outcome=Outcome(status=outcome.status) if lease.group_id in world.too_large else brief(outcome),
        reward=reward,
    )
    _count(world, world.tasks[lease.task_id], member)
    group = world.groups.get(lease.group_id)
    if group is not None and group.decided_at_ms is None:
        group = world.put_group(replace(group, members=[*group.members, member]))
        consider(world, group)
    if lease.final_in == 0:
        world.drop(lease)


def brief(outcome: Outcome) -> Outcome:
    """An outcome as a group lists it, up to hundreds of them in a record: the details stand with each session."""
    if outcome.failure is None:
        return outcome
    failure = replace(outcome.failure, message=outcome.failure.message[:MEMBER_MESSAGE], detail=None)
    return replace(outcome, failure=failure)


def consider(world: World, group: GroupState, *, over: bool = False) -> None:
    """Decide the group if it is time; `over`: nothing can come any more."""
    if group.decided_at_ms is not None:
        return
    rewarded = [one for one in group.members if one.reward is not None]
    if len(group.members) >= group.size:
        reason = "complete"
    elif group.quorum is not None and len(rewarded) >= group.quorum:
        reason = "quorum"
    elif over or (group.deadline_ms is not None and world.now_ms >= group.deadline_ms):
        reason = "deadline"
    else:
        return
    world.emit(
        "trajectories",
        group.group_id,
        GroupClosed(
            group_id=group.group_id,
            tasks=group.tasks,
            size=group.size,
            members=[
                GroupMember(
                    session_id=one.session_id,
                    task_id=one.task_id,
                    attempt=one.attempt,
                    outcome=one.outcome,
                    reward=one.reward,
                )
                for one in group.members
            ],
            selection=[one.session_id for one in rewarded],
            reason=reason,
            at_ms=world.now_ms,
        ),
    )
    world.put_group(replace(group, decided_at_ms=world.now_ms))


def _count(world: World, task: TaskState, member: Member) -> None:
    counts, status = task.counts, member.outcome.status
    counts = replace(
        counts,
        finished=counts.finished + 1,
        completed=counts.completed + (status is Status.COMPLETED),
        error=counts.error + (status is Status.ERROR),
        timeout=counts.timeout + (status is Status.TIMEOUT),
        cancelled=counts.cancelled + (status is Status.CANCELLED),
        rewarded=counts.rewarded + (member.reward is not None),
        reward_sum=counts.reward_sum + (member.reward or 0.0),
    )
    done = counts.finished == counts.accepted
    task = world.put_task(replace(task, counts=counts, finished_at_ms=world.now_ms if done else None))
    if done:
        world.emit(
            "results",
            f"t/{task.task_id}",
            TaskResult(
                task_id=task.task_id,
                group_id=task.group_id,
                status="completed" if counts.completed or counts.timeout else "failed",
                counts=counts,
                at_ms=world.now_ms,
            ),
            task.source,
        )
