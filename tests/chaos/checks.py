"""What must hold afterwards: the audit, and beside it what only a test can know, the engine's and the agents' side."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from polar.audit import audit
from polar.client import PolarClient
from polar.devmodel import ScriptedEngine
from polar.schemas import (
    CompletionCaptured,
    Failure,
    FailureKind,
    SessionClosed,
    SessionFinal,
    SessionGraded,
    SessionOpened,
    Status,
    Trajectory,
)


async def check_log(
    client: PolarClient, engine: ScriptedEngine, sessions: Collection[str], trajectories: Sequence[Trajectory]
) -> None:
    """`trajectories` are what a trainer has read of these sessions, which are all that the log holds and are final."""
    assert Counter(one.session_id for one in trajectories) == Counter(sessions)
    without = [one for one in trajectories if one.reward is None and one.status is Status.COMPLETED]
    assert all(_cost_a_grade(one.grade_failure) for one in without), [one.grade_failure for one in without]
    report = await audit(client.bus)
    assert report.clean, "\n".join(["the audit found", *map(str, report.offences), str(report.found)])
    assert not report.dead, report.dead
    counts = report.counts
    assert (counts["accepted"], counts["finished"], counts.get("in_flight", 0)) == (len(sessions), len(sessions), 0)
    captured = await _check_once_each(client, sessions)
    _check_told(engine, captured)
    _check_tokens(engine, trajectories)


def _cost_a_grade(failure: Failure | None) -> bool:
    """Whether it says that a fault has broken off the grading; a grade is not tried again in a box that it changed."""
    return failure is not None and failure.kind is FailureKind.EVALUATOR and failure.retryable


async def _check_once_each(client: PolarClient, sessions: Collection[str]) -> list[CompletionCaptured]:
    """As the audit says, counted anew in the plainest way; the captured completions."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    captured: list[CompletionCaptured] = []
    reader = await client.bus.reader(["completions", "built", "graded", "trajectories"])
    try:
        async for record in reader.to_end():
            value = record.value
            if isinstance(value, SessionOpened | SessionClosed | SessionFinal | SessionGraded):
                counts[type(value).__name__][value.session_id] += 1
            elif isinstance(value, Trajectory):
                counts[record.topic][value.session_id] += 1
            elif isinstance(value, CompletionCaptured):
                captured.append(value)
    finally:
        await reader.close()
    kinds = {"SessionOpened", "SessionClosed", "SessionFinal", "SessionGraded", "built", "trajectories"}
    assert counts == {kind: Counter(sessions) for kind in kinds}
    return captured


def _check_told(engine: ScriptedEngine, captured: Sequence[CompletionCaptured]) -> None:
    """Captured before told: whatever an agent has quoted of a reply is on the log, in the same session and attempt."""
    told: dict[tuple[str, int], set[str]] = defaultdict(set)
    attempts = {one.completion_id: (one.session_id, one.attempt) for one in captured}
    for one in captured:
        told[one.session_id, one.attempt].update(str(choice.message.get("content")) for choice in one.choices)
    for call in engine.calls:
        if call.id in attempts:
            quoted = {message["content"] for message in call.body["messages"] if message["role"] == "assistant"}
            assert quoted <= told[attempts[call.id]], f"told before it was captured: {quoted - told[attempts[call.id]]}"


def _check_tokens(engine: ScriptedEngine, trajectories: Sequence[Trajectory]) -> None:
    """What a trainer would train on is what the engine sampled in that very call, after the prompt it was given."""
    sampled = {call.id: call for call in engine.calls}
    for trajectory in trajectories:
        for trace in trajectory.traces:
            view = trajectory.view(trace)
            whole = [*view.prompt_ids.tolist(), *view.response_ids.tolist()]
            for turn in trace.turns:
                call = sampled[turn.completion_id]
                assert whole[turn.start : turn.end] == call.ids[0]
                assert whole[: turn.start] == call.prompt_ids
                logprobs = view.response_logprobs[turn.start - trace.prompt_length : turn.end - trace.prompt_length]
                assert logprobs.tolist() == call.logprobs[0]
