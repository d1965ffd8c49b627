"""The commands that talk to the log: run, submit, cancel, status, trajectories, show."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from msgspec.structs import replace

from polar.bus import BusSettings
from polar.client import PolarClient
from polar.schemas import (
    AgentSpec,
    BuilderSpec,
    CustomShell,
    EvaluatorSpec,
    GroupClosed,
    GroupState,
    Lease,
    RuntimeSpec,
    SamplingSpec,
    TaskAccepted,
    TaskRequest,
    TaskState,
    to_builtins,
)
from polar.schemas.validation import parse_object

from . import live
from .output import BAD_INPUT, console, fail, json_line, run_async, settings_or_fail
from .show import show as show_trajectory
from .tokens import NoTokenizer, load_tokenizer
from .upload import CannotUpload, argument_files, folder_files, prepare_actions

WORKSPACE = "/polar/session/workspace"

Json = Annotated[bool, typer.Option("--json", help="JSON lines instead of tables.")]


def _client() -> PolarClient:
    return PolarClient(settings_or_fail(lambda: BusSettings()))


def run(
    command: Annotated[list[str], typer.Argument(help="The agent: any program that reads OPENAI_BASE_URL.")],
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Sessions, which form one group.")] = 8,
    check: Annotated[
        str | None,
        typer.Option(help="Run in each box afterwards: its exit code, or JSON it prints, is the reward."),
    ] = None,
    instruction: Annotated[str | None, typer.Option(help="Text for the agent, in $POLAR_INSTRUCTION.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name that the agent sees.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each agent.")] = 600.0,
    upload: Annotated[list[Path], typer.Option(help="File or folder to lay into the workspace; repeatable.")] = [],  # noqa: B006
    env: Annotated[list[str], typer.Option(help="NAME=VALUE for the agent; repeatable.")] = [],  # noqa: B006
    builder: Annotated[
        str, typer.Option(help="How calls become traces: prefix_merging or per_request.")
    ] = "prefix_merging",
    temperature: Annotated[float, typer.Option(help="Sampling temperature of the policy.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens per call.")] = None,
    seed_calls: Annotated[bool, typer.Option(help="A seed per call, from session and call number.")] = False,
    artifact: Annotated[list[str], typer.Option(help="Pattern below the workspace to keep; repeatable.")] = [],  # noqa: B006
    task_id: Annotated[str | None, typer.Option(help="Id of the task; made where absent.")] = None,
    as_json: Json = False,
) -> None:
    """Run an agent program as a group of sessions, with no task file.

    The command's own files are sent along. Example:
    polar run --samples 8 --check 'grep -q Tokyo answer.txt' -- python my_agent.py
    """
    variables: dict[str, str] = {}
    for one in env:
        name, found, value = one.partition("=")
        if not found or not name:
            fail(f"--env {one!r} is not NAME=VALUE", code=BAD_INPUT)
        variables[name] = value
    words, files = argument_files(command)

    async def main() -> None:
        async with _client() as client:
            try:
                for path in upload:
                    files.update(folder_files(path))
                prepare = await prepare_actions(client, WORKSPACE, files)
            except CannotUpload as error:
                fail(str(error), code=BAD_INPUT)
            evaluator = (
                EvaluatorSpec() if check is None else EvaluatorSpec(strategy="command", config={"command": check})
            )
            task = TaskRequest(
                task_id=task_id,
                instruction=instruction or shlex.join(command),
                num_samples=samples,
                timeout_seconds=timeout,
                agent=AgentSpec(
                    harness="shell",
                    model_name=model,
                    custom_shell=CustomShell(command=shlex.join(words), env=variables),
                ),
                runtime=RuntimeSpec(prepare=prepare),
                builder=BuilderSpec(strategy=builder),
                evaluator=evaluator,
                sampling=SamplingSpec(temperature=temperature, max_tokens=max_tokens, seed_calls=seed_calls),
                artifacts=artifact,
            )
            await _submit_and_wait(client, task, as_json)

    run_async(main)


async def _submit_and_wait(client: PolarClient, task: TaskRequest, as_json: bool) -> None:
    accepted = await client.submit(task)
    out = console()
    _warn(accepted)
    if as_json:
        async for _ in client.stages(accepted.task_id, since_ms=accepted.at_ms - 60_000):
            pass
    else:
        await live.follow(client, accepted, out)
    trajectories, groups = await live.finished(client, accepted)
    if as_json:
        for one in [*trajectories, *groups]:
            json_line(one)
    else:
        live.report(out, trajectories)
        live.failures(out, trajectories)
        if trajectories:
            best = max(trajectories, key=lambda one: one.reward if one.reward is not None else float("-inf"))
            out.print(f"see one token by token: polar show {best.session_id}", soft_wrap=True)
    if all(one.outcome.failure is not None for one in trajectories):
        raise typer.Exit(1)


def _warn(accepted: TaskAccepted) -> None:
    from .output import complain

    for notice in accepted.warnings:
        complain().print(f"[yellow]warning:[/] {notice.field}: {notice.message}", soft_wrap=True)


def submit(
    file: Annotated[str, typer.Argument(help="Task file, JSON or YAML; - reads standard input.")],
    wait: Annotated[bool, typer.Option("--wait", help="Follow the task to its end and print the rewards.")] = False,
    as_json: Json = False,
) -> None:
    """Publish a task to the log."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        loose: Any = json.loads(text) if file.endswith(".json") else yaml.safe_load(text)
    except OSError as error:
        fail(f"cannot read {file}: {error.strerror}", code=BAD_INPUT)
    except (ValueError, yaml.YAMLError) as error:
        fail(f"{file} is neither JSON nor YAML: {error}", code=BAD_INPUT)
    if not isinstance(loose, dict):
        fail(f"{file} holds no task: expected a mapping, got {type(loose).__name__}", code=BAD_INPUT)

    async def main() -> None:
        task = parse_object(loose)
        if not isinstance(task, TaskRequest):
            fail("a file holds a task; cancel with `polar cancel`", code=BAD_INPUT)
        async with _client() as client:
            if task.task_id is None:
                task = replace(task, task_id=client.new_id())
            if wait:
                await _submit_and_wait(client, task, as_json)
                return
            accepted = await client.submit(task)
            _warn(accepted)
            if as_json:
                json_line(accepted)
            else:
                console().print(f"accepted task {accepted.task_id}: {accepted.count} sessions", soft_wrap=True)

    run_async(main)


def cancel(
    task_id: Annotated[str, typer.Argument(help="The task.")],
    session: Annotated[str | None, typer.Option(help="Only this session.")] = None,
    reason: Annotated[str, typer.Option(help="Kept in the outcome.")] = "cancelled by request",
) -> None:
    """End a task's sessions, or one of them, as cancelled."""

    async def main() -> None:
        async with _client() as client:
            await client.cancel(task_id, session, reason)
            console().print(f"cancel of {session or task_id} is in the log")

    run_async(main)


def status(
    task_id: Annotated[str | None, typer.Argument(help="One task; all where absent.")] = None, as_json: Json = False
) -> None:
    """Tasks, sessions in flight and nodes, as the scheduler's state in the log has them."""

    async def main() -> None:
        async with _client() as client:
            tasks: dict[str, TaskState] = {}
            leases: dict[str, Lease] = {}
            groups: dict[str, GroupState] = {}
            reader = await client.bus.reader(["leases"])
            try:
                async for record in reader.to_end():
                    key = record.key or ""
                    table: dict[str, Any] = (
                        tasks if key.startswith("t/") else groups if key.startswith("g/") else leases
                    )
                    if record.value is None:
                        table.pop(key, None)
                    elif isinstance(record.value, TaskState | GroupState | Lease):
                        table[key] = record.value
            finally:
                await reader.close()
            shown = [one for one in tasks.values() if task_id is None or one.task_id == task_id]
            if task_id is not None and not shown:
                fail(f"no task {task_id} is known", hint="`polar status` lists those that are")
            mine = [one for one in leases.values() if task_id is None or one.task_id == task_id]
            nodes = await client.nodes()
            if as_json:
                json_line({"tasks": shown, "sessions": mine, "nodes": nodes})
                return
            _print_status(shown, mine, [to_builtins(node) for node in nodes], detail=task_id is not None)

    run_async(main)


def _print_status(tasks: list[TaskState], leases: list[Lease], nodes: list[dict[str, Any]], *, detail: bool) -> None:
    from collections import Counter

    from rich.table import Table

    out = console()
    table = Table(title="tasks", title_justify="left")
    for name in ("task", "sessions", "finished", "completed", "timeout", "error", "cancelled", "mean reward"):
        table.add_column(name, justify="left" if name == "task" else "right", no_wrap=name == "task")
    for task in sorted(tasks, key=lambda one: one.accepted_at_ms):
        counts = task.counts
        mean = f"{counts.reward_sum / counts.rewarded:.2f}" if counts.rewarded else "–"
        numbers = (counts.accepted, counts.finished, counts.completed, counts.timeout, counts.error, counts.cancelled)
        table.add_row(task.task_id, *map(str, numbers), mean)
    out.print(table)
    live_leases = [one for one in leases if one.phase != "finished"]
    if detail:
        for lease in sorted(live_leases, key=lambda one: one.sample):
            place = f"  {lease.node}" if lease.node else ""
            out.print(f"  sample {lease.sample}  {lease.session_id}  attempt {lease.attempt}  {lease.phase}{place}")
    phases = Counter(str(one.phase) for one in live_leases)
    out.print("in flight: " + (", ".join(f"{count} {phase}" for phase, count in sorted(phases.items())) or "nothing"))
    out.print(f"nodes alive: {', '.join(sorted(node['node_id'] for node in nodes)) or 'none'}")


def trajectories(
    task: Annotated[list[str], typer.Option(help="Only this task; repeatable.")] = [],  # noqa: B006
    group: Annotated[list[str], typer.Option(help="Only this group; repeatable.")] = [],  # noqa: B006
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Whole trajectories as JSON lines.")] = False,
) -> None:
    """Read `polar.trajectories`: each finished session once, and each closed group."""

    async def main() -> None:
        out = console()
        async with _client() as client:
            async for event in client.trajectories(task_ids=task or None, group_ids=group or None, follow=follow):
                if as_json:
                    json_line(event)
                elif isinstance(event, GroupClosed):
                    counts = f"{len(event.selection)} of {event.size} selected"
                    out.print(f"group {event.group_id} closed ({event.reason}): {counts}", markup=False, soft_wrap=True)
                else:
                    reward = "no reward" if event.reward is None else f"reward {event.reward:g}"
                    kind = f" ({event.outcome.failure.kind})" if event.outcome.failure else ""
                    counts = f"{len(event.traces)} traces, {event.captured} calls"
                    line = f"{event.session_id} {event.status}{kind} {reward}, {counts}"
                    out.print(line, markup=False, soft_wrap=True)

    run_async(main)


def show(
    session: Annotated[str, typer.Argument(help="Session id, as `polar run` and `polar trajectories` print it.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(envvar="POLAR_TOKENIZER", help="The model's tokenizer.json, or the folder that holds it."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most tokens per trace, from the end.")] = None,
    numbers: Annotated[bool, typer.Option("--numbers", help="Each trained token's probability beside it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The trajectory as JSON.")] = False,
) -> None:
    """A session's traces: masked and trainable tokens told apart, probabilities, re-tokenization."""
    try:
        words = load_tokenizer(tokenizer) if tokenizer else None
    except NoTokenizer as error:
        fail(str(error), code=BAD_INPUT)

    async def main() -> None:
        async with _client() as client:
            found = await client.trajectory(session)
            if found is None:
                fail(f"no finished session {session} is in the log", hint="`polar trajectories` lists those that are")
            if as_json:
                json_line(found)
            else:
                show_trajectory(console(), found, words, limit=limit, numbers=numbers)

    run_async(main)
