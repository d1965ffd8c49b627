"""What a record means for tasks and sessions: a state machine over rows, without SQL, clock or waiting.

Fed with the records of one partition in order and of several in any interleaving, it comes to the same rows:

- Of a session, reports (`stages`) and result (`results`) are kept apart and put together when they are read. A session
  never goes back: an older attempt's report, or an earlier stage of the same attempt, is ignored.
- A task's sessions are those its acceptance names. Others that claim to be of it are kept aside: they belong to a task
  whose acceptance stands further on (an id may be used again after `task_memory`), or to nobody.
- A task counts as ended (`settled`) only once its acceptance and the results of all its sessions are here too, though
  they stand in other partitions than its own result. `settle` is for what the log no longer holds.
- What still comes of a task that was forgotten is ignored, so that it does not return as a torso.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from polar.schemas import (
    Event,
    Failure,
    Outcome,
    RecordRef,
    SessionResult,
    Stage,
    StageChanged,
    TaskAccepted,
    TaskRejected,
    TaskResult,
)
from polar.schemas.ids import session_id as derive_session_id

from .entries import Answered, Change, Moved, Settled

RANK = {stage: rank for rank, stage in enumerate(Stage)}
LIFE_MS = 60_000
"""Two tasks of one id are further apart than this (`task_memory`), the clocks of two leaders closer together."""


@dataclass(slots=True)
class TaskRow:
    task_id: str
    source: str | None = None
    """Place of the task's record; None: its acceptance has not been seen."""
    repeat: bool = False
    """Its acceptance was seen only as the answer to a repeat: `accepted_ms` is not when it began."""
    accepted_ms: int | None = None
    harness: str | None = None
    ended_ms: int | None = None
    outcome: str | None = None
    """`completed` or `failed`, once ended."""
    expected: int = 0
    """Sessions, as its result has it."""
    total: int = 0
    results: int = 0
    settled: bool = False
    heard_ms: int = 0
    """Newest report, while nothing else is known."""

    @property
    def known(self) -> bool:
        return self.source is not None or self.ended_ms is not None

    @property
    def status(self) -> str | None:
        if not self.known:
            return None
        return self.outcome if self.settled else "running"

    @property
    def since_ms(self) -> int | None:
        return self.accepted_ms if self.source is not None else self.ended_ms


@dataclass(slots=True)
class SessionRow:
    task_id: str
    session_id: str
    member: bool = False
    """The task's acceptance names it."""
    sample: int | None = None
    stage: Stage = Stage.REGISTERED
    attempt: int = 1
    node: str | None = None
    at_ms: int = 0
    failure: Failure | None = None
    outcome: Outcome | None = None
    reward: float | None = None
    has_result: bool = False
    over: bool = False
    """Its task has been settled without it."""

    @property
    def flight(self) -> Stage | None:
        """Where it is counted as being under way; None: it is not."""
        under_way = self.member and not self.has_result and not self.over and self.stage is not Stage.FINISHED
        return self.stage if under_way else None


class Rows(Protocol):
    """The rows of one transaction. What is returned may be changed and is then written."""

    def task(self, task_id: str) -> TaskRow | None: ...
    def new_task(self, task_id: str) -> TaskRow: ...
    def session(self, task_id: str, session_id: str) -> SessionRow | None: ...
    def new_session(self, task_id: str, session_id: str) -> SessionRow: ...
    def sessions(self, task_id: str) -> Iterable[SessionRow]: ...
    def drop_session(self, session: SessionRow) -> None: ...
    def forgotten(self, task_id: str) -> tuple[str | None, int] | None:
        """Source and ending of a task that was dropped."""

    def remember_again(self, task_id: str) -> None:
        """The id of a dropped task is used anew."""

    def put_accepted(self, event: TaskAccepted) -> None: ...
    def put_task_result(self, task_id: str, event: TaskResult | None) -> None: ...
    def put_session_result(self, event: SessionResult) -> None: ...
    def put_rejected(self, task_id: str, event: TaskRejected) -> None: ...


class Fold:
    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def apply(self, event: Event | None, ref: RecordRef) -> list[Change]:
        """Take one record; None and values of no concern change nothing."""
        match event:
            case StageChanged():
                self._moved(event)
                return [Moved(event, ref)]
            case SessionResult():
                return self._session_result(event)
            case TaskAccepted():
                return [Answered(event), Moved(event, ref), *self._accepted(event)]
            case TaskRejected():
                if event.task_id is not None:
                    self._rows.put_rejected(event.task_id, event)
                return [Answered(event), Moved(event, ref)]
            case TaskResult():
                return self._task_result(event)
        return []

    def settle(self, task: TaskRow) -> list[Change]:
        """Its results that are not here are not coming."""
        if task.settled:
            return []
        task.settled = True
        if task.results < task.total:
            for session in self._rows.sessions(task.task_id):
                session.over = True
        return [Settled(task.task_id)]

    def _moved(self, event: StageChanged) -> None:
        task = self._task(event.task_id, event.at_ms)
        if task is None:
            return
        if not task.known:
            task.heard_ms = max(task.heard_ms, event.at_ms)
        session = self._session(event.task_id, event.session_id)
        if session.stage is Stage.FINISHED:
            return
        if (event.attempt, RANK[event.stage]) >= (session.attempt, RANK[session.stage]):
            session.stage = event.stage
            session.attempt = event.attempt
            session.at_ms = event.at_ms
            session.node = event.node or session.node
            session.failure = event.failure
            session.outcome = event.outcome or session.outcome

    def _session_result(self, event: SessionResult) -> list[Change]:
        task = self._task(event.task_id, event.at_ms)
        if task is None:
            return []
        if not task.known:
            task.heard_ms = max(task.heard_ms, event.at_ms)
        session = self._session(event.task_id, event.session_id)
        if not session.has_result and (session.member or task.source is None):
            task.results += 1
        session.has_result = True
        session.reward = event.reward
        if not session.member:
            session.sample = event.sample
        self._rows.put_session_result(event)
        return self._settle_if_whole(task)

    def _accepted(self, event: TaskAccepted) -> list[Change]:
        rows, source = self._rows, f"{event.source.partition}/{event.source.offset}"
        repeat = event.answers != event.source
        task = rows.task(event.task_id)
        if task is None:
            gone = rows.forgotten(event.task_id)
            if gone is not None:
                if gone[0] == source or (gone[0] is None and (repeat or event.at_ms < gone[1] + LIFE_MS)):
                    return []
                rows.remember_again(event.task_id)
            task = rows.new_task(event.task_id)
        if task.source == source:
            return []
        if task.source is not None:
            # another task of the same id: what was of the former one goes
            for session in list(rows.sessions(event.task_id)):
                if session.member:
                    rows.drop_session(session)
        if task.ended_ms is not None and not repeat and task.ended_ms < event.at_ms - LIFE_MS:
            task.ended_ms = task.outcome = None
            rows.put_task_result(event.task_id, None)
            task.settled = False
        task.source, task.repeat, task.accepted_ms, task.harness = source, repeat, event.at_ms, event.harness
        task.total = event.count
        names = event.sessions or [
            derive_session_id(event.source.partition, event.source.offset, sample) for sample in range(event.count)
        ]
        early = {one.session_id: one for one in rows.sessions(event.task_id)}
        task.results = 0
        for sample, name in enumerate(names):
            session = early.get(name) or rows.new_session(event.task_id, name)
            session.at_ms = session.at_ms or event.at_ms
            session.member, session.sample, session.over = True, sample, False
            task.results += session.has_result
        rows.put_accepted(event)
        return self._settle_if_whole(task)

    def _task_result(self, event: TaskResult) -> list[Change]:
        task = self._task(event.task_id, event.at_ms)
        if task is None:
            return []
        began = task.accepted_ms
        if began is not None and not task.repeat and event.at_ms < began - LIFE_MS:
            return []  # of a former task of this id
        task.ended_ms, task.outcome, task.expected = event.at_ms, event.status, event.counts.accepted
        if task.source is None:
            task.total = event.counts.accepted
        self._rows.put_task_result(event.task_id, event)
        return self._settle_if_whole(task)

    def _settle_if_whole(self, task: TaskRow) -> list[Change]:
        # without its acceptance it cannot be told which sessions are its own, nor where its callback goes
        if task.source is None or task.ended_ms is None or task.results < task.expected:
            return []
        return self.settle(task)

    def _task(self, task_id: str, at_ms: int) -> TaskRow | None:
        """The task a record is about; None: it was dropped, and this is still about that one."""
        task = self._rows.task(task_id)
        if task is not None:
            return task
        gone = self._rows.forgotten(task_id)
        if gone is not None and at_ms < gone[1] + LIFE_MS:
            return None
        return self._rows.new_task(task_id)

    def _session(self, task_id: str, session_id: str) -> SessionRow:
        return self._rows.session(task_id, session_id) or self._rows.new_session(task_id, session_id)
