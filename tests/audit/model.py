"""A log that is right, made record by record: tasks, sessions, attempts, calls, fences, late ones, grades, groups.

The scheduler's records are written here as the design has them; builds are the real builder's and endings the real
finisher's, so that the audit is compared with them and not with a copy of itself. Sessions interleave.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from polar.audit import Audit, AuditOptions, AuditReport, Extent, Reach
from polar.audit.views import BY_TOPIC
from polar.builder.build import build, failed, summarize
from polar.builder.session import Entry, SessionState, Verdict
from polar.bus.records import Record
from polar.evaluator.finishing import finished, lost, result_of, stage_of, without_traces
from polar.schemas import (
    AgentSpec,
    AttemptFenced,
    Budgets,
    BuilderSpec,
    CallStarted,
    Choice,
    CompletionCaptured,
    CompletionFailed,
    Cursor,
    CustomShell,
    DeadLetter,
    Engine,
    EvaluatorSpec,
    Event,
    Failure,
    FailureKind,
    Grade,
    GroupClosed,
    GroupMember,
    GroupState,
    Lease,
    Logprobs,
    LogprobsMode,
    Outcome,
    Phase,
    Prompt,
    PromptBase,
    RecordRef,
    Sampling,
    SessionClosed,
    SessionFinal,
    SessionGraded,
    SessionOpened,
    Stage,
    StageChanged,
    Status,
    TaskAccepted,
    TaskCounts,
    TaskRejected,
    TaskRequest,
    TaskResult,
    TaskState,
    TokenIds,
    Trajectory,
    encode,
    headers,
)
from polar.schemas.ids import derived, session_id

PARTITIONS = 2
START_MS = 1_800_000_000_000


def partition_of(topic: str, key: str) -> int:
    return 0 if topic in ("leases", "dead") else zlib.crc32(key.encode()) % PARTITIONS


@dataclass
class Rec:
    """A record on the model's log."""

    topic: str
    partition: int
    offset: int
    key: str
    value: Event | None
    source: RecordRef | None
    at_ms: int
    raw: bytes | None = None
    """What stands there instead of `value`."""
    extra: dict[str, bytes] = field(default_factory=dict)
    """More headers."""

    @property
    def ref(self) -> RecordRef:
        return RecordRef(topic=self.topic, partition=self.partition, offset=self.offset)

    def record(self) -> Record:
        value = self.value
        found = {} if value is None else dict(headers(value, source=self.source))
        raw = self.raw or (None if value is None else encode(value))
        return Record(
            topic=self.topic,
            partition=self.partition,
            offset=self.offset,
            timestamp_ms=self.at_ms,
            key=self.key,
            value=None,
            raw=raw,
            headers=found | self.extra,
        )


@dataclass(frozen=True)
class CallPlan:
    ending: str = "captured"
    """`captured`, `failed`, `open`, `late_end` (after the next fence or the close), `unstarted` (a failure alone)."""
    choices: int = 1
    delta: bool = True
    repeated: bool = False
    """Its end is sent twice, as it is."""


@dataclass(frozen=True)
class SessionPlan:
    attempts: tuple[tuple[CallPlan, ...], ...] = ((CallPlan(),),)
    """The calls of each attempt; the last attempt is the one that counts. Empty: it never ran."""
    until: str = "final"
    """`queued`, `running`, `closed`, `built`, `graded`, `finished`, `final`."""
    late_calls: int = 0
    """Calls started after the close."""
    after: bool = False
    """A call is started after `SessionFinal`."""
    status: Status = Status.COMPLETED
    reward: float | None = 1.0
    strategy: str = "prefix_merging"
    unpublishable: bool = False


@dataclass(frozen=True)
class TaskPlan:
    sessions: tuple[SessionPlan, ...] = (SessionPlan(),)
    repeated: bool = False
    deadline: bool = False
    """The group is decided before its last session is published."""
    rejected: bool = False


@dataclass
class Life:
    """A session on the model's log."""

    session: str
    task: str
    group: str
    sample: int
    plan: SessionPlan
    source: RecordRef
    state: SessionState | None = None
    bodies: list[CompletionCaptured] = field(default_factory=list)
    trajectory: Trajectory | None = None
    built: RecordRef | None = None
    built_with: Any = None
    graded: SessionGraded | None = None
    graded_ref: RecordRef | None = None
    published: RecordRef | None = None
    final: bool = False


class LogModel:
    """Call `run`, then read `records`."""

    def __init__(
        self,
        plans: list[TaskPlan],
        seed: int = 0,
        *,
        where: Callable[[str, str], int] = partition_of,
        gaps: bool = True,
        reply_ids: int = 6,
        start_ms: int = START_MS,
        after: LogModel | None = None,
    ) -> None:
        """
        Args:
            where: the partition of a key.
            gaps: leave some out between offsets, as transaction markers do.
            reply_ids: most ids of a reply.
            start_ms: the time of the first record; each is a millisecond after the one before.
            after: the log that this one goes on from.
        """
        self._random = Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._plans = plans
        self._where = where
        self._gaps = gaps
        self._reply_ids = reply_ids
        self._next: dict[tuple[str, int], int] = {} if after is None else after._next
        self._calls = 0 if after is None else after._calls
        self._tasks = 0 if after is None else after._tasks
        self.now = start_ms if after is None else after.now
        self.records: list[Rec] = []
        self.lives: list[Life] = []

    # writing

    def put(self, topic: str, key: str, value: Event | None, source: RecordRef | None = None) -> RecordRef:
        partition = self._where(topic, key)
        offset = self._next.get((topic, partition), 0)
        if self._gaps and self._random.random() < 0.2:
            offset += 1
        self._next[topic, partition] = offset + 1
        self.now += 1
        self.records.append(Rec(topic, partition, offset, key, value, source, self.now))
        return self.records[-1].ref

    def run(self) -> LogModel:
        lives = [self._task(number, plan) for number, plan in enumerate(self._plans, self._tasks)]
        self._tasks += len(self._plans)
        while lives:
            one = self._random.choice(lives)
            if next(one, None) is None:
                lives.remove(one)
        return self

    # a task

    def _task(self, number: int, plan: TaskPlan) -> Iterator[bool]:
        task = f"task-{number}"
        request = TaskRequest(
            task_id=task,
            instruction="do it",
            agent=AgentSpec(harness="shell", custom_shell=CustomShell(command="true")),
            num_samples=len(plan.sessions),
        )
        source = self.put("tasks", task, request)  # the scheduler takes them in order, so it is answered at once
        if plan.rejected:
            self.put("stages", task, TaskRejected(task_id=task, answers=source, problems=[], at_ms=self.now), source)
            letter = DeadLetter(origin=source, service="scheduler", error="no", at_ms=self.now)
            self.put("dead", f"tasks/{source.partition}/{source.offset}", letter, source)
            self._cursor(source)
            return
        group = f"group-{number}"
        names = [session_id(source.partition, source.offset, sample) for sample in range(len(plan.sessions))]
        lives = [
            Life(name, task, group, sample, one, source)
            for sample, (name, one) in enumerate(zip(names, plan.sessions, strict=True))
        ]
        self.lives += lives

        def accepted(answers: RecordRef) -> None:
            event = TaskAccepted(
                task_id=task,
                count=len(names),
                group_id=group,
                source=source,
                answers=answers,
                at_ms=self.now,
                sessions=names,
            )
            self.put("stages", task, event, answers)

        accepted(source)
        for life in lives:
            self._lease(life, Phase.QUEUED)
        self._task_state(task, source, lives)
        self._group_state(group, lives, decided=False)
        self._cursor(source)
        if plan.repeated:
            again = self.put("tasks", task, request)
            accepted(again)
            self._cursor(again)
        yield True
        running = [self._session(life) for life in lives]
        decided = False
        while running:
            one = self._random.choice(running)
            if next(one, None) is None:
                running.remove(one)
            yield True
            ended = [life for life in lives if life.published is not None]
            early = plan.deadline and len(ended) == len(lives) - 1
            if not decided and ended and (early or len(ended) == len(lives)):
                self._close_group(group, task, ended, len(lives), "deadline" if early else "complete")
                self._group_state(group, lives, decided=True)
                decided = True
        if all(life.published is not None for life in lives):
            state = self._task_state(task, source, lives)
            result = TaskResult(task_id=task, group_id=group, status="completed", counts=state.counts, at_ms=self.now)
            self.put("results", f"t/{task}", result, source)

    def _cursor(self, ref: RecordRef) -> None:
        self.put("leases", f"c/tasks/{ref.partition}", Cursor(next=ref.offset + 1, replay_from=ref.offset + 1))

    def _task_state(self, task: str, source: RecordRef, lives: list[Life]) -> TaskState:
        graded = [life.graded for life in lives if life.published is not None and life.graded is not None]
        by = {status: sum(one.outcome.status == status for one in graded) for status in Status}
        rewards = [one.grade.reward for one in graded if one.grade is not None and one.grade.reward is not None]
        state = TaskState(
            task_id=task,
            body_sha256="",
            source=source,
            group_id=lives[0].group,
            counts=TaskCounts(
                accepted=len(lives),
                finished=len(graded),
                completed=by[Status.COMPLETED],
                error=by[Status.ERROR],
                timeout=by[Status.TIMEOUT],
                cancelled=by[Status.CANCELLED],
                rewarded=len(rewards),
                reward_sum=sum(rewards),
            ),
            accepted_at_ms=self.now,
            finished_at_ms=self.now if len(graded) == len(lives) else None,
        )
        self.put("leases", f"t/{task}", state)
        return state

    def _group_state(self, group: str, lives: list[Life], *, decided: bool) -> None:
        row = GroupState(
            group_id=group, size=len(lives), opened_at_ms=self.now, decided_at_ms=self.now if decided else None
        )
        self.put("leases", f"g/{group}", row)

    def _close_group(self, group: str, task: str, ended: list[Life], size: int, reason: str) -> None:
        members = []
        for life in ended:
            graded = life.graded
            assert graded is not None
            reward = None if graded.grade is None else graded.grade.reward
            members.append(
                GroupMember(
                    session_id=life.session,
                    task_id=task,
                    attempt=graded.attempt,
                    outcome=graded.outcome,
                    reward=reward,
                )
            )
        event = GroupClosed(
            group_id=group,
            tasks=[task],
            size=size,
            members=members,
            selection=[one.session_id for one in members if one.reward is not None],
            reason=reason,
            at_ms=self.now,
        )
        self.put("trajectories", group, event)

    # a session

    def _lease(self, life: Life, phase: Phase) -> None:
        row = Lease(
            session_id=life.session,
            task_id=life.task,
            group_id=life.group,
            sample=life.sample,
            phase=phase,
            queued_at_ms=self.now,
        )
        self.put("leases", life.session, row)

    def _session(self, life: Life) -> Iterator[bool]:
        plan = life.plan
        if plan.until == "queued":
            return
        self._open(life)
        yield True
        waiting: list[Callable[[], None]] = []
        for number, calls in enumerate(plan.attempts, 1):
            if number > 1:
                fence = AttemptFenced(session_id=life.session, attempt=number - 1, failure=INFRA, at_ms=self.now)
                self._see(life, fence)
            self._lease(life, Phase.RUNNING)
            done: list[CompletionCaptured] = []
            for call in calls:
                yield from self._call(life, number, call, done, waiting)
        if plan.until == "running":
            return
        attempt = max(1, len(plan.attempts))
        failure = None if plan.status is Status.COMPLETED else Failure(kind=FailureKind.HARNESS, message="it failed")
        outcome = Outcome(status=plan.status, failure=failure)
        self._see(life, SessionClosed(session_id=life.session, attempt=attempt, outcome=outcome, at_ms=self.now))
        self._lease(life, Phase.CLOSED)
        yield True
        for _ in range(plan.late_calls):
            yield from self._call(life, attempt, CallPlan(delta=False), [], [])
        for end in waiting:
            end()
            yield True
        if plan.until == "closed":
            return
        if life.built is None:
            self._final(life)
        assert life.built is not None
        self._lease(life, Phase.BUILT)
        yield True
        if plan.until == "built":
            return
        self._grade(life, outcome)
        yield True
        if plan.until == "graded":
            return
        self._publish(life)
        yield True
        self._lease(life, Phase.FINISHED)
        if plan.until == "finished":
            return
        if not life.final:
            self._final(life)
        self.put("leases", life.session, None)
        if plan.after:
            yield from self._call(life, attempt, CallPlan(delta=False), [], [])

    def _open(self, life: Life) -> None:
        event = SessionOpened(
            session_id=life.session,
            task_id=life.task,
            group_id=life.group,
            sample=life.sample,
            num_samples=8,
            source=life.source,
            harness="shell",
            builder=BuilderSpec(strategy=life.plan.strategy),
            evaluator=EvaluatorSpec(),
            budgets=Budgets(queue_ttl=1, init_timeout=1, timeout_seconds=1, evaluation_timeout=1),
            at_ms=self.now,
        )
        ref = self.put("completions", life.session, event, life.source)
        life.state = SessionState(ref, event)

    def _see(self, life: Life, event: Event) -> RecordRef:
        """Writes a record of the session and lets the builder see it."""
        ref = self.put("completions", life.session, event)
        state = life.state
        assert state is not None
        before = state.closing
        verdict = state.observe(Entry(ref, event))
        if isinstance(event, CompletionCaptured) and verdict in (Verdict.KEPT, Verdict.BUILD):
            life.bodies.append(event)
        if before is None and verdict is Verdict.BUILD:
            self._build(life, ref)
        return ref

    def _call(
        self,
        life: Life,
        attempt: int,
        plan: CallPlan,
        done: list[tuple[CompletionCaptured, RecordRef, int, int]],
        waiting: list[Callable[[], None]],
    ) -> Iterator[bool]:
        self._calls += 1
        name = f"call-{self._calls}"
        if plan.ending != "unstarted":
            start = CallStarted(
                completion_id=name, session_id=life.session, attempt=attempt, call=0, dialect="test", at_ms=self.now
            )
            self._see(life, start)
            yield True
        if plan.ending == "open":
            return
        if plan.ending in ("failed", "unstarted"):
            failure = Failure(kind=FailureKind.PROVIDER, message="the engine was away")
            end: Event = CompletionFailed(
                completion_id=name, session_id=life.session, attempt=attempt, call=0, failure=failure, at_ms=self.now
            )
            self._see(life, end)
            return
        captured, ids, messages = self._captured(life, attempt, name, plan, done[-1] if done else None)

        def finish() -> None:
            ref = self._see(life, captured)
            done.append((captured, ref, ids, messages))
            if plan.repeated:
                self._see(life, captured)

        if plan.ending == "late_end":
            waiting.append(finish)
        else:
            finish()

    def _captured(
        self,
        life: Life,
        attempt: int,
        name: str,
        plan: CallPlan,
        before: tuple[CompletionCaptured, RecordRef, int, int] | None,
    ) -> tuple[CompletionCaptured, int, int]:
        base: PromptBase | None = None
        new: list[dict[str, Any]] = [{"role": "user", "content": name}]
        if plan.delta and before is not None:
            earlier, ref, ids, messages = before
            base = PromptBase(completion_id=earlier.completion_id, offset=ref.offset, ids=ids, messages=messages)
        own = self._ids(self._random.randint(2, 6))
        choices = []
        for index in range(plan.choices):
            sampled = self._ids(self._random.randint(1, self._reply_ids))
            logprobs = Logprobs(-self._numbers.random(len(sampled), np.float32))
            message = {"role": "assistant", "content": f"{name}/{index}"}
            choices.append(
                Choice(index=index, ids=TokenIds(sampled), logprobs=logprobs, message=message, finish="stop")
            )
        captured = CompletionCaptured(
            completion_id=name,
            session_id=life.session,
            attempt=attempt,
            task_id=life.task,
            group_id=life.group,
            sample=life.sample,
            call=0,
            started_ms=self.now,
            ended_ms=self.now,
            dialect="test",
            request_sha256="",
            prompt=Prompt(ids=TokenIds(own), messages=new, base=base),
            choices=choices,
            sampling_asked=Sampling(),
            sampling=Sampling(temperature=1.0),
            engine=Engine(model="policy", endpoint="e", logprobs_mode=LogprobsMode.PROCESSED),
        )
        whole = (base.ids if base else 0) + len(own) + len(choices[0].ids)
        said = (base.messages if base else 0) + len(new) + 1
        return captured, whole, said

    def _ids(self, count: int) -> Any:
        return self._numbers.integers(0, 30_000, count, dtype=np.int32)

    def _final(self, life: Life) -> None:
        life.final = True
        attempt = max(1, len(life.plan.attempts))
        self._see(life, SessionFinal(session_id=life.session, attempt=attempt, at_ms=self.now))

    def _build(self, life: Life, ref: RecordRef) -> None:
        assert life.state is not None
        account = life.state.account()
        life.trajectory = build(account, life.bodies)
        assert life.trajectory.error is None, life.trajectory.error
        life.built = self.put("built", life.session, life.trajectory, ref)
        report = StageChanged(
            session_id=life.session,
            task_id=life.task,
            attempt=account.attempt,
            stage=Stage.BUILT,
            at_ms=self.now,
            built=life.built,
            summary=summarize(life.trajectory, account),
        )
        self.put("stages", life.session, report, ref)

    def _grade(self, life: Life, outcome: Outcome) -> None:
        assert life.trajectory is not None
        assert life.built is not None
        reward = life.plan.reward
        life.graded = SessionGraded(
            session_id=life.session,
            attempt=life.trajectory.attempt,
            task_id=life.task,
            group_id=life.group,
            outcome=outcome,
            built=life.built,
            grade=None if reward is None else Grade(reward=reward),
            evaluator=EvaluatorSpec(),
            at_ms=self.now,
        )
        life.graded_ref = self.put("graded", life.session, life.graded, life.built)
        self._lease(life, Phase.GRADED)

    def _publish(self, life: Life) -> None:
        graded, source = life.graded, life.graded_ref
        assert graded is not None
        assert life.trajectory is not None
        trajectory = finished(life.trajectory, graded)
        if life.plan.unpublishable:
            trajectory = without_traces(trajectory, INFRA)
        life.published = self.put("trajectories", life.group, trajectory, source)
        self.put("results", f"s/{life.session}", result_of(trajectory, graded, life.published, self.now), source)
        self.put("stages", life.session, stage_of(trajectory, graded, life.published, self.now), source)


INFRA = Failure(kind=FailureKind.INFRA, message="a machine was lost", retryable=True)


def reach_of(records: list[Rec], starts: dict[tuple[str, int], int] | None = None) -> Reach:
    """The whole log, or what `starts` leave of it, at rest."""
    ends: dict[tuple[str, int], int] = {}
    for topic in BY_TOPIC:
        for partition in range(1 if topic in ("leases", "dead") else PARTITIONS):
            ends[topic, partition] = 0
    for one in records:
        ends[one.topic, one.partition] = max(ends[one.topic, one.partition], one.offset + 1)
    begins = starts or {}
    return Reach({where: Extent(begins.get(where, 0), end, end) for where, end in ends.items()}, partition_of)


def audited(
    records: list[Rec],
    options: AuditOptions | None = None,
    *,
    starts: dict[tuple[str, int], int] | None = None,
    reach: Reach | None = None,
) -> AuditReport:
    """What the audit says of these records."""
    audit = Audit(reach or reach_of(records, starts), options)
    try:
        left = starts or {}
        audit.feed(one.record() for one in records if one.offset >= left.get((one.topic, one.partition), 0))
        audit.judge()
        return audit.report()
    finally:
        audit.close()


__all__ = ["CallPlan", "LogModel", "Rec", "SessionPlan", "TaskPlan", "audited", "derived", "failed", "lost", "reach_of"]
