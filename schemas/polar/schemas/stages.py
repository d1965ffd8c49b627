"""Reports: the values of `polar.stages`.

Every service tells here what happened; only the scheduler draws conclusions. Keyed by session id, or by task id for
what concerns a task as a whole.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from .base import Claim, Event, Part, RecordRef
from .failures import Failure


class Stage(StrEnum):
    """Where a session is. Upstream's statuses are `upstream_status`."""

    REGISTERED = "REGISTERED"
    """Accepted, or queued again for another attempt. (scheduler)"""
    INITIALIZING = "INITIALIZING"
    """(gateway)"""
    READY = "READY"
    """The box waits for a RUN slot. (gateway)"""
    RUNNING = "RUNNING"
    """(gateway)"""
    ENDED = "ENDED"
    """The attempt's processes are dead; `exit` says how. A report, not yet the session's outcome. (gateway)"""
    CLOSED = "CLOSED"
    """The outcome is decided. (scheduler)"""
    BUILT = "BUILT"
    """(builder)"""
    EVALUATING = "EVALUATING"
    """(evaluator)"""
    GRADED = "GRADED"
    """The grader's report. (evaluator)"""
    FINISHED = "FINISHED"
    """The trajectory is published. (evaluator, in the same transaction)"""


class Status(StrEnum):
    """How a session ended."""

    COMPLETED = "completed"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class Outcome(Part, frozen=True, kw_only=True):
    """The one ending of a session."""

    status: Status
    failure: Failure | None = None
    """None exactly when `status` is completed."""
    exit_code: int | None = None


class ExitReport(Part, frozen=True, kw_only=True):
    """How an attempt's processes ended, as the gateway saw it."""

    reason: str
    """`exited`, `timeout`, `revoked`, `failed` (could not start), `lost` (reaped after a restart)."""
    exit_code: int | None = None
    output_tail: str = ""
    """The last output of the harness, at most `output_tail_bytes`."""
    duration_s: float | None = None
    peak_memory_mb: float | None = None


class Artifact(Part, frozen=True, kw_only=True):
    """A file kept from a session's box."""

    name: str
    """Path below the workspace or the logs folder, e.g. `logs/harness.log`."""
    claim: Claim


class Grade(Part, frozen=True, kw_only=True):
    """A grader's report."""

    reward: float | None = None
    rewards: dict[str, float] = {}
    """Named parts of the reward."""
    trace_rewards: dict[str, float] = {}
    """By trace id, where an evaluator tells traces apart."""
    report: dict[str, Any] = {}


class BuildStatistics(Part, frozen=True, kw_only=True):
    """What a builder made of a session's replies. `replies = traces + sum(merges)`: each begins a trace or goes on with
    one."""

    replies: int
    """In traces; a completion with several choices has several."""
    merges: dict[str, int] = {}
    """Replies that go on with a trace, by context: `exact`, `retokenized`."""
    breaks: dict[str, int] = {}
    """Traces that ended before the session did, by reason."""
    labels: dict[str, int] = {}
    """Traces by label."""
    drifted: int = 0
    """Ids that the history renders otherwise than they stand in their trace."""


class BuildSummary(Part, frozen=True, kw_only=True):
    """What the scheduler and people need of a build, without tokens."""

    captured: int
    """Completions of the closing attempt up to the closing offset."""
    failed: int
    """Calls of that attempt that ended in `CompletionFailed`."""
    traces: int
    trained_tokens: int
    prompt_tokens: int
    set_aside: dict[str, int] = {}
    """Completions by reason."""
    statistics: BuildStatistics | None = None
    failure: Failure | None = None
    """What the calls alone show: `provider`, `no_completions`, or the builder's own error."""


class StageChanged(Event, frozen=True, kw_only=True):
    session_id: str
    task_id: str
    attempt: int
    stage: Stage
    at_ms: int
    node: str | None = None
    boot: str | None = None
    assignment: str | None = None
    """The assignment this report answers: `SessionAssigned.assignment_id` or `GradeAssigned.grade_id`."""
    failure: Failure | None = None
    exit: ExitReport | None = None
    outcome: Outcome | None = None
    """With CLOSED and FINISHED."""
    built: RecordRef | None = None
    """With BUILT: the record in `polar.built`."""
    summary: BuildSummary | None = None
    grade: Grade | None = None
    artifacts: list[Artifact] = []
    timing_ms: dict[str, float] = {}
    published: RecordRef | None = None
    """With FINISHED: the record in `polar.trajectories`."""


class Notice(Part, frozen=True, kw_only=True):
    """Something accepted otherwise than asked."""

    field: str
    message: str


class TaskAccepted(Event, frozen=True, kw_only=True):
    """The task is in the log for good and its sessions exist."""

    task_id: str
    count: int
    """Sessions."""
    group_id: str
    source: RecordRef
    """The task's record."""
    answers: RecordRef
    """The record this answers: `source`, or a later one with the same body."""
    at_ms: int
    sessions: list[str] = []
    warnings: list[Notice] = []
    harness: str | None = None
    """The harness's name or import path, for listings."""


class Problem(Part, frozen=True, kw_only=True):
    """One thing wrong with a request."""

    field: str
    """A path such as `agent.harness`; empty for the request as a whole."""
    message: str
    """What is wrong and what to do."""
    code: str = "invalid"
    """`invalid`, `missing`, `unknown_field`, `unknown_name`, `not_available`, `not_allowed`, `conflict`, `too_late`,
    `busy` (as many sessions are open as may be: the same task may be sent again later)."""


class TaskRejected(Event, frozen=True, kw_only=True):
    task_id: str | None
    answers: RecordRef
    problems: list[Problem]
    at_ms: int


UPSTREAM_STATUS = {
    Stage.REGISTERED: "REGISTERED",
    Stage.INITIALIZING: "INITIALIZING",
    Stage.READY: "READY",
    Stage.RUNNING: "RUNNING",
    Stage.ENDED: "POST_RUN",
    Stage.CLOSED: "BUILDING",
    Stage.BUILT: "EVALUATING",
    Stage.EVALUATING: "EVALUATING",
    Stage.GRADED: "EVALUATING",
}
"""The public Polar's names for stages under way; a finished session shows `COMPLETED`, `ERROR` or `TIMEOUT`."""
