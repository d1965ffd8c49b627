"""Results and trajectories in the shapes people and existing bridges read: the public Polar's (the paper, A.4).

Pure: records in, plain dictionaries out that any JSON encoder takes. What the records hold stays as it is; what JSON
lacks (a NaN, an infinity) becomes null. It knows neither where records come from nor who asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from polar.schemas import Failure, SessionResult, Status, Trace, Trajectory, to_builtins

LogprobShape = Literal["floats", "objects"]

STATUS = {
    Status.COMPLETED: "COMPLETED",
    Status.ERROR: "ERROR",
    Status.TIMEOUT: "TIMEOUT",
    Status.CANCELLED: "ERROR",
}
"""The public Polar's names for ended sessions; it has none for a cancelled one, whose error says so."""


def render_trace(
    trajectory: Trajectory,
    trace: Trace,
    *,
    logprobs: LogprobShape = "floats",
    decode: Callable[[int], str] | None = None,
) -> dict[str, Any]:
    """One trace of `trajectory`, self-contained.

    `prompt_ids` has P numbers; `response_ids`, `loss_mask` and `response_logprobs` have R each.

    Args:
        logprobs: `floats` (natural logarithms, 0.0 where an id was not sampled), or the paper's `objects`
            `{token, token_id, logprob}`.
        decode: the text of one id, for `objects`; without it `token` is null.
    """
    view = trajectory.view(trace)
    response_ids: list[int] = view.response_ids.tolist()
    floats = _numbers(view.response_logprobs)
    told: list[Any] = floats
    if logprobs == "objects":
        told = [
            {"token": decode(token) if decode else None, "token_id": token, "logprob": number}
            for token, number in zip(response_ids, floats, strict=True)
        ]
    last = trace.turns[-1] if trace.turns else None
    tools = trajectory.pool.tools[last.tools] if last is not None and last.tools is not None else []
    return {
        "prompt_ids": view.prompt_ids.tolist(),
        "response_ids": response_ids,
        "loss_mask": view.loss_mask.tolist(),
        "response_logprobs": told,
        "prompt_messages": trajectory.messages(trace.prompt_messages),
        "response_messages": trajectory.messages(trace.response_messages),
        "tools": tools,
        "finish_reason": last.finish if last is not None else None,
        "reward": trace.reward if trace.reward is not None else trajectory.reward,
        "metadata": {
            **trace.metadata,
            "trace_id": trace.trace_id,
            "label": trace.label.value,
            "label_by": trace.label_by,
            "trainable": trace.trainable,
            "rewards": trace.rewards or trajectory.rewards,
            "policy_versions": trace.policy_versions,
            "media": to_builtins(trace.media),
            "break_reason": trace.break_reason,
            "break_detail": trace.break_detail,
            "cut": trace.cut,
            "drift": to_builtins(trace.drift),
            "turns": to_builtins(trace.turns),
        },
    }


def render_trajectory(
    trajectory: Trajectory,
    *,
    logprobs: LogprobShape = "floats",
    decode: Callable[[int], str] | None = None,
) -> dict[str, Any]:
    """A trajectory with its traces written out; `logprobs` and `decode` as in `render_trace`."""
    return {
        "status": STATUS[trajectory.status],
        "metadata": {
            **trajectory.metadata,
            "trajectory_id": trajectory.trajectory_id,
            "session_id": trajectory.session_id,
            "task_id": trajectory.task_id,
            "group_id": trajectory.group_id,
            "sample": trajectory.sample,
            "num_samples": trajectory.num_samples,
            "attempt": trajectory.attempt,
            "harness": trajectory.harness,
            "models": trajectory.models,
            "builder": to_builtins(trajectory.builder),
            "evaluator": to_builtins(trajectory.evaluator),
            "report": trajectory.report,
            "rewards": trajectory.rewards,
            "captured": trajectory.captured,
            "set_aside": to_builtins(trajectory.set_aside),
        },
        "reward": trajectory.reward,
        "traces": [render_trace(trajectory, one, logprobs=logprobs, decode=decode) for one in trajectory.traces],
        "error": error_text(trajectory.error or trajectory.outcome.failure),
    }


def render_result(result: SessionResult, trajectory: Trajectory | None = None) -> dict[str, Any]:
    """A session's result; without `trajectory` only where it stands on the log (`trajectory_ref`)."""
    failure = result.error or result.outcome.failure
    return {
        "session_id": result.session_id,
        "task_id": result.task_id,
        "status": STATUS[result.status],
        "trajectory": render_trajectory(trajectory) if trajectory is not None else None,
        "trajectory_ref": to_builtins(result.trajectory),
        "timing": {_milliseconds(name): value for name, value in result.timing_ms.items()},
        "node_id": result.node_id,
        "error": error_text(failure),
        "metadata": result.metadata,
        "reward": result.reward,
        "rewards": result.rewards,
        "outcome": result.status.value,
        "failure": to_builtins(failure),
        "exit_code": result.outcome.exit_code,
        "group_id": result.group_id,
        "sample": result.sample,
        "attempt": result.attempt,
        "summary": to_builtins(result.summary),
        "artifacts": to_builtins(result.artifacts),
        "at_ms": result.at_ms,
    }


def result_path(result: SessionResult) -> str | None:
    """Where a session's trajectory stands, as `topic/partition/offset`: upstream has a file path in this place."""
    ref = result.trajectory
    return f"{ref.topic}/{ref.partition}/{ref.offset}" if ref is not None else None


def error_text(failure: Failure | None) -> str | None:
    """One line: the kind of failure and what it says."""
    return f"{failure.kind.value}: {failure.message}" if failure is not None else None


def _numbers(values: npt.NDArray[np.float32]) -> list[float | None]:
    # through float32's shortest decimal text, so that people read -0.1 and not -0.10000000149011612
    return [float(str(one)) if math.isfinite(one) else None for one in values]


def _milliseconds(name: str) -> str:
    return name if name.endswith("_ms") else f"{name}_ms"
