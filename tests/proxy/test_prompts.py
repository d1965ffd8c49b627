"""Delta prompts through a real proxy and a real log.

Whatever a harness and the processes do, prompts come back whole and the trajectory is the one that whole prompts give.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from polar.builder import Entry, rebuild
from polar.bus import Bus, BusSettings, Out, Record
from polar.devmodel import Match, Reply, Rule, Script, ScriptedEngine
from polar.schemas import (
    Budgets,
    BuilderSpec,
    CompletionCaptured,
    ControlState,
    EvaluatorSpec,
    Outcome,
    Prompt,
    RecordRef,
    SessionClosed,
    SessionFinal,
    SessionOpened,
    Status,
    encode,
)
from polar.schemas.prompts import MAX_CHAIN, Prompts
from tests.proxy.harness import SECRET, Door

Start = Callable[..., Any]
MODES = ["live", "synthetic"]
SCRIPT = Path(__file__).parent / "run_proxy.py"
OPENING = {"role": "user", "content": "What stands in the files of this repository? " * 8}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "description": "Reads a file. " * 10}}]


def talking() -> Script:
    return Script([Rule(replies=[Reply(text="I said number $turn, after: $last_user", template=True)])])


async def opened(bus: Bus, session: str) -> None:
    """The scheduler opens the session."""
    event = SessionOpened(
        session_id=session,
        task_id="t1",
        group_id="g1",
        sample=2,
        num_samples=3,
        source=RecordRef(topic="tasks", partition=0, offset=0),
        harness="shell",
        builder=BuilderSpec(),
        evaluator=EvaluatorSpec(),
        budgets=Budgets(queue_ttl=1, init_timeout=1, timeout_seconds=1, evaluation_timeout=1),
        at_ms=0,
    )
    await bus.send(Out("completions", session, event))


async def closed(bus: Bus, session: str, attempt: int = 1) -> list[Record]:
    """The scheduler closes the session; all that stands on the log of it."""
    outcome = Outcome(status=Status.COMPLETED)
    ending = SessionClosed(session_id=session, attempt=attempt, outcome=outcome, at_ms=0)
    await bus.send(Out("completions", session, ending))
    await bus.send(Out("completions", session, SessionFinal(session_id=session, attempt=attempt, at_ms=0)))
    return await so_far(bus, session)


async def so_far(bus: Bus, session: str) -> list[Record]:
    """What stands on the log of a session."""
    reader = await bus.reader(["completions"])
    try:
        return [record async for record in reader.to_end() if record.key == session]
    finally:
        await reader.close()


def captures(records: list[Record]) -> list[CompletionCaptured]:
    return [one.value for one in records if isinstance(one.value, CompletionCaptured)]


def check(records: list[Record], *engines: ScriptedEngine) -> list[CompletionCaptured]:
    """Prompts come back as the engines had them, and the trajectory is that of whole prompts."""
    truth = {call.id: call for engine in engines for call in engine.calls}
    by_attempt: dict[int, Prompts] = {}
    offsets = {one.value.completion_id: one.offset for one in records if isinstance(one.value, CompletionCaptured)}
    whole: dict[str, Prompt] = {}
    for one in captures(records):
        for base in [] if one.prompt.base is None else [one.prompt.base, *one.prompt.more]:
            assert offsets[base.completion_id] == base.offset < offsets[one.completion_id]
        prompt = whole[one.completion_id] = by_attempt.setdefault(one.attempt, Prompts()).take(one)
        assert [*prompt.ids] == truth[one.completion_id].prompt_ids
        assert prompt.messages == truth[one.completion_id].body["messages"]
        assert prompt.tools == truth[one.completion_id].body.get("tools")
    for strategy in ("prefix_merging", "per_request"):
        entries = [Entry(one.ref, one.value) for one in records if one.value is not None]
        built = rebuild(entries, BuilderSpec(strategy=strategy))
        plain = [
            Entry(ref, replace(event, prompt=whole[event.completion_id]))
            if isinstance(event, CompletionCaptured)
            else Entry(ref, event)
            for ref, event in entries
        ]
        assert built.error is None
        assert encode(built) == encode(rebuild(plain, BuilderSpec(strategy=strategy)))
        own = [one for one in captures(records) if one.attempt == built.attempt]
        assert built.captured == len(own)
        assert "base_expired" not in {one.reason for one in built.set_aside}
    return captures(records)


async def say(client: openai.AsyncOpenAI, messages: list[Any], *, stream: bool = False, **more: Any) -> list[Any]:
    """One call; the history with its reply and a next question."""
    answer = await client.chat.completions.create(model="m", messages=messages, stream=stream, **more)
    if stream:
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])
    else:
        text = answer.choices[0].message.content or ""
    question = f"And what about file {len(messages)}? It is the one with the long name and the many lines in it."
    return [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": question}]


@pytest.mark.parametrize("mode", MODES)
async def test_a_conversation_is_written_once(mode: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(talking())
    door: Door = await door_to(engine, stream_mode=mode)
    await opened(door.scheduler, "s1")
    messages: list[Any] = [OPENING]
    async with door.client() as client:
        for _ in range(6):
            messages = await say(client, messages, stream=True, tools=TOOLS)
        await door.settled()
    found = check(await closed(door.scheduler, "s1"), engine)
    assert [one.prompt.base is None for one in found] == [True, *[False] * 5]
    assert [len(one.prompt.messages) for one in found[1:]] == [1] * 5
    assert [one.prompt.tools is None for one in found[1:]] == [True] * 5
    value = door.service.registry.get_sample_value
    assert value("polar_proxy_prompts_total", {"form": "delta"}) == 5
    saved = value("polar_proxy_prompt_bytes_saved_total")
    assert saved is not None
    assert saved > 10_000


async def test_it_can_be_turned_off(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(talking())
    door: Door = await door_to(engine, delta_prompts=False)
    await opened(door.scheduler, "s1")
    messages: list[Any] = [OPENING]
    async with door.client() as client:
        for _ in range(3):
            messages = await say(client, messages)
        await door.settled()
    assert all(one.prompt.base is None for one in check(await closed(door.scheduler, "s1"), engine))


async def test_a_call_after_the_longest_chain_is_still_written_once(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(talking())
    door: Door = await door_to(engine)
    await opened(door.scheduler, "s1")
    messages: list[Any] = [OPENING]
    async with door.client() as client:
        for _ in range(MAX_CHAIN + 3):
            messages = await say(client, messages)
        await door.settled()
    found = check(await closed(door.scheduler, "s1"), engine)
    assert len(found) == MAX_CHAIN + 3
    assert [bool(one.prompt.more) for one in found[MAX_CHAIN:]] == [False, True, False]
    assert max(len(one.prompt.messages) for one in found) == 1


async def test_retries_twins_forks_side_calls_and_compactions_all_come_back(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(talking())
    door: Door = await door_to(engine)
    await opened(door.scheduler, "s1")
    async with door.client() as client:
        first = await say(client, [OPENING], tools=TOOLS)
        await say(client, [OPENING], tools=TOOLS)  # a retry of the same prompt
        second = await say(client, first, tools=TOOLS, n=3)  # several choices
        third, *_ = await asyncio.gather(*(say(client, second, tools=TOOLS) for _ in range(4)))  # at a time
        await say(client, [*first[:2], {"role": "user", "content": "Let us go back. " * 9}], tools=TOOLS)  # a fork
        await say(client, [{"role": "user", "content": "Find a title for: " + OPENING["content"]}])  # beside
        summary = {"role": "user", "content": "So far: all is well. " * 20}
        fourth = await say(client, [OPENING, summary], tools=TOOLS)  # a compaction
        rewritten = [{**one, "content": one["content"].upper()} for one in fourth]
        await say(client, rewritten, tools=TOOLS)
        await say(client, third, tools=[{**TOOLS[0], "type": "function"}, *TOOLS])  # other tools
        await say(client, third, tools=TOOLS)
        await door.settled()
    found = check(await closed(door.scheduler, "s1"), engine)
    assert len(found) == 13
    assert sum(one.prompt.base is None for one in found) < 6


async def test_a_reply_that_was_cut_off_is_a_base_too(engine_of: Start, door_to: Start) -> None:
    script = Script(
        [
            Rule(match=Match(turn=1), replies=[Reply(text="This is a long story. " * 40, disconnect_after=60)]),
            Rule(replies=[Reply(text="Yes.")]),
        ]
    )
    engine = await engine_of(script)
    door: Door = await door_to(engine, stream_mode="live")
    await opened(door.scheduler, "s1")
    async with door.client() as client:
        with pytest.raises((openai.APIError, openai.APIConnectionError)):
            await say(client, [OPENING], stream=True)
        await door.settled()
        cut = captures(await so_far(door.scheduler, "s1"))[0]
        assert not cut.complete
        await say(client, [OPENING, cut.choices[0].message, {"role": "user", "content": "Go on. " * 9}])
        await door.settled()
    found = check(await closed(door.scheduler, "s1"), engine)
    assert found[1].prompt.base is not None
    assert found[1].prompt.base.completion_id == cut.completion_id


async def test_another_attempt_begins_with_a_whole_prompt_and_a_fenced_one_is_freed(
    engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(talking())
    door: Door = await door_to(engine)
    await opened(door.scheduler, "s1")
    messages: list[Any] = [OPENING]
    async with door.client() as client:
        for _ in range(2):
            messages = await say(client, messages)
    assert door.service.histories is not None
    assert len(door.service.histories) == 1
    await door.control("s1", ControlState.FENCED, 1)
    assert len(door.service.histories) == 0
    messages = [OPENING]
    async with door.client(attempt=2) as client:
        for _ in range(2):
            messages = await say(client, messages)
        await door.settled()
    found = check(await closed(door.scheduler, "s1", attempt=2), engine)
    assert [(one.attempt, one.prompt.base is None) for one in found] == [(1, True), (1, False), (2, True), (2, False)]
    await door.control("s1", ControlState.CLOSED, 2)
    assert len(door.service.histories) == 0


async def test_a_session_that_was_forgotten_goes_on_with_a_whole_prompt(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(talking())
    door: Door = await door_to(engine, history_sessions=1)
    one: list[Any] = [OPENING]
    other: list[Any] = [OPENING]
    for session in ("one", "other"):
        await opened(door.scheduler, session)
    async with door.client("one") as first, door.client("other") as second:
        for _ in range(3):
            one = await say(first, one)
            one = await say(first, one)
            other = await say(second, other)
        await door.settled()
    found = check(await closed(door.scheduler, "one"), engine)
    assert [each.prompt.base is None for each in found] == [True, False] * 3
    assert all(each.prompt.base is None for each in check(await closed(door.scheduler, "other"), engine))


async def test_two_replicas_that_take_turns_each_know_their_own_calls(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(talking())
    doors: list[Door] = [await door_to(engine), await door_to(engine)]
    await opened(doors[0].scheduler, "s1")
    messages: list[Any] = [OPENING]
    for turn in range(6):
        async with doors[turn % 2].client() as client:
            messages = await say(client, messages)
            await doors[turn % 2].settled()
    found = check(await closed(doors[0].scheduler, "s1"), engine)
    assert [one.prompt.base is None for one in found] == [True, True, *[False] * 4]
    before = [one.completion_id for one in found]
    assert [one.prompt.base.completion_id for one in found[2:] if one.prompt.base is not None] == before[:4]
    assert [one.call for one in found] == list(range(6)), "no call number, and so no seed, comes twice"


@asynccontextmanager
async def proxy_process(settings: BusSettings, engine: ScriptedEngine) -> AsyncIterator[tuple[Any, str]]:
    """A proxy in a process of its own, and its address; killed at the end."""
    env = {
        **os.environ,
        "POLAR_KAFKA_BOOTSTRAP": settings.bootstrap,
        "POLAR_KAFKA_TOPIC_PREFIX": settings.topic_prefix,
        "POLAR_KAFKA_PARTITIONS": str(settings.partitions),
        "POLAR_KAFKA_TASK_PARTITIONS": str(settings.task_partitions),
        "POLAR_KAFKA_NODE_PARTITIONS": str(settings.node_partitions),
        "POLAR_KAFKA_BLOB_URL": settings.blob_url,
        "POLAR_PROXY_PORT": "0",
        "POLAR_PROXY_ENGINE_URLS": engine.base_url,
        "POLAR_PROXY_LOGPROBS_MODE": "processed_logprobs",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), SECRET, env=env, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while not (line := await process.stdout.readline()).strip().isdigit():
                assert line, "the proxy ended before it was ready"
        yield process, f"http://127.0.0.1:{int(line)}/v1"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_proxy_killed_in_mid_session_goes_on_with_a_whole_prompt(
    engine_of: Start, door_to: Start, bus_settings: BusSettings
) -> None:
    engine = await engine_of(
        Script(
            [
                Rule(match=Match(turn=4), times=1, replies=[Reply(text="Never told.", gate="killed")]),
                Rule(replies=[Reply(text="I said number $turn, after: $last_user", template=True)]),
            ]
        )
    )
    door: Door = await door_to(engine)  # for keys and the log; the calls go to the processes
    key = door.key()
    await opened(door.scheduler, "s1")
    messages: list[Any] = [OPENING]
    async with (
        proxy_process(bus_settings, engine) as (process, url),
        openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client,
    ):
        for _ in range(3):
            messages = await say(client, messages)
        hanging = asyncio.create_task(say(client, messages))
        await engine.until(lambda stats: stats.started > 3)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(openai.APIConnectionError):
            await hanging
    engine.open("killed")
    async with (
        proxy_process(bus_settings, engine) as (_, url),
        openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client,
    ):
        for _ in range(3):
            messages = await say(client, messages)
    records = await closed(door.scheduler, "s1")
    assert len([one for one in records if type(one.value).__name__ == "CallStarted"]) == 7
    found = check(records, engine)
    assert [one.prompt.base is None for one in found] == [True, False, False, True, False, False]
    assert [one.call for one in found] == list(range(6)), "the new process goes on counting where the history stands"
