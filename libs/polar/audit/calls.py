"""One session's calls against its trajectory: none lost, none told wrongly, sampled ids id for id. Pure.

What the builder does is worked out here anew, from offsets alone, so that a builder that errs is found. With the
session opened, closed with attempt A at offset C and final at F, the trajectory is closed at the first offset K from C
on at which every call of A that was started before C has ended, or at F. Each call whose first record is at or below K
has one fate:

    another attempt             set aside as `fenced`
    started after C             set aside as `late`
    no end at or below K        set aside as `unfinished`
    failed                      set aside as `failed`
    captured                    in a trace, or set aside for a reason of the builder's

What comes after K is late: counted, and in no trajectory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from polar.schemas.prompts import MAX_CHAIN

from .facts import Captured, Closed, Failed, Fenced, Final_, Opened, Placed, Sampled, Started, Trajected
from .intake import about
from .reach import Reach
from .report import Check, Findings, Place
from .session import Session

FATES: Final = frozenset({"fenced", "late", "unfinished", "failed"})
"""Reasons for which a call is set aside by the log alone; any other is the builder's, of a captured one."""
SHOWN: Final = 3
"""Different ids named in one sentence."""


@dataclass(slots=True)
class Call:
    name: str
    attempt: int
    start: Placed | None = None
    end: Placed | None = None

    @property
    def first(self) -> Place:
        found = self.start or self.end
        assert found is not None
        return found.place

    @property
    def captured(self) -> Captured | None:
        return self.end.fact if self.end is not None and isinstance(self.end.fact, Captured) else None

    def ended_by(self, offset: int) -> bool:
        return self.end is not None and self.end.place.offset <= offset


@dataclass(slots=True)
class Closing:
    """Where the log says that the session is to be built."""

    attempt: int
    closed: int
    """Offset of `SessionClosed`."""
    at: int | None
    """Offset of the closing record; None: not there yet."""


def judge_calls(session: Session, reach: Reach, findings: Findings, *, tokens: bool) -> None:
    """All checks of the calls of a session whose beginning is known."""
    judge = _Judge(session, reach, findings, tokens)
    judge.brackets()
    judge.prompts()
    judge.trajectories()


class _Judge:
    def __init__(self, session: Session, reach: Reach, findings: Findings, tokens: bool) -> None:
        self._session = session
        self._reach = reach
        self._findings = findings
        self._tokens = tokens
        self._calls: dict[str, Call] = {}

    def _offend(self, kind: str, message: str, place: Place, completion: str) -> None:
        self._findings.offend(kind, message, place, session=self._session.name, completion=completion)

    # starts and ends

    def brackets(self) -> None:
        session, findings = self._session, self._findings
        for one in session.of(Started):
            call = self._calls.get(one.fact.completion)
            if call is None:
                self._calls[one.fact.completion] = Call(one.fact.completion, one.fact.attempt, start=one)
            elif call.start is not None and call.start.fact.body != one.fact.body:  # type: ignore[attr-defined]
                message = f"the call is started at {call.start.place} and again, otherwise, at {one.place}"
                self._offend("call_twice", message, one.place, call.name)
            else:
                findings.count("calls_repeated")
        ends = sorted([*session.of(Captured), *session.of(Failed)], key=lambda one: one.place)
        for one in ends:
            self._end(one)
        highest = self._highest()
        for call in self._calls.values():
            if not 1 <= call.attempt <= highest:
                message = f"the call at {call.first} is of attempt {call.attempt}, which there never was"
                self._offend("attempt_differs", message, call.first, call.name)
        findings.count("calls", len(self._calls))
        findings.judged(Check.CALLS, len(self._calls))

    def _end(self, one: Placed) -> None:
        fact = one.fact
        assert isinstance(fact, Captured | Failed)
        captured = isinstance(fact, Captured)
        call = self._calls.get(fact.completion)
        if call is None:
            call = self._calls[fact.completion] = Call(fact.completion, fact.attempt)
            if captured:
                self._offend(
                    "end_without_start", f"there is a capture at {one.place} and no CallStarted", one.place, call.name
                )
            else:
                # its start was not acknowledged, so nothing was generated; the proxy says so all the same
                self._findings.count("failures_unstarted")
        elif call.end is not None:
            self._again(call, call.end, one)
            return
        call.end = one
        if call.start is not None and one.place.offset < call.start.place.offset:
            message = f"the call ends at {one.place} before it starts at {call.start.place}"
            self._offend("end_without_start", message, one.place, call.name)
        if fact.attempt != call.attempt:
            message = f"the call is started with attempt {call.attempt} and ends at {one.place} with {fact.attempt}"
            self._offend("attempt_differs", message, one.place, call.name)
        opened = self._session.first(Opened)
        if captured and opened is not None:
            assert isinstance(fact, Captured)
            mine = about(opened.fact.task, opened.fact.group, opened.fact.sample)
            if fact.about != mine:
                message = f"task, group or sample at {one.place} are not those at {opened.place}"
                self._offend("ids_differ", message, one.place, call.name)

    def _again(self, call: Call, before: Placed, one: Placed) -> None:
        # an end whose acknowledgement is missing is sent again as it is, and readers drop the second
        if (type(before.fact), before.fact.body) == (type(one.fact), one.fact.body):  # type: ignore[attr-defined]
            self._findings.count("ends_repeated")
            return
        message = f"the call ends at {before.place} and, otherwise, again at {one.place}"
        self._offend("ends_differ", message, one.place, call.name)

    def _highest(self) -> int:
        """The last attempt there was."""
        closed = self._session.first(Closed)
        if closed is not None:
            return int(closed.fact.attempt)
        return 1 + max((one.fact.attempt for one in self._session.of(Fenced)), default=0)

    # delta prompts

    def prompts(self) -> None:
        depth: dict[str, int] = {}
        whole: dict[str, tuple[int, int]] = {}
        """Ids and messages of a completion with its reply."""
        for call in sorted(self._calls.values(), key=lambda one: one.end.place.offset if one.end else -1):
            fact = call.captured
            if fact is None:
                continue
            ids, messages = fact.ids, fact.messages
            if fact.bases:
                self._bases(call, fact, whole, depth)
                ids += fact.bases[-1].ids
                messages += fact.bases[-1].messages
            first = fact.choices[0].ids if fact.choices else 0
            whole[call.name] = (ids + first, messages + bool(fact.choices))

    def _bases(self, call: Call, fact: Captured, whole: dict[str, tuple[int, int]], depth: dict[str, int]) -> None:
        assert call.end is not None
        place, at, said = call.end.place, 0, 0
        self._findings.judged(Check.PROMPTS)
        for base in fact.bases:
            before, size = self._calls.get(base.completion), whole.get(base.completion)
            if before is None or before.end is None or size is None or before.attempt != call.attempt:
                message = f"the prompt at {place} goes on from {base.completion}, no earlier completion of its attempt"
                self._offend("base_unknown", message, place, call.name)
                return
            found = before.end.place
            if found.offset != base.offset or found.offset > call.first.offset:
                message = f"the prompt at {place} has {base.completion} at offset {base.offset}; it is at {found}"
                if found.offset == base.offset:
                    message = (
                        f"the call of {call.first} goes on from {base.completion}, captured after its start at {found}"
                    )
                self._offend("base_misplaced", message, place, call.name)
            if not (at <= base.ids <= size[0] and said <= base.messages <= size[1]):
                message = (
                    f"the prompt at {place} goes on from {base.ids} ids and {base.messages} messages of "
                    f"{base.completion}, which has {size[0]} and {size[1]}"
                )
                self._offend("base_too_long", message, place, call.name)
            at, said = base.ids, base.messages
        # the others stand for what their own records hold
        depth[call.name] = depth.get(fact.bases[0].completion, 0) + 1
        if depth[call.name] > MAX_CHAIN:
            message = f"the prompt at {place} ends a chain of {depth[call.name]} references, more than {MAX_CHAIN}"
            self._offend("chain_too_long", message, place, call.name)

    # trajectories

    def trajectories(self) -> None:
        session, findings = self._session, self._findings
        closing = self._closing()
        told = [*session.published[:1], *session.built[:1]]
        facts = [one.fact for one in told]
        if len(facts) == 2 and _same(facts[0], facts[1]):
            told = told[:1]  # the published one speaks for both
        for one in told:
            assert isinstance(one.fact, Trajected)
            if one.fact.lost:
                findings.skip(Check.CALLS, len(self._calls))
                continue
            self._closed_at(one, one.fact, closing)
            self._account(one, one.fact, closing, counting=one is told[0])
        if not told:
            findings.count("calls_in_flight", len(self._calls))

    def _closing(self) -> Closing | None:
        closed, final = self._session.first(Closed), self._session.first(Final_)
        if closed is None:
            return None
        attempt, at = closed.fact.attempt, closed.place.offset
        last: int | None = at
        for call in self._calls.values():
            if call.attempt != attempt or call.first.offset > at:
                continue
            if call.end is None:
                last = None
                break
            assert last is not None
            last = max(last, call.end.place.offset)
        if final is not None and (last is None or last > final.place.offset):
            last = final.place.offset
        return Closing(attempt, at, last)

    def _closed_at(self, one: Placed, fact: Trajected, closing: Closing | None) -> None:
        if closing is None:
            return  # told as `not_closed`
        found = fact.closing
        if found.topic != "completions" or found.offset != closing.at:
            wanted = "is not there yet" if closing.at is None else f"is at offset {closing.at}"
            message = f"the trajectory at {one.place} is closed at {found}; by the log its closing record {wanted}"
            self._findings.offend("closing_wrong", message, one.place, session=self._session.name)
        opened = self._session.first(Opened)
        if opened is not None and fact.opening != opened.place:
            message = f"`opening` of {one.place} is {fact.opening}, and the session is opened at {opened.place}"
            self._findings.offend("reference_wrong", message, one.place, session=self._session.name)

    def _account(self, one: Placed, fact: Trajected, closing: Closing | None, *, counting: bool) -> None:
        if closing is None:
            return
        traced: dict[str, list[Sampled]] = {}
        for told in fact.told:
            traced.setdefault(told.completion, []).append(told.sampled)
        asides: dict[str, set[str]] = {}
        for aside in fact.asides:
            asides.setdefault(aside.completion, set()).add(aside.reason)
        bare = fact.error and not traced and not asides
        fates: Counter[str] = Counter()
        captured = failed = 0
        for call in self._calls.values():
            fate = self._fate(call, fact.closing.offset, closing)
            mine = call.attempt == closing.attempt and fate != "late" and fate is not None
            captured += fate == "captured"
            failed += fate == "failed" and mine
            if fate is None:
                fates["late"] += 1
                if call.name in traced or call.name in asides:
                    message = f"{one.place} holds the call of {call.first}, which comes after its closing record"
                    self._offend("unknown_call", message, one.place, call.name)
                continue
            if bare:
                fates["untold"] += 1
                continue
            fates[self._told(call, fate, call.name in traced, asides.get(call.name, set()), one)] += 1
        for name in [*traced, *asides]:
            if name not in self._calls:
                message = f"{one.place} holds {name}, which is no call of this session"
                self._offend("unknown_call", message, one.place, name)
        if (fact.captured, fact.failed) != (captured, failed):
            message = (
                f"{one.place} counts {fact.captured} captured and {fact.failed} failed calls; "
                f"the log has {captured} and {failed}"
            )
            self._findings.offend("counts_differ", message, one.place, session=self._session.name)
        self._spans(one, fact)
        if counting:
            for fate, number in fates.items():
                self._findings.count(f"calls_{fate}", number)

    def _fate(self, call: Call, closing_offset: int, closing: Closing) -> str | None:
        """What a trajectory closed at that offset has to say of a call; None: nothing, it came later."""
        if call.first.offset > closing_offset:
            return None
        if call.attempt != closing.attempt:
            return "fenced"
        if call.first.offset > closing.closed:
            # an end alone after the close is dropped by the builder, a start is told
            return "late" if call.start is not None else None
        if not call.ended_by(closing_offset):
            return "unfinished"
        return "captured" if call.captured is not None else "failed"

    def _told(self, call: Call, fate: str, traced: bool, reasons: set[str], one: Placed) -> str:
        """Compares; what to count the call as."""
        if fate == "captured":
            wrong = sorted(reasons & FATES)
            if wrong:
                message = f"{one.place} sets the call aside as `{wrong[0]}`; it was captured in time at {call.first}"
                self._offend("aside_wrong", message, one.place, call.name)
            elif not traced and not reasons:
                message = f"the call captured at {_end(call)} is neither in a trace of {one.place} nor set aside"
                self._offend("call_unaccounted", message, one.place, call.name)
                return "unaccounted"
            return "traced" if traced else "aside"
        if traced:
            message = f"a trace of {one.place} holds the call of {call.first}, which is `{fate}`"
            self._offend("trace_wrong", message, one.place, call.name)
        elif not reasons:
            message = f"the call of {call.first}, `{fate}`, is not set aside in {one.place}"
            self._offend("call_unaccounted", message, one.place, call.name)
            return "unaccounted"
        elif reasons != {fate}:
            message = f"{one.place} sets the call aside as `{', '.join(sorted(reasons))}`; by the log it is `{fate}`"
            self._offend("aside_wrong", message, one.place, call.name)
        return fate

    def _spans(self, one: Placed, fact: Trajected) -> None:
        """Each reply in a trace is one that the engine sampled, and each is in one trace."""
        left: dict[str, list[Sampled]] = {}
        for told in fact.told:
            call = self._calls.get(told.completion)
            choices = call.captured.choices if call is not None and call.captured is not None else None
            if choices is None:
                continue  # told as `unknown_call` or `trace_wrong`
            if self._tokens:
                self._findings.judged(Check.TOKENS)
                self._findings.count("sampled_tokens", told.sampled.ids)
            if told.cut:
                self._findings.skip(Check.TOKENS)
                continue
            rest = left.setdefault(told.completion, list(choices))
            if told.sampled in rest:
                rest.remove(told.sampled)
                continue
            where = f"trace {told.trace} of {one.place}"
            if told.sampled in choices:
                message = f"a reply of {told.completion} is in {where} and in a trace before it"
                self._offend("sampled_twice", message, one.place, told.completion)
            elif any((two.ids, two.digest) == (told.sampled.ids, told.sampled.digest) for two in choices):
                message = f"the log-probabilities in {where} are not those captured at {_end(call)}"
                self._offend("logprobs_differ", message, one.place, told.completion)
            else:
                have = ", ".join(str(two.ids) for two in choices[:SHOWN])
                message = (
                    f"the {told.sampled.ids} sampled ids in {where} are not those captured at {_end(call)} ({have} ids)"
                )
                self._offend("tokens_differ", message, one.place, told.completion)


def _end(call: Call | None) -> Place | None:
    return None if call is None or call.end is None else call.end.place


def _same(one: object, other: object) -> bool:
    assert isinstance(one, Trajected)
    assert isinstance(other, Trajected)
    return (one.told, one.asides, one.closing, one.opening) == (other.told, other.asides, other.closing, other.opening)
