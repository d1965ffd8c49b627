"""What the tests of token-in share: whole prompts, what goes on from what, and what the builder makes of it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from polar.builder import Entry, rebuild
from polar.bus import Out
from polar.schemas import (
    Budgets,
    BuilderSpec,
    CompletionCaptured,
    EvaluatorSpec,
    Outcome,
    RecordRef,
    SessionClosed,
    SessionFinal,
    SessionOpened,
    Status,
    Trajectory,
)
from polar.schemas.prompts import Prompts
from tests.proxy.harness import Door


def whole(records: list[Any]) -> list[CompletionCaptured]:
    """The session's calls with their whole prompts, in log order."""
    prompts = Prompts()
    return [replace(one, prompt=prompts.take(one)) for one in records if isinstance(one, CompletionCaptured)]


def goes_on(before: CompletionCaptured, after: CompletionCaptured) -> bool:
    """Whether the prompt of `after` begins with the prompt ids and the sampled ids of `before`."""
    return after.prompt.ids.data.startswith(before.prompt.ids.data + before.choices[0].ids.data)


async def built(door: Door, session: str) -> Trajectory:
    """What the builder makes of a session as it stands on the log, closed."""
    opened = SessionOpened(
        session_id=session,
        task_id="t1",
        group_id="g1",
        sample=0,
        num_samples=1,
        source=RecordRef(topic="tasks", partition=0, offset=0),
        harness="shell",
        builder=BuilderSpec(),
        evaluator=EvaluatorSpec(),
        budgets=Budgets(queue_ttl=1, init_timeout=1, timeout_seconds=1, evaluation_timeout=1),
        at_ms=0,
    )
    at: dict[str, Any] = {"session_id": session, "attempt": 1, "at_ms": 0}
    for event in (SessionClosed(outcome=Outcome(status=Status.COMPLETED), **at), SessionFinal(**at)):
        await door.scheduler.send(Out("completions", session, event))
    reader = await door.bus.reader(["completions"])
    try:
        records = [record async for record in reader.to_end() if record.key == session and record.value is not None]
    finally:
        await reader.close()
    # the scheduler's first word, which nobody said here before the calls
    first = Entry(replace(records[0].ref, offset=records[0].ref.offset - 1), opened)
    return rebuild([first, *(Entry(one.ref, one.value) for one in records if one.value is not None)], BuilderSpec())
