"""The records as an audit decodes them: only the fields it needs, token arrays as views of the record's bytes.

A record of a long session holds megabytes; decoding all of it would cost most of an audit's time. msgspec skips what a
struct here does not name. Names and tags are those of `polar.schemas`, and a test compares the two.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, Union

import msgspec

from polar.schemas import RecordRef, Status


class View(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """A record, in part."""


class Something(msgspec.Struct, frozen=True):
    """It is there; what it says is not needed."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """Of an `Outcome`."""

    status: Status


class TaskRequest(View, frozen=True, kw_only=True, tag=True):
    task_id: str | None = None


class CancelRequest(View, frozen=True, kw_only=True, tag=True):
    task_id: str


class CloseRequest(View, frozen=True, kw_only=True, tag=True):
    task_id: str


class StageChanged(View, frozen=True, kw_only=True, tag=True):
    session_id: str
    attempt: int
    stage: str
    built: RecordRef | None = None
    published: RecordRef | None = None


class TaskAccepted(View, frozen=True, kw_only=True, tag=True):
    task_id: str
    count: int
    group_id: str
    source: RecordRef
    answers: RecordRef
    at_ms: int
    sessions: list[str] = []


class TaskRejected(View, frozen=True, kw_only=True, tag=True):
    answers: RecordRef


class Lease(View, frozen=True, kw_only=True, tag=True):
    session_id: str
    task_id: str
    group_id: str
    phase: str


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    accepted: int
    finished: int = 0
    completed: int = 0
    error: int = 0
    timeout: int = 0
    cancelled: int = 0
    rewarded: int = 0
    reward_sum: float = 0.0


class TaskState(View, frozen=True, kw_only=True, tag=True):
    task_id: str
    source: RecordRef
    counts: Counts
    accepted_at_ms: int
    finished_at_ms: int | None = None


class GroupState(View, frozen=True, kw_only=True, tag=True):
    group_id: str
    opened_at_ms: int
    decided_at_ms: int | None = None


class CancelMemory(View, frozen=True, kw_only=True, tag=True):
    task_id: str


class Cursor(View, frozen=True, kw_only=True, tag=True):
    next: int


class SessionOpened(View, frozen=True, kw_only=True, tag=True):
    session_id: str
    task_id: str
    group_id: str
    sample: int
    source: RecordRef
    at_ms: int


class AttemptFenced(View, frozen=True, kw_only=True, tag=True):
    session_id: str
    attempt: int


class SessionClosed(View, frozen=True, kw_only=True, tag=True):
    session_id: str
    attempt: int
    outcome: Ended


class SessionFinal(View, frozen=True, kw_only=True, tag=True):
    session_id: str
    attempt: int


class CallStarted(View, frozen=True, kw_only=True, tag=True):
    completion_id: str
    session_id: str
    attempt: int


class PromptBase(msgspec.Struct, frozen=True, kw_only=True):
    completion_id: str
    offset: int
    ids: int
    messages: int


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    ids: memoryview
    messages: msgspec.Raw = msgspec.Raw(b"\x90")
    base: PromptBase | None = None
    more: list[PromptBase] = []


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    ids: memoryview
    logprobs: memoryview


class CompletionCaptured(View, frozen=True, kw_only=True, tag=True):
    completion_id: str
    session_id: str
    attempt: int
    task_id: str
    group_id: str
    sample: int
    prompt: Prompt
    choices: list[Choice]


class CompletionFailed(View, frozen=True, kw_only=True, tag=True):
    completion_id: str
    session_id: str
    attempt: int


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    tokens: memoryview = memoryview(b"")
    logprobs: memoryview = memoryview(b"")


class Span(msgspec.Struct, frozen=True, kw_only=True):
    start: int
    end: int


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    completion_id: str
    start: int
    end: int
    trainable: bool = True


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    segments: list[Span]
    turns: list[Turn]
    trainable: bool = True
    prompt_length: int
    cut: int = 0


class SetAside(msgspec.Struct, frozen=True, kw_only=True):
    completion_id: str
    reason: str
    attempt: int


class Trajectory(View, frozen=True, kw_only=True, tag=True):
    trajectory_id: str
    session_id: str
    attempt: int
    task_id: str
    group_id: str
    sample: int
    status: Status
    reward: float | None = None
    pool: Pool = Pool()
    traces: list[Trace] = []
    set_aside: list[SetAside] = []
    closing: RecordRef
    opening: RecordRef
    captured: int = 0
    failed: int = 0
    builder: msgspec.Raw
    builder_version: str
    error: Something | None = None


class GradeView(msgspec.Struct, frozen=True, kw_only=True):
    reward: float | None = None


class SessionGraded(View, frozen=True, kw_only=True, tag=True):
    session_id: str
    attempt: int
    task_id: str
    group_id: str
    revision: int = 0
    outcome: Ended
    built: RecordRef
    grade: GradeView | None = None


class Member(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    attempt: int
    outcome: Ended
    reward: float | None = None


class GroupClosed(View, frozen=True, kw_only=True, tag=True):
    group_id: str
    size: int
    members: list[Member]
    selection: list[str]
    reason: str


class RewardRevised(View, frozen=True, kw_only=True, tag=True):
    session_id: str
    group_id: str


class SessionResult(View, frozen=True, kw_only=True, tag=True):
    session_id: str
    task_id: str
    group_id: str
    sample: int
    attempt: int
    trajectory: RecordRef | None = None


class TaskResult(View, frozen=True, kw_only=True, tag=True):
    task_id: str
    counts: Counts


class DeadLetter(View, frozen=True, kw_only=True, tag=True):
    origin: RecordRef
    service: str
    error: str
    key: bytes | None = None


class DeadResolved(View, frozen=True, kw_only=True, tag=True):
    origin: RecordRef
    action: str


BY_TOPIC: Final[dict[str, tuple[type[View], ...]]] = {
    "leases": (Lease, TaskState, GroupState, CancelMemory, Cursor),
    "tasks": (TaskRequest, CancelRequest, CloseRequest),
    "stages": (StageChanged, TaskAccepted, TaskRejected),
    "completions": (
        SessionOpened,
        AttemptFenced,
        SessionClosed,
        SessionFinal,
        CallStarted,
        CompletionCaptured,
        CompletionFailed,
    ),
    "built": (Trajectory,),
    "graded": (SessionGraded,),
    "trajectories": (Trajectory, GroupClosed),
    "rewards": (RewardRevised,),
    "results": (SessionResult, TaskResult),
    "dead": (DeadLetter, DeadResolved),
}
"""The topics an audit reads."""


@lru_cache(maxsize=len(BY_TOPIC))
def decoder(topic: str) -> msgspec.msgpack.Decoder[Any]:
    """Of the values of a topic; raises msgspec's errors."""
    return msgspec.msgpack.Decoder(Union[BY_TOPIC[topic]])  # noqa: UP007 - made at run time


class _Named(msgspec.Struct, frozen=True):
    """A task record of anyone's: `type` may be missing."""

    type: str = "TaskRequest"
    task_id: str | None = None


task_in_json: Final = msgspec.json.Decoder(_Named)
