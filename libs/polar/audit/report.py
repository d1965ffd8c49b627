"""What an audit says: offences, counts, and how far the proof reaches. Pure data; knows no log and no store."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec


class Check(StrEnum):
    """The parts of the proof, in the order in which they are told."""

    RECORDS = "records"
    ACCOUNTING = "accounting"
    SESSIONS = "sessions"
    SOURCES = "sources"
    CALLS = "calls"
    TOKENS = "tokens"
    PROMPTS = "prompts"
    GROUPS = "groups"
    TASKS = "tasks"
    DEAD = "dead"


CHECKS: Final[dict[Check, str]] = {
    Check.RECORDS: "each can be read and stands under its key",
    Check.ACCOUNTING: "accepted = finished + in flight",
    Check.SESSIONS: "each step once, none without the one before",
    Check.SOURCES: "what derives has its source, and its own",
    Check.CALLS: "one end at most; in a trace or rightly set aside",
    Check.TOKENS: "sampled spans are what the engine sampled",
    Check.PROMPTS: "deltas go on from captures of their attempt",
    Check.GROUPS: "closed once; members ended, each once",
    Check.TASKS: "each answered; results are their sessions' sums",
    Check.DEAD: "no dead letter keeps a session from ending",
}
"""What each proves, in a few words."""

KINDS: Final[dict[str, Check]] = {
    "unreadable": Check.RECORDS,
    "key_wrong": Check.RECORDS,
    "not_accepted": Check.ACCOUNTING,
    "lost": Check.ACCOUNTING,
    "opened_twice": Check.SESSIONS,
    "closed_twice": Check.SESSIONS,
    "final_twice": Check.SESSIONS,
    "fenced_twice": Check.SESSIONS,
    "built_twice": Check.SESSIONS,
    "graded_twice": Check.SESSIONS,
    "published_twice": Check.SESSIONS,
    "result_twice": Check.SESSIONS,
    "not_opened": Check.SESSIONS,
    "not_closed": Check.SESSIONS,
    "not_final": Check.SESSIONS,
    "not_built": Check.SESSIONS,
    "not_graded": Check.SESSIONS,
    "not_published": Check.SESSIONS,
    "no_result": Check.SESSIONS,
    "out_of_order": Check.SESSIONS,
    "attempts_wrong": Check.SESSIONS,
    "attempt_differs": Check.SESSIONS,
    "ids_differ": Check.SESSIONS,
    "id_not_derived": Check.SESSIONS,
    "published_differs": Check.SESSIONS,
    "source_missing": Check.SOURCES,
    "source_wrong": Check.SOURCES,
    "reference_wrong": Check.SOURCES,
    "call_twice": Check.CALLS,
    "ends_differ": Check.CALLS,
    "end_without_start": Check.CALLS,
    "closing_wrong": Check.CALLS,
    "call_unaccounted": Check.CALLS,
    "aside_wrong": Check.CALLS,
    "trace_wrong": Check.CALLS,
    "unknown_call": Check.CALLS,
    "counts_differ": Check.CALLS,
    "tokens_differ": Check.TOKENS,
    "logprobs_differ": Check.TOKENS,
    "sampled_twice": Check.TOKENS,
    "base_unknown": Check.PROMPTS,
    "base_misplaced": Check.PROMPTS,
    "base_too_long": Check.PROMPTS,
    "chain_too_long": Check.PROMPTS,
    "group_closed_twice": Check.GROUPS,
    "group_not_closed": Check.GROUPS,
    "group_incomplete": Check.GROUPS,
    "member_twice": Check.GROUPS,
    "member_not_ended": Check.GROUPS,
    "member_differs": Check.GROUPS,
    "selection_wrong": Check.GROUPS,
    "accepted_twice": Check.TASKS,
    "unanswered": Check.TASKS,
    "task_result_twice": Check.TASKS,
    "task_result_wrong": Check.TASKS,
    "no_task_result": Check.TASKS,
    "left_open": Check.DEAD,
}
"""Every kind of offence and the check it breaks."""


class Place(NamedTuple):
    """Where a record stands; the topic without its prefix."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


class Offence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that must not be, where it shows, in one sentence."""

    kind: str
    """One of `KINDS`."""
    message: str
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    session_id: str | None = None
    task_id: str | None = None
    group_id: str | None = None
    completion_id: str | None = None

    @property
    def check(self) -> Check:
        return KINDS[self.kind]


class Letter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An unresolved dead letter."""

    origin: Place
    """The record that could not be processed."""
    service: str
    error: str
    partition: int
    offset: int
    """Of the letter, in `dead`."""
    session_id: str | None = None
    open: bool = False
    """The session it concerns has not finished."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    check: Check
    proves: str
    checked: int
    """How many of what it is about were judged."""
    offences: int
    unjudged: int
    """How many could not be judged, because the log no longer has (or this audit did not read) what it takes."""


class TopicReach(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a topic was read. Sums over its partitions."""

    topic: str
    records: int
    """Committed ones that were read."""
    removed: int
    """Offsets before the first one read: taken by retention, or older than `since`."""
    from_ms: int | None = None
    """Time of the oldest record read from a partition that begins late, the latest such one: from here on the topic is
    whole. None: whole from its beginning."""


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an audit."""

    offences: list[Offence]
    """The first ones, up to the limit that was asked for; `found` counts all."""
    found: dict[str, int]
    """Number of offences by kind."""
    counts: dict[str, int]
    """What was counted, such as `accepted`, `finished`, `in_flight`, `calls`, `late`."""
    checks: list[CheckResult]
    reach: list[TopicReach]
    dead: list[Letter] = []
    """Unresolved dead letters, the first ones; `counts["dead"]` counts all."""
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether everything that could be judged holds."""
        return not self.found


class Findings:
    """Collects offences and counts. While `muted`, what is said of a session that was not asked for is dropped."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self.muted = False
        self.offences: list[Offence] = []
        self.found: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.checked: Counter[Check] = Counter()
        self.unjudged: Counter[Check] = Counter()
        self.dead: list[Letter] = []

    def offend(
        self,
        kind: str,
        message: str,
        place: Place | None = None,
        *,
        session: str | None = None,
        task: str | None = None,
        group: str | None = None,
        completion: str | None = None,
    ) -> None:
        assert kind in KINDS, kind
        if self.muted:
            return
        self.found[kind] += 1
        if len(self.offences) < self._keep:
            self.offences.append(
                Offence(
                    kind=kind,
                    message=message,
                    topic=None if place is None else place.topic,
                    partition=None if place is None else place.partition,
                    offset=None if place is None else place.offset,
                    session_id=session,
                    task_id=task,
                    group_id=group,
                    completion_id=completion,
                )
            )

    def count(self, name: str, number: int = 1) -> None:
        if not self.muted and number:
            self.counts[name] += number

    def judged(self, check: Check, number: int = 1) -> None:
        if not self.muted:
            self.checked[check] += number

    def skip(self, check: Check, number: int = 1) -> None:
        """`number` of what `check` is about cannot be judged."""
        if not self.muted:
            self.unjudged[check] += number

    def letter(self, letter: Letter) -> None:
        if self.muted:
            return
        self.counts["dead"] += 1
        if len(self.dead) < self._keep:
            self.dead.append(letter)

    def results(self) -> list[CheckResult]:
        per: Counter[Check] = Counter()
        for kind, number in self.found.items():
            per[KINDS[kind]] += number
        return [
            CheckResult(
                check=check,
                proves=proves,
                checked=self.checked[check],
                offences=per[check],
                unjudged=self.unjudged[check],
            )
            for check, proves in CHECKS.items()
        ]
