"""What a trainer gets: trajectories, and what surrounds them.

A trajectory holds its tokens and messages once, in a `Pool`; each trace is a list of segments of it, so that traces
which share a prefix (`per_request`, forks) cost no more than merged ones. `Trajectory.view(trace)` gives the arrays a
trainer wants.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .arrays import Logprobs, TokenIds
from .base import Event, Part, RecordRef
from .completions import PolicySpan, Sampling
from .failures import Failure
from .stages import Artifact, Outcome, Status
from .tasks import BuilderSpec, EvaluatorSpec


class Span(Part, frozen=True, kw_only=True):
    """`start` to `end`, exclusive."""

    start: int
    end: int


class Pool(Part, frozen=True, kw_only=True):
    """Each distinct run of tokens and each distinct message once."""

    tokens: TokenIds = TokenIds()
    logprobs: Logprobs = Logprobs()
    """Aligned with `tokens`: the engine's value where the token was sampled, NaN where it was given."""
    messages: list[dict[str, Any]] = []
    tools: list[list[dict[str, Any]]] = []


class Label(StrEnum):
    MAIN = "main"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    SIDE = "side"
    """Titles, probes, classifiers."""


class Context(StrEnum):
    EXACT = "exact"
    """The tokens before the span are those the engine had, id for id."""
    RETOKENIZED = "retokenized"
    """The same text, but somewhere before the span other ids than the engine had."""


class Turn(Part, frozen=True, kw_only=True):
    """One sampled span of a trace. Positions count from the start of the trace."""

    completion_id: str
    start: int
    end: int
    finish: str | None
    truncated: bool = False
    """Cut by a length limit, an abort or a lost connection."""
    tools: int | None = None
    """Index into `Pool.tools`."""
    policy: list[PolicySpan] = []
    """Relative to `start`."""
    sampling: Sampling = Sampling()
    constraints: list[str] = []
    context: Context = Context.EXACT
    trainable: bool = True
    """False: kept for reading, masked for training; `untrainable` says why."""
    untrainable: str | None = None


class Drift(Part, frozen=True, kw_only=True):
    """Where re-rendered history differs from what was sampled."""

    turn: int
    """Index of the turn whose tokens were rendered otherwise later."""
    position: int
    """First differing position within that turn."""
    sampled: int
    """Ids of the sampled stretch that differs."""
    canonical: int
    """Ids of its canonical rendering."""


class Trace(Part, frozen=True, kw_only=True):
    """One sequence to train on: a prompt, then a response in which some ids were sampled."""

    trace_id: str
    segments: list[Span]
    """Of `Pool.tokens`, concatenated."""
    prompt_length: int
    """The first so many ids are the prompt; the rest is the response."""
    turns: list[Turn]
    label: Label = Label.MAIN
    trainable: bool = True
    prompt_messages: list[Span] = []
    """Of `Pool.messages`."""
    response_messages: list[Span] = []
    reward: float | None = None
    rewards: dict[str, float] = {}
    drift: list[Drift] = []
    break_reason: str | None = None
    """Why the chain ends here; None: the session ended."""
    cut: int = 0
    """Ids left out at the end because of a length limit."""
    metadata: dict[str, Any] = {}


class SetAside(Part, frozen=True, kw_only=True):
    """A completion, or an open call, that is in no trace."""

    completion_id: str
    reason: str
    """`fenced`, `late`, `unfinished`, `failed`, `retry`, `base_expired`, `empty`, …."""
    attempt: int
    detail: str | None = None


class TraceView(NamedTuple):
    """A trace's arrays. `R` is the response's length."""

    prompt_ids: npt.NDArray[np.int32]
    """Shape `(P,)`."""
    response_ids: npt.NDArray[np.int32]
    """Shape `(R,)`."""
    loss_mask: npt.NDArray[np.uint8]
    """Shape `(R,)`: 1 exactly on sampled ids of trainable turns of a trainable trace."""
    response_logprobs: npt.NDArray[np.float32]
    """Shape `(R,)`: the engine's where an id was sampled, 0.0 elsewhere."""


class Trajectory(Event, frozen=True, kw_only=True):
    """Exactly one per accepted session, perhaps with no traces."""

    trajectory_id: str
    session_id: str
    attempt: int
    task_id: str
    group_id: str
    sample: int
    num_samples: int
    status: Status
    outcome: Outcome
    reward: float | None = None
    rewards: dict[str, float] = {}
    pool: Pool = Pool()
    traces: list[Trace] = []
    set_aside: list[SetAside] = []
    closing: RecordRef
    """The record at which the session was built: records after it are not in here."""
    opening: RecordRef
    """The session's first record."""
    captured: int = 0
    failed: int = 0
    builder: BuilderSpec
    builder_version: str
    evaluator: EvaluatorSpec
    evaluator_version: str | None = None
    report: dict[str, Any] = {}
    """The evaluator's."""
    harness: str | None = None
    models: list[str] = []
    timing_ms: dict[str, float] = {}
    artifacts: list[Artifact] = []
    metadata: dict[str, Any] = {}
    error: Failure | None = None
    """Set when the trajectory itself could not be built or published; then there are no traces."""

    def view(self, trace: Trace) -> TraceView:
        """The arrays of one of this trajectory's traces."""
        ids = _gather(self.pool.tokens.array, trace.segments)
        logprobs = _gather(self.pool.logprobs.array, trace.segments)
        sampled = np.zeros(len(ids), np.uint8)
        trained = np.zeros(len(ids), np.uint8)
        for turn in trace.turns:
            sampled[turn.start : turn.end] = 1
            if trace.trainable and turn.trainable:
                trained[turn.start : turn.end] = 1
        start = trace.prompt_length
        return TraceView(
            prompt_ids=ids[:start],
            response_ids=ids[start:],
            loss_mask=trained[start:],
            response_logprobs=np.where(sampled[start:], logprobs[start:], np.float32(0)).astype(np.float32),
        )

    def messages(self, spans: list[Span]) -> list[dict[str, Any]]:
        """`Trace.prompt_messages` or `Trace.response_messages` as a list."""
        return [message for span in spans for message in self.pool.messages[span.start : span.end]]


def _gather(values: npt.NDArray[Any], segments: list[Span]) -> npt.NDArray[Any]:
    if len(segments) == 1:
        return values[segments[0].start : segments[0].end]
    if not segments:
        return values[:0]
    return np.concatenate([values[one.start : one.end] for one in segments])


class GroupMember(Part, frozen=True, kw_only=True):
    session_id: str
    task_id: str
    attempt: int
    outcome: Outcome
    reward: float | None = None


class GroupClosed(Event, frozen=True, kw_only=True):
    """The group is decided; its trajectories stand before this in the same partition."""

    group_id: str
    tasks: list[str]
    size: int
    members: list[GroupMember]
    selection: list[str]
    """Session ids that count for training; the other members stay listed."""
    reason: str
    """`complete`, `quorum` or `deadline`."""
    at_ms: int


class RewardRevised(Event, frozen=True, kw_only=True):
    """A later grade of a finished session; carries no tokens. Key: group id."""

    session_id: str
    task_id: str
    group_id: str
    revision: int
    revision_id: str
    reward: float | None
    rewards: dict[str, float] = {}
    trace_rewards: dict[str, float] = {}
    evaluator: EvaluatorSpec
    evaluator_version: str | None = None
    run: str
    """The regrade this belongs to."""
    report: dict[str, Any] = {}
    failure: Failure | None = None
    at_ms: int
