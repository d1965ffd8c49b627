"""The audit without a log: fed with records in any order, asked once for what it found.

Promises: memory does not grow with the number of records, but with the calls of the largest session and the members of
the largest task or group; every record is kept as a few facts in a sorted file (`store`), and each session, task and
group is judged by itself, whole. It knows no Kafka and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, Protocol

from .accounts import lost
from .facts import Chosen, Dead, Placed
from .groups import SumJudge
from .intake import Intake
from .lives import SessionJudge
from .reach import Reach
from .report import AuditReport, Check, Findings, Place
from .session import Session, what
from .store import Row, Store
from .views import BY_TOPIC

KEEP: Final = 1_000
"""Offences that a report names, unless asked for more."""
TASK_MEMORY_S: Final = 7 * 86_400.0
"""For so long a task's id cannot be used again: the scheduler's default."""
TOLD_EVERY: Final = 500
"""Sessions between two words on progress."""

Progress = Callable[[str, int, int], None]
"""What is being done (`reading`, `judging`), how much of it is done, and how much there is."""


class AuditOptions(NamedTuple):
    """What is audited, and how deeply. Empty filters: everything."""

    tokens: bool = True
    """Prove that sampled ids and log-probabilities are the captured ones."""
    tasks: frozenset[str] = frozenset()
    sessions: frozenset[str] = frozenset()
    since_ms: int | None = None
    """Only sessions accepted or opened since then; older parts of the log are not read."""
    keep: int = KEEP
    task_memory_s: float = TASK_MEMORY_S


class RecordLike(Protocol):
    """A record as `polar.bus` hands it out, undecoded."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def timestamp_ms(self) -> int: ...
    @property
    def key(self) -> str | None: ...
    @property
    def raw(self) -> bytes | None: ...
    @property
    def headers(self) -> Mapping[str, bytes]: ...


class Audit:
    """One audit. Feed, then `judge`, perhaps `absolve`, then `report`; close it."""

    def __init__(self, reach: Reach, options: AuditOptions | None = None) -> None:
        self._reach = reach
        self._options = options = options or AuditOptions()
        self._findings = Findings(options.keep)
        self._intake = Intake(reach.within, tokens=options.tokens)
        self._store = Store(BY_TOPIC)
        self._judge = SessionJudge(reach, self._findings, tokens=options.tokens, keep=options.keep)
        self._records = 0

    def feed(self, records: Iterable[RecordLike]) -> None:
        """Takes records in. Those beyond the end of what is to be read are left out, but for those of `leases`, where a
        later row may stand for one that compaction took."""
        rows: list[Row] = []
        for one in records:
            place = Place(one.topic, one.partition, one.offset)
            if one.topic != "leases" and not self._reach.within(place):
                continue
            self._reach.saw(one.topic, one.partition, one.timestamp_ms)
            self._records += 1
            self._findings.judged(Check.RECORDS)
            rows += self._intake.rows(place, one.key, one.raw, one.headers, one.timestamp_ms)
        self._store.add(rows)

    def judge(self, progress: Progress = lambda *_: None) -> None:
        """All checks. Takes a while: not for an event loop."""
        self._sessions(progress)
        self._sums(progress)
        self._sourceless()

    @property
    def suspects(self) -> frozenset[str]:
        """Sessions that look lost. `absolve` those that the log, read once more, shows alive or finished."""
        return frozenset(self._judge.suspects)

    def absolve(self, sessions: Iterable[str]) -> None:
        """These were not lost: their lease moved on while the log was read."""
        for session in sessions:
            if self._judge.suspects.pop(session, None) is not None:
                self._findings.count("in_flight")

    def report(self, seconds: float = 0.0) -> AuditReport:
        findings = self._findings
        for session, (task, place) in self._judge.suspects.items():
            findings.count("lost")
            findings.offend("lost", lost(place), place, session=session, task=task)
        return AuditReport(
            offences=findings.offences,
            found=dict(findings.found),
            counts={"records": self._records, **findings.counts},
            checks=findings.results(),
            reach=self._reach.topics(),
            dead=findings.dead,
            seconds=seconds,
        )

    def close(self) -> None:
        self._store.close()

    def _sessions(self, progress: Progress) -> None:
        total = self._store.count()
        done = 0
        sums: list[Row] = []
        for number, (key, facts) in enumerate(self._store.groups()):
            done += len(facts)
            kind, slash, _ = key.partition("/")
            if slash and kind in ("t", "g", "p", "d"):
                sums += [Row(key, *one.place, one.fact) for one in facts]
            else:
                sums += self._session(key, facts)
            if number % TOLD_EVERY == 0:
                self._store.add(sums, "sums")
                sums.clear()
                progress("judging", done, total)
        self._store.add(sums, "sums")
        progress("judging", total, total)

    def _session(self, name: str, facts: list[Placed]) -> list[Row]:
        session = Session(name, facts)
        chosen = self._chosen(session)
        self._findings.muted = not chosen
        found = self._judge.judge(session)
        self._findings.muted = False
        if found is None:
            return []
        # where it stands means nothing; any known topic will do
        where = ("leases", 0, 0)
        rows = [Row(f"t/{session.task}", *where, found)] if session.task is not None else []
        if session.group is not None:
            rows.append(Row(f"g/{session.group}", *where, found))
        rows += [Row(f"d/{one.fact.origin}", *where, found) for one in session.of(Dead)]
        if self._filtered and chosen:
            # marks its task and its group as asked for
            rows += [row._replace(fact=Chosen()) for row in rows]
        return rows

    @property
    def _filtered(self) -> bool:
        options = self._options
        return bool(options.tasks or options.sessions or options.since_ms is not None)

    def _chosen(self, session: Session) -> bool:
        options = self._options
        if options.sessions and session.name not in options.sessions:
            return False
        if options.tasks and session.task not in options.tasks:
            return False
        return options.since_ms is None or session.opened_ms >= options.since_ms

    def _sums(self, progress: Progress) -> None:
        judge = SumJudge(
            self._reach,
            self._findings,
            task_memory_ms=round(self._options.task_memory_s * 1000),
            cursors=self._intake.cursors,
        )
        judges = {"t": judge.task, "g": judge.group, "p": judge.asked, "d": judge.dead}
        for key, facts in self._store.groups("sums"):
            kind, _, name = key.partition("/")
            chosen = not self._filtered or any(isinstance(one.fact, Chosen) for one in facts)
            if not chosen and self._options.tasks and not self._options.sessions:
                chosen = self._names_task(kind, name, facts)
            self._findings.muted = not chosen
            judges[kind](name, [one for one in facts if not isinstance(one.fact, Chosen)])
            self._findings.muted = False

    def _names_task(self, kind: str, name: str, facts: list[Placed]) -> bool:
        """Whether a task that was asked for is meant, also where none of its sessions is there."""
        if kind == "p":
            return any(getattr(one.fact, "task", None) in self._options.tasks for one in facts)
        return kind == "t" and name in self._options.tasks

    def _sourceless(self) -> None:
        """What stands where a source should be."""
        for one in self._judge.unsourced:
            found = self._store.at(one.source)
            if found is None:
                message = f"the source of {one.place} is {one.source}, where there is no record"
                kind = "source_missing"
            else:
                key, fact = found
                there = f"{what(fact)} of {key}" if key else what(fact)
                message = f"the source of {one.place} is {one.source}, {there}, and not {one.wanted} of its own"
                kind = "source_wrong"
            self._findings.offend(kind, message, one.place, session=one.session)
