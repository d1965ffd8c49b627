"""What is known of every task, session and node: a state machine over `stages`, `results` and `nodes`.

Pure: no clock, no I/O, no waiting. `apply` takes the records of one partition in order, of several partitions in any
interleaving, and any record twice; it answers with what changed, and the shell (`feed.py`) tells those who wait.

Promises:
- A record at or below one already applied of its partition changes nothing.
- A session never goes back: an older attempt's report, or an earlier stage of the same attempt, is ignored.
- A task counts as ended (`settled`) only once the results of all its sessions are here too, though they stand in
  other partitions than the task's; after `caught_up`, what the log no longer holds is not waited for.
- Memory is bounded: at the limit the oldest ended task goes first, then the oldest that was never seen accepted, then
  the oldest of all. What went is forgotten here only; the log and the scheduler still have it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from polar.schemas import (
    Event,
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
    Tick,
)
from polar.schemas.ids import session_id as derive_session_id

RANK = {stage: rank for rank, stage in enumerate(Stage)}


class ViewLimits(NamedTuple):
    max_tasks: int = 10_000
    max_sessions: int = 200_000
    max_answers: int = 4_096
    """Acceptances and rejections kept for those who ask a moment later."""
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
    result: TaskResult | None = None
    sessions: dict[str, SessionEntry] = field(default_factory=dict)
    """In sample order, as far as known."""
    results: int = 0
    """Sessions whose result is here."""
    settled: bool = False
    """Ended, and everything that is going to be known of it is known."""

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


class Answered(NamedTuple):
    """The scheduler decided on a request."""

    answer: TaskAccepted | TaskRejected


class Settled(NamedTuple):
    task: TaskEntry


class Moved(NamedTuple):
    """A report worth showing, with where it stands on the log."""

    event: StageChanged | TaskAccepted | TaskRejected
    ref: RecordRef


Change = Answered | Settled | Moved


class View:
    def __init__(self, limits: ViewLimits | None = None) -> None:
        self.limits = limits or ViewLimits()
        self.tasks: dict[str, TaskEntry] = {}
        """In the order in which they were first seen."""
        self.rejected: OrderedDict[str, TaskRejected] = OrderedDict()
        """The last rejection per task id, bounded by `max_answers`."""
        self.nodes: dict[str, NodeEntry] = {}
        self.tick: Tick | None = None
        self.dropped = 0
        """Tasks forgotten because of the limits."""
        self.ready = False
        self._next: dict[tuple[str, int], int] = {}
        self._stages: Counter[Stage] = Counter()
        self._sessions = 0
        self._unseen: dict[str, None] = {}
        self._ended: dict[str, None] = {}
        self._answers: OrderedDict[RecordRef, TaskAccepted | TaskRejected] = OrderedDict()
        self._ticks = 0

    # --- reading ---

    def answer(self, ref: RecordRef) -> TaskAccepted | TaskRejected | None:
        """What the scheduler said of the request at `ref`; None: nothing yet, or long ago."""
        return self._answers.get(ref)

    def in_flight(self) -> dict[Stage, int]:
        """Sessions that are not finished, by stage."""
        return {stage: count for stage, count in self._stages.items() if count and stage is not Stage.FINISHED}

    @property
    def session_count(self) -> int:
        return self._sessions

    def next_offset(self, topic: str, partition: int) -> int:
        """The first offset of that partition that has not been applied."""
        return self._next.get((topic, partition), 0)

    def silent_ticks(self, node: NodeEntry) -> int:
        return self._ticks - node.at_tick

    def alive(self, node: NodeEntry) -> bool:
        return self.silent_ticks(node) < self.limits.dead_after_ticks

    # --- writing ---

    def apply(self, event: Event | None, *, ref: RecordRef, key: str | None) -> list[Change]:
        """Take one record; `event` None is a tombstone, or a record that cannot be read and is only passed over."""
        place = (ref.topic, ref.partition)
        if ref.offset < self._next.get(place, 0):
            return []
        self._next[place] = ref.offset + 1
        match event:
            case StageChanged():
                return self._moved(event, ref)
            case SessionResult():
                return self._session_result(event)
            case TaskAccepted():
                return self._accepted(event, ref)
            case TaskRejected():
                return self._rejected(event, ref)
            case TaskResult():
                return self._task_result(event)
            case NodeHeartbeat():
                self._beat(event, key)
            case Tick():
                self.tick = event
                self._ticks += 1
            case None if ref.topic == "nodes" and key is not None:
                self.nodes.pop(key, None)
            case _:
                pass
        return []

    def caught_up(self) -> list[Change]:
        """The log's end, as it was at the start, has been reached: results that are not here by now are gone."""
        if self.ready:
            return []
        self.ready = True
        return [
            change
            for task_id in list(self._ended)
            if (entry := self.tasks.get(task_id)) is not None and not entry.settled
            for change in self._settle(entry)
        ]

    def _moved(self, event: StageChanged, ref: RecordRef) -> list[Change]:
        session = self._session(event.task_id, event.session_id)
        if not session.finished and (event.attempt, RANK[event.stage]) >= (session.attempt, RANK[session.stage]):
            self._enter(session, event.stage)
            session.attempt = event.attempt
            session.at_ms = event.at_ms
            session.node = event.node or session.node
            session.failure = event.failure
            session.outcome = event.outcome or session.outcome
        self._shrink(event.task_id)
        return [Moved(event, ref)]

    def _session_result(self, event: SessionResult) -> list[Change]:
        task = self._task(event.task_id)
        session = self._session(event.task_id, event.session_id)
        self._enter(session, Stage.FINISHED)
        session.attempt, session.at_ms, session.sample = event.attempt, event.at_ms, event.sample
        session.node = event.node_id or session.node
        session.outcome, session.failure = event.outcome, event.error or event.outcome.failure
        if session.result is None:
            task.results += 1
        session.result = event
        changes = self._settle_if_whole(task)
        self._shrink(event.task_id)
        return changes

    def _accepted(self, event: TaskAccepted, ref: RecordRef) -> list[Change]:
        task = self._task(event.task_id)
        if task.accepted is not None and task.accepted.source != event.source:
            # The id was used again after `task_memory`: another task. A result written since is the new one's.
            result = task.result
            self._forget(event.task_id)
            task = self._task(event.task_id)
            if result is not None and result.at_ms >= event.at_ms:
                task.result = result
                self._ended[event.task_id] = None
        if task.accepted is None:
            task.accepted = event
            self._unseen.pop(event.task_id, None)
            names = event.sessions or [
                derive_session_id(event.source.partition, event.source.offset, sample) for sample in range(event.count)
            ]
            early = task.sessions
            task.sessions = {}
            for sample, name in enumerate(names):
                session = early.pop(name, None)
                if session is None:
                    session = self._add(task, name, event.at_ms)
                task.sessions[name] = session
                session.sample = sample
            task.sessions.update(early)
        self._remember(event.answers, event)
        changes: list[Change] = [Answered(event), Moved(event, ref), *self._settle_if_whole(task)]
        self._shrink(event.task_id)
        return changes

    def _rejected(self, event: TaskRejected, ref: RecordRef) -> list[Change]:
        if event.task_id is not None:
            self.rejected[event.task_id] = event
            self.rejected.move_to_end(event.task_id)
            while len(self.rejected) > self.limits.max_answers:
                self.rejected.popitem(last=False)
        self._remember(event.answers, event)
        return [Answered(event), Moved(event, ref)]

    def _task_result(self, event: TaskResult) -> list[Change]:
        task = self._task(event.task_id)
        self._unseen.pop(event.task_id, None)
        task.result = event
        self._ended[event.task_id] = None
        changes = self._settle_if_whole(task)
        self._shrink(event.task_id)
        return changes

    def _beat(self, event: NodeHeartbeat, key: str | None) -> None:
        name = key or event.node_id
        self.nodes.pop(name, None)
        self.nodes[name] = NodeEntry(beat=event, at_tick=self._ticks)
        if len(self.nodes) > self.limits.max_nodes:
            del self.nodes[next(iter(self.nodes))]

    def _remember(self, ref: RecordRef, answer: TaskAccepted | TaskRejected) -> None:
        self._answers[ref] = answer
        while len(self._answers) > self.limits.max_answers:
            self._answers.popitem(last=False)

    def _settle_if_whole(self, task: TaskEntry) -> list[Change]:
        if task.result is None or task.settled:
            return []
        # Of a task that had to be forgotten under way, the earlier results are not coming again.
        forgotten = self.ready and self.dropped > 0 and task.accepted is None
        if task.results < task.result.counts.accepted and not forgotten:
            return []
        return self._settle(task)

    def _settle(self, task: TaskEntry) -> list[Change]:
        task.settled = True
        return [Settled(task)]

    def _task(self, task_id: str) -> TaskEntry:
        task = self.tasks.get(task_id)
        if task is None:
            task = self.tasks[task_id] = TaskEntry(task_id)
            self._unseen[task_id] = None
        return task

    def _session(self, task_id: str, session_id: str) -> SessionEntry:
        task = self._task(task_id)
        return task.sessions.get(session_id) or self._add(task, session_id, 0)

    def _add(self, task: TaskEntry, session_id: str, at_ms: int) -> SessionEntry:
        session = task.sessions[session_id] = SessionEntry(session_id, task.task_id, at_ms=at_ms)
        self._sessions += 1
        self._stages[session.stage] += 1
        return session

    def _enter(self, session: SessionEntry, stage: Stage) -> None:
        self._stages[session.stage] -= 1
        self._stages[stage] += 1
        session.stage = stage

    def _shrink(self, keep: str) -> None:
        """Down to the limits, sparing the task that has just been touched."""
        while len(self.tasks) > self.limits.max_tasks or self._sessions > self.limits.max_sessions:
            victim = next(
                (one for pile in (self._ended, self._unseen, self.tasks) for one in pile if one != keep),
                None,
            )
            if victim is None:
                return
            self._forget(victim)
            self.dropped += 1

    def _forget(self, task_id: str) -> None:
        task = self.tasks.pop(task_id)
        self._ended.pop(task_id, None)
        self._unseen.pop(task_id, None)
        self._sessions -= len(task.sessions)
        for session in task.sessions.values():
            self._stages[session.stage] -= 1
