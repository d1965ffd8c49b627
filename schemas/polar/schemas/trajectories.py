"""What a trainer gets: trajectories, and what surrounds them.

A trajectory holds its tokens and messages once, in a `Pool`; each trace is a list of segments of it, so that traces
which share a prefix (`per_request`, forks) cost no more than merged ones. `Trajectory.view(trace)` gives the arrays a
trainer wants.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .arrays import Logprobs, TokenIds
from .base import Claim, Event, Part, RecordRef
from .completions import MediaPart, PolicySpan, Sampling
from .failures import Failure
from .stages import Artifact, BuildStatistics, Outcome, Status
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
    """Titles, probes, classifiers, searches: what the harness asks besides the conversation."""


class Context(StrEnum):
    EXACT = "exact"
    """The tokens before the span are those the engine had, id for id."""
    RETOKENIZED = "retokenized"
    """The same conversation, but somewhere before the span other ids than the engine had: other ids of the same text,
    or what a template puts around a turn; `Trace.drift` says where."""


class RoutedExperts(Part, frozen=True, kw_only=True):
    """Which experts the engine used."""

    claim: Claim
    start: int
    """Row of the turn's first id; rows are the ids of the completion's choice."""


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
    """`constrained`, `temperature_0`, `aborted`, `logprobs_mode`, `no_logprob`, `policy_version`, `retokenized`."""
    routed_experts: RoutedExperts | None = None
    experts_dropped: str | None = None
    """Why there are none although the engine gave them: `retokenized`."""


class Drift(Part, frozen=True, kw_only=True):
    """A stretch in which re-rendered history differs from what stands in the trace."""

    turn: int
    """Index of the turn whose tokens were rendered otherwise later."""
    position: int
    """First differing position within that turn. Negative: in the generation prompt before it, which the history does
    not show or has melted with the text; the turn's length less its end: the end of turn alone."""
    sampled: int
    """Ids of the stretch as it stands in the trace."""
    canonical: int
    """Ids that the engine had for it later."""


class Shared(Part, frozen=True, kw_only=True):
    """How a trace branches off an earlier one."""

    trace: int
    """Its place in `Trajectory.traces`."""
    length: int
    """The first so many ids are the same, with the same places in the pool."""


class Trace(Part, frozen=True, kw_only=True):
    """One sequence to train on: a prompt, then a response in which some ids were sampled."""

    trace_id: str
    segments: list[Span]
    """Of `Pool.tokens`, concatenated."""
    prompt_length: int
    """The first so many ids are the prompt; the rest is the response."""
    turns: list[Turn]
    label: Label = Label.MAIN
    label_by: str = ""
    """What showed it: `mark:…` of the harness, or a rule of structure (docs/trajectories.md)."""
    trainable: bool = True
    rewarded: bool | None = None
    """Whether it gets the session's reward; None: if it is trainable."""
    prompt_messages: list[Span] = []
    """Of `Pool.messages`."""
    response_messages: list[Span] = []
    reward: float | None = None
    rewards: dict[str, float] = {}
    policy_versions: list[str] = []
    """That sampled it, in order; more than one: the weights changed within the trace."""
    media: list[MediaPart] = []
    """In order, by their place in the trace; offset -1: not known."""
    drift: list[Drift] = []
    break_reason: str | None = None
    """Why the chain ends here; None: the session ended."""
    break_detail: str | None = None
    """What changed the history: `client`, `template`, or `bytes`: ids that end inside a character are no text."""
    cut: int = 0
    """Ids left out at the end because of a length limit; the completions that began there are set aside."""
    shares: Shared | None = None
    """Where the strategy builds a tree; `prefix_tree` does."""
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
    grade_failure: Failure | None = None
    """Why there is no reward: nothing to grade, or the grader failed or died with its box."""
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

    def statistics(self) -> BuildStatistics:
        """Chains, merges and breaks of this trajectory."""
        merges = {context.value: 0 for context in Context}
        breaks: Counter[str] = Counter()
        labels: Counter[str] = Counter()
        for trace in self.traces:
            labels[trace.label.value] += 1
            if trace.break_reason is not None:
                breaks[trace.break_reason] += 1
            for before, turn in pairwise(trace.turns):
                # several turns in a row may be pieces of one reply
                merges[turn.context.value] += before.completion_id != turn.completion_id
        drift = [one for trace in self.traces for one in trace.drift]
        return BuildStatistics(
            replies=len(self.traces) + sum(merges.values()),
            merges={name: count for name, count in merges.items() if count},
            breaks=dict(sorted(breaks.items())),
            labels=dict(sorted(labels.items())),
            drifted=sum(max(one.sampled, one.canonical) for one in drift),
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
