"""The scheduler's state as records: the values of `polar.leases`, compacted.

Keys: a session id for `Lease`, `t/<task>` for `TaskState`, `g/<group>` for `GroupState`, `c/<topic>/<partition>` for
the scheduler's `Cursor`. A new leader reads them to their end and goes on. A `None` value (tombstone) ends one.
"""

from __future__ import annotations

from enum import StrEnum

from .base import Event, Part, RecordRef
from .failures import Failure
from .stages import Artifact, BuildSummary, Grade, Outcome


class Phase(StrEnum):
    """Where the scheduler has a session."""

    QUEUED = "queued"
    ASSIGNED = "assigned"
    """On a node's partition of `polar.assignments`; INIT not reported yet, or under way."""
    READY = "ready"
    RUNNING = "running"
    CLOSED = "closed"
    """Outcome decided; waits for the build."""
    BUILT = "built"
    """Waits for a grader."""
    GRADING = "grading"
    GRADED = "graded"
    """`SessionGraded` is written; waits for the finisher."""
    FINISHED = "finished"
    """Waits for `SessionFinal` only."""


class Lease(Event, frozen=True, kw_only=True):
    session_id: str
    task_id: str
    group_id: str
    sample: int
    phase: Phase
    attempt: int = 1
    opened: bool = False
    """`SessionOpened` is written."""
    queued_at_ms: int
    node: str | None = None
    """The gateway node of the session's box; stays after the close until the release."""
    boot: str | None = None
    assignment_id: str | None = None
    assigned_offset: int = -1
    """Where the current assignment (of a session or of a grade) stands in its partition of `polar.assignments`."""
    box_held: bool = False
    """The node still has the session's box."""
    cancel: str | None = None
    """The reason, once a cancel has been asked."""
    outcome: Outcome | None = None
    closed_at_ms: int | None = None
    final_in: int | None = None
    """Ticks left until `SessionFinal`."""
    built: RecordRef | None = None
    summary: BuildSummary | None = None
    grader: str | None = None
    """The evaluator node of the grade under way."""
    grader_boot: str | None = None
    grade_attempt: int = 0
    grade_started: bool = False
    grade_deadline_ms: int | None = None
    grade: Grade | None = None
    failure: Failure | None = None
    """The last attempt's, kept for people while a retry waits."""
    retry_at_ms: int | None = None
    artifacts: list[Artifact] = []
    timing_ms: dict[str, float] = {}


class TaskCounts(Part, frozen=True, kw_only=True):
    accepted: int
    finished: int = 0
    completed: int = 0
    error: int = 0
    timeout: int = 0
    cancelled: int = 0
    rewarded: int = 0
    reward_sum: float = 0.0


class TaskState(Event, frozen=True, kw_only=True):
    task_id: str
    body_sha256: str
    """Of the canonical body, to tell a repeat from a conflict."""
    source: RecordRef
    group_id: str
    counts: TaskCounts
    accepted_at_ms: int
    finished_at_ms: int | None = None
    cancelled: str | None = None


class Member(Part, frozen=True, kw_only=True):
    """A session in its group."""

    session_id: str
    task_id: str
    attempt: int
    outcome: Outcome
    reward: float | None = None


class GroupState(Event, frozen=True, kw_only=True):
    group_id: str
    size: int
    """Sessions that belong to it when it is whole."""
    members: list[Member] = []
    """Ended and published, in the order in which the scheduler saw them."""
    tasks: list[str] = []
    opened_at_ms: int
    deadline_ms: int | None = None
    quorum: int | None = None
    decided_at_ms: int | None = None


class CancelMemory(Event, frozen=True, kw_only=True):
    """A cancel of a task not seen yet, kept for `queue_ttl`; key `x/<task>`.

    Partitions of `polar.tasks` are not ordered among each other, so a cancel may be read before its task.
    """

    task_id: str
    session_id: str | None = None
    reason: str
    until_ms: int
