"""What the proxy relies on in vLLM, against a real one (VLLM_BASE_URL, VLLM_MODEL)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import openai
import pytest

from polar.schemas import CompletionCaptured, LogprobsMode, PolicySpan, SamplingSpec
from tests.proxy.engines_harness import upstream_of
from tests.proxy.harness import Door, ask, captured, failed, rest_of
from tests.proxy.test_engines_pauses import trainer
from tests.proxy.test_told import until

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


# weights ----------------------------------------------------------------------------------------------------------
# These stop the engine for everybody for a moment; `weights` lets it go on whatever happens.


async def engine(method: str, path: str, **body: Any) -> Any:
    """The engine's own answer."""
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, url().removesuffix("/v1") + path, json=body or None) as response,
    ):
        response.raise_for_status()
        return await response.json()


@pytest.fixture
async def weights() -> AsyncIterator[str]:
    """The version of the engine's weights, which is put back, and the engine resumed."""
    version = (await engine("GET", "/weight_info"))["weight_version"]
    try:
        yield str(version)
    finally:
        await engine("POST", "/resume")
        await engine("POST", "/update_weight_version", new_version=version)


async def first_tokens(stream: Any) -> None:
    while not (await anext(stream)).choices[0].delta.content:
        pass


@pytest.mark.parametrize("mode", ["live", "synthetic"])
async def test_an_abort_for_new_weights_keeps_what_was_sampled(mode: str, weights: str, door_to: Start) -> None:
    door: Door = await door_to(url(), stream_mode=mode)
    fields: Any = {"model": "m", "messages": USER, "extra_body": {"min_tokens": 1900}}
    async with door.client(sampling=SamplingSpec(max_tokens=2000)) as client:
        call: asyncio.Task[Any]
        if mode == "live":
            stream = await client.chat.completions.create(stream=True, **fields)
            await first_tokens(stream)
            call = asyncio.create_task(rest_of(stream))
        else:
            line = upstream_of(door, url()).line
            call = asyncio.create_task(client.chat.completions.create(**fields))
            await until(lambda: line.sizes == (1, 0))
            # most of them may be others', so the call gets the time of many
            await tokens_flow(await sampled_tokens() + 300)
        status, told = await trainer(door, "/pause", mode="abort")
        assert (status, told["engines"][0]["paused"], told["engines"][0]["calls"]) == (200, "abort", 0)
        with pytest.raises(openai.APIError) as raised:
            await call
        assert raised.value.code == "engine_unavailable"
        record = captured(await door.settled())
        assert (record.complete, record.choices[0].finish) == (False, "abort")
        ids = record.choices[0].ids
        assert 0 < len(ids) == len(record.choices[0].logprobs) < 2000
        assert record.choices[0].spans == [PolicySpan(start=0, end=len(ids), version=weights, exact=True)]

        waiting = asyncio.create_task(ask(client, stream=False, messages=USER, max_tokens=4))
        await until(lambda: upstream_of(door, url()).line.sizes == (0, 1))
        await engine("POST", "/update_weight_version", new_version="polar-test-2")
        status, told = await trainer(door, "/resume")
        assert (status, told["engines"][0]["weight_version"]) == (200, "polar-test-2")
        await waiting
    (span,) = (await door.settled())[-1].choices[0].spans
    assert (span.version, span.exact) == ("polar-test-2", True)


async def sampled_tokens() -> float:
    """By everybody, since the engine started."""
    async with aiohttp.ClientSession() as http, http.get(url().removesuffix("/v1") + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


async def tokens_flow(beyond: float) -> None:
    """Wait until the engine has sampled more than `beyond`."""
    async with asyncio.timeout(60):
        while await sampled_tokens() <= beyond:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.05)


async def test_a_drain_lets_calls_end_and_a_kept_call_goes_on(weights: str, door_to: Start) -> None:
    door: Door = await door_to(url())
    async with door.client(sampling=SamplingSpec(max_tokens=60)) as client:
        for mode in ("drain", "keep"):
            stream = await client.chat.completions.create(model="m", messages=USER, stream=True)
            await first_tokens(stream)
            call = asyncio.create_task(rest_of(stream))
            status, told = await trainer(door, "/pause", mode=mode)
            assert (status, told["engines"][0]["paused"]) == (200, mode)
            await engine("POST", "/update_weight_version", new_version=f"polar-test-{mode}")
            assert (await trainer(door, "/resume"))[0] == 200
            await call
            record = (await door.settled())[-1]
            assert record.complete
            (span,) = record.choices[0].spans
            if mode == "drain":
                assert (span.version, span.exact) == (weights, True)
            elif len(record.choices[0].ids) == 60:
                # a reply that ended by itself may have been whole before the pause
                assert (span.version, span.exact) == ("polar-test-keep", False)


async def test_somebody_elses_pause_is_waited_for(weights: str, door_to: Start) -> None:
    door: Door = await door_to(url(), engine_probe_every=0.1)
    await until(lambda: upstream_of(door, url()).endpoint.engine is not None)
    await engine("POST", "/pause?mode=wait")
    await until(lambda: upstream_of(door, url()).is_paused)
    async with door.client(sampling=SamplingSpec(max_tokens=4)) as client:
        call = asyncio.create_task(ask(client, stream=True, messages=USER))
        await until(lambda: upstream_of(door, url()).line.sizes == (0, 1))
        await engine("POST", "/resume")
        await call
    assert captured(await door.settled()).complete
