"""Outcomes without tokens, cursors and dead letters."""

from __future__ import annotations

from typing import Any

from .base import Claim, Event, RecordRef
from .failures import Failure
from .leases import TaskCounts
from .stages import Artifact, BuildSummary, Grade, Outcome, Status
from .tasks import EvaluatorSpec


class SessionGraded(Event, frozen=True, kw_only=True):
    """The decided grade. Revision 0 is the scheduler's and exactly one per session; later ones are regrades."""

    session_id: str
    attempt: int
    task_id: str
    group_id: str
    revision: int = 0
    revision_id: str | None = None
    run: str | None = None
    outcome: Outcome
    """Refined: what the calls alone showed (`provider`, `no_completions`) is in here."""
    built: RecordRef
    grade: Grade | None = None
    """None: nothing to grade, or the grader failed; `failure` says which."""
    failure: Failure | None = None
    evaluator: EvaluatorSpec
    evaluator_version: str | None = None
    artifacts: list[Artifact] = []
    timing_ms: dict[str, float] = {}
    node: str | None = None
    at_ms: int


class SessionResult(Event, frozen=True, kw_only=True):
    """Key `s/<session>`."""

    session_id: str
    task_id: str
    group_id: str
    sample: int
    attempt: int
    status: Status
    outcome: Outcome
    reward: float | None = None
    rewards: dict[str, float] = {}
    summary: BuildSummary | None = None
    trajectory: RecordRef | None = None
    """In `polar.trajectories`."""
    node_id: str | None = None
    timing_ms: dict[str, float] = {}
    artifacts: list[Artifact] = []
    error: Failure | None = None
    metadata: dict[str, Any] = {}
    at_ms: int


class TaskResult(Event, frozen=True, kw_only=True):
    """Key `t/<task>`, written when the task's last session has finished."""

    task_id: str
    group_id: str
    status: str
    """`completed`: at least one session ended with a trajectory to read; `failed`: none did."""
    counts: TaskCounts
    at_ms: int


class PolicyPublished(Event, frozen=True, kw_only=True):
    """The engine confirmed new weights. Key: model name."""

    model: str
    version: str
    endpoints: dict[str, str] = {}
    """Version per endpoint."""
    step: int | None = None
    at_ms: int


class Cursor(Event, frozen=True, kw_only=True):
    """How far a consumer of a partition is. Key `<service>/<topic>/<partition>`."""

    next: int
    """The next record to process."""
    replay_from: int
    """Records from here up to `next` rebuild the consumer's state and emit nothing."""
    at_ms: int = 0


class DeadLetter(Event, frozen=True, kw_only=True):
    """A record that could not be processed."""

    origin: RecordRef
    service: str
    error: str
    key: bytes | None = None
    value: bytes = b""
    """The first 64 KiB."""
    whole: Claim | None = None
    """The rest, where there is more."""
    headers: dict[str, bytes] = {}
    at_ms: int


class DeadResolved(Event, frozen=True, kw_only=True):
    """An operator has dealt with a dead letter. It stands behind the letter, under the same key, and counts for every
    letter of that origin before it."""

    origin: RecordRef
    letter: RecordRef
    """The letter's place in `polar.dead`."""
    action: str
    """`retried` or `dropped`."""
    published: RecordRef | None = None
    """With `retried`: where the record stands now. Written in the same transaction as that record."""
    forced: bool = False
    reason: str = ""
    by: str = ""
    at_ms: int
