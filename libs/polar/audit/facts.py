"""What an audit keeps of a record: about a hundred bytes, sorted later by what it is about.

Facts on a session have its id as key; those on a task, a group, a record of `tasks` or a record that died have `t/…`,
`g/…`, `p/…` or `d/…`.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Union

import msgspec

from .report import Place


class Fact(msgspec.Struct, frozen=True, array_like=True):
    """Encoded as an array, with a number as tag: there are millions of them."""


class Wrong(Fact, frozen=True, tag=0):
    """An offence that shows in the record itself."""

    kind: str
    message: str
    session: str | None = None


class Accepted(Fact, frozen=True, tag=1):
    task: str
    group: str | None
    """None: each session is a group of its own."""
    sample: int
    at_ms: int


class LeaseRow(Fact, frozen=True, tag=2):
    phase: str | None
    """None: a tombstone."""
    task: str | None
    group: str | None


class Opened(Fact, frozen=True, tag=3):
    task: str
    group: str
    sample: int
    asked: Place
    """The task's record."""
    source: Place | None
    at_ms: int


class Fenced(Fact, frozen=True, tag=4):
    attempt: int


class Closed(Fact, frozen=True, tag=5):
    attempt: int
    status: str


class Final_(Fact, frozen=True, tag=6):
    attempt: int


class Started(Fact, frozen=True, tag=7):
    completion: str
    attempt: int
    body: int
    """Checksum of the record."""


class Base(NamedTuple):
    completion: str
    offset: int
    ids: int
    messages: int


class Sampled(NamedTuple):
    """A stretch of sampled ids: its length, and digests of the ids and of the log-probabilities; 0: not taken."""

    ids: int
    digest: int
    logprobs: int


class Captured(Fact, frozen=True, tag=8):
    completion: str
    attempt: int
    body: int
    about: int
    """Digest of task, group and sample."""
    ids: int
    """Of the prompt, as far as this record holds it."""
    messages: int
    bases: list[Base]
    """What the prompt goes on from; empty: it is whole."""
    choices: list[Sampled]
    """By index."""


class Failed(Fact, frozen=True, tag=9):
    completion: str
    attempt: int
    body: int


class Told(NamedTuple):
    """A completion's share of a trace: the turns of one sampled reply, joined."""

    completion: str
    sampled: Sampled
    trace: int
    cut: bool
    """The trace was cut at its end, and this stands there: it need not be whole."""


class Aside(NamedTuple):
    completion: str
    reason: str
    attempt: int


class Trajected(Fact, frozen=True, tag=10):
    """A trajectory, built or published."""

    id: str
    derived: str
    """What its id has to be, by its session, attempt and builder."""
    attempt: int
    task: str
    group: str
    sample: int
    opening: Place
    closing: Place
    source: Place | None
    captured: int
    failed: int
    lost: bool
    """Made by the finisher because the built one was gone."""
    error: bool
    reward: float | None
    told: list[Told]
    asides: list[Aside]


class Graded(Fact, frozen=True, tag=11):
    attempt: int
    task: str
    group: str
    revision: int
    status: str
    reward: float | None
    built: Place
    source: Place | None
    again: Place | None
    """An operator wrote it once more: the place of the first."""


class Result(Fact, frozen=True, tag=12):
    attempt: int
    task: str
    group: str
    sample: int
    trajectory: Place | None
    source: Place | None


class Reported(Fact, frozen=True, tag=13):
    """A BUILT or FINISHED report."""

    stage: str
    attempt: int
    names: Place | None
    """The built or published record."""
    source: Place | None


class Revised(Fact, frozen=True, tag=14):
    group: str
    source: Place | None


class Dead(Fact, frozen=True, tag=15):
    origin: Place
    service: str
    error: str
    session: str | None


class Resolved(Fact, frozen=True, tag=25):
    """What an operator did about the letters of an origin that stand before it."""

    action: str


class Asked(Fact, frozen=True, tag=16):
    """A record of `tasks`; what it is, by name, and the id it gives."""

    what: str
    task: str | None
    at_ms: int


class Answered(Fact, frozen=True, tag=17):
    accepted: str | None
    """The task id; None: rejected."""
    source: bool
    """The record is what the task was accepted for, not a repeat of it."""


class TaskTaken(Fact, frozen=True, tag=18):
    """An acceptance, under its task."""

    asked: Place
    count: int
    at_ms: int


class TaskRow(Fact, frozen=True, tag=19):
    """The scheduler's state of a task; `counts` None: a tombstone."""

    asked: Place | None
    counts: tuple[int, ...] | None
    finished: bool
    at_ms: int


class GroupRow(Fact, frozen=True, tag=20):
    """The scheduler's state of a group; `known` False: a tombstone."""

    known: bool
    decided: bool
    at_ms: int


class TaskDone(Fact, frozen=True, tag=21):
    counts: tuple[int, ...]
    reward_sum: float
    source: Place | None


class Listed(NamedTuple):
    """A member as a closed group has it."""

    session: str
    attempt: int
    status: str
    reward: float | None


class GroupDone(Fact, frozen=True, tag=22):
    size: int
    members: list[Listed]
    selection: list[str]
    reason: str


class SessionSum(Fact, frozen=True, tag=23):
    """What a session came to, for its task and its group; made by the audit itself."""

    session: str
    sample: int
    state: str
    """`finished`, `in_flight`, `lost` or `unknown`."""
    attempt: int | None
    status: str | None
    """As graded."""
    rewarded: bool
    reward: float | None
    published: Place | None
    opened_ms: int


class Chosen(Fact, frozen=True, tag=24):
    """A session of this task or group was asked for."""


Any_ = Union[  # noqa: UP007 - a tagged union for msgspec
    Wrong,
    Accepted,
    LeaseRow,
    Opened,
    Fenced,
    Closed,
    Final_,
    Started,
    Captured,
    Failed,
    Trajected,
    Graded,
    Result,
    Reported,
    Revised,
    Dead,
    Asked,
    Answered,
    TaskTaken,
    TaskRow,
    GroupRow,
    TaskDone,
    GroupDone,
    SessionSum,
    Chosen,
    Resolved,
]


class Placed(NamedTuple):
    """A fact and where it stands."""

    place: Place
    fact: Fact


encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder(Any_).decode
