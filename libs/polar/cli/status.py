"""`polar status`: tasks, one task's sessions and groups, nodes and the scheduler, as the log has them."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from polar.client import PolarClient, SchedulerState
from polar.client.dead import count_open
from polar.schemas import GroupState, Lease, NodeHeartbeat, Phase, SessionResult, TaskState, Tick

from . import following
from .output import BAD_INPUT, console, duration, fail, json_line, new_client, plain_table, run_async, visible

EXAMPLES = """\b
Examples:
  polar status
  polar status 01a1fe23-7527-7581-8bb9-b504684bebd4
  polar status 01a1fe23-7527-7581-8bb9-b504684bebd4 --wait
"""


def status(
    task_id: Annotated[
        str | None, typer.Argument(metavar="TASK", help="One task, with its sessions and groups; all where absent.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow TASK to its end and print its rewards.")] = False,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Most tasks listed, the newest.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
) -> None:
    """List tasks and nodes, or one task's sessions."""
    if wait and task_id is None:
        fail("--wait needs a TASK", code=BAD_INPUT)

    async def main() -> None:
        async with new_client() as client:
            state = await client.scheduler_state()
            if task_id is not None and task_id not in state.tasks:
                lease = state.leases.get(task_id)
                fail(
                    f"no task {task_id} is known",
                    code=BAD_INPUT,
                    hint=f"it is a session: polar status {lease.task_id}" if lease else "known ones: polar status",
                )
            if wait and task_id is not None:
                await following.wait(client, state.tasks[task_id], as_json=as_json)
                return
            await _show(client, state, task_id, limit, as_json)

    run_async(main)


async def _show(client: PolarClient, state: SchedulerState, task_id: str | None, limit: int, as_json: bool) -> None:
    mine = task_id is None
    tasks = [one for one in state.tasks.values() if mine or one.task_id == task_id]
    leases = [one for one in state.leases.values() if mine or one.task_id == task_id]
    groups = [one for one in state.groups.values() if mine or task_id in one.tasks]
    nodes, leader = await client.nodes(), await client.leader()
    dead = await count_open(client.bus) if mine else 0
    results: list[SessionResult] = []
    if task_id is not None:
        _, sessions = await client.results()
        results = sorted((one for one in sessions.values() if one.task_id == task_id), key=lambda one: one.sample)
    if as_json:
        found = {"tasks": tasks, "sessions": leases, "groups": groups, "nodes": nodes, "leader": leader}
        json_line({**found, "dead_letters": dead} if task_id is None else {**found, "results": results})
        return
    out, now_ms = console(), client.clock.now_ms()
    _print_tasks(out, tasks, limit, now_ms)
    if task_id is not None:
        _print_sessions(out, leases, results, now_ms)
        _print_groups(out, groups)
    else:
        _print_in_flight(out, leases)
    out.print()
    _print_nodes(out, nodes, leader)
    if dead:
        out.print(f"[red]{dead} dead {'letter' if dead == 1 else 'letters'}[/]: polar dead list --open", soft_wrap=True)


def _print_tasks(out: Console, tasks: list[TaskState], limit: int, now_ms: int) -> None:
    if not tasks:
        out.print("no tasks yet: `polar run` and `polar submit` make some")
        return
    ordered = sorted(tasks, key=lambda one: one.accepted_at_ms)
    if len(ordered) > limit:
        out.print(f"{len(ordered) - limit} older tasks are left out (--limit)", style="dim")
    table = plain_table(
        ("task", "id"),
        ("state", "left"),
        ("done", "right"),
        ("failed", "right"),
        ("reward", "right"),
        ("age", "right"),
    )
    for task in ordered[-limit:]:
        counts = task.counts
        mean = f"{counts.reward_sum / counts.rewarded:.2f}" if counts.rewarded else "–"
        failed = counts.error + counts.cancelled
        table.add_row(
            Text(task.task_id),
            _state(task),
            f"{counts.finished}/{counts.accepted}",
            Text(str(failed) if failed else "–", "red" if failed else ""),
            mean,
            duration((now_ms - task.accepted_at_ms) / 1000),
        )
    out.print(table)


def _state(task: TaskState) -> Text:
    """As the HTTP API has it: a task has failed where no session came to an end that can be read."""
    if task.finished_at_ms is None:
        return Text("cancelling" if task.cancelled else "running", "yellow")
    fine = task.counts.completed or task.counts.timeout
    return Text("completed", "green") if fine else Text("failed", "red")


def _print_sessions(out: Console, leases: list[Lease], results: list[SessionResult], now_ms: int) -> None:
    table = plain_table(("#", "right"), ("session", "id"), ("state", "left"), ("try", "right"), ("", "left"))
    done = {one.session_id for one in results}
    rows: list[tuple[int, str, Text, int, Text]] = []
    for result in results:
        failure = result.outcome.failure or result.error
        note = Text(visible(f"{failure.kind}: {failure.message}"), "red") if failure else Text()
        if result.reward is not None:
            note = Text(f"reward {result.reward:g}  ").append_text(note)
        ending = Text(str(result.status), "red" if failure else "green")
        rows.append((result.sample, result.session_id, ending, result.attempt, note))
    for lease in leases:
        if lease.session_id in done or lease.phase is Phase.FINISHED:
            continue
        note = Text(f"on {lease.node}" if lease.node and lease.phase is not Phase.QUEUED else "")
        if lease.failure is not None:
            note.append_text(Text(visible(f"  {lease.failure.kind}: {lease.failure.message}"), "yellow"))
        if lease.phase is Phase.QUEUED:
            note = Text(f"for {duration((now_ms - lease.queued_at_ms) / 1000)}").append_text(note)
        rows.append((lease.sample, lease.session_id, Text(str(lease.phase)), lease.attempt, note))
    if not rows:
        return
    for sample, session, phase, attempt, note in sorted(rows, key=lambda row: row[0]):
        table.add_row(str(sample), Text(session), phase, str(attempt), note)
    out.print()
    out.print(table)


def _print_groups(out: Console, groups: list[GroupState]) -> None:
    for group in groups:
        told = f"group {group.group_id}: {len(group.members)} of {group.size} have ended"
        told += ", decided" if group.decided_at_ms is not None else ", open"
        if group.quorum is not None:
            told += f", quorum {group.quorum}"
        if len(group.tasks) > 1:
            told += f", of {len(group.tasks)} tasks"
        out.print(told, markup=False, soft_wrap=True)


def _print_in_flight(out: Console, leases: list[Lease]) -> None:
    counts: Counter[Phase] = Counter(one.phase for one in leases if one.phase is not Phase.FINISHED)
    told = ", ".join(f"{counts[phase]} {phase}" for phase in Phase if counts[phase]) or "nothing"
    out.print(f"sessions in flight: {told}", soft_wrap=True)


def _print_nodes(out: Console, nodes: list[NodeHeartbeat], leader: Tick | None) -> None:
    if leader is None:
        out.print("[red]no scheduler is alive[/]: polar serve submit", soft_wrap=True)
    if not nodes:
        out.print("[red]no node is alive[/]: polar serve gateway evaluator", soft_wrap=True)
        return
    table = plain_table(
        ("node", "left"),
        ("init", "right"),
        ("ready", "right"),
        ("run", "right"),
        ("grade", "right"),
        ("offers", "left"),
    )
    for node in nodes:
        held = Counter(one.stage for one in node.held)
        capacity, offers = node.capacity, node.offers
        name = Text(node.node_id if node.half == "all" else f"{node.node_id}/{node.half}")
        if node.draining:
            name.append(" draining", "yellow")
        table.add_row(
            name,
            _slots(held["INITIALIZING"], capacity.init),
            _slots(held["READY"], capacity.ready),
            _slots(held["RUNNING"], capacity.run),
            _slots(held["GRADE"], capacity.grade),
            Text(", ".join((*offers.backends, *offers.harnesses, *offers.evaluators)), "dim"),
        )
    out.print(table)


def _slots(used: int, of: int) -> str:
    return f"{used}/{of}" if of or used else "–"
