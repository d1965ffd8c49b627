"""What the scheduler hands out: the values of `polar.assignments`, `polar.ready` and `polar.control`."""

from __future__ import annotations

from enum import StrEnum

from .base import Event, Part, RecordRef
from .stages import Outcome
from .tasks import EvaluatorSpec, TaskRequest


class SessionAssigned(Event, frozen=True, kw_only=True):
    """Prepare and run this attempt. Key: node id."""

    assignment_id: str
    node: str
    boot: str
    session_id: str
    attempt: int
    task_id: str
    group_id: str
    sample: int
    task: TaskRequest
    """The task as accepted; a long instruction is a claim."""


class SessionRevoked(Event, frozen=True, kw_only=True):
    """Stop this attempt, kill its processes, report ENDED with reason `revoked`."""

    node: str
    boot: str
    session_id: str
    attempt: int
    reason: str


class SessionReleased(Event, frozen=True, kw_only=True):
    """The session's box is no longer needed: tear it down."""

    node: str
    boot: str
    session_id: str
    attempt: int


class BoxAccess(Part, frozen=True, kw_only=True):
    """The way into one session's own box, for its grader."""

    url: str
    """The gateway's runtime API."""
    key: str
    """A token good for that box only; never logged."""
    workdir: str | None = None


class GradeAssigned(Event, frozen=True, kw_only=True):
    """Grade this session. Key: node id. A grade is never retried in the same box."""

    grade_id: str
    node: str
    boot: str
    session_id: str
    attempt: int
    task_id: str
    evaluator: EvaluatorSpec
    instruction_ref: RecordRef
    """The task's record."""
    outcome: Outcome
    built: RecordRef
    box: BoxAccess | None = None
    timeout_s: float


class GradePrewarm(Event, frozen=True, kw_only=True):
    """Start a clean grading box; a grade for it is likely to follow."""

    node: str
    boot: str
    session_id: str
    attempt: int
    task: TaskRequest


class GradeRevoked(Event, frozen=True, kw_only=True):
    grade_id: str
    node: str
    boot: str
    session_id: str
    reason: str


class SessionReady(Event, frozen=True, kw_only=True):
    """INIT to RUN within a node, on `polar.ready`. Key: node id."""

    assignment_id: str
    node: str
    boot: str
    session_id: str
    attempt: int
    box_id: str


class ControlState(StrEnum):
    FENCED = "fenced"
    """Attempts up to `attempt` are over; a later one may follow."""
    CLOSED = "closed"
    CANCELLED = "cancelled"


class SessionControl(Event, frozen=True, kw_only=True):
    """What a proxy must know of a session; the newest per session wins. Key: session id."""

    session_id: str
    state: ControlState
    attempt: int
    """Attempts up to this one are refused."""
    at_ms: int
    until_ms: int | None = None
    """By then every key of these attempts is dead by itself, and this need not be remembered; None: not told."""
