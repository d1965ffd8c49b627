"""Answers of the HTTP API and bodies of callbacks, made from what the view knows.

Names are the public Polar's where it has them. Without tokens, everything is small and pure. With them, a task is
written one session at a time (`task_chunks`), so that a task of a thousand sessions takes the memory of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from polar.bus import Bus, BusError
from polar.client.render import STATUS, error_text, render_result, result_path
from polar.schemas import (
    SessionResult,
    StageChanged,
    TaskAccepted,
    TaskRejected,
    Trajectory,
    to_builtins,
    to_json_bytes,
)
from polar.schemas.stages import UPSTREAM_STATUS, Stage

from .entries import NodeEntry, SessionEntry, TaskEntry
from .view import View

THREAD_RESULTS = 200
"""Writing one result takes about 30 µs."""


def task_head(task: TaskEntry) -> dict[str, Any]:
    """All of a task's document but its results."""
    counts = task.result.counts if task.result is not None else None
    return {
        "task_id": task.task_id,
        "status": task.status,
        "total_sessions": task.total,
        "completed_sessions": task.results,
        "group_id": task.group_id,
        "harness": task.accepted.harness if task.accepted is not None else None,
        "accepted_at_ms": task.accepted.at_ms if task.accepted is not None else None,
        "finished_at_ms": task.result.at_ms if task.result is not None else None,
        "counts": to_builtins(counts),
        "warnings": to_builtins(task.accepted.warnings) if task.accepted is not None else [],
    }


def task_document(task: TaskEntry) -> dict[str, Any]:
    """`GET /rollout/task/{id}` and the callback's body, without tokens."""
    return _whole(task_head(task), list(results_of(task)))


async def task_json(task: TaskEntry) -> bytes:
    """`task_document` as JSON; a task of many sessions is written in a thread."""
    head, results = task_head(task), list(results_of(task))
    if len(results) > THREAD_RESULTS:
        return await asyncio.to_thread(lambda: to_json_bytes(_whole(head, results)))
    return to_json_bytes(_whole(head, results))


def _whole(head: dict[str, Any], results: list[SessionResult]) -> dict[str, Any]:
    return {**head, "result_paths": _paths(results), "results": [render_result(one) for one in results]}


def _paths(results: list[SessionResult]) -> list[str]:
    return [path for one in results if (path := result_path(one)) is not None]


async def task_chunks(bus: Bus, task: TaskEntry) -> AsyncIterator[bytes]:
    """As `task_document` with every trajectory in it, as JSON text piece by piece; at most one is in memory.

    A trajectory that the log no longer has is null, and `trajectory_error` says why.
    """
    results = list(results_of(task))
    head = to_json_bytes({**task_head(task), "result_paths": _paths(results)})
    yield head[:-1] + b',"results":['
    comma = b""
    for result in results:
        yield comma + await _with_trajectory(bus, result)
        comma = b","
    yield b"]}"


async def _with_trajectory(bus: Bus, result: SessionResult) -> bytes:
    trajectory: Trajectory | None = None
    problem: str | None = None
    if result.trajectory is None:
        problem = "no trajectory was published"
    else:
        try:
            record = await bus.lookup(result.trajectory)
        except BusError as error:
            # also a passing one: the document's head is out, so this session says it instead of the status line
            problem = str(error)
        else:
            if isinstance(record.value, Trajectory):
                trajectory = record.value
            else:
                problem = f"the record holds no trajectory: {record.error or 'another type'}"
    # arrays of a long session are hundreds of thousands of numbers: not on the event loop
    return await asyncio.to_thread(_result_json, result, trajectory, problem)


def _result_json(result: SessionResult, trajectory: Trajectory | None, problem: str | None) -> bytes:
    try:
        document = render_result(result, trajectory)
    except (IndexError, ValueError, TypeError) as error:
        # a trajectory of a strategy of one's own may point outside its pool
        document = render_result(result)
        problem = f"the trajectory cannot be rendered: {type(error).__name__}: {error}"
    if problem is not None:
        document["trajectory_error"] = problem
    return to_json_bytes(document)


def results_of(task: TaskEntry) -> Iterator[SessionResult]:
    """The results known, in sample order."""
    return (one.result for one in task.sessions.values() if one.result is not None)


def task_line(task: TaskEntry) -> dict[str, Any]:
    """One row of `GET /tasks`."""
    head = task_head(task)
    del head["warnings"]
    return {**head, "mean_reward": task.mean_reward}


def rejected_document(rejected: TaskRejected) -> dict[str, Any]:
    """A task that was never taken, e.g. one written to Kafka by hand."""
    return {
        "task_id": rejected.task_id,
        "status": "failed",
        "total_sessions": 0,
        "completed_sessions": 0,
        "results": [],
        "result_paths": [],
        "error": "; ".join(f"{one.field or 'task'}: {one.message}" for one in rejected.problems),
        "problems": [{"code": one.code, **to_builtins(one)} for one in rejected.problems],
        "finished_at_ms": rejected.at_ms,
    }


def session_document(session: SessionEntry) -> dict[str, Any]:
    """One row of `GET /tasks/{id}/sessions`."""
    result = session.result
    return {
        "session_id": session.session_id,
        "task_id": session.task_id,
        "sample": session.sample,
        "status": session_status(session),
        "stage": session.stage.value,
        "attempt": session.attempt,
        "node_id": session.node,
        "at_ms": session.at_ms,
        "outcome": session.outcome.status.value if session.outcome is not None else None,
        "error": error_text(session.failure or (session.outcome.failure if session.outcome is not None else None)),
        "reward": result.reward if result is not None else None,
        "trajectory_ref": to_builtins(result.trajectory) if result is not None else None,
    }


def session_status(session: SessionEntry) -> str:
    """The public Polar's name for where a session is."""
    if session.finished:
        return STATUS[session.outcome.status] if session.outcome is not None else "COMPLETED"
    return UPSTREAM_STATUS[session.stage]


def node_document(view: View, key: str, node: NodeEntry) -> dict[str, Any]:
    beat = node.beat
    return {
        "node_id": beat.node_id,
        "key": key,
        "half": beat.half,
        "alive": view.alive(node),
        "silent_ticks": view.silent_ticks(node),
        "last_beat_ms": beat.at_ms,
        "draining": beat.draining,
        "capacity": {name: getattr(beat.capacity, name) for name in beat.capacity.__struct_fields__},
        "offers": {name: getattr(beat.offers, name) for name in beat.offers.__struct_fields__},
        "held": to_builtins(beat.held),
        "runtime_api": beat.runtime_api,
    }


def nodes_document(view: View) -> dict[str, Any]:
    """`GET /nodes`."""
    tick = view.tick
    return {
        "nodes": [node_document(view, key, node) for key, node in sorted(view.nodes.items())],
        "scheduler": None
        if tick is None
        else {"leader_id": tick.leader_id, "tick": tick.number, "last_tick_ms": tick.at_ms},
    }


def status_document(view: View, tasks: dict[str, str]) -> dict[str, Any]:
    """`GET /rollout/status`; `tasks`: status by id."""
    stages = view.in_flight()
    return {
        "tasks": tasks,
        "pipeline": {
            "pending_sessions": stages.get(Stage.REGISTERED, 0),
            "sessions": {stage.value: count for stage, count in stages.items()},
        },
        "nodes": nodes_document(view),
        "ready": view.ready,
        "forgotten_tasks": view.counts.dropped,
    }


def event_document(event: StageChanged | TaskAccepted | TaskRejected) -> dict[str, Any]:
    """The data of one event of `GET /events`."""
    match event:
        case TaskAccepted():
            return {
                "type": "task_accepted",
                "task_id": event.task_id,
                "count": event.count,
                "group_id": event.group_id,
                "at_ms": event.at_ms,
            }
        case TaskRejected():
            return {
                "type": "task_rejected",
                "task_id": event.task_id,
                "problems": [{"code": one.code, **to_builtins(one)} for one in event.problems],
                "at_ms": event.at_ms,
            }
    ended = event.outcome
    finished = event.stage is Stage.FINISHED and ended is not None
    return {
        "type": "stage",
        "session_id": event.session_id,
        "task_id": event.task_id,
        "attempt": event.attempt,
        "stage": event.stage.value,
        "status": STATUS[ended.status] if finished and ended is not None else UPSTREAM_STATUS.get(event.stage),
        "node_id": event.node,
        "at_ms": event.at_ms,
        "outcome": ended.status.value if ended is not None else None,
        "error": error_text(event.failure or (ended.failure if ended is not None else None)),
        "reward": event.grade.reward if event.grade is not None else None,
    }
