"""A model of everything around the scheduler: gateways, builder, graders and finisher as they are told to behave.

It runs on the machine's own records: what the machine emits is delivered, what nodes report is queued, and the rows of
`polar.leases` are kept as a topic would keep them, so that a leader can be thrown away and restored at any point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from polar.schemas import (
    AgentSpec,
    BuildSummary,
    CancelRequest,
    Capacity,
    CustomShell,
    EvaluatorSpec,
    Event,
    Failure,
    FailureKind,
    Grade,
    GradeAssigned,
    GradeRevoked,
    Held,
    NodeHeartbeat,
    Offers,
    RecordRef,
    SessionAssigned,
    SessionClosed,
    SessionGraded,
    SessionReleased,
    SessionRevoked,
    Stage,
    StageChanged,
    TaskRequest,
    TaskState,
)
from polar.schemas.validation import Limits, check
from polar.schemas.wire import sha256
from polar.submit.scheduler.core import Scheduler
from polar.submit.scheduler.settings import SchedulerSettings
from polar.submit.scheduler.world import Emit

EventT = TypeVar("EventT", bound=Event)


def shell_task(task_id: str, samples: int = 1, **fields: object) -> TaskRequest:
    fields.setdefault("agent", AgentSpec(harness="shell", custom_shell=CustomShell(command="true")))
    return TaskRequest(task_id=task_id, instruction="do it", num_samples=samples, **fields)  # type: ignore[arg-type]


@dataclass
class Row:
    session: str
    attempt: int
    task: str
    stage: str


@dataclass
class Gateway:
    node_id: str
    boot: str = "boot-0"
    init: int = 2
    ready: int = 2
    run: int = 2
    rows: dict[str, Row] = field(default_factory=dict)
    inbox: list[tuple[int, Event]] = field(default_factory=list)
    read_to: int = 0
    beats: int = 0
    up: bool = True
    halves: set[str] | None = None
    """The processes that are up, of a node that is two; None: it is one."""
    harnesses: list[str] = field(default_factory=lambda: ["shell"])

    def has(self, half: str) -> bool:
        return self.up and (self.halves is None or half in self.halves)


@dataclass
class Grader:
    node_id: str
    boot: str = "boot-0"
    slots: int = 2
    evaluators: list[str] = field(default_factory=lambda: ["session_completed", "command"])
    rows: dict[str, GradeAssigned] = field(default_factory=dict)
    inbox: list[tuple[int, Event]] = field(default_factory=list)
    read_to: int = 0
    beats: int = 0
    up: bool = True


class Cluster:
    def __init__(self, *, gateways: int = 2, graders: int = 1, **settings: object) -> None:
        self.settings = SchedulerSettings(**{"final_grace": 3, "node_silence": 3, "lost_after": 2, **settings})
        self.limits = Limits()
        self.now = 1_000_000
        self.rows: dict[str, Event] = {}
        self.log: list[Emit] = []
        self.requests: dict[str, TaskRequest] = {}
        self.reports: list[StageChanged] = []
        self.offset = 0
        self.tasks_offset = 0
        self.gateways = {f"g{i}": Gateway(f"g{i}") for i in range(gateways)}
        self.graders = {f"e{i}": Grader(f"e{i}") for i in range(graders)}
        self.exits: dict[str, Failure | None] = {}
        """What the next harness of a session ends with, by session id."""
        self.summaries: dict[str, BuildSummary] = {}
        self.inputs: list[Callable[[], None]] = []
        """What the machine has read since the last commit: a new leader reads it again."""
        self.nodes_topic: dict[str, NodeHeartbeat] = {}
        """Compacted: the last beat of each process, also of those long gone."""
        self.beats_lag = False
        self.late_beats: list[NodeHeartbeat] = []
        self.machine = self._new()
        self.machine.catch_up()
        self.beat_all()

    def _new(self) -> Scheduler:
        machine = Scheduler(self.settings, self.limits, lambda session, attempt, until: f"key-{session}-{attempt}")
        machine.advance(self.now)
        return machine

    # the shell's work

    def commit(self) -> list[Emit]:
        """Decide and write, as the shell does in one transaction."""
        self.machine.decide()
        outs = self.machine.world.take_out()
        self.inputs.clear()
        for emit in outs:
            if emit.topic == "nodes" and emit.value is None:
                self.nodes_topic.pop(emit.key or "", None)
            if isinstance(emit.value, SessionAssigned):
                self.machine.assigned_at(emit.value.assignment_id, emit.value.session_id, self.offset)
            if isinstance(emit.value, GradeAssigned):
                self.machine.assigned_at(emit.value.grade_id, emit.value.session_id, self.offset)
            if emit.topic == "assignments":
                assert emit.key is not None
                node = self.gateways.get(emit.key) or self.graders[emit.key]
                node.inbox.append((self.offset, emit.value))
                self.offset += 1
            self.log.append(emit)
            self._react(emit)
        for key, row in self.machine.world.take_dirty():
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row
        return outs

    def lose_commit(self) -> None:
        """Decide, and have the transaction fail: the leader starts anew from the log."""
        self.machine.decide()
        self.restart_leader()

    def restart_leader(self, lost: frozenset[str] = frozenset()) -> None:
        """Throw the machine away with whatever it has not committed, and restore another from the rows; `lost`: tasks
        whose records the log no longer gives.

        It reads again what had not been committed, and first of all the beats: those of the topic, however old.
        """
        again, self.inputs = self.inputs, []
        self.machine = self._new()
        for key, row in self.rows.items():
            self.machine.world.restore(key, row)
        for row in list(self.machine.world.tasks.values()):
            if row.task_id in self.machine.world.sessions_of and row.task_id in lost:
                self.machine.world.lose_task(row, "the task's record is lost: the log starts at offset 9")
            elif row.task_id in self.machine.world.sessions_of:
                self.machine.world.know_request(check(self.requests[row.task_id], self.limits).task)
        self.machine.restored()
        for beat in self.nodes_topic.values():
            self.machine.on_heartbeat(beat)
        for read in again:
            self._read(read)
        self.deliver()
        self.machine.catch_up()
        self.late_beats.clear()
        for node in [*self.gateways.values(), *self.graders.values()]:
            if node.up:
                self.beat(node)

    def _react(self, emit: Emit) -> None:
        """The builder and the finisher, which are exactly-once: each trigger has one answer."""
        event = emit.value
        if isinstance(event, SessionClosed):
            task = next(one.value.task_id for one in self.log if _opens(one, event.session_id))
            summary = self.summaries.get(
                event.session_id, BuildSummary(captured=1, failed=0, traces=1, trained_tokens=3, prompt_tokens=5)
            )
            self.reports.append(
                self._stage(
                    event.session_id,
                    task,
                    event.attempt,
                    Stage.BUILT,
                    built=RecordRef(topic="built", partition=0, offset=len(self.log)),
                    summary=summary,
                )
            )
        elif isinstance(event, SessionGraded):
            self.reports.append(
                self._stage(event.session_id, event.task_id, event.attempt, Stage.FINISHED, outcome=event.outcome)
            )

    def _stage(self, session: str, task: str, attempt: int, stage: Stage, **fields: object) -> StageChanged:
        return StageChanged(
            session_id=session,
            task_id=task,
            attempt=attempt,
            stage=stage,
            at_ms=self.now,
            **fields,  # type: ignore[arg-type]
        )

    # inputs

    def submit(self, request: TaskRequest) -> RecordRef:
        ref = RecordRef(topic="tasks", partition=0, offset=self.tasks_offset)
        self.tasks_offset += 1
        assert request.task_id is not None
        self.requests.setdefault(request.task_id, request)
        self._read(lambda: self.machine.on_task(ref, request, sha256(request)))
        return ref

    def cancel(self, request: CancelRequest) -> None:
        self._read(lambda: self.machine.on_cancel(request))

    def _read(self, read: Callable[[], None]) -> None:
        self.inputs.append(read)
        read()

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1_000
            self.machine.on_own_tick()
            self.machine.tick(self.now)
            for node in [*self.gateways.values(), *self.graders.values()]:
                if node.up:
                    self.beat(node)

    def beat_all(self) -> None:
        for node in [*self.gateways.values(), *self.graders.values()]:
            self.beat(node)

    def beat(self, node: Gateway | Grader) -> None:
        for beat in self._beats(node):
            key = beat.node_id if beat.half == "all" else f"{beat.node_id}/{beat.half}"
            self.nodes_topic.pop(key, None)
            self.nodes_topic[key] = beat
            self.late_beats.append(beat)
        if not self.beats_lag:
            self.deliver_beats()

    def deliver_beats(self) -> None:
        """Let the machine read the beats that are waiting, oldest first."""
        late, self.late_beats = self.late_beats, []
        for beat in late:
            self.machine.on_heartbeat(beat)

    def _beats(self, node: Gateway | Grader) -> Iterator[NodeHeartbeat]:
        whole = self._beat(node)
        if not isinstance(node, Gateway) or node.halves is None:
            yield whole
            return
        size = whole.capacity
        if "init" in node.halves:
            capacity = Capacity(init=size.init, ready=size.ready)
            yield replace(whole, half="init", capacity=capacity, runtime_api=None)
        if "run" in node.halves:
            yield replace(whole, half="run", capacity=Capacity(run=size.run), read_to=-1)

    def _beat(self, node: Gateway | Grader) -> NodeHeartbeat:
        node.beats += 1
        if isinstance(node, Gateway):
            capacity = Capacity(init=node.init, ready=node.ready, run=node.run)
            offers = Offers(backends=["local"], harnesses=node.harnesses)
            held = [
                Held(assignment_id=one, session_id=row.session, attempt=row.attempt, stage=row.stage)
                for one, row in node.rows.items()
            ]
            api = f"http://{node.node_id}"
        else:
            capacity = Capacity(grade=node.slots)
            offers = Offers(evaluators=node.evaluators)
            held = [
                Held(assignment_id=one, session_id=row.session_id, attempt=row.attempt, stage="GRADE")
                for one, row in node.rows.items()
            ]
            api = None
        return NodeHeartbeat(
            node_id=node.node_id,
            boot_id=node.boot,
            capacity=capacity,
            held=held,
            read_to=node.read_to,
            offers=offers,
            runtime_api=api,
            beat=node.beats,
            at_ms=self.now,
        )

    def deliver(self, count: int | None = None) -> None:
        """Let the machine read reports, oldest first."""
        taken, self.reports = self.reports[:count], self.reports[count:] if count is not None else []
        for report in taken:
            self._read(lambda report=report: self.machine.on_stage(report))  # type: ignore[misc]

    # nodes at work

    def read_assignments(self) -> None:
        for gateway in self.gateways.values():
            for offset, event in gateway.inbox if gateway.has("init") else []:
                gateway.read_to = offset + 1
                self._take(gateway, event)
            if gateway.has("init"):
                gateway.inbox.clear()
        for grader in self.graders.values():
            for offset, event in grader.inbox if grader.up else []:
                grader.read_to = offset + 1
                if isinstance(event, GradeAssigned) and event.boot == grader.boot:
                    grader.rows[event.grade_id] = event
                elif isinstance(event, GradeRevoked) and event.boot == grader.boot:
                    grader.rows.pop(event.grade_id, None)
            if grader.up:
                grader.inbox.clear()

    def _take(self, gateway: Gateway, event: Event) -> None:
        if getattr(event, "boot", None) != gateway.boot:
            return
        if isinstance(event, SessionAssigned):
            gateway.rows[event.assignment_id] = Row(event.session_id, event.attempt, event.task_id, Stage.INITIALIZING)
        elif isinstance(event, SessionRevoked):
            for one, row in gateway.rows.items():
                if (row.session, row.attempt) == (event.session_id, event.attempt) and row.stage != Stage.ENDED:
                    self.end(gateway, one, Failure(kind=FailureKind.CANCELLED, message="revoked"))
        elif isinstance(event, SessionReleased):
            gone = [
                one
                for one, row in gateway.rows.items()
                if (row.session, row.attempt) == (event.session_id, event.attempt)
            ]
            for one in gone:
                assert gateway.rows[one].stage == Stage.ENDED, "released before its attempt ended"
                del gateway.rows[one]

    def end(self, gateway: Gateway, assignment: str, failure: Failure | None) -> None:
        row = gateway.rows[assignment]
        row.stage = Stage.ENDED
        self.reports.append(
            self._stage(
                row.session,
                row.task,
                row.attempt,
                Stage.ENDED,
                assignment=assignment,
                failure=failure,
                node=gateway.node_id,
            )
        )

    def work(self) -> None:
        """Every node does one step of what it has."""
        self.read_assignments()
        for gateway in self.gateways.values():
            running = sum(row.stage == Stage.RUNNING for row in gateway.rows.values())
            for one, row in list(gateway.rows.items()) if gateway.up else []:
                if row.stage == Stage.RUNNING and gateway.has("run"):
                    self.end(gateway, one, self.exits.pop(row.session, None))
                elif row.stage == Stage.INITIALIZING and gateway.has("init"):
                    row.stage = Stage.READY
                    self.reports.append(self._stage(row.session, row.task, row.attempt, Stage.READY, assignment=one))
                elif row.stage == Stage.READY and gateway.has("run") and running < gateway.run:
                    running += 1
                    row.stage = Stage.RUNNING
                    self.reports.append(self._stage(row.session, row.task, row.attempt, Stage.RUNNING, assignment=one))
        for grader in self.graders.values():
            for one, grade in list(grader.rows.items()) if grader.up else []:
                common = {"assignment": one, "node": grader.node_id}
                for stage, extra in (
                    (Stage.EVALUATING, {}),
                    (Stage.GRADED, {"grade": Grade(reward=1.0)}),
                ):
                    self.reports.append(
                        self._stage(grade.session_id, grade.task_id, grade.attempt, stage, **common, **extra)
                    )
                del grader.rows[one]

    def step_until(self, reached: Callable[[], bool]) -> None:
        """Commit, look, work and deliver in turn until `reached`."""
        for _ in range(50):
            self.commit()
            if reached():
                return
            self.work()
            self.deliver()
        raise AssertionError("not reached in 50 steps")

    def settle(self, rounds: int = 60) -> None:
        """Everything up and working until nothing is left to do."""
        self.beats_lag = False
        for node in [*self.gateways.values(), *self.graders.values()]:
            node.up = True
            if isinstance(node, Gateway) and node.halves is not None:
                node.halves = {"init", "run"}
            self.beat(node)
        for _ in range(rounds):
            self.commit()
            self.work()
            self.deliver()
            self.tick()
            if not self.reports and not self.machine.world.leases:
                break
        self.commit()

    # questions

    def of(self, kind: type[EventT], session: str | None = None) -> list[EventT]:
        found = [one.value for one in self.log if isinstance(one.value, kind)]
        return [one for one in found if session is None or getattr(one, "session_id", None) == session]

    def state(self, task_id: str) -> TaskState:
        return self.machine.world.tasks[task_id]


def _opens(emit: Emit, session: str) -> bool:
    return type(emit.value).__name__ == "SessionOpened" and getattr(emit.value, "session_id", None) == session


COMMAND = EvaluatorSpec(strategy="command", config={"command": "true"})
