"""The builder on one partition of `completions`: sessions in, a trajectory and a BUILT report each out.

Replay and processing run every record through the same `SessionState`; only processing emits. What is emitted depends
on the records alone, the time stamps of the report apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import msgspec
import structlog

from polar.bus import Out, Record, RecordTooLarge, Send
from polar.schemas import (
    AttemptFenced,
    BuildSummary,
    CompletionCaptured,
    Failure,
    FailureKind,
    SessionFinal,
    SessionOpened,
    Stage,
    StageChanged,
    Trajectory,
)
from polar.schemas.completions import Bracket, SessionClosed
from polar.service.clock import Clock

from .bodies import Bodies
from .build import build, failed, summarize
from .metrics import BuilderMetrics
from .session import Account, CallState, Entry, SessionState, Verdict
from .texts import Tokenizers

_log = structlog.get_logger(__name__)

SessionEvent = SessionOpened | AttemptFenced | SessionClosed | SessionFinal | Bracket


class SessionProcessor:
    """Open sessions of one partition. A `polar.bus.Processor`."""

    def __init__(
        self,
        bodies: Bodies,
        metrics: BuilderMetrics,
        clock: Clock,
        allowed: Collection[str],
        tokenizers: Tokenizers | None = None,
    ) -> None:
        self._bodies = bodies
        self._metrics = metrics
        self._clock = clock
        self._allowed = allowed
        self._tokenizers = tokenizers
        self._open: dict[str, SessionState] = {}
        """In the order of their opening records."""

    def replay(self, record: Record) -> None:
        state, verdict = self._observe(record)
        if state is not None:
            self._forget(state, record, verdict)

    async def process(self, record: Record, send: Send) -> None:
        state, verdict = self._observe(record)
        self._metrics.records.labels(str(verdict)).inc()
        await self._bodies.settle()
        if state is None:
            return
        if verdict is Verdict.BUILD:
            await self._build(state.account(), record, send)
        self._forget(state, record, verdict)

    def replay_from(self, next_offset: int) -> int:
        oldest = next(iter(self._open.values()), None)
        return next_offset if oldest is None else oldest.opening.offset

    def _observe(self, record: Record) -> tuple[SessionState | None, Verdict]:
        event = record.value
        assert isinstance(event, SessionEvent)
        session = event.session_id
        state = self._open.get(session)
        if state is None:
            if not isinstance(event, SessionOpened):
                _log.info("record of a session that is not open", session=session, offset=record.offset)
                return None, Verdict.LATE
            state = self._open[session] = SessionState(record.ref, event)
            return state, Verdict.OPENED
        verdict = state.observe(Entry(record.ref, event))
        if isinstance(event, CompletionCaptured) and verdict in (Verdict.KEPT, Verdict.BUILD):
            self._bodies.put(session, record.offset, event, len(record.raw or b""))
        if isinstance(event, AttemptFenced) and _all_fenced(state):
            self._bodies.drop(session)
        return state, verdict

    async def _build(self, account: Account, record: Record, send: Send) -> None:
        session = account.opened.session_id
        started = self._clock.monotonic()
        make = partial(_made, account, self._allowed, self._tokenizers)
        trajectory, summary = await self._bodies.use(session, make)
        seconds = self._clock.monotonic() - started
        try:
            (built,) = await send(Out("built", session, trajectory, source=record.ref))
        except RecordTooLarge as error:
            trajectory = failed(account, None, _too_large(error))
            summary = summarize(trajectory, account)
            try:
                (built,) = await send(Out("built", session, trajectory, source=record.ref))
            except RecordTooLarge:
                # tens of thousands of calls: the summary counts them, the log still has them
                trajectory = msgspec.structs.replace(trajectory, set_aside=[], metadata={})
                (built,) = await send(Out("built", session, trajectory, source=record.ref))
        await send(
            Out(
                "stages",
                session,
                StageChanged(
                    session_id=session,
                    task_id=account.opened.task_id,
                    attempt=account.attempt,
                    stage=Stage.BUILT,
                    at_ms=self._clock.now_ms(),
                    failure=trajectory.error,
                    built=built,
                    summary=summary,
                    timing_ms={"build_ms": round(seconds * 1000, 3)},
                ),
                source=record.ref,
            )
        )
        self._metrics.built(trajectory, summary, seconds)
        if trajectory.error is not None:
            _log.warning("session not built", session=session, reason=trajectory.error.message)

    def _forget(self, state: SessionState, record: Record, verdict: Verdict) -> None:
        session = state.opened.session_id
        if verdict is Verdict.BUILD:
            self._bodies.drop(session)
        if isinstance(record.value, SessionFinal):
            del self._open[session]


def _made(
    account: Account, allowed: Collection[str], tokenizers: Tokenizers | None, bodies: Iterator[CompletionCaptured]
) -> tuple[Trajectory, BuildSummary]:
    trajectory = build(account, bodies, allowed=allowed, tokenizers=tokenizers)
    return trajectory, summarize(trajectory, account)


def _all_fenced(state: SessionState) -> bool:
    """Whether no call captured so far can count any more."""
    captured = (call for call in state.calls.values() if call.state is CallState.CAPTURED)
    return all(call.attempt in state.fenced for call in captured)


def _too_large(error: RecordTooLarge) -> Failure:
    return Failure(
        kind=FailureKind.INFRA,
        message=f"the trajectory has {error.size} bytes, over the limit of {error.limit} for a record: raise "
        "POLAR_KAFKA_MAX_RECORD_BYTES, or build with fewer calls per session",
        stage=str(Stage.BUILT),
    )
