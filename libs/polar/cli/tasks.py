"""`polar submit` and `polar cancel`: what one asks for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from msgspec.structs import replace

from polar.schemas import Phase, TaskRequest
from polar.schemas.validation import Refused, parse_object

from . import following
from .output import BAD_INPUT, console, fail, fail_problems, json_line, new_client, run_async

SUBMIT_EXAMPLES = """\b
Examples:
  polar submit task.yaml --wait
  jq '.num_samples = 16' task.json | polar submit -

\b
The smallest task file:
  instruction: Name the capital of Japan.
  agent: {harness: shell, custom_shell: {command: "python3 /path/in/the/box/agent.py"}}

Exit codes: 0 accepted (--wait: ended), 1 every session failed, 2 refused.
"""


def submit(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Task file, JSON or YAML; - reads standard input.")],
    wait: Annotated[bool, typer.Option("--wait", help="Follow the task to its end and print its rewards.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON lines: the answer; with --wait, then trajectories and groups.")
    ] = False,
) -> None:
    """Publish a task from a file, and perhaps wait.

    Prints what the scheduler answered, or every field that is wrong and why.

    The same file with the same `task_id` again is the same task: it is not run twice.
    """
    loose = read_task(file)
    try:
        task = parse_object(loose)
    except Refused as error:
        fail_problems(error.problems)
    except (TypeError, ValueError, RecursionError) as error:
        fail(f"{file} holds what JSON cannot: {error}", code=BAD_INPUT)
    if not isinstance(task, TaskRequest):
        fail("a file holds a task; to end one there is `polar cancel`", code=BAD_INPUT)

    async def main() -> None:
        async with new_client() as client:
            named = task if task.task_id is not None else replace(task, task_id=client.new_id())
            accepted = await following.submit(client, named)
            if as_json:
                json_line(accepted)
            if wait:
                await following.wait(client, accepted, as_json=as_json)
            elif not as_json:
                out = console()
                out.print(f"accepted task {accepted.task_id}: {accepted.count} sessions", markup=False, soft_wrap=True)
                out.print(f"follow it: polar status {accepted.task_id} --wait", markup=False, soft_wrap=True)

    run_async(main)


def read_task(file: str) -> dict[str, Any]:
    """The mapping in a JSON or YAML file, or on standard input; ends with exit code 2 where there is none."""
    name = "standard input" if file == "-" else file
    try:
        text = sys.stdin.buffer.read().decode() if file == "-" else Path(file).read_bytes().decode()
    except OSError as error:
        fail(f"cannot read {file}: {error.strerror}", code=BAD_INPUT)
    except UnicodeDecodeError:
        fail(f"{name} is not UTF-8 text", code=BAD_INPUT)
    is_json = text.lstrip().startswith("{") and not file.endswith((".yaml", ".yml"))
    try:
        # JSON by itself, since YAML takes no tabs and its errors would mislead
        loose = json.loads(text) if is_json or file.endswith(".json") else yaml.safe_load(text)
    except (ValueError, RecursionError) as error:
        fail(f"{name} is not JSON: {error}", code=BAD_INPUT)
    except yaml.YAMLError as error:
        fail(f"{name} is neither JSON nor YAML: {' '.join(str(error).split())}", code=BAD_INPUT)
    if not isinstance(loose, dict):
        kind = "nothing" if loose is None else f"a {type(loose).__name__}"
        fail(f"{name} holds no task: expected a mapping, found {kind}", code=BAD_INPUT)
    return loose


def cancel(
    task_id: Annotated[str, typer.Argument(metavar="TASK", help="The task's id.")],
    session: Annotated[str | None, typer.Option(metavar="ID", help="Only this session of the task.")] = None,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Kept in the outcome of each session.")
    ] = "cancelled by request",
) -> None:
    """Cancel a task's sessions, or one of them.

    They end as cancelled, without reward; their trajectories still come. A task that is not known
    yet may be cancelled too: the cancel is remembered for a day.
    """

    async def main() -> None:
        out = console()
        async with new_client() as client:
            state = await client.scheduler_state()
            known = state.tasks.get(task_id)
            lease = state.leases.get(task_id)
            if known is None and lease is not None:
                fail(
                    f"{task_id} is a session",
                    code=BAD_INPUT,
                    hint=f"polar cancel {lease.task_id} --session {task_id}",
                )
            ended = (Phase.CLOSED, Phase.BUILT, Phase.GRADING, Phase.GRADED, Phase.FINISHED)
            going = [one for one in state.leases.values() if one.task_id == task_id and one.phase not in ended]
            if session is not None:
                going = [one for one in going if one.session_id == session]
            if known is not None and not going:
                what = f"task {task_id}" if session is None else f"session {session} of task {task_id}"
                out.print(f"{what} has nothing left to cancel", markup=False, soft_wrap=True)
                return
            await client.cancel(task_id, session, reason)
            if known is None:
                told = f"no task {task_id} is known: the cancel is remembered for a day, in case it still comes"
            else:
                told = f"cancelling {len(going)} of the {known.counts.accepted} sessions of task {task_id}"
            out.print(told, markup=False, soft_wrap=True)

    run_async(main)
