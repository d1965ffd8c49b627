"""Accepted = finished + in flight: what became of each session. Pure."""

from __future__ import annotations

from typing import Final

from polar.schemas import Phase

from .facts import Accepted, LeaseRow, Opened, Result
from .reach import Reach
from .report import Check, Findings, Place
from .session import Session, what

MOST: Final = 10_000
"""Suspects that are kept to be looked at once more; where there are more, something else is wrong."""


class Accounts:
    def __init__(self, reach: Reach, findings: Findings) -> None:
        self._reach = reach
        self._findings = findings
        self.suspects: dict[str, tuple[str | None, Place]] = {}
        """Sessions that look lost, with task and the record that shows them accepted."""

    def state(self, session: Session) -> str:
        """`finished`, `in_flight`, `lost`, or `unknown` where the log no longer tells."""
        reach, findings = self._reach, self._findings
        accepted, opened, rows = session.first(Accepted), session.first(Opened), session.of(LeaseRow)
        findings.count("accepted")
        findings.judged(Check.ACCOUNTING)
        if accepted is None and not rows:
            evidence = opened or next(iter([*session.in_completions, *session.graded, *session.published]), None)
            if evidence is not None and reach.judged(evidence.place):
                if reach.may_have_had("stages", session.task or "", session.opened_ms):
                    findings.skip(Check.ACCOUNTING)
                else:
                    message = f"there is {what(evidence.fact)} at {evidence.place} and no TaskAccepted that lists it"
                    findings.offend("not_accepted", message, evidence.place, session=session.name)
        # the scheduler has seen it published, though that may no longer be there
        seen = bool(rows) and rows[-1].fact.phase == Phase.FINISHED
        if session.published or session.of(Result) or seen:
            findings.count("finished")
            return "finished"
        # beyond the end of what counts as read, a lease that ends shows that it was there
        alive = [one for one in rows if one.fact.phase is not None or not reach.within(one.place)]
        if alive and (rows[-1].fact.phase is not None or not reach.within(rows[-1].place)):
            findings.count("in_flight")
            return "in_flight"
        shown = accepted or opened or (rows[-1] if rows else None)
        if shown is not None and not reach.judged(shown.place):
            findings.count("in_flight")
            return "in_flight"
        if shown is None or (
            any(reach.may_have_had("trajectories", one, session.opened_ms) for one in session.possible_groups)
            and reach.may_have_had("results", f"s/{session.name}", session.opened_ms)
        ):
            findings.skip(Check.ACCOUNTING)
            findings.count("unknown")
            return "unknown"
        if len(self.suspects) < MOST and not findings.muted:
            self.suspects[session.name] = (session.task, shown.place)
        else:
            findings.count("lost")
            findings.offend("lost", lost(shown.place), shown.place, session=session.name, task=session.task)
        return "lost"


def lost(place: Place) -> str:
    """Why a session counts as lost, shown as accepted at `place`."""
    return f"the session was accepted ({place}) and has neither a lease nor a result nor a trajectory"
