"""One session: is its life on the log whole? Pure.

What is there twice is an offence wherever it stands. What is missing is one only where it must be there: not if the
log no longer has it, and not on account of a record so young that the rest of its transaction may not have been read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from polar.schemas import Phase
from polar.schemas.ids import session_id

from .accounts import Accounts
from .calls import judge_calls
from .facts import (
    Accepted,
    Captured,
    Closed,
    Failed,
    Fenced,
    Final_,
    LeaseRow,
    Opened,
    Placed,
    Result,
    SessionSum,
    Started,
    Trajected,
    Wrong,
)
from .reach import Reach
from .report import Check, Findings, Place
from .session import Session, what
from .sources import SourceJudge, SourceWanted

BUILT_SINCE: Final = frozenset({Phase.BUILT, Phase.GRADING, Phase.GRADED, Phase.FINISHED})
GRADED_SINCE: Final = frozenset({Phase.GRADED, Phase.FINISHED})
CLOSED_SINCE: Final = BUILT_SINCE | {Phase.CLOSED}


class SessionJudge:
    """Judges sessions one after the other; `unsourced` and `suspects` are left to be settled after the last."""

    def __init__(self, reach: Reach, findings: Findings, *, tokens: bool, keep: int) -> None:
        self._reach = reach
        self._findings = findings
        self._tokens = tokens
        self._sources = SourceJudge(reach, findings, keep=keep)
        self._accounts = Accounts(reach, findings)

    @property
    def unsourced(self) -> list[SourceWanted]:
        return self._sources.unsourced

    @property
    def suspects(self) -> dict[str, tuple[str | None, Place]]:
        return self._accounts.suspects

    def judge(self, session: Session) -> SessionSum | None:
        """All checks of one session; what it came to, where it is one at all."""
        for place, fact in session.of(Wrong):
            self._offend(fact.kind, f"{place} {fact.message}", place, session)
        if not (session.task or session.in_completions):
            return None
        self._findings.judged(Check.SESSIONS)
        self._uniqueness(session)
        headless = self._opening(session)
        self._frames(session, headless)
        self._chain(session)
        self._sources.judge(session)
        self._ids(session)
        if not headless:
            judge_calls(session, self._reach, self._findings, tokens=self._tokens)
        elif session.of(Started) or session.of(Captured) or session.of(Failed):
            self._findings.skip(Check.CALLS, len({one.fact.completion for one in _calls(session)}))
        state = self._accounts.state(session)
        graded = session.graded[0].fact if session.graded else None
        published = session.published[0] if session.published else None
        opened = session.first(Opened) or session.first(Accepted)
        return SessionSum(
            session=session.name,
            sample=-1 if opened is None else opened.fact.sample,
            state=state,
            attempt=None if published is None else published.fact.attempt,
            status=None if graded is None else graded.status,
            rewarded=graded is not None and graded.reward is not None,
            reward=None if graded is None else graded.reward,
            published=None if published is None else published.place,
            opened_ms=session.opened_ms,
        )

    def _offend(self, kind: str, message: str, place: Place | None, session: Session, **more: str) -> None:
        self._findings.offend(kind, message, place, session=session.name or None, **more)

    def _uniqueness(self, session: Session) -> None:
        kinds: tuple[tuple[Sequence[Placed], str, str], ...] = (
            (session.of(Opened), "opened_twice", "opened"),
            (session.of(Closed), "closed_twice", "closed"),
            (session.of(Final_), "final_twice", "final"),
            (session.built, "built_twice", "built"),
            (session.graded, "graded_twice", "graded with revision 0"),
            (session.published, "published_twice", "published"),
            (session.of(Result), "result_twice", "given a result"),
        )
        for found, kind, done in kinds:
            for one in found[1:]:
                message = f"the session is {done} at {found[0].place} and again at {one.place}"
                self._offend(kind, message, one.place, session)
        fenced: dict[int, Place] = {}
        for one in session.of(Fenced):
            before = fenced.setdefault(one.fact.attempt, one.place)
            if before is not one.place:
                message = f"attempt {one.fact.attempt} is fenced at {before} and again at {one.place}"
                self._offend("fenced_twice", message, one.place, session)

    def _opening(self, session: Session) -> bool:
        """Whether the session's beginning is not there to be judged."""
        opened = session.first(Opened)
        if opened is not None:
            for one in session.in_completions:
                if one.place.partition != opened.place.partition or one.place.offset < opened.place.offset:
                    message = f"{what(one.fact)} stands at {one.place}, before the session is opened at {opened.place}"
                    self._offend("out_of_order", message, one.place, session)
                    break
            return False
        evidence = [*session.in_completions, *session.built, *session.graded, *session.published, *session.of(Result)]
        if not evidence:
            return True
        if self._reach.may_have_had("completions", session.name, session.opened_ms):
            self._findings.skip(Check.SESSIONS)
        elif any(self._reach.judged(one.place) for one in evidence):
            first = evidence[0]
            message = f"there is {what(first.fact)} at {first.place} and no SessionOpened"
            self._offend("not_opened", message, first.place, session)
        return True

    def _frames(self, session: Session, headless: bool) -> None:
        closed, final = session.first(Closed), session.first(Final_)
        fences = session.of(Fenced)
        if closed is None:
            if final is not None and not headless:
                message = f"SessionFinal stands at {final.place} and there is no SessionClosed"
                self._offend("not_closed", message, final.place, session)
            return
        if final is not None and final.place.offset < closed.place.offset:
            message = f"SessionFinal at {final.place} stands before SessionClosed at {closed.place}"
            self._offend("out_of_order", message, final.place, session)
        if final is not None and final.fact.attempt != closed.fact.attempt:
            self._attempt(session, final, closed.fact.attempt, f"closed with attempt {closed.fact.attempt}")
        late = next((one for one in fences if one.place.offset > closed.place.offset), None)
        if late is not None:
            message = f"attempt {late.fact.attempt} is fenced at {late.place}, after the close at {closed.place}"
            self._offend("out_of_order", message, late.place, session)
        if headless:
            return
        wanted, found = list(range(1, closed.fact.attempt)), sorted({one.fact.attempt for one in fences})
        if wanted != found:
            message = f"it is closed with attempt {closed.fact.attempt}, and the attempts fenced are {found or 'none'}"
            self._offend("attempts_wrong", message, closed.place, session)

    def _chain(self, session: Session) -> None:
        """Each step of a finished session rests on the one before."""
        reach, name = self._reach, session.name
        since = session.opened_ms
        closed, result = session.first(Closed), session.first(Result)
        graded = session.graded[0] if session.graded else None
        built = session.built[0] if session.built else None
        published = session.published[0] if session.published else None
        phase = self._phase(session)

        def missing(kind: str, topic: str, key: str, what: str, because: Placed | None, claim: str) -> None:
            if because is None or not reach.judged(because.place):
                return
            if reach.may_have_had(topic, key, since):
                self._findings.skip(Check.SESSIONS)
            else:
                self._offend(kind, f"{claim} at {because.place} and there is no {what}", because.place, session)

        group = session.possible_groups[0]
        if closed is None and session.first(Opened) is not None:
            because = built or graded
            missing("not_closed", "completions", name, "SessionClosed", because, _claim(because))
            if because is None:
                missing("not_closed", "completions", name, "SessionClosed", *_lease(phase, CLOSED_SINCE))
        if built is None:
            because = graded or (published if published is not None and not published.fact.lost else None)
            missing("not_built", "built", name, "built trajectory", because, _claim(because))
            if because is None:
                missing("not_built", "built", name, "built trajectory", *_lease(phase, BUILT_SINCE))
        if graded is None:
            missing("not_graded", "graded", name, "SessionGraded", published, _claim(published))
            if published is None:
                missing("not_graded", "graded", name, "SessionGraded", *_lease(phase, GRADED_SINCE))
        if published is None:
            missing("not_published", "trajectories", group, "trajectory", result, _claim(result))
            if result is None:
                missing("not_published", "trajectories", group, "trajectory", *_lease(phase, {Phase.FINISHED}))
        if result is None:
            missing("no_result", "results", f"s/{name}", "SessionResult", published, _claim(published))
        if published is not None and session.first(Opened) is not None and session.first(Final_) is None:
            gone = self._tombstone(session)
            missing("not_final", "completions", name, "SessionFinal", gone, "its lease ended")
        if built is not None and published is not None:
            self._same(session, built, published)

    def _same(self, session: Session, built: Placed, published: Placed) -> None:
        one, other = built.fact, published.fact
        assert isinstance(one, Trajected)
        assert isinstance(other, Trajected)
        differ = [name for name in ("id", "opening", "closing") if getattr(one, name) != getattr(other, name)]
        # one that could not be published is published as an error without traces
        if not other.error and (one.told, one.asides) != (other.told, other.asides):
            differ.append("traces")
        if session.graded and other.reward != session.graded[0].fact.reward:
            differ.append("reward")
        if differ:
            message = f"published at {published.place} with another {', '.join(differ)} than built at {built.place}"
            self._offend("published_differs", message, published.place, session)

    def _ids(self, session: Session) -> None:
        opened, accepted = session.first(Opened), session.first(Accepted)
        if opened is not None:
            asked, sample = opened.fact.asked, opened.fact.sample
            if session.name != session_id(asked.partition, asked.offset, sample):
                message = f"it is opened at {opened.place} as sample {sample} of {asked}, which has another id"
                self._offend("id_not_derived", message, opened.place, session)
        for one in (*session.built, *session.published):
            if one.fact.id != one.fact.derived:
                message = f"the trajectory {one.fact.id} at {one.place} should have the id {one.fact.derived}"
                self._offend("id_not_derived", message, one.place, session)
        ones = [*session.built, *session.graded, *session.published, *session.of(Result), *session.regraded]
        reference = opened or (ones[0] if ones else None)
        if reference is None:
            return
        task, group = reference.fact.task, reference.fact.group
        for one in ones:
            if (one.fact.task, one.fact.group) != (task, group):
                self._differ(session, one, reference)
        samples = [one for one in (*session.built, *session.published, *session.of(Result)) if one.fact.sample >= 0]
        for one in samples:
            if opened is not None and one.fact.sample != opened.fact.sample:
                self._differ(session, one, opened)
        if opened is not None and accepted is not None:
            # a task too large for a group has one for each session
            alone = group == session.name
            if (accepted.fact.task, accepted.fact.sample) != (task, opened.fact.sample) or not (
                alone or accepted.fact.group == group
            ):
                self._differ(session, opened, accepted)
        closed = session.first(Closed)
        if closed is not None:
            for one in (*session.built, *session.graded, *session.published, *session.of(Result)):
                if one.fact.attempt != closed.fact.attempt:
                    self._attempt(session, one, closed.fact.attempt, f"closed with attempt {closed.fact.attempt}")

    def _differ(self, session: Session, one: Placed, reference: Placed) -> None:
        message = f"task, group or sample at {one.place} are not those at {reference.place}"
        self._offend("ids_differ", message, one.place, session)

    def _attempt(self, session: Session, one: Any, attempt: int, claim: str) -> None:
        message = f"{what(one.fact)} at {one.place} has attempt {one.fact.attempt}; the session is {claim}"
        self._offend("attempt_differs", message, one.place, session)

    def _phase(self, session: Session) -> Placed | None:
        rows = session.of(LeaseRow)
        return rows[-1] if rows and rows[-1].fact.phase is not None else None

    def _tombstone(self, session: Session) -> Placed | None:
        rows = session.of(LeaseRow)
        return rows[-1] if rows and rows[-1].fact.phase is None else None


def _calls(session: Session) -> list[Any]:
    return [*session.of(Started), *session.of(Captured), *session.of(Failed)]


def _claim(because: Placed | None) -> str:
    return "" if because is None else f"there is {what(because.fact)}"


def _lease(row: Placed | None, phases: Iterable[Phase]) -> tuple[Placed | None, str]:
    """The lease, where it says that a step has been done."""
    if row is None or not isinstance(row.fact, LeaseRow) or row.fact.phase not in set(phases):
        return None, ""
    return row, f"its lease is `{row.fact.phase}`"
