"""INIT: from an assignment to a box in which the harness can start.

What fails here is the task's doing where a command or a path of the task fails, and the machine's where the box does
not come up or the time is over; the machine's is worth another attempt.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

from polar.bus import Bus
from polar.runtime import (
    BackendNotAvailable,
    Box,
    BoxSpec,
    ExecOutcome,
    Network,
    PathRefused,
    RuntimeFailure,
    SpecRefused,
    TooLarge,
)
from polar.schemas import Failure, FailureKind, PrepareAction, SessionAssigned, Stage

from .boxes import Boxes, labels
from .environment import instruction_file, preparation, workspace
from .errors import AttemptFailed
from .machine import Row
from .settings import GatewaySettings

TASKS_DOING = (SpecRefused, PathRefused, TooLarge, BackendNotAvailable)
"""Failures of a runtime that come of what the task asks for."""
SHOWN = 500
"""Characters of a task's command in a message."""


def box_spec(row: Row, event: SessionAssigned) -> BoxSpec:
    """The box that a task asks for. Raises SpecRefused: a network that no box has."""
    runtime = event.task.runtime
    network = runtime.network or "proxy-only"
    if network not in get_args(Network):
        raise SpecRefused(f"this gateway has no network {network!r}", hint=f"it has {', '.join(get_args(Network))}")
    return BoxSpec(
        box_id=row.box_id,
        image=runtime.image,
        workdir=runtime.workdir,
        env=runtime.env,
        cpus=runtime.cpus,
        memory_mb=runtime.memory_mb,
        storage_mb=runtime.storage_mb,
        gpus=runtime.gpus,
        network=cast(Network, network),
        labels=labels(row),
        kwargs=runtime.kwargs,
    )


async def initialize(row: Row, event: SessionAssigned, boxes: Boxes, bus: Bus, settings: GatewaySettings) -> Box:
    """Make and prepare the box within the task's `init_timeout`.

    Raises:
        AttemptFailed: with the failure to report; the box, if there is one, is the caller's to destroy.
    """
    progress = _Progress()
    try:
        async with asyncio.timeout(event.task.init_timeout):
            return await _initialize(row, event, boxes, bus, settings, progress)
    except TimeoutError:
        raise failed(
            FailureKind.INFRA,
            f"init_timeout of {event.task.init_timeout:g} s was over while {progress.doing}",
            retryable=True,
        ) from None
    except RuntimeFailure as error:
        kind = FailureKind.TASK if isinstance(error, TASKS_DOING) else FailureKind.INFRA
        raise failed(kind, f"{progress.doing}: {error}", retryable=error.retryable) from error


class _Progress:
    doing = "making the box"


async def _initialize(
    row: Row, event: SessionAssigned, boxes: Boxes, bus: Bus, settings: GatewaySettings, progress: _Progress
) -> Box:
    box = await boxes.create(row, box_spec(row, event))
    progress.doing = "writing the instruction"
    await box.write_file(instruction_file(box.session_dir), (await instruction_of(event, bus)).encode())
    env = preparation(event, box.session_dir)
    for number, action in enumerate(event.task.runtime.prepare):
        progress.doing = f"runtime.prepare[{number}] ({action.type})"
        await _prepare(box, action, env, bus, settings, progress.doing)
    return box


async def instruction_of(event: SessionAssigned, bus: Bus) -> str:
    """The task's instruction; a long one is fetched."""
    instruction = event.task.instruction
    if isinstance(instruction, str):
        return instruction
    return (await bus.blobs.get(instruction)).decode("utf-8", "replace")


async def _prepare(
    box: Box, action: PrepareAction, env: dict[str, str], bus: Bus, settings: GatewaySettings, where: str
) -> None:
    if action.type == "exec":
        outcome = await box.exec(
            action.command or "",
            cwd=_in_box(box, action.cwd) if action.cwd else None,
            env={**env, **action.env},
            output_limit=max(1, settings.output_tail_bytes),
        )
        if not outcome.ok:
            raise _command_failed(outcome, where, action.command or "", settings.output_tail_bytes)
        return
    target = _in_box(box, action.target or "")
    if action.type == "upload_file" and action.content is not None:
        await box.write_file(target, action.content.encode())
    elif action.type == "upload_file" and action.blob is not None:
        await box.write_file(target, await bus.blobs.get(action.blob))
    else:
        source = await asyncio.to_thread(_permitted, action.source or "", settings.upload_roots, where)
        await box.upload(source, target)


def _in_box(box: Box, path: str) -> str:
    """A path of the task: absolute in the box, or relative to the workspace."""
    return posixpath.join(workspace(box.session_dir, box.spec.workdir), path)


def _permitted(source: str, roots: Sequence[Path], where: str) -> Path:
    """The host path that a task names, links resolved, if the operator shares it. Raises AttemptFailed. Blocks."""
    path = Path(source).resolve()
    if not any(path.is_relative_to(root.resolve()) for root in roots):
        raise failed(
            FailureKind.TASK,
            f"{where}: this gateway shares no folder with {source!r}: give the text as `content`, or let the operator "
            "name the folder in POLAR_GATEWAY_UPLOAD_ROOTS",
        )
    if not path.exists():
        raise failed(FailureKind.TASK, f"{where}: there is no {source!r} on the gateway's machine")
    return path


def _command_failed(outcome: ExecOutcome, where: str, command: str, tail_bytes: int) -> AttemptFailed:
    tail = tail_of(outcome, tail_bytes)
    shown = command if len(command) <= SHOWN else f"{command[:SHOWN]}…"
    if outcome.return_code is None:
        return failed(FailureKind.INFRA, f"{where} was killed: {shown}", retryable=True, output_tail=tail)
    return failed(
        FailureKind.TASK,
        f"{where} ended with exit code {outcome.return_code}: {shown}",
        exit_code=outcome.return_code,
        output_tail=tail,
    )


def tail_of(outcome: ExecOutcome, limit: int) -> str:
    """The last `limit` bytes of a command's output, what it said on stderr last."""
    both = outcome.stdout + (b"\n" if outcome.stdout and not outcome.stdout.endswith(b"\n") else b"") + outcome.stderr
    return both[max(0, len(both) - limit) :].decode("utf-8", "replace")


def failed(
    kind: FailureKind,
    message: str,
    *,
    stage: Stage = Stage.INITIALIZING,
    retryable: bool = False,
    exit_code: int | None = None,
    output_tail: str = "",
) -> AttemptFailed:
    """An `AttemptFailed` with a whole report."""
    detail = {"exit_code": exit_code, "output_tail": output_tail or None}
    failure = Failure(
        kind=kind,
        message=message,
        retryable=retryable,
        stage=stage,
        detail={name: value for name, value in detail.items() if value is not None} or None,
    )
    return AttemptFailed(failure, exit_code=exit_code, output_tail=output_tail)
