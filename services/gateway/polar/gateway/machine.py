"""A session's life on a node, as a pure state machine over one row of the node's books.

    REGISTERED ─► INITIALIZING ─► READY ─► RUNNING ─► ENDED ─► (gone)
        └──────────────┴────────────┴──────────────────►┘

Each function takes a row and gives the step to write: the row as it shall be, and the reports that go with it. The
state file writes both in one transaction before anything is done about it, so a crash finds either the old row or the
new row with its reports to send. `None` means that the row is not where the step begins: somebody was faster (a
revoke, the other half), and there is nothing to do.

An attempt ends once: ENDED is final, and only the release removes it. Knows no I/O, no clock and no runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from polar.schemas import (
    UNGRADED,
    Artifact,
    Event,
    ExitReport,
    Failure,
    FailureKind,
    Held,
    SessionAssigned,
    SessionReady,
    Stage,
    StageChanged,
)
from polar.schemas.ids import derived


class Half(StrEnum):
    """The part of a gateway node that a process is; the two halves share the state file."""

    ALL = "all"
    INIT = "init"
    RUN = "run"

    @property
    def prepares(self) -> bool:
        return self is not Half.RUN

    @property
    def runs(self) -> bool:
        return self is not Half.INIT


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt on the node's books. Times are ms since the epoch."""

    assignment_id: str
    session_id: str
    attempt: int
    task_id: str
    node: str
    boot: str
    backend: str
    box_id: str
    """Derived from the assignment, so it is on the books before the box exists."""
    stage: Stage = Stage.REGISTERED
    revoked: str | None = None
    """Why the attempt shall stop; it is dead once the stage is ENDED."""
    released: bool = False
    """The box goes as soon as the attempt has ended."""
    box_kept: bool = True
    """After ENDED: the box waits for its grader."""
    assigned_ms: int
    init_ms: int | None = None
    ready_ms: int | None = None
    run_ms: int | None = None
    ended_ms: int | None = None

    @property
    def ended(self) -> bool:
        return self.stage is Stage.ENDED

    @property
    def held(self) -> Held:
        return Held(
            assignment_id=self.assignment_id, session_id=self.session_id, attempt=self.attempt, stage=self.stage.value
        )


class Ending(NamedTuple):
    """How an attempt ended."""

    exit: ExitReport
    failure: Failure | None = None
    """None exactly when the harness exited with 0."""


class Message(NamedTuple):
    """A record to send."""

    topic: str
    key: str
    value: Event


class Step(NamedTuple):
    row: Row
    messages: tuple[Message, ...] = ()


def assigned(event: SessionAssigned, backend: str, now_ms: int) -> Row:
    """The row of a new assignment."""
    return Row(
        assignment_id=event.assignment_id,
        session_id=event.session_id,
        attempt=event.attempt,
        task_id=event.task_id,
        node=event.node,
        boot=event.boot,
        backend=event.task.runtime.backend or backend,
        box_id=derived("box", event.assignment_id, event.boot),
        assigned_ms=now_ms,
    )


def begin_init(row: Row, now_ms: int) -> Step | None:
    if row.stage is not Stage.REGISTERED:
        return None
    row = _with(row, stage=Stage.INITIALIZING, init_ms=now_ms)
    return Step(row, (_report(row, now_ms),))


def box_ready(row: Row, now_ms: int) -> Step | None:
    """INIT is done; a revoke that came meanwhile ends the attempt instead."""
    if row.stage is not Stage.INITIALIZING:
        return None
    if row.revoked is not None:
        return ended(row, now_ms, revocation(row.revoked, row.stage))
    row = _with(row, stage=Stage.READY, ready_ms=now_ms)
    ready = SessionReady(
        assignment_id=row.assignment_id,
        node=row.node,
        boot=row.boot,
        session_id=row.session_id,
        attempt=row.attempt,
        box_id=row.box_id,
    )
    return Step(row, (_report(row, now_ms), Message("ready", row.node, ready)))


def begin_run(row: Row, now_ms: int) -> Step | None:
    if row.stage is not Stage.READY:
        return None
    row = _with(row, stage=Stage.RUNNING, run_ms=now_ms)
    return Step(row, (_report(row, now_ms),))


def ended(
    row: Row,
    now_ms: int,
    ending: Ending,
    *,
    artifacts: Sequence[Artifact] = (),
    timing_ms: Mapping[str, float] | None = None,
) -> Step | None:
    """The attempt's processes are dead. `now_ms`: when they died; `timing_ms`: what was measured besides.

    The box is kept where there is something to grade in it.
    """
    if row.ended:
        return None
    kept = ending.failure is None or ending.failure.kind not in UNGRADED
    row = _with(row, stage=Stage.ENDED, ended_ms=now_ms, box_kept=kept)
    value = msgspec.structs.replace(
        _changed(row, now_ms),
        exit=ending.exit,
        failure=ending.failure,
        artifacts=list(artifacts),
        timing_ms={**timings(row), **(timing_ms or {})},
    )
    return Step(row, (Message("stages", row.session_id, value),))


def revoke(row: Row, reason: str, now_ms: int) -> Step | None:
    """Stop the attempt. Where no process can run it ends at once; else its worker sees `revoked` and ends it."""
    if row.ended or row.revoked is not None:
        return None
    row = _with(row, revoked=reason)
    if row.stage in (Stage.REGISTERED, Stage.READY):
        return ended(row, now_ms, revocation(reason, row.stage))
    return Step(row)


def release(row: Row, now_ms: int) -> Step | None:
    """The box is no longer needed. An attempt that has not ended is over, too: nobody waits for it."""
    if row.released:
        return None
    step = revoke(row, "released before its end", now_ms) or Step(row)
    return Step(_with(step.row, released=True), step.messages)


def recovered(row: Row, half: Half, now_ms: int) -> Step | None:
    """What a start finds: an attempt whose worker died with the process before is lost, a box that waits is not."""
    mine = (row.stage is Stage.INITIALIZING and half.prepares) or (row.stage is Stage.RUNNING and half.runs)
    if not mine:
        return None
    if row.revoked is not None:
        return ended(row, now_ms, revocation(row.revoked, row.stage))
    return ended(row, now_ms, loss("the gateway was restarted", row.stage))


def given_back(row: Row, now_ms: int) -> Step | None:
    """The node drains and has not begun with this assignment: another node can have it at once."""
    if row.stage is not Stage.REGISTERED:
        return None
    return ended(row, now_ms, loss("the gateway is shutting down", row.stage))


def revocation(reason: str, stage: Stage, *, output_tail: str = "", duration_s: float | None = None) -> Ending:
    """The ending of a revoked attempt."""
    return Ending(
        ExitReport(reason="revoked", output_tail=output_tail, duration_s=duration_s),
        Failure(kind=FailureKind.CANCELLED, message=reason, stage=stage),
    )


def loss(message: str, stage: Stage) -> Ending:
    """The ending of an attempt whose processes died with, or because of, their gateway."""
    return Ending(
        ExitReport(reason="lost"),
        Failure(kind=FailureKind.INFRA, message=f"{message} during {stage}", retryable=True, stage=stage),
    )


def timings(row: Row) -> dict[str, float]:
    """How long the attempt was in each of its stages, in ms; a stage that never began has no entry."""
    found = {}
    for name, start, end in (
        ("init_wait", row.assigned_ms, row.init_ms),
        ("init", row.init_ms, row.ready_ms),
        ("ready_wait", row.ready_ms, row.run_ms),
        ("run", row.run_ms, row.ended_ms),
    ):
        if start is not None and end is not None:
            found[name] = float(max(0, end - start))
    return found


def _changed(row: Row, now_ms: int) -> StageChanged:
    return StageChanged(
        session_id=row.session_id,
        task_id=row.task_id,
        attempt=row.attempt,
        stage=row.stage,
        at_ms=now_ms,
        node=row.node,
        boot=row.boot,
        assignment=row.assignment_id,
    )


def _report(row: Row, now_ms: int) -> Message:
    value = msgspec.structs.replace(_changed(row, now_ms), timing_ms=timings(row))
    return Message("stages", row.session_id, value)


def _with(row: Row, **changes: Any) -> Row:
    return msgspec.structs.replace(row, **changes)
