"""Who is there: the values of `polar.nodes`, one compacted partition."""

from __future__ import annotations

from .base import Event, Part


class Capacity(Part, frozen=True, kw_only=True):
    """How many sessions a node takes per stage at once."""

    init: int = 0
    ready: int = 0
    """Boxes that may wait for a RUN slot beyond those that are free."""
    run: int = 0
    grade: int = 0


class Held(Part, frozen=True, kw_only=True):
    """An assignment that a node has on its books."""

    assignment_id: str
    session_id: str
    attempt: int
    stage: str
    """A `Stage` value for sessions; `GRADE` for grades."""


class Offers(Part, frozen=True, kw_only=True):
    """What a node can do; a session goes only where all it needs is offered."""

    backends: list[str] = []
    harnesses: list[str] = []
    evaluators: list[str] = []


class NodeHeartbeat(Event, frozen=True, kw_only=True):
    """Key: `<node>` or, where init and run are two processes, `<node>/<half>`."""

    node_id: str
    boot_id: str
    """Lives in the node's state file; changes only when that is lost or the machine has rebooted."""
    half: str = "all"
    """`all`, `init` or `run`: the part of a gateway node this process is."""
    capacity: Capacity
    held: list[Held] = []
    """Every assignment on the node's books, of both halves (they share the state file)."""
    read_to: int = -1
    """The offset of the node's partition of `polar.assignments` below which all has been read and put on the books.
    Only the half that reads assignments sends it; -1 otherwise."""
    offers: Offers = Offers()
    runtime_api: str | None = None
    """URL of the node's runtime API, for graders that work in a session's own box."""
    draining: bool = False
    """Finishes what it has and takes nothing new."""
    beat: int
    at_ms: int


class Tick(Event, frozen=True, kw_only=True):
    """The leader's sign of life, each second, key `tick`. Log time: silence is counted in ticks."""

    leader_id: str
    number: int
    """Counts from 1 in each leadership."""
    at_ms: int
