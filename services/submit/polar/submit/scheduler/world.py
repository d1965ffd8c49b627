"""The scheduler's state: plain tables with the indexes it decides by. No clock, no I/O.

Whatever changes is marked dirty; the shell writes dirty rows to `polar.leases` in the transaction of the decisions that
changed them, so that a new leader finds exactly what was decided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace

from polar.schemas import (
    AgentSpec,
    CancelMemory,
    Event,
    Failure,
    FailureKind,
    GroupState,
    Lease,
    NodeHeartbeat,
    Phase,
    RecordRef,
    TaskRequest,
    TaskState,
)

LONGEST_S = 7 * 86_400.0
"""Of any budget, as submit's limits have it by default."""
ON_NODE = frozenset({Phase.ASSIGNED, Phase.READY, Phase.RUNNING})
"""Phases in which an attempt is a gateway's."""


class Emit(NamedTuple):
    """A record to write."""

    topic: str
    key: str | None
    value: Event | None
    """None: a tombstone."""
    source: RecordRef | None = None


class Needs(NamedTuple):
    """What a session asks of a gateway; sessions of equal needs wait in one queue."""

    backend: str | None
    harness: str


@dataclass
class Node:
    """One node as its beats show it; `halves` are its processes."""

    node_id: str
    boot: str
    halves: dict[str, NodeHeartbeat] = field(default_factory=dict)
    silent: dict[str, int] = field(default_factory=dict)
    """Ticks of this leader since each half's last beat."""
    proven: set[str] = field(default_factory=set)
    """Halves that have beaten since this leader began: the topic keeps the last beat of nodes long gone."""
    keys: set[str] = field(default_factory=set)
    """Of its records in `polar.nodes`."""
    gone: int = 0
    """Ticks since its last half fell silent."""
    released: dict[tuple[str, int], int] = field(default_factory=dict)
    """(session, attempt) → the tick at which its release was last sent, for rows that no lease explains."""

    def beat(self, heartbeat: NodeHeartbeat, *, live: bool) -> None:
        """`live`: sent since this leader has caught up."""
        # a node that changed between one process and two leaves no stale half behind
        stale = ("init", "run") if heartbeat.half == "all" else ("all",)
        for half in stale:
            self.drop(half)
        self.boot = heartbeat.boot_id
        self.halves[heartbeat.half] = heartbeat
        self.silent[heartbeat.half] = 0
        self.gone = 0
        self.keys.add(self.node_id if heartbeat.half == "all" else f"{self.node_id}/{heartbeat.half}")
        if live:
            self.proven.add(heartbeat.half)

    def drop(self, half: str) -> None:
        self.halves.pop(half, None)
        self.silent.pop(half, None)
        self.proven.discard(half)

    @property
    def alive(self) -> bool:
        return bool(self.halves)

    def capacity(self, name: str) -> int:
        return sum(getattr(one.capacity, name) for one in self.halves.values())

    @property
    def draining(self) -> bool:
        return any(one.draining for one in self.halves.values())

    @property
    def whole(self) -> bool:
        """Both halves are there, and not from hearsay."""
        return "all" in self.proven or {"init", "run"} <= self.proven

    def offered(self, kind: str) -> set[str]:
        return {name for one in self.halves.values() for name in getattr(one.offers, kind)}

    @property
    def runtime_api(self) -> str | None:
        return next((one.runtime_api for one in self.halves.values() if one.runtime_api), None)


class World:
    def __init__(self) -> None:
        self.now_ms = 0
        self.ticks = 0
        self.leases: dict[str, Lease] = {}
        self.tasks: dict[str, TaskState] = {}
        self.requests: dict[str, TaskRequest] = {}
        """Requests of tasks that are not finished."""
        self.groups: dict[str, GroupState] = {}
        self.cancels: dict[str, CancelMemory] = {}
        self.nodes: dict[str, Node] = {}
        self.final_wait: dict[str, int] = {}
        """Session → ticks until `SessionFinal`; in memory only, a new leader waits the whole grace again."""
        self.sessions_of: dict[str, dict[str, None]] = {}
        self.phases: dict[Phase, dict[str, None]] = {phase: {} for phase in Phase}
        self.queues: dict[Needs, dict[str, None]] = {}
        self.on_node: dict[str, dict[str, None]] = {}
        """Gateway node → sessions whose attempt or box it has."""
        self.grading_on: dict[str, dict[str, None]] = {}
        self.too_large: dict[str, str] = {}
        """Session, task or group → why what follows from it could not be written before; the shell's word."""
        self.doomed: dict[str, Failure] = {}
        """Sessions that cannot go on: their task's record is lost, or too large things follow from them."""
        self.out: list[Emit] = []
        self._dirty: dict[str, Event | None] = {}

    # rows

    def put(self, lease: Lease) -> Lease:
        """Store a lease, keep the indexes true, mark it dirty."""
        old = self.leases.get(lease.session_id)
        if old is not None:
            self._unindex(old)
        self.leases[lease.session_id] = lease
        self._index(lease)
        self._dirty[lease.session_id] = lease
        return lease

    def change(self, lease: Lease, **fields: Any) -> Lease:
        return self.put(replace(lease, **fields))

    def drop(self, lease: Lease) -> None:
        self._unindex(self.leases.pop(lease.session_id))
        sessions = self.sessions_of[lease.task_id]
        sessions.pop(lease.session_id, None)
        if not sessions:
            del self.sessions_of[lease.task_id]
            self.requests.pop(lease.task_id, None)
        self.final_wait.pop(lease.session_id, None)
        self.doomed.pop(lease.session_id, None)
        self._dirty[lease.session_id] = None

    def put_task(self, state: TaskState) -> TaskState:
        self.tasks[state.task_id] = state
        self._dirty[f"t/{state.task_id}"] = state
        return state

    def drop_task(self, task_id: str) -> None:
        del self.tasks[task_id]
        self.requests.pop(task_id, None)
        self._dirty[f"t/{task_id}"] = None

    def put_group(self, state: GroupState) -> GroupState:
        self.groups[state.group_id] = state
        self._dirty[f"g/{state.group_id}"] = state
        return state

    def drop_group(self, group_id: str) -> None:
        del self.groups[group_id]
        self._dirty[f"g/{group_id}"] = None

    def put_cancel(self, memory: CancelMemory) -> None:
        self.cancels[memory.task_id] = memory
        self._dirty[f"x/{memory.task_id}"] = memory

    def drop_cancel(self, task_id: str) -> None:
        del self.cancels[task_id]
        self._dirty[f"x/{task_id}"] = None

    def restore(self, key: str, row: Event | None) -> None:
        """A row of `polar.leases`, in log order; None ends it. Marks nothing dirty."""
        if row is None:
            kind, _, name = key.partition("/")
            tables: dict[str, dict[str, Any]] = {"t": self.tasks, "g": self.groups, "x": self.cancels}
            if name and kind in tables:
                tables[kind].pop(name, None)
            elif key in self.leases:
                self.drop(self.leases[key])
        elif isinstance(row, Lease):
            self.put(row)
        elif isinstance(row, TaskState):
            self.tasks[row.task_id] = row
        elif isinstance(row, GroupState):
            self.groups[row.group_id] = row
        elif isinstance(row, CancelMemory):
            self.cancels[row.task_id] = row
        self._dirty.clear()

    def take_dirty(self) -> list[tuple[str, Event | None]]:
        dirty, self._dirty = list(self._dirty.items()), {}
        return dirty

    @property
    def has_dirty(self) -> bool:
        return bool(self._dirty)

    def take_out(self) -> list[Emit]:
        out, self.out = self.out, []
        return out

    def emit(self, topic: str, key: str | None, value: Event | None, source: RecordRef | None = None) -> None:
        self.out.append(Emit(topic, key, value, source))

    # questions

    def in_phase(self, phase: Phase) -> Iterator[Lease]:
        return (self.leases[one] for one in list(self.phases[phase]))

    def at_node(self, node: str) -> list[Lease]:
        return [self.leases[one] for one in self.on_node.get(node, ())]

    def graded_at(self, node: str) -> list[Lease]:
        return [self.leases[one] for one in self.grading_on.get(node, ())]

    def request(self, lease: Lease) -> TaskRequest:
        """What the session's task asks for; of a doomed session, the least that its ending needs."""
        request = self.requests[lease.task_id]
        return stand_in(request.task_id or lease.task_id, request) if lease.session_id in self.doomed else request

    def needs(self, lease: Lease) -> Needs:
        request = self.requests[lease.task_id]
        # gateways offer the import paths they load by name, like harnesses
        return Needs(request.runtime.backend, request.agent.harness or request.agent.import_path or "")

    def _index(self, lease: Lease) -> None:
        session = lease.session_id
        self.sessions_of.setdefault(lease.task_id, {})[session] = None
        self.phases[lease.phase][session] = None
        if lease.phase is Phase.QUEUED and lease.task_id in self.requests:
            self.queues.setdefault(self.needs(lease), {})[session] = None
        if lease.node is not None and (lease.phase in ON_NODE or lease.box_held):
            self.on_node.setdefault(lease.node, {})[session] = None
        if lease.phase is Phase.GRADING and lease.grader is not None:
            self.grading_on.setdefault(lease.grader, {})[session] = None

    def _unindex(self, lease: Lease) -> None:
        session = lease.session_id
        self.phases[lease.phase].pop(session, None)
        if lease.phase is Phase.QUEUED and lease.task_id in self.requests:
            needs = self.needs(lease)
            queue = self.queues.get(needs, {})
            queue.pop(session, None)
            if not queue:
                self.queues.pop(needs, None)
        if lease.node is not None:
            self.on_node.get(lease.node, {}).pop(session, None)
        if lease.grader is not None:
            self.grading_on.get(lease.grader, {}).pop(session, None)

    def lose_task(self, state: TaskState, reason: str) -> None:
        """A restored task whose record the log no longer has: its open sessions can only be ended."""
        for session in self.sessions_of.get(state.task_id, ()):
            self.doomed[session] = Failure(kind=FailureKind.INFRA, message=reason)
        made = stand_in(state.task_id)
        # its keys may be good for as long as any task's may
        self.know_request(replace(made, num_samples=state.counts.accepted, timeout_seconds=LONGEST_S))

    def doom_too_large(self) -> None:
        """Restored sessions from which, as the shell has found, something too large follows."""
        for session, reason in self.too_large.items():
            if session in self.leases:
                self.doomed.setdefault(session, Failure(kind=FailureKind.INFRA, message=reason))

    def know_request(self, request: TaskRequest) -> None:
        """The request of a restored task: its queued sessions can now be placed."""
        assert request.task_id is not None
        self.requests[request.task_id] = request
        for session in self.sessions_of.get(request.task_id, ()):
            self._index(self.leases[session])


def stand_in(task_id: str, request: TaskRequest | None = None) -> TaskRequest:
    """A request for a session that cannot go on; only the budgets of the real one remain, where it is known."""
    made = TaskRequest(task_id=task_id, instruction="", agent=AgentSpec(), max_attempts=1)
    if request is None:
        return made
    return replace(
        made,
        num_samples=request.num_samples,
        timeout_seconds=request.timeout_seconds,
        queue_ttl=request.queue_ttl,
        init_timeout=request.init_timeout,
        evaluation_timeout=request.evaluation_timeout,
    )
