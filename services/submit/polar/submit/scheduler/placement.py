"""Which node gets what: credit per stage, first come first served among sessions that a node can take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from polar.schemas import Lease, Phase
from polar.schemas.catalog import EVALUATORS

from .grading import SignBox, assign_grade, box_awaited
from .sessions import assign
from .settings import SchedulerSettings
from .world import Needs, Node, World


class _Credit(NamedTuple):
    init: int
    waiting: int
    """Sessions that may still be before RUN."""

    @property
    def free(self) -> int:
        return min(self.init, self.waiting)


def session_credit(world: World, node: Node, settings: SchedulerSettings) -> int:
    """How many more sessions a gateway takes now.

    INIT slots bound what is prepared at once. READY has a bound of its own, beyond the RUN slots that are free, so INIT
    goes on while all RUN slots are busy, and stops when enough boxes wait. Boxes kept for their grade have one, too:
    without graders a gateway pauses.
    """
    if node.draining or not node.whole:
        return 0
    count = dict.fromkeys((Phase.ASSIGNED, Phase.READY, Phase.RUNNING), 0)
    kept = 0
    for lease in world.at_node(node.node_id):
        if lease.phase in count:
            count[lease.phase] += 1
        else:
            kept += 1
    if kept >= settings.kept_boxes:
        return 0
    before_run = count[Phase.ASSIGNED] + count[Phase.READY]
    free_run = max(0, node.capacity("run") - count[Phase.RUNNING])
    waiting = node.capacity("ready") + free_run - before_run
    return max(0, _Credit(node.capacity("init") - count[Phase.ASSIGNED], waiting).free)


def place_sessions(world: World, settings: SchedulerSettings) -> None:
    credit = {node.node_id: session_credit(world, node, settings) for node in world.nodes.values()}
    credit = {node: free for node, free in credit.items() if free > 0}
    heads = {needs: iter(list(queue)) for needs, queue in world.queues.items()}
    waiting = {needs: session for needs, queue in heads.items() if (session := _next(world, queue)) is not None}
    while credit and waiting:
        # the longest waiting head that some node with credit can take; ties by id, so that a replay decides alike
        needs = min(waiting, key=lambda one: (world.leases[waiting[one]].queued_at_ms, waiting[one]))
        able = [node for node in credit if _able(world.nodes[node], needs)]
        if not able:
            del waiting[needs]
            continue
        chosen = max(able, key=lambda node: (credit[node], node))
        assign(world, world.leases[waiting[needs]], chosen, world.nodes[chosen].boot)
        credit[chosen] -= 1
        if not credit[chosen]:
            del credit[chosen]
        following = _next(world, heads[needs])
        if following is None:
            del waiting[needs]
        else:
            waiting[needs] = following


def _next(world: World, queue: Iterator[str]) -> str | None:
    for session in queue:
        due = world.leases[session].retry_at_ms
        if due is None or due <= world.now_ms:
            return session
    return None


def _able(node: Node, needs: Needs) -> bool:
    backends, harnesses = node.offered("backends"), node.offered("harnesses")
    if needs.backend is None:
        return bool(backends) and needs.harness in harnesses
    return needs.backend in backends and needs.harness in harnesses


def evaluator_name(world: World, lease: Lease) -> str:
    """The evaluator a session needs, as graders offer it."""
    strategy = world.request(lease).evaluator.strategy
    entry = EVALUATORS.resolve(strategy)
    return entry.name if entry is not None else strategy


def evaluators_offered(world: World) -> set[str]:
    """By nodes that live, have a slot for grades at all, and are not going away."""
    able = [node for node in world.nodes.values() if node.whole and not node.draining and node.capacity("grade")]
    return {name for node in able for name in node.offered("evaluators")}


def place_grades(world: World, settings: SchedulerSettings, sign: SignBox) -> None:
    credit = {
        node.node_id: node.capacity("grade") - len(world.graded_at(node.node_id))
        for node in world.nodes.values()
        if node.whole and not node.draining
    }
    for lease in world.in_phase(Phase.BUILT):
        name = evaluator_name(world, lease)
        able = [node for node, free in credit.items() if free > 0 and name in world.nodes[node].offered("evaluators")]
        if not able or box_awaited(world, settings, lease):
            continue
        chosen = max(able, key=lambda node: (credit[node], node))
        assign_grade(world, lease, chosen, world.nodes[chosen].boot, settings, sign)
        credit[chosen] -= 1
