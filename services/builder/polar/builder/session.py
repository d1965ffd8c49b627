"""One session's life on `polar.completions`, as a state machine over its records in log order.

Promises: the answer depends on the order of the records and on nothing else (no clock, no network); the closing record
is the first at which the session is closed and no call of its attempt is open, or `SessionFinal`; every call started up
to that record is known with how it ended; feeding the closing record again gives the same answer. It must not know
Kafka, strategies or what a completion holds: bodies are kept by the caller.

    SessionOpened ─► calls … ─► SessionClosed ─► last open call ends ─► BUILD ─► SessionFinal
                      │ AttemptFenced: calls so far are set aside          └─ or SessionFinal: open calls unfinished
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from polar.schemas import (
    AttemptFenced,
    CallStarted,
    CompletionCaptured,
    CompletionFailed,
    Event,
    Failure,
    FailureKind,
    Outcome,
    RecordRef,
    SessionClosed,
    SessionFinal,
    SessionOpened,
    SetAside,
    Status,
)


class Entry(NamedTuple):
    """A record and where it stands."""

    ref: RecordRef
    event: Event


class Verdict(StrEnum):
    """What a record means for its session."""

    OPENED = "opened"
    KEPT = "kept"
    """Part of the session; a `CompletionCaptured` so judged is what a build needs."""
    FENCED = "fenced"
    """Of an attempt that is over: accounted for, its body is not needed."""
    DUPLICATE = "duplicate"
    """Said before; dropped."""
    LATE = "late"
    """Too late to count: in no trajectory."""
    BUILD = "build"
    """The closing record: build now."""
    ENDED = "ended"
    """`SessionFinal` of a session that is built: forget it."""


class CallState(StrEnum):
    OPEN = "open"
    CAPTURED = "captured"
    FAILED = "failed"
    LATE = "late"
    """Started after the close; opens nothing."""


@dataclass(slots=True)
class Call:
    completion_id: str
    attempt: int
    state: CallState
    failure: Failure | None = None


class SessionState:
    """One session from `SessionOpened` on."""

    def __init__(self, opening: RecordRef, opened: SessionOpened) -> None:
        self.opening = opening
        self.opened = opened
        self.closed: SessionClosed | None = None
        self.closing: RecordRef | None = None
        self.fenced: set[int] = set()
        self.calls: dict[str, Call] = {}
        """By completion id, in log order of their first record."""

    def observe(self, entry: Entry) -> Verdict:
        """Takes the next record of this session; raises nothing, whatever comes."""
        ref, event = entry
        if self.closing is not None:
            if ref == self.closing:
                return Verdict.BUILD
            return Verdict.ENDED if isinstance(event, SessionFinal) else Verdict.LATE
        verdict = self._take(event)
        if verdict is not Verdict.BUILD and self._complete():
            verdict = Verdict.BUILD
        if verdict is Verdict.BUILD:
            self.closing = ref
        return verdict

    def _take(self, event: Event) -> Verdict:
        match event:
            case SessionOpened():
                return Verdict.DUPLICATE
            case AttemptFenced():
                self.fenced.add(event.attempt)
                return Verdict.KEPT
            case SessionClosed():
                if self.closed is not None:
                    return Verdict.DUPLICATE
                self.closed = event
                return Verdict.KEPT
            case SessionFinal():
                return Verdict.BUILD
            case CallStarted():
                return self._start(event)
            case CompletionCaptured() | CompletionFailed():
                return self._end(event)
        return Verdict.LATE

    def _start(self, event: CallStarted) -> Verdict:
        if event.completion_id in self.calls:
            return Verdict.DUPLICATE
        over = self._over(event.attempt)
        late = self.closed is not None and not over
        state = CallState.LATE if late else CallState.OPEN
        self.calls[event.completion_id] = Call(event.completion_id, event.attempt, state)
        if late:
            return Verdict.LATE
        return Verdict.FENCED if over else Verdict.KEPT

    def _end(self, event: CompletionCaptured | CompletionFailed) -> Verdict:
        call = self.calls.get(event.completion_id)
        if call is None:
            # the proxy always starts a call first; a record without its start still counts while the session is open
            if self.closed is not None:
                return Verdict.LATE
            call = self.calls[event.completion_id] = Call(event.completion_id, event.attempt, CallState.OPEN)
        if call.state is CallState.LATE:
            return Verdict.LATE
        if call.state is not CallState.OPEN:
            return Verdict.DUPLICATE
        if isinstance(event, CompletionFailed):
            call.state, call.failure = CallState.FAILED, event.failure
        else:
            call.state = CallState.CAPTURED
        return Verdict.FENCED if self._over(call.attempt) else Verdict.KEPT

    def _over(self, attempt: int) -> bool:
        """Whether `attempt` is known not to be the one that counts."""
        return attempt in self.fenced or (self.closed is not None and attempt != self.closed.attempt)

    def _complete(self) -> bool:
        if self.closed is None:
            return False
        attempt = self.closed.attempt
        return not any(call.state is CallState.OPEN and call.attempt == attempt for call in self.calls.values())

    def account(self) -> Account:
        """The session at its closing record.

        Raises:
            ValueError: there is no closing record yet.
        """
        if self.closing is None:
            raise ValueError(f"session {self.opened.session_id} is not closed yet")
        closed = self.closed
        if closed is None:
            # the scheduler closes in the transaction before; should it ever not, the session still gets its one ending
            failure = Failure(kind=FailureKind.INFRA, message="the log holds SessionFinal without SessionClosed")
            attempt = max((call.attempt for call in self.calls.values()), default=0)
            outcome = Outcome(status=Status.ERROR, failure=failure)
        else:
            attempt, outcome = closed.attempt, closed.outcome
        return Account(self.opening, self.opened, self.closing, attempt, outcome, tuple(self.calls.values()))


class Account(NamedTuple):
    """What a build needs of a session besides its completions."""

    opening: RecordRef
    opened: SessionOpened
    closing: RecordRef
    attempt: int
    """The one that counts."""
    outcome: Outcome
    calls: tuple[Call, ...]
    """Every call started up to the closing record, in log order."""

    def own(self) -> list[Call]:
        """The closing attempt's calls that were started in time."""
        return [call for call in self.calls if call.attempt == self.attempt and call.state is not CallState.LATE]

    @property
    def captured(self) -> frozenset[str]:
        """Completion ids that a build accounts for in traces (or says why not)."""
        return frozenset(call.completion_id for call in self.own() if call.state is CallState.CAPTURED)

    def set_aside(self) -> list[SetAside]:
        """The calls that cannot be in a trace, each with the reason, in log order."""
        found = []
        for call in self.calls:
            reason: str | None = None
            detail: str | None = None
            if call.attempt != self.attempt:
                reason, detail = "fenced", f"attempt {call.attempt}; attempt {self.attempt} counts"
            elif call.state is CallState.LATE:
                reason, detail = "late", "started after the session was closed"
            elif call.state is CallState.OPEN:
                reason, detail = "unfinished", "neither captured nor failed when the session was final"
            elif call.state is CallState.FAILED:
                reason = "failed"
                detail = f"{call.failure.kind}: {call.failure.message}" if call.failure else None
            if reason is not None:
                found.append(
                    SetAside(completion_id=call.completion_id, reason=reason, attempt=call.attempt, detail=detail)
                )
        return found
