"""Token-in mode on a real vLLM (VLLM_BASE_URL, started with --enable-scale-out), at temperature 1."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any, Literal

import openai
import pytest
from msgspec.structs import replace

from polar.schemas import CompletionCaptured, Context, SamplingSpec
from tests.proxy.harness import Door
from tests.proxy.token_in_harness import built, goes_on, whole

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("VLLM_BASE_URL" not in os.environ, reason="needs VLLM_BASE_URL"),
    pytest.mark.timeout(600),
]
Start = Callable[..., Any]
Mode = Literal["rendered", "token_in"]
SESSIONS, TURNS = 20, 6
"""100 pairs of calls."""
QUESTIONS = ("Tell me a story about a fox.", "And then?", "Write a line of Python for it.", "Say it in French.", "Why?")
SAMPLING = SamplingSpec(temperature=1.0, max_tokens=8)


def url() -> str:
    return os.environ["VLLM_BASE_URL"]


async def talk(client: openai.AsyncOpenAI, session: int, turns: int) -> None:
    """A conversation of so many calls, every third streamed."""
    client = client.with_options(max_retries=10, timeout=120)  # others pause this engine for their tests
    messages: list[Any] = [{"role": "user", "content": f"{QUESTIONS[0]} It lives in house {session}."}]
    for turn in range(turns):
        if turn % 3 == 2:
            stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
            text = "".join([one.choices[0].delta.content or "" async for one in stream if one.choices])
        else:
            answer = await client.chat.completions.create(model="m", messages=messages)
            text = answer.choices[0].message.content or ""
        question = QUESTIONS[1 + (session + turn) % (len(QUESTIONS) - 1)]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]


def unbroken(records: list[Any]) -> list[CompletionCaptured]:
    """A session's calls, without those that somebody's pause broke off."""
    return [one for one in whole(records) if one.complete]


async def test_a_hundred_pairs_go_on_from_the_very_tokens(door_to: Start) -> None:
    door: Door = await door_to(url())
    names: dict[Mode, list[str]] = {
        "token_in": [f"exact-{i}" for i in range(SESSIONS)],
        "rendered": [f"rendered-{i}" for i in range(SESSIONS)],
    }
    async with AsyncExitStack() as stack:
        clients = [
            (await stack.enter_async_context(door.client(one, capture=mode, sampling=SAMPLING)), number)
            for mode, sessions in names.items()
            for number, one in enumerate(sessions)
        ]
        await asyncio.gather(*(talk(client, number, TURNS) for client, number in clients))
    await door.settled()
    calls = {mode: [unbroken(await door.records(one)) for one in sessions] for mode, sessions in names.items()}
    found = {
        mode: [goes_on(before, after) for session in sessions for before, after in pairwise(session)]
        for mode, sessions in calls.items()
    }
    broken = {mode: results.count(False) for mode, results in found.items()}
    drifted = [one.drift for session in calls["rendered"] for one in session if one.drift]
    made = Counter((one.capture, one.fallback) for session in calls["token_in"] for one in session)
    ends = Counter(one.choices[0].finish for session in calls["token_in"] for one in session)
    print(
        f"pairs that do not go on from prompt and reply: token_in {broken['token_in']} of {len(found['token_in'])}, "
        f"rendered {broken['rendered']} of {len(found['rendered'])} (drift of those: {sorted(drifted)}); "
        f"token_in calls: {dict(made)}, ended by {dict(ends)}"
    )
    assert len(found["token_in"]) >= 100
    assert broken["token_in"] == 0
    assert broken["rendered"] > 0, "at temperature 1 text and back gives other ids"
    for mode, sessions in calls.items():
        for session in sessions:
            first, *others = session
            assert (first.context_kind, first.drift, first.capture) == ("fresh", None, "rendered")
            for before, one in zip(session, others, strict=False):
                assert one.context_kind == "append"
                assert (one.drift == 0) == goes_on(before, one)
                assert (one.capture, one.fallback) == (mode, None)
                assert len(one.choices[0].ids) == len(one.choices[0].logprobs) > 0
    for name in names["token_in"]:
        trajectory = await built(door, name)
        assert trajectory.error is None
        trace = trajectory.traces[0]
        assert trace.drift == []
        assert {turn.context for turn in trace.turns} == {Context.EXACT}
        if all(one.complete for one in await door.records(name) if isinstance(one, CompletionCaptured)):
            assert len(trajectory.traces) == 1
            assert len(trace.turns) == TURNS


async def test_the_same_seed_samples_the_same_from_tokens_as_from_messages(door_to: Start) -> None:
    door: Door = await door_to(url())
    sampling = SamplingSpec(seed_calls=True, temperature=1.0, max_tokens=8)
    messages: list[Any] = [
        {"role": "user", "content": "What is the capital of Japan?"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "And of France?"},
    ]
    calls = {}
    for mode in ("rendered", "token_in"):
        # one session's name, so one seed; the second one's history is the proxy's own memory of the first
        async with door.client("twin", capture=mode, sampling=sampling) as client:
            first = await client.chat.completions.create(model="m", messages=messages[:1])
            messages[1]["content"] = first.choices[0].message.content
            await client.chat.completions.create(
                model="m", messages=messages, logprobs=True, top_logprobs=2, extra_body={"stop": ["zzz"]}
            )
        calls[mode] = unbroken(await door.settled("twin"))[-1]
    exact, rendered = calls["token_in"], calls["rendered"]
    assert (exact.capture, rendered.capture) == ("token_in", "rendered")
    assert exact.sampling == replace(rendered.sampling, seed=exact.sampling.seed)
    assert exact.engine == rendered.engine
    assert exact.usage.keys() == rendered.usage.keys()
    assert exact.choices[0].spans
    assert exact.choices[0].message.keys() == rendered.choices[0].message.keys()


async def test_what_a_request_asks_besides_is_as_in_a_chat(door_to: Start) -> None:
    door: Door = await door_to(url())
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    asked: dict[str, Any] = {"tools": [tool], "stop": ["e", "a"], "n": 2, "logprobs": True, "top_logprobs": 2}
    messages: list[Any] = [{"role": "user", "content": "Write a line about cats."}]
    async with door.client(capture="token_in", sampling=SAMPLING) as client:
        for _ in range(3):
            reply = await client.chat.completions.create(model="m", messages=messages, **asked)
            for choice in reply.choices:
                assert not {"e", "a"} & set(choice.message.content or "")
                assert choice.logprobs is not None
                assert {len(entry.top_logprobs) for entry in choice.logprobs.content or ()} == {2}
            text = reply.choices[1].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
    calls = unbroken(await door.settled())
    assert [one.capture for one in calls] == ["rendered", "token_in", "token_in"]
    for before, after in pairwise(calls):
        sampled = before.prompt.ids.data + before.choices[1].ids.data
        assert after.prompt.ids.data.startswith(sampled)
        assert after.drift == 0
    for one in calls:
        for choice in one.choices:
            assert choice.stop in ("e", "a", None)
            assert one.usage["completion_tokens"] == sum(len(each.ids) for each in one.choices)
