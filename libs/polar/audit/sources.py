"""Does what derives from a record rest on one that is there? Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from .facts import Captured, Closed, Fact, Failed, Final_, Graded, Opened, Placed, Reported, Result, Revised, Trajected
from .reach import Reach
from .report import Check, Findings, Place
from .session import Session, what

_CLOSERS: Final = (Closed, Final_, Captured, Failed)
_GRADES: Final = (Graded,)


class SourceWanted(NamedTuple):
    """A source that is not among its session's records: what stands there is looked up at the end."""

    session: str
    place: Place
    source: Place
    wanted: str


class SourceJudge:
    """Judges the `source` headers of one session after the other, and the fields that name other records."""

    def __init__(self, reach: Reach, findings: Findings, *, keep: int) -> None:
        self._reach = reach
        self._findings = findings
        self._keep = keep
        self.unsourced: list[SourceWanted] = []

    def judge(self, session: Session) -> None:
        for one in session.of(Opened):
            fact = one.fact
            self._findings.judged(Check.SOURCES)
            if fact.source != fact.asked:
                self._reference(session, one, "source", fact.source, "the task's record", fact.asked)
        for one in (*session.built, *session.published):
            wanted = "the record that closes the session" if one in session.built else "a SessionGraded"
            kinds = _CLOSERS if one in session.built else _GRADES
            self._source(session, one, one.fact.source, kinds, wanted)
            if one in session.built and one.fact.source != one.fact.closing:
                self._reference(session, one, "closing", one.fact.closing, "its source", one.fact.source)
        for one in session.graded:
            self._source(session, one, one.fact.source, (Trajected,), "a built trajectory")
            if one.fact.source != one.fact.built:
                self._reference(session, one, "built", one.fact.built, "its source", one.fact.source)
        for one in session.of(Result):
            self._source(session, one, one.fact.source, _GRADES, "a SessionGraded")
            self._names(session, one, one.fact.trajectory, session.published)
        for one in session.of(Revised):
            self._source(session, one, one.fact.source, _GRADES, "a SessionGraded")
        for one in session.of(Reported):
            built = one.fact.stage == "BUILT"
            wanted = "the record that closes the session" if built else "a SessionGraded"
            self._source(session, one, one.fact.source, _CLOSERS if built else _GRADES, wanted)
            self._names(session, one, one.fact.names, session.built if built else session.published)

    def _source(
        self, session: Session, one: Placed, source: Place | None, kinds: tuple[type[Fact], ...], wanted: str
    ) -> None:
        if not self._reach.judged(one.place):
            return
        self._findings.judged(Check.SOURCES)
        if source is None:
            message = f"{what(one.fact)} at {one.place} has no header `source`"
            self._offend("source_missing", message, one.place, session)
            return
        fact = session.places.get(source)
        if isinstance(fact, kinds) and (not isinstance(fact, Trajected) or source.topic == "built"):
            return
        if self._reach.expired(source):
            self._findings.skip(Check.SOURCES)
            self._findings.count("source_expired")
        elif fact is not None:
            message = f"the source of {one.place} is {source}, {what(fact)}, and not {wanted}"
            self._offend("source_wrong", message, one.place, session)
        elif not self._findings.muted and len(self.unsourced) < self._keep:
            self.unsourced.append(SourceWanted(session.name, one.place, source, wanted))

    def _names(self, session: Session, one: Placed, names: Place | None, there: Sequence[Placed]) -> None:
        """A field that refers to another record of the session."""
        if names is None or not self._reach.judged(one.place) or self._reach.expired(names):
            return
        if names not in {other.place for other in there}:
            have = ", ".join(str(other.place) for other in there) or "nowhere"
            message = f"{what(one.fact)} at {one.place} names the trajectory {names}; this session's is at {have}"
            self._offend("reference_wrong", message, one.place, session)

    def _reference(
        self, session: Session, one: Placed, field: str, found: Place | None, what: str, wanted: Place | None
    ) -> None:
        message = f"`{field}` of {one.place} is {found}, and {what} is {wanted}"
        self._offend("reference_wrong", message, one.place, session)

    def _offend(self, kind: str, message: str, place: Place, session: Session) -> None:
        self._findings.offend(kind, message, place, session=session.name)
