"""What the view knows, as it is handed to whoever asks: tasks, sessions, nodes, and what a record changed.

Snapshots: an entry does not follow the log after it was read. No I/O, no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from polar.schemas import (
    Failure,
    NodeHeartbeat,
    Outcome,
    RecordRef,
    SessionResult,
    Stage,
    StageChanged,
    TaskAccepted,
    TaskRejected,
    TaskResult,
)

TOPICS = ("stages", "results", "nodes")
"""What a view is made of."""

Place = tuple[str, int]
"""Topic, without prefix, and partition."""


class ViewLimits(NamedTuple):
    """What a view keeps. Ended tasks go in the order in which they ended; running ones only for `max_bytes`."""

    max_tasks: int = 50_000
    """Ended tasks."""
    max_sessions: int = 500_000
    """Sessions of ended tasks, all together."""
    keep_ms: int = 14 * 86_400_000
    """An ended task older than this, by the scheduler's ticks, goes."""
    max_bytes: int = 4 * 1024**3
    """Of the file."""
    max_answers: int = 1_024
    """Acceptances kept in memory for those who ask a moment later; rejections kept in the file."""
    max_nodes: int = 4_096
    dead_after_ticks: int = 10
    """A node whose beat is this many ticks of the leader old is shown as not alive."""


@dataclass(slots=True)
class SessionEntry:
    session_id: str
    task_id: str
    sample: int | None = None
    stage: Stage = Stage.REGISTERED
    attempt: int = 1
    node: str | None = None
    at_ms: int = 0
    failure: Failure | None = None
    outcome: Outcome | None = None
    result: SessionResult | None = None

    @property
    def finished(self) -> bool:
        return self.stage is Stage.FINISHED


@dataclass(slots=True)
class TaskEntry:
    task_id: str
    accepted: TaskAccepted | None = None
    """Its list of session ids may be empty: `sessions` has them."""
    result: TaskResult | None = None
    sessions: dict[str, SessionEntry] = field(default_factory=dict)
    """In sample order, as far as known; empty in listings."""
    results: int = 0
    """Sessions whose result is here."""
    settled: bool = False
    """Ended, and everything that is going to be known of it is known."""
    mean_reward: float | None = None
    """Over the sessions that have one; set in listings."""

    @property
    def known(self) -> bool:
        """False for one of which only sessions' reports were seen, e.g. because its acceptance stands further on."""
        return self.accepted is not None or self.result is not None

    @property
    def status(self) -> str:
        """`running`, `completed` or `failed`."""
        return self.result.status if self.settled and self.result is not None else "running"

    @property
    def total(self) -> int:
        if self.accepted is not None:
            return self.accepted.count
        return self.result.counts.accepted if self.result is not None else len(self.sessions)

    @property
    def group_id(self) -> str | None:
        if self.accepted is not None:
            return self.accepted.group_id
        return self.result.group_id if self.result is not None else None

    @property
    def since_ms(self) -> int:
        """When it was accepted; of a task whose acceptance is no longer on the log, when it ended."""
        if self.accepted is not None:
            return self.accepted.at_ms
        return self.result.at_ms if self.result is not None else 0


@dataclass(slots=True)
class NodeEntry:
    beat: NodeHeartbeat
    at_tick: int
    """Ticks of leaders read when it came."""


class TaskFilter(NamedTuple):
    """Which tasks a listing wants: the newest `limit` that fit; None: any."""

    status: str | None
    harness: str | None
    since_ms: int | None
    limit: int


class Selected(NamedTuple):
    tasks: list[TaskEntry]
    more: bool
    """There are older ones that fit."""


class Answered(NamedTuple):
    """The scheduler decided on a request."""

    answer: TaskAccepted | TaskRejected


class Settled(NamedTuple):
    """A task has ended, with everything that is going to be known of it."""

    task_id: str


class Moved(NamedTuple):
    """A report worth showing, with where it stands on the log."""

    event: StageChanged | TaskAccepted | TaskRejected
    ref: RecordRef


Change = Answered | Settled | Moved


class Applied(NamedTuple):
    """What came of some records."""

    changes: Sequence[Change]
    poison: Sequence[tuple[RecordRef, str]]
    """Records passed over, with the reason."""
