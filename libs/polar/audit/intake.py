"""From a record as it stands on the log to the facts kept of it. Pure: no log, no store, no judgement but of the record
by itself.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import msgspec

from polar.schemas import BuilderSpec, RecordRef, canonical
from polar.schemas.ids import derived, session_id, trajectory_id

from . import views
from .facts import (
    Accepted,
    Answered,
    Aside,
    Asked,
    Base,
    Captured,
    Closed,
    Dead,
    Fact,
    Failed,
    Fenced,
    Final_,
    Graded,
    GroupDone,
    GroupRow,
    LeaseRow,
    Listed,
    Opened,
    Reported,
    Resolved,
    Result,
    Revised,
    Sampled,
    Started,
    TaskDone,
    TaskRow,
    TaskTaken,
    Told,
    Trajected,
    Wrong,
)
from .report import Place
from .store import Row

SESSION_KEYED: Final = frozenset({"completions", "built", "graded", "stages"})
ID_BYTES: Final = 4
"""Of a token id, and of a log-probability."""

Keyed = Iterator[tuple[str, Fact]]
"""Facts with what they are about."""


def digest(*parts: bytes | memoryview) -> int:
    """64 bits of a hash; never 0, which stands for none."""
    made = blake2b(digest_size=8)
    for part in parts:
        made.update(part)
    return int.from_bytes(made.digest(), "little") or 1


def about(task: str, group: str, sample: int) -> int:
    return digest(f"{task}\x1f{group}\x1f{sample}".encode())


class Intake:
    def __init__(self, within: Callable[[Place], bool], *, tokens: bool) -> None:
        """
        Args:
            within: whether a place is below the end of what counts as read.
            tokens: whether sampled ids and log-probabilities are digested, for the proof of `Check.TOKENS`.
        """
        self._within = within
        self._tokens = tokens
        self._takers: dict[type[views.View], Callable[[Any, Place, Mapping[str, bytes]], Keyed]] = {
            views.Lease: self._lease,
            views.TaskState: self._task_state,
            views.GroupState: self._group_state,
            views.StageChanged: self._stage,
            views.TaskAccepted: self._accepted,
            views.TaskRejected: self._rejected,
            views.SessionOpened: self._opened,
            views.AttemptFenced: self._fenced,
            views.SessionClosed: self._closed,
            views.SessionFinal: self._final,
            views.CallStarted: self._started,
            views.CompletionCaptured: self._captured,
            views.CompletionFailed: self._failed,
            views.Trajectory: self._trajectory,
            views.SessionGraded: self._graded,
            views.GroupClosed: self._group_closed,
            views.RewardRevised: self._revised,
            views.SessionResult: self._result,
            views.TaskResult: self._task_result,
            views.DeadLetter: self._dead,
            views.DeadResolved: self._resolved,
        }
        self._body = 0
        self.cursors: dict[int, int] = {}
        """How far the scheduler has read, by partition of `tasks`."""

    def rows(
        self, place: Place, key: str | None, raw: bytes | None, headers: Mapping[str, bytes], timestamp_ms: int
    ) -> list[Row]:
        """The facts of a record."""
        topic = place.topic
        if topic == "tasks":
            return [Row(f"p/{place}", *place, _asked(raw, headers, timestamp_ms))]
        if raw is None:
            return [Row(about_, *place, fact) for about_, fact in _tombstone(topic, key)]
        try:
            view = views.decoder(topic).decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            whose = key if topic in SESSION_KEYED else None
            fact = Wrong("unreadable", f"cannot be read as a value of `{topic}`: {error}", whose)
            return [Row(f"d/{place}", *place, fact)]
        if isinstance(view, views.Cursor):
            self._cursor(place, key, view.next)
            return []
        taker = self._takers.get(type(view))
        if taker is None:
            return []
        self._body = zlib.crc32(raw) | len(raw) << 32
        found = [Row(one, *place, fact) for one, fact in taker(view, place, headers)]
        wanted = _key_of(view, topic)
        if wanted is not None and key != wanted and found:
            message = f"stands under the key {key!r} and is about {wanted!r}"
            found.append(Row(found[0].key, *place, Wrong("key_wrong", message)))
        return found

    # the scheduler's rows

    def _cursor(self, place: Place, key: str | None, after: int) -> None:
        kind, _, rest = (key or "").partition("/")
        topic, _, partition = rest.partition("/")
        if kind == "c" and topic == "tasks" and partition.isdecimal() and self._within(place):
            self.cursors[int(partition)] = max(after, self.cursors.get(int(partition), 0))

    def _lease(self, view: views.Lease, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        yield view.session_id, LeaseRow(view.phase, view.task_id, view.group_id)

    def _task_state(self, view: views.TaskState, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        counts, _ = _counts(view.counts)
        finished = view.finished_at_ms is not None
        yield f"t/{view.task_id}", TaskRow(_place(view.source), counts, finished, view.accepted_at_ms)

    def _group_state(self, view: views.GroupState, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        yield f"g/{view.group_id}", GroupRow(True, view.decided_at_ms is not None, view.opened_at_ms)

    # stages

    def _stage(self, view: views.StageChanged, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        if view.stage in ("BUILT", "FINISHED"):
            ref = view.built if view.stage == "BUILT" else view.published
            names = None if ref is None else _place(ref)
            yield view.session_id, Reported(view.stage, view.attempt, names, _source(headers))

    def _accepted(self, view: views.TaskAccepted, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        source = view.answers == view.source
        yield f"p/{_place(view.answers)}", Answered(view.task_id, source)
        if not source:
            return
        asked = _place(view.source)
        yield f"t/{view.task_id}", TaskTaken(asked, view.count, view.at_ms)
        # without a group of its own the task's id stands there, and each session is its own group where it is large
        for sample, session in enumerate(view.sessions):
            yield session, Accepted(view.task_id, view.group_id, sample, view.at_ms)
            if session != session_id(asked.partition, asked.offset, sample):
                message = f"sample {sample} of the task at {asked} has the id of another place or sample"
                yield session, Wrong("id_not_derived", message)

    def _rejected(self, view: views.TaskRejected, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        yield f"p/{_place(view.answers)}", Answered(None, False)

    # completions

    def _opened(self, view: views.SessionOpened, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        asked = _place(view.source)
        fact = Opened(view.task_id, view.group_id, view.sample, asked, _source(headers), view.at_ms)
        yield view.session_id, fact
        yield f"p/{asked}", fact

    def _fenced(self, view: views.AttemptFenced, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        yield view.session_id, Fenced(view.attempt)

    def _closed(self, view: views.SessionClosed, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        yield view.session_id, Closed(view.attempt, view.outcome.status)

    def _final(self, view: views.SessionFinal, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        yield view.session_id, Final_(view.attempt)

    def _started(self, view: views.CallStarted, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        yield view.session_id, Started(view.completion_id, view.attempt, self._body)

    def _captured(self, view: views.CompletionCaptured, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        prompt = view.prompt
        bases = [] if prompt.base is None else [prompt.base, *prompt.more]
        yield (
            view.session_id,
            Captured(
                completion=view.completion_id,
                attempt=view.attempt,
                body=self._body,
                about=about(view.task_id, view.group_id, view.sample),
                ids=len(prompt.ids) // ID_BYTES,
                messages=_length(memoryview(prompt.messages)),
                bases=[Base(one.completion_id, one.offset, one.ids, one.messages) for one in bases],
                choices=[
                    self._sampled(len(one.ids), [one.ids], [one.logprobs])
                    for one in sorted(view.choices, key=lambda one: one.index)
                ],
            ),
        )

    def _failed(self, view: views.CompletionFailed, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        yield view.session_id, Failed(view.completion_id, view.attempt, self._body)

    # what derives from them

    def _trajectory(self, view: views.Trajectory, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        lost = view.builder_version == "" and view.error is not None
        if lost:
            name = derived("lost", view.session_id, view.attempt)
        else:
            name = trajectory_id(view.session_id, view.attempt, _spec(bytes(view.builder)))
        yield (
            view.session_id,
            Trajected(
                id=view.trajectory_id,
                derived=name,
                attempt=view.attempt,
                task=view.task_id,
                group=view.group_id,
                sample=view.sample,
                opening=_place(view.opening),
                closing=_place(view.closing),
                source=_source(headers),
                captured=view.captured,
                failed=view.failed,
                lost=lost,
                error=view.error is not None,
                reward=view.reward,
                told=list(self._told(view)),
                asides=[Aside(one.completion_id, one.reason, one.attempt) for one in view.set_aside],
            ),
        )

    def _told(self, view: views.Trajectory) -> Iterator[Told]:
        tokens, logprobs = view.pool.tokens, view.pool.logprobs
        for number, trace in enumerate(view.traces):
            starts, at = [], 0
            for segment in trace.segments:
                starts.append(at)
                at += segment.end - segment.start
            for name, start, end in _joined(trace.turns):
                spans = list(_within(trace.segments, starts, start, end))
                sampled = self._sampled(
                    (end - start) * ID_BYTES,
                    [tokens[first * ID_BYTES : last * ID_BYTES] for first, last in spans],
                    [logprobs[first * ID_BYTES : last * ID_BYTES] for first, last in spans],
                )
                yield Told(name, sampled, number, trace.cut > 0 and end >= at)

    def _sampled(self, size: int, ids: list[memoryview], logprobs: list[memoryview]) -> Sampled:
        if not self._tokens:
            return Sampled(size // ID_BYTES, 0, 0)
        return Sampled(size // ID_BYTES, digest(*ids), digest(*logprobs))

    def _graded(self, view: views.SessionGraded, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        yield (
            view.session_id,
            Graded(
                attempt=view.attempt,
                task=view.task_id,
                group=view.group_id,
                revision=view.revision,
                status=view.outcome.status,
                reward=None if view.grade is None else view.grade.reward,
                built=_place(view.built),
                source=_source(headers),
                again=_source(headers, "polar-retry-of"),
            ),
        )

    def _group_closed(self, view: views.GroupClosed, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        members = [Listed(one.session_id, one.attempt, one.outcome.status, one.reward) for one in view.members]
        yield f"g/{view.group_id}", GroupDone(view.size, members, view.selection, view.reason)

    def _revised(self, view: views.RewardRevised, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        yield view.session_id, Revised(view.group_id, _source(headers))

    def _result(self, view: views.SessionResult, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        yield (
            view.session_id,
            Result(
                attempt=view.attempt,
                task=view.task_id,
                group=view.group_id,
                sample=view.sample,
                trajectory=None if view.trajectory is None else _place(view.trajectory),
                source=_source(headers),
            ),
        )

    def _task_result(self, view: views.TaskResult, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        counts, rewards = _counts(view.counts)
        yield f"t/{view.task_id}", TaskDone(counts, rewards, _source(headers))

    def _dead(self, view: views.DeadLetter, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        origin = _place(view.origin)
        whose = view.key.decode("utf-8", "replace") if origin.topic in SESSION_KEYED and view.key else None
        fact = Dead(origin, view.service, view.error, whose)
        yield f"d/{origin}", fact
        if origin.topic == "tasks":
            yield f"p/{origin}", fact
        if whose is not None:
            yield whose, fact

    def _resolved(self, view: views.DeadResolved, place: Place, headers: Mapping[str, bytes]) -> Keyed:
        yield f"d/{_place(view.origin)}", Resolved(view.action)


def _place(ref: RecordRef) -> Place:
    return Place(ref.topic, ref.partition, ref.offset)


def _source(headers: Mapping[str, bytes], name: str = "source") -> Place | None:
    """The record that a header names; None: there is none that can be read."""
    topic, _, rest = headers.get(name, b"").decode("ascii", "replace").partition("/")
    partition, _, offset = rest.partition("/")
    if not (partition.isdecimal() and offset.isdecimal()):
        return None
    return Place(topic, int(partition), int(offset))


def _counts(counts: views.Counts) -> tuple[tuple[int, ...], float]:
    whole = (
        counts.accepted,
        counts.finished,
        counts.completed,
        counts.error,
        counts.timeout,
        counts.cancelled,
        counts.rewarded,
    )
    return whole, counts.reward_sum


def _key_of(view: views.View, topic: str) -> str | None:
    """The key a record must have; None: any."""
    match view:
        case views.Trajectory() | views.GroupClosed() if topic == "trajectories":
            return view.group_id
        case views.RewardRevised():
            return view.group_id
        case views.SessionResult():
            return f"s/{view.session_id}"
        case views.TaskResult():
            return f"t/{view.task_id}"
        case views.TaskAccepted():
            return view.task_id
        case views.TaskRejected() | views.DeadLetter() | views.DeadResolved():
            return None
        case views.TaskState():
            return f"t/{view.task_id}"
        case views.GroupState():
            return f"g/{view.group_id}"
    return getattr(view, "session_id", None)


def _tombstone(topic: str, key: str | None) -> Keyed:
    if topic != "leases" or key is None:
        return
    kind, slash, _ = key.partition("/")
    if not slash:
        yield key, LeaseRow(None, None, None)
    elif kind == "t":
        yield key, TaskRow(None, None, False, 0)
    elif kind == "g":
        yield key, GroupRow(False, False, 0)


def _asked(raw: bytes | None, headers: Mapping[str, bytes], timestamp_ms: int) -> Fact:
    """A record of `tasks`, which anyone may write, in MessagePack or JSON."""
    is_json = headers.get("content-type", b"").startswith(b"application/json") or (raw or b"").lstrip()[:1] == b"{"
    try:
        if raw is None:
            return Asked("unreadable", None, timestamp_ms)
        if is_json:
            named = views.task_in_json.decode(raw)
            return Asked(named.type, named.task_id, timestamp_ms)
        view = views.decoder("tasks").decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Asked("unreadable", None, timestamp_ms)
    return Asked(type(view).__name__, view.task_id, timestamp_ms)


@lru_cache(maxsize=1024)
def _spec(raw: bytes) -> str:
    """The canonical text of a builder's specification: there are few different ones."""
    return canonical(msgspec.msgpack.decode(raw, type=BuilderSpec)).decode()


def _length(head: memoryview) -> int:
    """How many items a MessagePack array has, by its first bytes."""
    first = head[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F
    width = {0xDC: 2, 0xDD: 4}.get(first, 0)
    return int.from_bytes(head[1 : 1 + width], "big")


def _joined(turns: list[views.Turn]) -> Iterator[tuple[str, int, int]]:
    """Turns in a row of one completion as one: a reply is split where only a part of it may train."""
    name, start, end = "", 0, 0
    for turn in turns:
        if turn.completion_id == name and turn.start == end:
            end = turn.end
            continue
        if name:
            yield name, start, end
        name, start, end = turn.completion_id, turn.start, turn.end
    if name:
        yield name, start, end


def _within(segments: list[views.Span], starts: list[int], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where positions `start` to `end` of a trace stand in the pool."""
    for number in range(max(0, bisect_right(starts, start) - 1), len(segments)):
        at = starts[number]
        if at >= end:
            return
        segment = segments[number]
        first, last = max(start, at) - at, min(end - at, segment.end - segment.start)
        if first < last:
            yield segment.start + first, segment.start + last
