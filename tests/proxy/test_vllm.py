"""What the proxy relies on in vLLM, against a real one (VLLM_BASE_URL, VLLM_MODEL)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import openai
import pytest

from polar.schemas import CompletionCaptured, LogprobsMode, SamplingSpec
from tests.proxy.harness import Door, ask, captured, failed

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("VLLM_BASE_URL" not in os.environ, reason="needs VLLM_BASE_URL"),
    pytest.mark.timeout(300),
]
Start = Callable[..., Any]
USER = [{"role": "user", "content": "What is the capital of Japan?"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SEEDED = SamplingSpec(seed_calls=True, max_tokens=12)


def url() -> str:
    return os.environ["VLLM_BASE_URL"]


async def test_streamed_and_whole_are_captured_with_every_token(door_to: Start) -> None:
    records: dict[str, CompletionCaptured] = {}
    texts: dict[str, str] = {}
    for mode in ("live", "synthetic"):
        door: Door = await door_to(url(), stream_mode=mode, logprobs_mode="auto")
        async with door.client("same", sampling=SEEDED) as client:
            seen: list[Any] = []
            fields: Any = {"messages": USER, "tools": [TOOL], "stream_options": {"include_usage": True}}
            await ask(client, stream=True, seen=seen, **fields)
        records[mode] = [one for one in await door.settled("same") if isinstance(one, CompletionCaptured)][-1]
        texts[mode] = "".join(chunk.choices[0].delta.content or "" for chunk in seen if chunk.choices)
        assert seen[-1].usage.completion_tokens == len(records[mode].choices[0].ids)
    live, synthetic = records["live"], records["synthetic"]
    # the same seed: the same tokens where the engine is alone, so only the shape is compared here
    for record, text in ((live, texts["live"]), (synthetic, texts["synthetic"])):
        choice = record.choices[0]
        assert len(choice.ids) == len(choice.logprobs) == record.usage["completion_tokens"]
        assert len(record.prompt.ids) == record.usage["prompt_tokens"]
        assert choice.finish in ("stop", "length")
        assert text == (choice.message["content"] or "")
        assert all(value <= 0 for value in choice.logprobs)
        assert record.engine.logprobs_mode is LogprobsMode.PROCESSED
        assert record.engine.build is not None
        assert record.sampling.seed is not None
        assert choice.spans, "the engine tells its weights' version"
    assert live.prompt == synthetic.prompt


async def test_several_choices_and_logprobs(door_to: Start) -> None:
    door: Door = await door_to(url())
    async with door.client(sampling=SamplingSpec(max_tokens=4)) as client:
        reply = await client.chat.completions.create(model="gpt-9", messages=USER, n=2, logprobs=True, top_logprobs=2)
    record = captured(await door.settled())
    for told, choice in zip(reply.choices, record.choices, strict=True):
        assert told.logprobs is not None
        assert told.logprobs.content is not None
        assert len(told.logprobs.content) == len(choice.ids)
        assert {len(one.top_logprobs) for one in told.logprobs.content} == {2}


async def test_a_prompt_that_is_too_long(door_to: Start) -> None:
    door: Door = await door_to(url())
    async with door.client() as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await ask(client, stream=False, messages=[{"role": "user", "content": "word " * 9000}])
    assert raised.value.code == "context_length_exceeded"
    assert failed(await door.settled()).http_status == 400


async def test_a_client_that_leaves(door_to: Start) -> None:
    door: Door = await door_to(url())
    async with door.client(sampling=SamplingSpec(max_tokens=400)) as client:
        stream = await client.chat.completions.create(model="m", messages=USER, stream=True)
        while not (await anext(stream)).choices[0].delta.content:
            pass
        await stream.close()
    record = captured(await door.settled())
    assert not record.complete
    assert 0 < len(record.choices[0].ids) < 400
