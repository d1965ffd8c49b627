"""RUN: the harness in its box, from its start to the death of its last process.

Promises: when `execute` returns, or raises, nothing that the harness started runs any more. How it ended is data.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import NamedTuple

from polar.runtime import Box, ExecOutcome, RuntimeFailure
from polar.schemas import ExitReport, Failure, FailureKind, SessionAssigned, Stage

from .environment import harness_environment, instruction_file, workspace
from .harness import HarnessRefused, Launch, Session, load_harness
from .initialize import TASKS_DOING, tail_of
from .machine import Ending, loss, revocation
from .pool import Stop, Stopped, Why
from .settings import GatewaySettings

MASK = "***"
"""In the place of the session's key, where a harness prints its environment."""


class Ended(NamedTuple):
    """How the harness ended. `ran`: it was started, so its files are worth keeping."""

    ending: Ending
    ran: bool


def launch_of(
    event: SessionAssigned, box: Box, instruction: str, model: str, key: str, settings: GatewaySettings
) -> Launch:
    """The command of the task's harness with its whole environment. Raises HarnessRefused."""
    agent = event.task.agent
    environment = harness_environment(
        event,
        session_dir=box.session_dir,
        instruction=instruction,
        inline_bytes=settings.inline_instruction_bytes,
        model=model,
        base_url=box.door_url,
        key=key,
    )
    launch = load_harness(agent, settings.import_paths).launch(
        Session(
            session_id=event.session_id,
            attempt=event.attempt,
            task_id=event.task_id,
            agent=agent,
            instruction=instruction,
            instruction_file=instruction_file(box.session_dir),
            workdir=workspace(box.session_dir, event.task.runtime.workdir),
            session_dir=box.session_dir,
            model=model,
            base_url=box.door_url,
            key=key,
            environment=environment,
        )
    )
    return Launch(
        command=launch.command,
        env={**agent.env, **environment, **launch.env},
        cwd=launch.cwd,
        stdin=launch.stdin,
        files=launch.files,
    )


async def execute(
    event: SessionAssigned,
    box: Box,
    instruction: str,
    model: str,
    key: str,
    log_file: Path,
    stop: Stop,
    settings: GatewaySettings,
) -> Ended:
    """Run the task's harness to its end, its timeout or `stop`."""
    timeout = event.task.timeout_seconds
    loop = asyncio.get_running_loop()
    began = loop.time()
    ran = False
    try:
        launch = launch_of(event, box, instruction, model, key, settings)
        for path, content in launch.files.items():
            await box.write_file(path, content)
        ran, began = True, loop.time()
        outcome = await stop.unless(
            box.exec(
                launch.command,
                cwd=launch.cwd,
                env=launch.env,
                timeout=timeout,
                stdin=launch.stdin,
                output_limit=max(1, settings.output_tail_bytes),
                log_file=log_file,
                log_limit=settings.harness_log_bytes,
            )
        )
    except HarnessRefused as refused:
        return Ended(_not_started(FailureKind.HARNESS, str(refused), retryable=False), ran)
    except RuntimeFailure as failure:
        await box.kill_all()
        kind = FailureKind.TASK if isinstance(failure, TASKS_DOING) else FailureKind.INFRA
        return Ended(_not_started(kind, f"the harness did not run: {failure}", failure.retryable), ran)
    except Stopped as stopped:
        await box.kill_all()
        tail = await asyncio.to_thread(_log_tail, log_file, settings.output_tail_bytes)
        return Ended(stop_ending(stopped, Stage.RUNNING, tail.replace(key, MASK), loop.time() - began), ran)
    await box.kill_all()  # the command's own are dead; this is for what it may have handed to others
    whole = not outcome.log_truncated
    tail = await asyncio.to_thread(_log_tail, log_file, settings.output_tail_bytes) if whole else ""
    tail = (tail or tail_of(outcome, settings.output_tail_bytes)).replace(key, MASK)
    return Ended(exit_ending(outcome, tail, timeout), ran)


def exit_ending(outcome: ExecOutcome, tail: str, timeout_s: float) -> Ending:
    """What an outcome of the harness means."""
    if outcome.timed_out:
        return Ending(
            ExitReport(reason="timeout", output_tail=tail, duration_s=outcome.duration_s),
            Failure(
                kind=FailureKind.TIMEOUT,
                message=f"the agent's time of {timeout_s:g} s (timeout_seconds) was over",
                stage=Stage.RUNNING,
            ),
        )
    if outcome.return_code is None:
        return Ending(
            ExitReport(reason="lost", output_tail=tail, duration_s=outcome.duration_s),
            Failure(kind=FailureKind.INFRA, message="the harness was killed", retryable=True, stage=Stage.RUNNING),
        )
    report = ExitReport(reason="exited", exit_code=outcome.return_code, output_tail=tail, duration_s=outcome.duration_s)
    if outcome.return_code == 0:
        return Ending(report)
    message = f"the harness ended with exit code {outcome.return_code}"
    detail = {"exit_code": outcome.return_code, "output_tail": tail, "oom_killed": outcome.oom_killed}
    if outcome.door_lost:
        message += f"; the model proxy was away ({outcome.door_lost} connections lost)"
        failure = Failure(kind=FailureKind.INFRA, message=message, retryable=True, stage=Stage.RUNNING, detail=detail)
        return Ending(report, failure)
    if outcome.oom_killed:
        message += "; the box's memory limit killed a process of it (runtime.memory_mb)"
    elif outcome.return_code in (126, 127):
        message += ": a command of it was not found or cannot be run in the box"
    return Ending(report, Failure(kind=FailureKind.HARNESS, message=message, stage=Stage.RUNNING, detail=detail))


def stop_ending(stopped: Stopped, stage: Stage, tail: str = "", duration_s: float | None = None) -> Ending:
    """The ending of an attempt that was told to stop."""
    if stopped.why is Why.REVOKED:
        return revocation(stopped.reason, stage, output_tail=tail, duration_s=duration_s)
    lost = loss(stopped.reason, stage)
    return Ending(ExitReport(reason="lost", output_tail=tail, duration_s=duration_s), lost.failure)


def _not_started(kind: FailureKind, message: str, retryable: bool) -> Ending:
    return Ending(
        ExitReport(reason="failed"), Failure(kind=kind, message=message, retryable=retryable, stage=Stage.RUNNING)
    )


def _log_tail(path: Path, limit: int) -> str:
    """The last bytes of a log as text. Blocks."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            data = file.read(limit)
    except FileNotFoundError:
        return ""
    return data.decode("utf-8", "replace")
