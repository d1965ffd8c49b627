"""The one topic table: name, key, partitions, settings, value types, writers and readers.

Topics are created from it, services check them at start, producers and consumers take their sizes from it, and tests
check every writer against it. Names here are without the prefix (`polar.` by default, a setting).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from . import assignments, completions, leases, nodes, results, stages, tasks, trajectories
from .base import Event

HOUR = 3_600_000
DAY = 24 * HOUR

MAX_RECORD_BYTES = 8 * 1024 * 1024
"""Default of the one size setting; applied to topics, producers and consumers."""

LONGEST_SESSION_MS = 7 * DAY
"""From `SessionOpened` to `SessionFinal`, as retention assumes it: the most that a task may ask for as its agent's
time. Attempts that use that up one after the other would outlast it; `polar rebuild` would name what they lost."""
EXPORT_WINDOW_MS = 21 * DAY
"""How long after its close a session can be built again (`polar rebuild`, exporters), whatever else happens."""
TASK_MEMORY_MS = 7 * DAY
"""Default of the scheduler's `task_memory`: so long it answers a repeated task with what is known of it."""


class Service(StrEnum):
    USER = "user"
    SUBMIT = "submit"
    SCHEDULER = "scheduler"
    GATEWAY = "gateway"
    PROXY = "proxy"
    BUILDER = "builder"
    GRADER = "grader"
    FINISHER = "finisher"
    TRAINER = "trainer"


class TopicSpec(NamedTuple):
    name: str
    key: str
    """What the key is, for people."""
    values: tuple[type[Event], ...]
    writers: tuple[Service, ...]
    readers: tuple[Service, ...]
    partitions: str | int
    """A number, or the name of the setting that gives it: `partitions` (N), `task_partitions`, `node_partitions`."""
    retention_ms: int | None = None
    """None: kept for ever, or until compacted."""
    compacted: bool = False
    segment_bytes: int | None = None
    transactional: bool = False
    """Written inside transactions: read it committed."""

    def config(self, max_record_bytes: int) -> dict[str, str]:
        """The topic's settings as Kafka names them."""
        policy = [*(["compact"] if self.compacted else []), *(["delete"] if self.retention_ms is not None else [])]
        found = {
            "cleanup.policy": ",".join(policy) or "delete",
            "max.message.bytes": str(max_record_bytes),
            "retention.ms": str(-1 if self.retention_ms is None else self.retention_ms),
        }
        if self.segment_bytes is not None:
            found["segment.bytes"] = str(self.segment_bytes)
        return found


S = Service
TABLE: tuple[TopicSpec, ...] = (
    TopicSpec(
        "tasks",
        "task id",
        (tasks.TaskRequest, tasks.CancelRequest, tasks.CloseRequest),
        (S.USER, S.SUBMIT),
        (S.SCHEDULER,),
        "task_partitions",
        retention_ms=14
        * DAY,  # longer than task_memory (7 days) and the longest session: leases refer to these records
    ),
    TopicSpec(
        "stages",
        "session id, or task id",
        (stages.StageChanged, stages.TaskAccepted, stages.TaskRejected),
        (S.SCHEDULER, S.GATEWAY, S.BUILDER, S.GRADER, S.FINISHER),
        (S.SCHEDULER, S.SUBMIT),
        "partitions",
        retention_ms=7 * DAY,
        transactional=True,
    ),
    TopicSpec(
        "leases",
        "session id, t/<task>, g/<group>, x/<task>, c/<topic>/<partition>",
        (leases.Lease, leases.TaskState, leases.GroupState, leases.CancelMemory, results.Cursor),
        (S.SCHEDULER,),
        (S.SCHEDULER,),
        1,
        compacted=True,
        segment_bytes=16 * 1024 * 1024,
        transactional=True,
    ),
    TopicSpec(
        "nodes",
        "node id, or tick",
        (nodes.NodeHeartbeat, nodes.Tick),
        (S.GATEWAY, S.GRADER, S.SCHEDULER),
        (S.SCHEDULER, S.SUBMIT),
        1,
        compacted=True,
        segment_bytes=16 * 1024 * 1024,
        transactional=True,
    ),
    TopicSpec(
        "assignments",
        "node id",
        (
            assignments.SessionAssigned,
            assignments.SessionRevoked,
            assignments.SessionReleased,
            assignments.GradeAssigned,
            assignments.GradePrewarm,
            assignments.GradeRevoked,
        ),
        (S.SCHEDULER,),
        (S.GATEWAY, S.GRADER),
        "node_partitions",
        retention_ms=7 * DAY,
        transactional=True,
    ),
    TopicSpec(
        "ready",
        "node id",
        (assignments.SessionReady,),
        (S.GATEWAY,),
        (S.GATEWAY,),
        "node_partitions",
        retention_ms=7 * DAY,
    ),
    TopicSpec(
        "control",
        "session id",
        (assignments.SessionControl,),
        (S.SCHEDULER,),
        (S.PROXY,),
        "partitions",
        retention_ms=8 * DAY,  # longer than the longest session token: a task may ask for 7 days
        compacted=True,
        segment_bytes=16 * 1024 * 1024,
        transactional=True,
    ),
    TopicSpec(
        "completions",
        "session id",
        (
            completions.SessionOpened,
            completions.AttemptFenced,
            completions.SessionClosed,
            completions.SessionFinal,
            completions.CallStarted,
            completions.CompletionCaptured,
            completions.CompletionFailed,
        ),
        (S.SCHEDULER, S.PROXY),
        (S.BUILDER,),
        "partitions",
        retention_ms=30 * DAY,
        transactional=True,
    ),
    TopicSpec(
        "built",
        "session id",
        (trajectories.Trajectory,),
        (S.BUILDER,),
        (S.FINISHER, S.GRADER),
        "partitions",
        retention_ms=8 * DAY,  # a grade kept for 7 days refers to it
        transactional=True,
    ),
    TopicSpec(
        "graded",
        "session id",
        (results.SessionGraded,),
        (S.SCHEDULER,),
        (S.FINISHER,),
        "partitions",
        retention_ms=7 * DAY,
        transactional=True,
    ),
    TopicSpec(
        "trajectories",
        "group id",
        (trajectories.Trajectory, trajectories.GroupClosed),
        (S.FINISHER, S.SCHEDULER),
        (S.TRAINER, S.USER),
        "partitions",
        retention_ms=30 * DAY,
        transactional=True,
    ),
    TopicSpec(
        "rewards",
        "group id",
        (trajectories.RewardRevised,),
        (S.FINISHER,),
        (S.TRAINER, S.USER),
        "partitions",
        retention_ms=30 * DAY,
        transactional=True,
    ),
    TopicSpec(
        "results",
        "s/<session>, t/<task>",
        (results.SessionResult, results.TaskResult),
        (S.FINISHER, S.SCHEDULER),
        (S.SUBMIT, S.USER),
        "partitions",
        retention_ms=14 * DAY,
        compacted=True,
        transactional=True,
    ),
    TopicSpec("policy", "model name", (results.PolicyPublished,), (S.TRAINER,), (S.PROXY, S.SUBMIT), 1, compacted=True),
    TopicSpec(
        "cursors",
        "<service>/<topic>/<partition>",
        (results.Cursor,),
        (S.BUILDER, S.FINISHER),
        (S.BUILDER, S.FINISHER),
        "partitions",
        compacted=True,
        segment_bytes=1024 * 1024,  # the smallest Apache Kafka takes: a start reads the whole partition
        transactional=True,
    ),
    TopicSpec(
        "dead",
        "origin",
        (results.DeadLetter, results.DeadResolved),
        (S.SCHEDULER, S.GATEWAY, S.PROXY, S.BUILDER, S.GRADER, S.FINISHER, S.SUBMIT, S.USER),
        (S.USER,),
        1,
        retention_ms=30 * DAY,
    ),
)

BY_NAME: dict[str, TopicSpec] = {spec.name: spec for spec in TABLE}


def topic(name: str) -> TopicSpec:
    """The row of `name` (without prefix); KeyError with the known names otherwise."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise KeyError(f"no topic {name!r}; known: {', '.join(BY_NAME)}") from None


class RetentionProblem(NamedTuple):
    """A topic that forgets too early."""

    topic: str
    """Without the prefix."""
    found_ms: int
    wanted_ms: int
    """Or more."""
    reason: str

    def __str__(self) -> str:
        return f"`{self.topic}` keeps {_days(self.found_ms)}, wanted {_days(self.wanted_ms)} or more: {self.reason}"


def retention_problems(
    kept: Mapping[str, int | None],
    *,
    export_window_ms: int = EXPORT_WINDOW_MS,
    longest_session_ms: int = LONGEST_SESSION_MS,
    task_memory_ms: int = TASK_MEMORY_MS,
) -> list[RetentionProblem]:
    """What the topics' retention must be so that nothing is forgotten while something else still refers to it.

    Args:
        kept: retention by topic (without prefix) in ms; None or below zero: for ever, as topics have it that are
            compacted only. Topics not named are not judged.
        export_window_ms: how long after its close a session is to be built again.
        longest_session_ms: from a session's first record to its last.
        task_memory_ms: how long the scheduler remembers an ended task.
    """
    whole = export_window_ms + longest_session_ms
    rules = (
        ("completions", whole, "a session is rebuilt from its first record, up to the export window after its close"),
        ("trajectories", export_window_ms, "a rebuilt trajectory takes its outcome and reward from there"),
        ("rewards", export_window_ms, "a rebuilt trajectory takes its revised reward from there"),
        ("tasks", task_memory_ms + longest_session_ms, "leases refer to a task's record while the task is remembered"),
        ("control", longest_session_ms, "a proxy that starts reads back who is closed, over the longest token life"),
        ("results", task_memory_ms, "a task that is asked for again is answered with its result"),
    )
    found = []
    for name, wanted, reason in rules:
        value = kept.get(name)
        if value is not None and 0 <= value < wanted:
            found.append(RetentionProblem(name, value, wanted, reason))
    return found


def _days(ms: int) -> str:
    return f"{ms / DAY:.3g} days" if ms >= DAY else f"{ms / HOUR:.3g} hours"
