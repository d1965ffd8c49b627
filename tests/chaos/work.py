"""The work that chaos falls into: tasks whose agents call the model, and how their trajectories are collected."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection
from contextlib import aclosing

from polar.bus import BusError
from polar.client import PolarClient
from polar.schemas import (
    AgentSpec,
    Cursor,
    CustomShell,
    EvaluatorSpec,
    GroupClosed,
    PrepareAction,
    RuntimeSpec,
    TaskRequest,
    Trajectory,
)

from .faults import moving
from .installation import Installation

TOPICS = ("assignments", "completions", "built", "graded", "stages", "trajectories")
"""Those that a stall shows in."""

AGENT = """import http.client, json, os, time, urllib.error, urllib.request

def ask(messages):
    # as a real harness: what may pass is tried again, a refusal is the end
    body = json.dumps({"model": os.environ.get("POLAR_MODEL", "policy"), "messages": messages}).encode()
    while True:
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
            "content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                raise
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.2)

"""
CONVERSATION = """messages = []
for turn in range({turns}):
    messages.append({{"role": "user", "content": f"turn {{turn}} of {name}"}})
    messages.append({{"role": "assistant", "content": ask(messages)}})
open("answer.txt", "w").write(messages[-1]["content"])
"""


def conversation(turns: int, name: str = "{os.environ['SESSION_ID']}") -> str:
    """An agent that makes `turns` calls in one conversation, each again until it is answered."""
    return AGENT + CONVERSATION.format(turns=turns, name=name)


def task_of(program: str, **fields: object) -> TaskRequest:
    """A task whose agent is this Python program; what it must leave behind is `answer.txt`."""
    settings: dict[str, object] = {
        "task_id": f"chaos-{uuid.uuid4().hex[:8]}",
        "instruction": "do it",
        "timeout_seconds": 300.0,
        "max_attempts": 10,
        "agent": AgentSpec(harness="shell", custom_shell=CustomShell(command="python3 agent.py")),
        "runtime": RuntimeSpec(
            prepare=[PrepareAction(type="upload_file", target="/polar/session/workspace/agent.py", content=program)]
        ),
        "evaluator": EvaluatorSpec(strategy="command", config={"command": "test -s answer.txt"}),
    }
    return TaskRequest(**{**settings, **fields})  # type: ignore[arg-type]


async def ended(client: PolarClient, task_ids: Collection[str], stack: Installation) -> list[Trajectory]:
    """Every trajectory of tasks whose groups are all closed, as a trainer reads them."""
    found: list[Trajectory] = []
    closed: set[str] = set()

    async def read() -> None:
        async with aclosing(client.trajectories(task_ids=task_ids)) as events:
            async for event in events:
                if isinstance(event, GroupClosed):
                    closed.update(event.tasks)
                    if closed >= set(task_ids):
                        return
                else:
                    found.append(event)

    reading = asyncio.create_task(read())
    try:
        await _moving(
            client,
            stack,
            lambda: len(found) + len(closed) + reading.done(),
            lambda _: reading.done(),
            f"waiting for the trajectories of {len(task_ids)} tasks",
        )
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return found


async def settled(client: PolarClient, stack: Installation) -> None:
    """Until the scheduler has nothing left in flight: each session is finished and final."""
    left = len((await client.scheduler_state()).leases)

    async def count() -> None:
        nonlocal left
        while left:
            left = len((await client.scheduler_state()).leases)
            await asyncio.sleep(0.3)

    counting = asyncio.create_task(count())
    try:
        await _moving(client, stack, lambda: left, lambda now: now == 0, "sessions that are not final")
        await counting
    finally:
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)


async def _moving(
    client: PolarClient, stack: Installation, progress: Callable[[], int], done: Callable[[int], bool], what: str
) -> None:
    """`moving`; where it is stuck, the error has a note of what the log says."""
    try:
        await moving(stack, progress, done, what)
    except AssertionError as error:
        try:
            async with asyncio.timeout(60):
                error.add_note(await _stuck(client))
        except (BusError, TimeoutError) as silent:
            error.add_note(f"the log says nothing: {silent!r}")
        raise


async def _stuck(client: PolarClient) -> str:
    """Unfinished sessions, what the nodes hold, and how far each partition is readable and processed."""
    lines = ["--- leases", *map(str, (await client.scheduler_state()).leases.values())]
    lines += ["--- nodes", *map(str, await client.nodes(within_ms=3_600_000)), "--- partitions"]
    cursors: dict[str, int] = {}
    reader = await client.bus.reader(["cursors"])
    async for record in reader.to_end():
        if isinstance(record.value, Cursor):
            cursors[str(record.key)] = record.value.next
    await reader.close()
    committed, written = [await client.bus.reader(TOPICS, committed=flag) for flag in (True, False)]
    ends = await written.ends()
    for (topic, partition), stable in (await committed.ends()).items():
        read = [f"{key} at {at}" for key, at in cursors.items() if key.endswith(f"/{topic}/{partition}")]
        lines.append(f"{topic}/{partition}: {ends[topic, partition]} written, {stable} committed {read}")
    await committed.close()
    await written.close()
    return "\n".join(lines)
