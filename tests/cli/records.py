"""Records for tests of the command line."""

from __future__ import annotations

from typing import Any

from polar.schemas import (
    BuilderSpec,
    EvaluatorSpec,
    Failure,
    FailureKind,
    GroupClosed,
    GroupMember,
    Logprobs,
    Outcome,
    Pool,
    RecordRef,
    Span,
    Stage,
    StageChanged,
    Status,
    TokenIds,
    Trace,
    Trajectory,
    Turn,
)

COMPLETED = Outcome(status=Status.COMPLETED, exit_code=0)


def failed(kind: FailureKind = FailureKind.HARNESS, message: str = "it broke", **detail: Any) -> Outcome:
    return Outcome(status=Status.ERROR, failure=Failure(kind=kind, message=message, detail=detail or None), exit_code=1)


def ref(offset: int = 0, topic: str = "completions") -> RecordRef:
    return RecordRef(topic=topic, partition=0, offset=offset)


def moved(session: str, stage: Stage, attempt: int = 1, **more: Any) -> StageChanged:
    return StageChanged(session_id=session, task_id="t", attempt=attempt, stage=stage, at_ms=1, **more)


def trace(prompt: int, sampled: list[tuple[int, int]], length: int, **more: Any) -> Trace:
    """`length` tokens, of which those in `sampled` were."""
    turns = [
        Turn(completion_id=f"c{number}", start=start, end=end, finish="stop")
        for number, (start, end) in enumerate(sampled)
    ]
    return Trace(
        **{
            "trace_id": "trace",
            "segments": [Span(start=0, end=length)],
            "prompt_length": prompt,
            "turns": turns,
            **more,
        }
    )


def trajectory(ids: list[int] | None = None, traces: list[Trace] | None = None, **more: Any) -> Trajectory:
    ids = ids or []
    return Trajectory(
        **{
            "trajectory_id": "trajectory",
            "session_id": "session",
            "attempt": 1,
            "task_id": "t",
            "group_id": "t",
            "sample": 0,
            "num_samples": 2,
            "status": more.get("outcome", COMPLETED).status,
            "outcome": COMPLETED,
            "pool": Pool(tokens=TokenIds(ids), logprobs=Logprobs([-0.5] * len(ids))),
            "traces": traces or [],
            "closing": ref(),
            "opening": ref(),
            "builder": BuilderSpec(),
            "builder_version": "1",
            "evaluator": EvaluatorSpec(),
            "captured": len(traces or []),
            **more,
        }
    )


def group(rewards: dict[str, float | None], selection: list[str], **more: Any) -> GroupClosed:
    members = [
        GroupMember(session_id=name, task_id="t", attempt=1, outcome=COMPLETED, reward=reward)
        for name, reward in rewards.items()
    ]
    return GroupClosed(
        **{
            "group_id": "t",
            "tasks": ["t"],
            "size": len(members),
            "members": members,
            "selection": selection,
            "reason": "complete",
            "at_ms": 1,
            **more,
        }
    )
