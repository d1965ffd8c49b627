"""`polar trajectories` and `polar show`: what came of it."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from polar.bus.reader import Start
from polar.client import PolarClient
from polar.client.render import render_trajectory
from polar.schemas import GroupClosed, Trajectory

from .output import BAD_INPUT, console, fail, json_line, new_client, run_async
from .report import trained_tokens
from .show import show_named
from .tokens import NoTokenizer, load_tokenizer, pieces

TRAJECTORIES_EXAMPLES = """\b
Examples:
  polar trajectories --since 1h
  polar trajectories --task 01a1fe23-7527-7581-8bb9-b504684bebd4 --json > group.jsonl
  polar trajectories --follow --upstream
"""
SHOW_EXAMPLES = """\b
Examples:
  polar show 0b7c…
  polar show 0b7c… --tokenizer /models/SmolLM2-135M-Instruct
  polar show 0b7c… --trace 0 --limit 0 --numbers | less -R
  polar show 0b7c… --json | jq .traces

Colours: dim was given; green to red was sampled and trains, by its probability (0.9, 0.5, 0.1); magenta was sampled
and does not train; underlined would be other ids if the text were tokenized anew. Without colours (NO_COLOR, a pipe)
what trains stands in ⟦ ⟧, sampled untrained text in ⟨ ⟩, and a re-tokenized token has a ~ before it. FORCE_COLOR=1
keeps colours in a pipe.
"""
SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])\Z")
UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
Upstream = Annotated[
    bool, typer.Option("--upstream", help="JSON lines in the public Polar's shape; closed groups are left out.")
]


def trajectories(
    task: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only of this task; repeatable.")] = None,
    group: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only of this group; repeatable.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Only since then: 30s, 10m, 2h, 7d ago, or a time like 2026-05-01T12:00."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until Ctrl-C.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Whole trajectories and closed groups as JSON lines.")
    ] = False,
    upstream: Upstream = False,
) -> None:
    """List, export or follow finished sessions.

    Each finished session comes once, and each closed group after its sessions.
    """
    if as_json and upstream:
        fail("--json and --upstream are two shapes of the same; choose one", code=BAD_INPUT)

    async def main() -> None:
        out = console()
        async with new_client() as client:
            start: Start = "earliest" if since is None else since_ms(since, client.clock.now_ms())
            events = client.trajectories(
                task_ids=task or None,
                group_ids=group or None,
                start=start,
                follow=follow,
            )
            found = 0
            async with aclosing(events):
                async for event in events:
                    found += 1
                    if as_json:
                        json_line(event)
                    elif not upstream:
                        _line(out, event)
                    elif isinstance(event, Trajectory):
                        json_line(render_trajectory(event))
            if not found and not (as_json or upstream):
                out.print("no trajectories" + (" of these" if task or group or since else " yet"))

    run_async(main)


def since_ms(text: str, now_ms: int) -> int:
    """A time span before now, or a moment (local time where it names no zone), in ms since the epoch.

    Ends with exit code 2 where it is neither.
    """
    span = SPAN.match(text)
    if span is not None:
        return max(0, now_ms - round(float(span[1]) * UNITS[span[2]] * 1000))
    try:
        return max(0, round(datetime.fromisoformat(text).timestamp() * 1000))
    except (ValueError, OverflowError, OSError):
        fail(f"--since {text!r} is neither a span like 10m or 2h nor a time like 2026-05-01T12:00", code=BAD_INPUT)


def _line(out: Console, event: Trajectory | GroupClosed) -> None:
    if isinstance(event, GroupClosed):
        chosen = f"{len(event.selection)} of {event.size} sessions to train on"
        out.print(Text(f"group {event.group_id} closed ({event.reason}): {chosen}", "bold"), soft_wrap=True)
        return
    failure = event.outcome.failure
    ending = str(failure.kind if failure else event.status)
    reward = "no reward" if event.reward is None else f"reward {event.reward:g}"
    line = Text(event.session_id).append("  ").append(f"{ending:<9}", "red" if failure else "green")
    line.append(f"  {reward:<11} {event.captured} calls, {len(event.traces)} traces, {trained_tokens(event)} tokens")
    out.print(line, soft_wrap=True)


def show(
    session: Annotated[
        str, typer.Argument(metavar="SESSION", help="Session id, as `polar run` and `polar trajectories` print it.")
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            envvar="POLAR_TOKENIZER",
            metavar="PATH",
            help="The model's tokenizer.json, or the folder that holds it; by default the engine is asked.",
        ),
    ] = None,
    trace: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only this trace, counted from 0.")] = None,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Most tokens per trace, from the end; 0: all.")] = 2000,
    numbers: Annotated[bool, typer.Option("--numbers", help="Each trained token's probability behind it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole trajectory as JSON.")] = False,
    upstream: Annotated[
        bool, typer.Option("--upstream", help="The trajectory as JSON in the public Polar's shape, with token texts.")
    ] = False,
) -> None:
    """Print a session's traces token by token.

    What was given, what was sampled and trains and how probable it was, and where re-tokenizing would have differed.
    """
    if as_json and upstream:
        fail("--json and --upstream are two shapes of the same; choose one", code=BAD_INPUT)
    try:
        words = load_tokenizer(tokenizer) if tokenizer and not as_json else None
    except NoTokenizer as error:
        fail(str(error), code=BAD_INPUT)

    async def main() -> None:
        async with new_client() as client:
            found = await client.trajectory(session)
            if found is None:
                await _not_found(client, session)
                return
            if trace is not None and trace >= len(found.traces):
                fail(f"session {session} has {len(found.traces)} traces, counted from 0", code=BAD_INPUT)
            if as_json:
                json_line(found)
            elif upstream:
                decode = None if words is None else lambda one: "".join(pieces(words, [one]))
                json_line(render_trajectory(found, logprobs="floats" if words is None else "objects", decode=decode))
            else:
                how = {"only": trace, "limit": limit or None, "numbers": numbers}
                await asyncio.to_thread(show_named, console(), found, words, **how)

    run_async(main)


async def _not_found(client: PolarClient, session: str) -> None:
    state = await client.scheduler_state()
    lease = state.leases.get(session)
    if lease is not None:
        fail(
            f"session {session} has not finished: it is {lease.phase}, attempt {lease.attempt}",
            hint=f"follow it: polar status {lease.task_id} --wait",
        )
    if session in state.tasks:
        fail(f"{session} is a task", code=BAD_INPUT, hint=f"its sessions: polar status {session}")
    fail(f"no finished session {session} is in the log", code=BAD_INPUT, hint="those that are: polar trajectories")
