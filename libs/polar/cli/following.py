"""From a task to its end, as `run`, `submit --wait` and `status --wait` have it."""

from __future__ import annotations

import asyncio

import typer
from rich.console import Console
from rich.markup import escape

from polar.client import PolarClient
from polar.schemas import TaskAccepted, TaskRequest, TaskState

from . import live
from .output import complain, console, json_line, warn
from .report import report


async def submit(client: PolarClient, task: TaskRequest) -> TaskAccepted:
    """Publish a task that has an id, and tell the scheduler's warnings."""
    try:
        with complain().status("waiting for the scheduler"):
            accepted = await client.submit(task)
    except asyncio.CancelledError:
        complain().print(f"interrupted; the task may be in the log as {task.task_id}", markup=False, soft_wrap=True)
        raise
    for notice in accepted.warnings:
        warn(f"{notice.field}: {notice.message}")
    return accepted


async def wait(client: PolarClient, task: TaskAccepted | TaskState, *, as_json: bool) -> None:
    """Follow a task to its end and print what came of it.

    Ends with exit code 1 where every session failed. Interrupted, it says how to find the task again.
    """
    out = console()
    try:
        followed = await live.followed(client, task)
        if as_json:
            async for _ in client.stages(followed.task_id, since_ms=followed.since_ms):
                pass
        else:
            out.print(f"task {task.task_id}: {len(followed.sessions)} sessions", markup=False, soft_wrap=True)
            await tell_missing(client, out)
            await live.follow(client, followed, out)
        trajectories, groups = await live.finished(client, followed)
    except asyncio.CancelledError:
        speaker = complain()
        speaker.print(f"the task goes on without this command: {task.task_id}", markup=False, soft_wrap=True)
        speaker.print(f"  follow it:  polar status {task.task_id} --wait", markup=False, soft_wrap=True)
        speaker.print(f"  end it:     polar cancel {task.task_id}", markup=False, soft_wrap=True)
        raise
    if as_json:
        for one in [*trajectories, *groups]:
            json_line(one)
    else:
        report(out, trajectories, groups)
    missing = len(followed.sessions) - len(trajectories)
    if missing:
        warn(f"{missing} trajectories of the ended task are not in the log (any more)")
    if all(one.outcome.failure is not None for one in trajectories):
        raise typer.Exit(1)


async def tell_missing(client: PolarClient, out: Console) -> None:
    """Say what nobody is there for, since the task then waits."""
    nodes = await client.nodes()
    lacking = []
    if not any(node.capacity.init for node in nodes):
        lacking.append("gateway")
    if not any(node.capacity.grade for node in nodes):
        lacking.append("evaluator")
    for name in lacking:
        told = f"no {name} is alive, so sessions wait for one: polar serve {name}"
        out.print(f"[yellow]{escape(told)}[/]", soft_wrap=True)
