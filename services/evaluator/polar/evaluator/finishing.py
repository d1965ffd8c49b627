"""From a decided grade to what a trainer gets. Pure: a built trajectory and a grade in, records out."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from polar.schemas import (
    BuilderSpec,
    BuildSummary,
    Failure,
    FailureKind,
    Grade,
    Pool,
    RecordRef,
    RewardRevised,
    SessionGraded,
    SessionResult,
    SetAside,
    Stage,
    StageChanged,
    Status,
    Trace,
    Trajectory,
)
from polar.schemas.ids import derived


def finished(built: Trajectory, graded: SessionGraded) -> Trajectory:
    """The trajectory as published: with outcome, rewards, report, timings and artifacts."""
    grade = graded.grade or Grade()
    return replace(
        built,
        status=Status.ERROR if built.error is not None else graded.outcome.status,
        outcome=graded.outcome,
        reward=grade.reward,
        rewards=grade.rewards,
        traces=[_rewarded(trace, grade) for trace in built.traces],
        evaluator=graded.evaluator,
        evaluator_version=graded.evaluator_version,
        report=grade.report,
        grade_failure=graded.failure,
        timing_ms={**graded.timing_ms, **built.timing_ms},
        artifacts=graded.artifacts,
    )


def _rewarded(trace: Trace, grade: Grade) -> Trace:
    """A trace gets the session's reward if it trains or its builder was told so, or what the grade has for it alone."""
    own = grade.trace_rewards.get(trace.trace_id)
    if not (trace.trainable if trace.rewarded is None else trace.rewarded):
        return trace if own is None else replace(trace, reward=own)
    return replace(trace, reward=grade.reward if own is None else own, rewards=grade.rewards)


def without_traces(trajectory: Trajectory, failure: Failure) -> Trajectory:
    """The ending of a session whose trajectory cannot be published: every call is set aside."""
    completions = dict.fromkeys(turn.completion_id for trace in trajectory.traces for turn in trace.turns)
    return replace(
        trajectory,
        status=Status.ERROR,
        pool=Pool(),
        traces=[],
        set_aside=[
            *trajectory.set_aside,
            *(SetAside(completion_id=one, reason="not_published", attempt=trajectory.attempt) for one in completions),
        ],
        error=failure,
    )


def bare(trajectory: Trajectory) -> Trajectory:
    """What is left when even that is too large: ids, status, outcome and the error."""
    return replace(trajectory, set_aside=[], report={}, rewards={}, artifacts=[], metadata={}, timing_ms={})


def lost(graded: SessionGraded, message: str) -> Trajectory:
    """The ending of a session whose built record the log no longer has: still exactly one trajectory."""
    failure = Failure(kind=FailureKind.INFRA, message=message, stage=str(Stage.FINISHED))
    return Trajectory(
        trajectory_id=derived("lost", graded.session_id, graded.attempt),
        session_id=graded.session_id,
        attempt=graded.attempt,
        task_id=graded.task_id,
        group_id=graded.group_id,
        sample=-1,
        num_samples=0,
        status=Status.ERROR,
        outcome=graded.outcome,
        closing=graded.built,
        opening=graded.built,
        builder=BuilderSpec(),
        builder_version="",
        evaluator=graded.evaluator,
        error=failure,
    )


def summary_of(trajectory: Trajectory) -> BuildSummary:
    """The numbers of a trajectory, for those who do not read tokens."""
    trained = sum(
        turn.end - turn.start
        for trace in trajectory.traces
        if trace.trainable
        for turn in trace.turns
        if turn.trainable
    )
    return BuildSummary(
        captured=trajectory.captured,
        failed=trajectory.failed,
        traces=len(trajectory.traces),
        trained_tokens=trained,
        prompt_tokens=sum(trace.prompt_length for trace in trajectory.traces),
        set_aside=dict(sorted(Counter(one.reason for one in trajectory.set_aside).items())),
        statistics=trajectory.statistics(),
        failure=trajectory.error,
    )


def result_of(trajectory: Trajectory, graded: SessionGraded, published: RecordRef, at_ms: int) -> SessionResult:
    """The session's result, without tokens."""
    return SessionResult(
        session_id=graded.session_id,
        task_id=graded.task_id,
        group_id=graded.group_id,
        sample=trajectory.sample,
        attempt=graded.attempt,
        status=trajectory.status,
        outcome=graded.outcome,
        reward=trajectory.reward,
        rewards=trajectory.rewards,
        summary=summary_of(trajectory),
        trajectory=published,
        node_id=graded.node,
        timing_ms=trajectory.timing_ms,
        artifacts=trajectory.artifacts,
        error=trajectory.error or graded.outcome.failure or graded.failure,
        metadata=trajectory.metadata,
        at_ms=at_ms,
    )


def stage_of(trajectory: Trajectory, graded: SessionGraded, published: RecordRef, at_ms: int) -> StageChanged:
    """The report that the session is finished."""
    return StageChanged(
        session_id=graded.session_id,
        task_id=graded.task_id,
        attempt=graded.attempt,
        stage=Stage.FINISHED,
        at_ms=at_ms,
        failure=trajectory.error or graded.failure,
        outcome=graded.outcome,
        grade=graded.grade,
        published=published,
    )


def revision_of(graded: SessionGraded, at_ms: int) -> RewardRevised:
    """A later grade, which looks nothing up and carries no tokens."""
    grade = graded.grade or Grade()
    revision_id = graded.revision_id or derived("revision", graded.session_id, graded.revision, graded.run or "")
    return RewardRevised(
        session_id=graded.session_id,
        task_id=graded.task_id,
        group_id=graded.group_id,
        revision=graded.revision,
        revision_id=revision_id,
        reward=grade.reward,
        rewards=grade.rewards,
        trace_rewards=grade.trace_rewards,
        evaluator=graded.evaluator,
        evaluator_version=graded.evaluator_version,
        run=graded.run or "",
        report=grade.report,
        failure=graded.failure,
        at_ms=at_ms,
    )
