"""Who is there and what they have: beats against leases.

A beat says what a node has on its books and how far it has read its assignments. What it should have and has not is
lost and queued again; what it has and should not is taken back. Silence is counted in ticks of this leader that were
read back, so that an outage of the log expires nothing.
"""

from __future__ import annotations

from polar.schemas import (
    Failure,
    FailureKind,
    GradeRevoked,
    Held,
    Lease,
    NodeHeartbeat,
    Phase,
    SessionReleased,
    SessionRevoked,
    Stage,
)

from . import grading, sessions
from .settings import SchedulerSettings
from .world import ON_NODE, Node, World

DOUBT_MEMORY = 600
"""Ticks after which a doubt about an assignment that was never settled is forgotten; it ended otherwise."""


class Nodes:
    def __init__(self, world: World, settings: SchedulerSettings) -> None:
        self._world = world
        self._settings = settings
        self._doubts: dict[str, int] = {}
        """Assignment → the tick at which its node's books first lacked it, or held it without a lease."""
        self._early: dict[tuple[str, str], NodeHeartbeat] = {}
        """The newest beat per process that was read before this leader had caught up."""
        self._caught_up = False

    def catch_up(self) -> None:
        """Everything that may explain a beat has been read."""
        self._caught_up = True
        early, self._early = self._early, {}
        for beat in early.values():
            self._on_beat(beat, live=False)

    def forget_doubts(self) -> None:
        ticks = self._world.ticks
        self._doubts = {one: since for one, since in self._doubts.items() if ticks - since < DOUBT_MEMORY}

    def on_heartbeat(self, beat: NodeHeartbeat) -> None:
        if self._caught_up:
            self._on_beat(beat, live=True)
            return
        # the topic holds beats of former boots and of nodes long gone, and reports that explain them may come later
        self._early.pop((beat.node_id, beat.half), None)
        self._early[beat.node_id, beat.half] = beat

    def _on_beat(self, beat: NodeHeartbeat, *, live: bool) -> None:
        world = self._world
        node = world.nodes.get(beat.node_id)
        if node is None:
            node = world.nodes[beat.node_id] = Node(beat.node_id, beat.boot_id)
        elif node.boot != beat.boot_id:
            self._lose(node, f"node {node.node_id} lost its state (new boot id)", boot=node.boot, boxes=True)
            for half in list(node.halves):
                node.drop(half)
        node.beat(beat, live=live)
        if beat.read_to >= 0 and live:
            self._reconcile(node, beat)

    def _reconcile(self, node: Node, beat: NodeHeartbeat) -> None:
        """Compare a node's books with the leases: queue again what it lost, take back what it should not have."""
        world = self._world
        held = {one.assignment_id for one in beat.held}
        for lease in [*world.at_node(node.node_id), *world.graded_at(node.node_id)]:
            grading_here = lease.phase is Phase.GRADING and lease.grader == node.node_id
            if not grading_here and lease.phase not in ON_NODE:
                continue
            assert lease.assignment_id is not None
            if lease.assignment_id in held or not 0 <= lease.assigned_offset < beat.read_to:
                self._doubts.pop(lease.assignment_id, None)
                continue
            # a report that explains it may be on its way: reports and beats are in different topics
            since = self._doubts.setdefault(lease.assignment_id, world.ticks)
            if world.ticks - since >= self._settings.lost_after:
                del self._doubts[lease.assignment_id]
                self.lost(lease, grading_here=grading_here, message=f"node {node.node_id} no longer has the assignment")
        for row in beat.held:
            lease_ = world.leases.get(row.session_id)
            explained = lease_ is not None and (
                lease_.assignment_id == row.assignment_id
                or (lease_.box_held and lease_.node == node.node_id and lease_.attempt == row.attempt)
            )
            if row.stage == "GRADE":
                self._check_grade(node, row, lease_)
                continue
            if explained:
                continue
            key = (row.session_id, row.attempt)
            if world.ticks - node.released.get(key, -self._settings.release_repeat) < self._settings.release_repeat:
                continue
            node.released[key] = world.ticks
            if row.stage != Stage.ENDED:
                world.emit(
                    "assignments",
                    node.node_id,
                    SessionRevoked(
                        node=node.node_id,
                        boot=beat.boot_id,
                        session_id=row.session_id,
                        attempt=row.attempt,
                        reason="no lease",
                    ),
                )
            world.emit(
                "assignments",
                node.node_id,
                SessionReleased(node=node.node_id, boot=beat.boot_id, session_id=row.session_id, attempt=row.attempt),
            )
        for key in node.released.keys() - {(row.session_id, row.attempt) for row in beat.held}:
            if world.ticks - node.released[key] >= self._settings.release_repeat:
                del node.released[key]

    def _check_grade(self, node: Node, row: Held, lease: Lease | None) -> None:
        """Take back a grade that the scheduler has given up, e.g. while its grader was silent."""
        if lease is not None and lease.assignment_id == row.assignment_id:
            return
        since = self._doubts.setdefault(row.assignment_id, self._world.ticks)
        if self._world.ticks - since < self._settings.lost_after:
            return  # done, and the beat is older than the report
        del self._doubts[row.assignment_id]
        self._world.emit(
            "assignments",
            node.node_id,
            GradeRevoked(
                grade_id=row.assignment_id,
                node=node.node_id,
                boot=node.boot,
                session_id=row.session_id,
                reason="no lease",
            ),
        )

    def lost(self, lease: Lease, *, grading_here: bool, message: str) -> None:
        if grading_here:
            failure = Failure(kind=FailureKind.EVALUATOR, message=message, retryable=True, stage=Stage.EVALUATING)
            grading.lost(self._world, self._settings, lease, failure)
        else:
            failure = Failure(kind=FailureKind.INFRA, message=message, retryable=True, stage=lease.phase.upper())
            sessions.end_attempt(self._world, self._settings, lease, failure)

    def _lose(self, node: Node, message: str, *, boot: str, boxes: bool) -> None:
        """A node is gone, with whatever ran under that boot id; `boxes`: and with the boxes it kept for grades."""
        world = self._world
        for lease in world.at_node(node.node_id):
            if lease.boot != boot:
                continue
            if boxes or lease.phase in ON_NODE:
                # the box died with the node: nothing to release, and no grader can work in it
                lease = world.change(lease, box_held=False)
            if lease.phase in ON_NODE:
                self.lost(lease, grading_here=False, message=message)
        for lease in world.graded_at(node.node_id):
            if lease.grader_boot == boot:
                self.lost(lease, grading_here=True, message=message)

    def on_own_tick(self) -> None:
        """A tick of this leader was read back: the log is alive, so silence counts."""
        for node in list(self._world.nodes.values()):
            for half in node.silent:
                node.silent[half] += 1
            silent = [half for half, ticks in node.silent.items() if ticks > self._settings.node_silence]
            for half in silent:
                node.drop(half)
            if silent:
                self._lose(node, f"node {node.node_id} has been silent", boot=node.boot, boxes=False)
            node.gone += not node.alive
            if node.gone > self._settings.node_memory:
                del self._world.nodes[node.node_id]
                for key in node.keys:
                    self._world.emit("nodes", key, None)
