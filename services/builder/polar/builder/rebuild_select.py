"""Which sessions a rebuild is about, and what of a record tells so. Pure: no log, no clock.

A session is selected by the time of its close, its task or its id; whichever are given must all fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from polar.schemas import AttemptFenced, CompletionCaptured, Event, SessionClosed, SessionFinal, SessionOpened

MARGIN_MS: Final = 10 * 60_000
"""By how much the clocks of two schedulers that follow each other, or a record's time stamp and the time in it, may
differ."""
FIRST_LOOK_BACK: Final = 10_000
"""Records; doubled each time, so that little more than twice of what is needed is read."""


class Span(NamedTuple):
    """What is known of a session. Offsets are of `completions`; None: not seen."""

    session: str
    partition: int
    opened: int | None = None
    closed: int | None = None
    closed_ms: int | None = None
    task: str | None = None
    num_samples: int | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """What is asked for; without anything: every session."""

    since_ms: int | None = None
    """Closed at or after."""
    until_ms: int | None = None
    """Closed before."""
    tasks: frozenset[str] = frozenset()
    sessions: frozenset[str] = frozenset()

    @property
    def by_time(self) -> bool:
        return self.since_ms is not None or self.until_ms is not None

    def in_time(self, closed_ms: int | None) -> bool:
        """Whether a session closed then is meant, as far as time goes; None: it is not closed."""
        if closed_ms is None:
            return not self.by_time
        if self.since_ms is not None and closed_ms < self.since_ms:
            return False
        return self.until_ms is None or closed_ms < self.until_ms

    def wants(self, span: Span) -> bool:
        if self.sessions and span.session not in self.sessions:
            return False
        if self.tasks and span.task not in self.tasks:
            return False
        return self.in_time(span.closed_ms)

    def homeless(self, span: Span) -> bool:
        """Whether it may be meant, but its start has not been seen, and perhaps not its task either."""
        if span.opened is not None or (self.sessions and span.session not in self.sessions):
            return False
        if self.tasks and span.task is not None and span.task not in self.tasks:
            return False
        return self.in_time(span.closed_ms)

    def over(self, event: Event) -> bool:
        """Whether `event` shows that every close before `until_ms` stands before it in its partition.

        Only the scheduler's records say so: the proxies' clocks are others, and closes are the scheduler's.
        """
        if self.until_ms is None or not isinstance(event, SessionOpened | AttemptFenced | SessionClosed | SessionFinal):
            return False
        return event.at_ms >= self.until_ms + MARGIN_MS


def sighting(event: Event, partition: int, offset: int, selection: Selection) -> Span | None:
    """What a record of `completions` says of its session; None: nothing that matters."""
    match event:
        case SessionOpened():
            return Span(event.session_id, partition, opened=offset, task=event.task_id, num_samples=event.num_samples)
        case SessionClosed() | SessionFinal():
            # a final record without a close is a close: see `SessionState.account`
            return Span(event.session_id, partition, closed=offset, closed_ms=event.at_ms)
        case CompletionCaptured() if selection.tasks and event.task_id in selection.tasks:
            # should the session's start be lost, this says whose it was
            return Span(event.session_id, partition, task=event.task_id)
    return None


def merged(one: Span, other: Span) -> Span:
    """Two sightings of a session in one, in whatever order they came: its first opening and its first close."""
    opened = min((at for at in (one.opened, other.opened) if at is not None), default=None)
    closes = [(at.closed, at.closed_ms) for at in (one, other) if at.closed is not None]
    closed, closed_ms = min(closes, key=lambda pair: pair[0] or 0, default=(None, None))
    return Span(
        one.session,
        one.partition,
        opened,
        closed,
        closed_ms,
        one.task or other.task,
        one.num_samples if one.num_samples is not None else other.num_samples,
    )


def look_back(start: int, log_start: int) -> Iterator[tuple[int, int]]:
    """Stretches before `start`, the nearest first and each twice as long as the one before, down to `log_start`."""
    width, end = FIRST_LOOK_BACK, start
    while end > log_start:
        begin = max(log_start, end - width)
        yield begin, end
        end, width = begin, width * 2
