"""What sessions add up to (tasks, groups), the records of `tasks` by themselves, and dead letters. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Final, TypeVar

from polar.schemas import Status
from polar.schemas.ids import session_id

from .facts import (
    Answered,
    Asked,
    Dead,
    Fact,
    GroupDone,
    GroupRow,
    Opened,
    Placed,
    Resolved,
    SessionSum,
    TaskDone,
    TaskRow,
    TaskTaken,
    Wrong,
)
from .reach import Reach
from .report import Check, Findings, Letter, Place

F = TypeVar("F", bound=Fact)

CENT: Final = 1e-6
"""Sums of rewards may differ by so much per session: the order of the terms is not the same."""
FINISHED: Final = "finished"
BLOCKING: Final = frozenset({"completions", "graded"})
"""Topics whose dead records a session cannot do without: the builder's and the finisher's inputs."""


class SumJudge:
    """Judges tasks (`t/…`), groups (`g/…`), records of `tasks` (`p/…`) and records that died (`d/…`)."""

    def __init__(
        self,
        reach: Reach,
        findings: Findings,
        *,
        task_memory_ms: int,
        cursors: Mapping[int, int],
    ) -> None:
        """`cursors`: see `Intake.cursors`."""
        self._reach = reach
        self._findings = findings
        self._memory_ms = task_memory_ms
        self._cursors = cursors

    # tasks

    def task(self, task: str, facts: Iterable[Placed]) -> None:
        by = _by(facts)
        taken: list[Placed] = by.get(TaskTaken, [])
        rows: list[Any] = by.get(TaskRow, [])
        done: list[Any] = by.get(TaskDone, [])
        sums: list[Any] = by.get(SessionSum, [])
        if not (taken or done or sums):
            return
        self._findings.count("tasks")
        self._findings.judged(Check.TASKS)
        for place, fact in by.get(Wrong, []):
            self._findings.offend(fact.kind, f"{place} {fact.message}", place, task=task)
        self._accepted_once(task, taken)
        for one in done[1:]:
            message = f"the task has a result at {done[0].place} and another at {one.place}"
            self._findings.offend("task_result_twice", message, one.place, task=task)
        row = rows[-1] if rows else None
        if done:
            self._result(task, done[-1], sums)
        elif row is not None and row.fact.finished and self._reach.judged(row.place):
            if self._reach.may_have_had("results", f"t/{task}", row.fact.at_ms):
                self._findings.skip(Check.TASKS)
            else:
                message = f"the scheduler has the task as finished at {row.place} and there is no TaskResult"
                self._findings.offend("no_task_result", message, row.place, task=task)
        if row is not None and row.fact.counts is not None and self._reach.judged(row.place):
            self._row(task, row, sums)

    def _accepted_once(self, task: str, taken: list[Any]) -> None:
        for before, one in pairwise(taken):
            # an id may be used again once its task is forgotten
            if one.fact.asked == before.fact.asked or one.fact.at_ms - before.fact.at_ms < self._memory_ms:
                message = f"the task is accepted at {before.place} and again at {one.place}"
                self._findings.offend("accepted_twice", message, one.place, task=task)

    def _result(self, task: str, done: Any, sums: list[Any]) -> None:
        """The result against the sessions of the task, where all of them are known."""
        if not self._reach.judged(done.place):
            return
        counts = done.fact.counts
        finished = [one.fact for one in sums if one.fact.state == FINISHED]
        if len(sums) > counts[0]:
            message = f"the result at {done.place} counts {counts[0]} sessions and the log has {len(sums)}"
            self._findings.offend("task_result_wrong", message, done.place, task=task)
            return
        graded = [one for one in finished if one.status is not None]
        if len(graded) < counts[0]:
            unfinished = next((one.fact for one in sums if one.fact.state in ("in_flight", "lost")), None)
            if unfinished is not None:
                message = f"the task has its result at {done.place} and a session of it has not finished"
                self._findings.offend("task_result_wrong", message, done.place, task=task, session=unfinished.session)
            else:
                self._findings.skip(Check.TASKS)
            return
        statuses = [sum(one.status == status for one in graded) for status in _STATUSES]
        rewarded = [one.reward for one in graded if one.rewarded]
        found = (len(graded), len(graded), *statuses, len(rewarded))
        off = abs(sum(one or 0.0 for one in rewarded) - done.fact.reward_sum) > CENT * len(graded)
        if found != counts or off:
            message = f"the result at {done.place} counts {_told(counts)}; its sessions give {_told(found)}"
            if off:
                message += " and another sum of rewards"
            self._findings.offend("task_result_wrong", message, done.place, task=task)

    def _row(self, task: str, row: Any, sums: list[Any]) -> None:
        """The scheduler counts what it has seen published, so never more than there is."""
        accepted, counted = row.fact.counts[:2]
        finished = sum(one.fact.state in (FINISHED, "unknown") for one in sums)
        asked = row.fact.asked
        gone = [
            sample
            for sample in range(accepted if len(sums) < accepted else 0)
            if session_id(asked.partition, asked.offset, sample) not in {one.fact.session for one in sums}
        ]
        if counted > finished and not gone:
            message = f"the scheduler counts {counted} sessions of the task as finished at {row.place}; {finished} are"
            self._findings.offend("task_result_wrong", message, row.place, task=task)

    # groups

    def group(self, group: str, facts: Iterable[Placed]) -> None:
        by = _by(facts)
        closes: list[Any] = by.get(GroupDone, [])
        rows: list[Any] = by.get(GroupRow, [])
        sums: dict[str, Any] = {one.fact.session: one for one in by.get(SessionSum, [])}
        if not (closes or rows or sums):
            return
        self._findings.count("groups")
        self._findings.judged(Check.GROUPS)
        for place, fact in by.get(Wrong, []):
            self._findings.offend(fact.kind, f"{place} {fact.message}", place, group=group)
        for one in closes[1:]:
            message = f"the group is closed at {closes[0].place} and again at {one.place}"
            self._findings.offend("group_closed_twice", message, one.place, group=group)
        if closes:
            self._findings.count("groups_closed")
            self._closed(group, closes[0], sums)
        else:
            self._open(group, rows, sums)

    def _closed(self, group: str, close: Any, sums: dict[str, Any]) -> None:
        place, fact = close.place, close.fact
        seen: set[str] = set()
        for member in fact.members:
            if member.session in seen:
                message = f"the session is a member twice of the group closed at {place}"
                self._findings.offend("member_twice", message, place, group=group, session=member.session)
                continue
            seen.add(member.session)
            self._member(group, place, member, sums.get(member.session))
        strangers = [one for one in fact.selection if one not in seen]
        if strangers or len(set(fact.selection)) != len(fact.selection):
            which = f"{strangers[0]}, which is no member" if strangers else "a session twice"
            message = f"the group closed at {place} selects {which}"
            self._findings.offend("selection_wrong", message, place, group=group)
        if fact.reason == "complete" and len(fact.members) != fact.size:
            message = f"the group is closed at {place} as complete with {len(fact.members)} of {fact.size} members"
            self._findings.offend("group_incomplete", message, place, group=group)
        late = [one for name, one in sums.items() if name not in seen and one.fact.published is not None]
        self._findings.count("late_trajectories", len(late))
        if fact.reason == "complete" and late:
            first = late[0].fact
            message = f"the group is closed at {place} as complete, and {first.published} is no member"
            self._findings.offend("group_incomplete", message, place, group=group, session=first.session)

    def _member(self, group: str, place: Place, member: Any, found: Any | None) -> None:
        published = None if found is None else found.fact.published
        if published is None:
            since = 0 if found is None else found.fact.opened_ms
            if not self._reach.judged(place) or self._reach.may_have_had("trajectories", group, since):
                self._findings.skip(Check.GROUPS)
                return
            message = f"a member of the group closed at {place} has no trajectory in it"
        elif published.partition != place.partition or published.offset > place.offset:
            message = f"a member of the group closed at {place} is published at {published}, not before it"
        else:
            fact = found.fact  # type: ignore[union-attr]
            graded = fact.status is None or (fact.status == member.status and fact.reward == member.reward)
            if fact.attempt != member.attempt or not graded:
                message = (
                    f"a member of the group closed at {place} has not the attempt, status and reward of {published}"
                )
                self._findings.offend("member_differs", message, place, group=group, session=member.session)
            return
        self._findings.offend("member_not_ended", message, place, group=group, session=member.session)

    def _open(self, group: str, rows: list[Any], sums: dict[str, Any]) -> None:
        """No close is there: must one be?"""
        row = rows[-1] if rows else None
        since = min((one.fact.opened_ms for one in sums.values()), default=0)
        if row is not None and row.fact.known:
            if not (row.fact.decided and self._reach.judged(row.place)):
                return
            since, place = row.fact.at_ms, row.place
            message = f"the scheduler has the group as decided at {place} and there is no GroupClosed"
        else:
            published = [one.fact.published for one in sums.values() if one.fact.published is not None]
            shown = [one for one in published if self._reach.judged(one)]
            if not shown:
                return
            place = shown[0]
            message = f"{place} is of the group, which the scheduler does not know and which has no GroupClosed"
        if self._reach.may_have_had("trajectories", group, since):
            self._findings.skip(Check.GROUPS)
        else:
            self._findings.offend("group_not_closed", message, place, group=group)

    # records of `tasks`

    def asked(self, place: str, facts: Iterable[Placed]) -> None:
        by = _by(facts)
        asked = next(iter(by.get(Asked, [])), None)
        letters: list[Any] = by.get(Dead, [])
        answers: list[Any] = by.get(Answered, [])
        opened: list[Any] = by.get(Opened, [])
        if asked is None:
            self._unasked(place, answers, opened)
            return
        fact: Any = asked.fact
        self._findings.count("task_records")
        for one in (*answers, *opened):
            self._findings.judged(Check.SOURCES)
            names = one.fact.accepted if isinstance(one.fact, Answered) else one.fact.task
            rejected = isinstance(one.fact, Answered) and names is None
            if not rejected and (fact.what != "TaskRequest" or fact.task not in (None, names)):
                message = f"{one.place} says that task {names} was asked for at {place}, where {_asked(fact)} stands"
                self._findings.offend("source_wrong", message, one.place, task=names)
        self._answered(place, asked, answers, letters)

    def _answered(self, place: str, asked: Placed, answers: list[Any], letters: list[Any]) -> None:
        fact: Any = asked.fact
        if fact.what != "TaskRequest" or answers or letters:
            return
        if asked.place.offset >= self._cursors.get(asked.place.partition, 0):
            return
        if fact.task is None or self._reach.may_have_had("stages", fact.task, fact.at_ms):
            self._findings.skip(Check.TASKS)
            return
        message = f"the scheduler has read the task at {place} and has neither accepted nor rejected it"
        self._findings.offend("unanswered", message, asked.place, task=fact.task)

    def _unasked(self, place: str, answers: list[Any], opened: list[Any]) -> None:
        topic, partition, offset = place.split("/")
        asked = Place(topic, int(partition), int(offset))
        for one in (*answers, *opened):
            if not self._reach.judged(one.place):
                continue
            if self._reach.expired(asked):
                self._findings.skip(Check.SOURCES)
                self._findings.count("source_expired")
                continue
            self._findings.judged(Check.SOURCES)
            names = one.fact.accepted if isinstance(one.fact, Answered) else one.fact.task
            message = f"{one.place} is about the task record {place}, which is not there"
            self._findings.offend("source_missing", message, one.place, task=names)

    # dead letters

    def dead(self, origin: str, facts: Iterable[Placed]) -> None:
        """What died at a place, and what was done about it."""
        by = _by(facts)
        letters: list[Any] = by.get(Dead, [])
        for place, fact in by.get(Wrong, []):
            if letters:
                self._findings.count("unreadable_dead")  # as it should be: its consumer went on
            else:
                self._findings.offend(fact.kind, f"{place} {fact.message}", place, session=fact.session)
        resolved = by.get(Resolved, [])
        begun = next((one.fact for one in by.get(SessionSum, [])), None)
        for place, fact in letters:
            self._findings.judged(Check.DEAD)
            after = [one.fact.action for one in resolved if one.place.offset > place.offset]
            stuck = begun is not None and begun.state != FINISHED and "retried" not in after
            if not after:
                self._findings.letter(
                    Letter(
                        origin=fact.origin,
                        service=fact.service,
                        error=fact.error,
                        partition=place.partition,
                        offset=place.offset,
                        session_id=fact.session,
                        open=stuck,
                    )
                )
            if stuck and fact.origin.topic in BLOCKING:
                message = f"the {fact.service} could not process {origin}, and the session has not ended"
                if after:
                    message += "; its dead letter was dropped"
                self._findings.offend("left_open", message, place, session=fact.session)


_STATUSES: Final = (Status.COMPLETED, Status.ERROR, Status.TIMEOUT, Status.CANCELLED)


def _by(facts: Iterable[Placed]) -> dict[type[Fact], list[Any]]:
    found: dict[type[Fact], list[Any]] = {}
    for one in facts:
        found.setdefault(type(one.fact), []).append(one)
    return found


def _told(counts: tuple[int, ...]) -> str:
    names = ("accepted", "finished", "completed", "error", "timeout", "cancelled", "rewarded")
    return ", ".join(f"{number} {name}" for name, number in zip(names, counts, strict=True))


def _asked(fact: Any) -> str:
    return f"{fact.what} of {fact.task}" if fact.task is not None else str(fact.what)
