"""Records as the other services write them, for tests of the view and of what stands on it."""

from types import SimpleNamespace
from typing import Any

from polar.schemas import (
    BuilderSpec,
    Capacity,
    Context,
    EvaluatorSpec,
    Event,
    Failure,
    FailureKind,
    Logprobs,
    NodeHeartbeat,
    Outcome,
    Pool,
    RecordRef,
    SessionResult,
    Span,
    Stage,
    StageChanged,
    Status,
    TaskAccepted,
    TaskCounts,
    TaskResult,
    Tick,
    TokenIds,
    Trace,
    Trajectory,
    Turn,
    encode,
)

COMPLETED = Outcome(status=Status.COMPLETED, exit_code=0)
TIMED_OUT = Outcome(status=Status.TIMEOUT, failure=Failure(kind=FailureKind.TIMEOUT, message="time is up"))
CANCELLED = Outcome(status=Status.CANCELLED, failure=Failure(kind=FailureKind.CANCELLED, message="by request"))


def ref(offset: int, partition: int = 0, topic: str = "stages") -> RecordRef:
    return RecordRef(topic=topic, partition=partition, offset=offset)


def message(event: Event | bytes | None, place: RecordRef, key: str | None = "k", timestamp: int = 1) -> Any:
    """A record as aiokafka gives it; the topic's full name is its name."""
    return SimpleNamespace(
        topic=place.topic,
        partition=place.partition,
        offset=place.offset,
        timestamp=timestamp,
        key=None if key is None else key.encode(),
        value=encode(event) if isinstance(event, Event) else event,
        headers=(),
    )


NAMES = {name: name for name in ("stages", "results", "nodes")}


def accepted(task_id: str = "t", count: int = 1, at_ms: int = 1_000, source: int = 0, **more: Any) -> TaskAccepted:
    place = ref(source, topic="tasks")
    return TaskAccepted(
        **{
            "task_id": task_id,
            "count": count,
            "group_id": task_id,
            "source": place,
            "answers": place,
            "at_ms": at_ms,
            "sessions": [f"{task_id}-{number}" for number in range(count)],
            "harness": "shell",
            **more,
        }
    )


def moved(session_id: str, stage: Stage, attempt: int = 1, at_ms: int = 2_000, **more: Any) -> StageChanged:
    return StageChanged(
        session_id=session_id,
        task_id=more.pop("task_id", session_id.rsplit("-", 1)[0]),
        attempt=attempt,
        stage=stage,
        at_ms=at_ms,
        **more,
    )


def session_result(session_id: str, outcome: Outcome = COMPLETED, at_ms: int = 3_000, **more: Any) -> SessionResult:
    task_id, _, sample = session_id.rpartition("-")
    return SessionResult(
        **{
            "session_id": session_id,
            "task_id": task_id,
            "group_id": task_id,
            "sample": int(sample),
            "attempt": 1,
            "status": outcome.status,
            "outcome": outcome,
            "reward": 1.0,
            "at_ms": at_ms,
            "timing_ms": {"run": 12.5},
            **more,
        }
    )


def task_result(task_id: str = "t", count: int = 1, at_ms: int = 4_000, status: str = "completed") -> TaskResult:
    return TaskResult(
        task_id=task_id,
        group_id=task_id,
        status=status,
        counts=TaskCounts(accepted=count, finished=count, completed=count),
        at_ms=at_ms,
    )


def beat(node_id: str = "n1", number: int = 1, **more: Any) -> NodeHeartbeat:
    return NodeHeartbeat(
        **{
            "node_id": node_id,
            "boot_id": "b",
            "capacity": Capacity(init=1, ready=1, run=2),
            "beat": number,
            "at_ms": 5_000,
            **more,
        }
    )


def tick(number: int) -> Tick:
    return Tick(leader_id="l", number=number, at_ms=1_000 * number)


def trajectory(session_id: str = "t-0", **more: Any) -> Trajectory:
    """Two turns: prompt 1 2 3, sampled 4 5, given 6, sampled 7 (not trainable)."""
    task_id, _, sample = session_id.rpartition("-")
    nan = float("nan")
    return Trajectory(
        **{
            "trajectory_id": f"traj-{session_id}",
            "session_id": session_id,
            "attempt": 1,
            "task_id": task_id,
            "group_id": task_id,
            "sample": int(sample),
            "num_samples": 1,
            "status": Status.COMPLETED,
            "outcome": COMPLETED,
            "reward": 1.0,
            "rewards": {"tests": 1.0},
            "pool": Pool(
                tokens=TokenIds([1, 2, 3, 4, 5, 6, 7]),
                logprobs=Logprobs([nan, nan, nan, -0.1, -0.2, nan, -0.7]),
                messages=[
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "yes"},
                    {"role": "user", "content": "more"},
                    {"role": "assistant", "content": "no"},
                ],
                tools=[[{"type": "function", "function": {"name": "ls"}}]],
            ),
            "traces": [
                Trace(
                    trace_id="tr-0",
                    segments=[Span(start=0, end=7)],
                    prompt_length=3,
                    turns=[
                        Turn(completion_id="c0", start=3, end=5, finish="tool_calls", tools=0),
                        Turn(
                            completion_id="c1",
                            start=6,
                            end=7,
                            finish="stop",
                            tools=0,
                            trainable=False,
                            untrainable="temperature 0",
                            context=Context.RETOKENIZED,
                        ),
                    ],
                    prompt_messages=[Span(start=0, end=1)],
                    response_messages=[Span(start=1, end=4)],
                )
            ],
            "closing": ref(9, topic="completions"),
            "opening": ref(1, topic="completions"),
            "captured": 2,
            "builder": BuilderSpec(),
            "builder_version": "1",
            "evaluator": EvaluatorSpec(),
            "harness": "shell",
            "metadata": {"policy_version": 17},
            **more,
        }
    )
