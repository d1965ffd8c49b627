"""`polar run`: an agent program as a group of sessions, with no task file."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from polar.bus import BusSettings
from polar.schemas import (
    AgentSpec,
    BuilderSpec,
    CustomShell,
    EvaluatorSpec,
    RuntimeSpec,
    SamplingSpec,
    TaskRequest,
)
from polar.schemas.catalog import BUILDERS
from polar.service.settings import CommonSettings

from . import following
from .output import BAD_INPUT, complain, fail, json_line, new_client, run_async, settings_or_fail, warn
from .upload import CannotUpload, argument_files, checked, folders_among, merge, prepare_actions, tree_files

EXAMPLES = """\b
Examples:
  polar run python my_agent.py
  polar run -n 16 --check 'grep -qi tokyo answer.txt' python my_agent.py Japan
  polar run --upload src --env DEBUG=1 --check 'pytest -q' -- python -m src.agent

Exit codes: 0 ended, 1 every session failed, 2 bad input. Ctrl-C leaves the task running.
"""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="The agent: any program that reads OPENAI_BASE_URL and OPENAI_API_KEY."),
    ],
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Sessions, which form one group.")] = 8,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="SHELL",
            help="Run in each box afterwards. Exit code 0 is reward 1, another is 0; a number or "
            '{"reward": …} as JSON on the last line of its output is the reward instead.',
        ),
    ] = None,
    instruction: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="In $POLAR_INSTRUCTION and $POLAR_INSTRUCTION_FILE. Default: the command."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model name that the agent sees. Default: the gateway's.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time for each agent.")] = 600.0,
    upload: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="File or folder to send along besides the command's own files; repeatable."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="Variable for the agent; without a value, yours. Repeatable."),
    ] = None,
    builder: Annotated[
        str, typer.Option(metavar="NAME", help=f"How calls become traces: {', '.join(BUILDERS.names())}.")
    ] = "prefix_merging",
    temperature: Annotated[float, typer.Option(help="Of the policy; the agent's own wish is overridden.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help="Most tokens that one call may sample.")] = None,
    seed_calls: Annotated[
        bool, typer.Option("--seed-calls", help="Seed each call by session and call number, to sample the same again.")
    ] = False,
    artifact: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Files of the workspace to keep, e.g. '*.patch'; repeatable."),
    ] = None,
    task_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Id of the task. The same one again follows the task it named.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Trajectories and the closed group as JSON lines, at the end.")
    ] = False,
) -> None:
    """Run an agent program as a group of sessions.

    It needs no task file. Each session runs COMMAND in a sandbox of its own, whose model is Polar's proxy. Files that
    the command names are sent along and keep their path relative to the current folder; files from elsewhere lie in
    the workspace itself. Prints the stages as they pass, and at the end rewards and advantages.
    """
    try:
        variables = dict(variable(one) for one in env or [])
        words, files = argument_files(command)
        folders = folders_among(command)
        private = [settings_or_fail(CommonSettings).state_dir]
        for path in upload or []:
            found, skipped = tree_files(path, private=private)
            merge(files, found)
            for line in skipped:
                warn(f"not sent: {line}")
        for text in filter(None, (instruction, check, model, task_id, *(artifact or []))):
            checked(text, "an option")
    except CannotUpload as error:
        fail(str(error), code=BAD_INPUT)
    for folder in folders:
        if not any(Path(folder) in (path, *path.parents) for path in upload or []):
            warn(f"{folder} is a folder, which is not sent along by itself: --upload {shlex.quote(folder)}")
    settings_or_fail(BusSettings)

    async def main() -> None:
        async with new_client() as client:
            try:
                prepare = await prepare_actions(client, files)
            except CannotUpload as error:
                fail(str(error), code=BAD_INPUT)
            if files and not as_json:
                complain().print(f"sending {told(list(files))}", style="dim", markup=False, soft_wrap=True)
            task = TaskRequest(
                task_id=task_id or client.new_id(),
                instruction=shlex.join(command) if instruction is None else instruction,
                num_samples=samples,
                timeout_seconds=timeout,
                agent=AgentSpec(
                    harness="shell",
                    model_name=model,
                    custom_shell=CustomShell(command=shlex.join(words), env=variables),
                ),
                runtime=RuntimeSpec(prepare=prepare),
                builder=BuilderSpec(strategy=builder),
                evaluator=(
                    EvaluatorSpec() if check is None else EvaluatorSpec(strategy="command", config={"command": check})
                ),
                sampling=SamplingSpec(temperature=temperature, max_tokens=max_tokens, seed_calls=seed_calls),
                artifacts=artifact or [],
            )
            accepted = await following.submit(client, task)
            if as_json:
                json_line(accepted)
            await following.wait(client, accepted, as_json=as_json)

    run_async(main)


def variable(text: str) -> tuple[str, str]:
    """`NAME=VALUE`, or `NAME` with the value it has here; ends with exit code 2 where it is neither."""
    name, found, value = text.partition("=")
    if not VARIABLE.match(name):
        fail(f"--env {text!r} is neither NAME=VALUE nor NAME", code=BAD_INPUT)
    if not found:
        if name not in os.environ:
            fail(f"--env {name}: there is no such variable here; give a value: --env {name}=…", code=BAD_INPUT)
        value = os.environ[name]
    return name, checked(value, f"the value of {name}")


def told(names: list[str]) -> str:
    """Files for people: all names, or the first ones."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{', '.join(names[:3])} and {len(names) - 3} more files"
