"""Each dialect against a real vLLM (VLLM_BASE_URL): what is captured and told is the engine's own answer.

The same seed gives the same tokens where the engine is alone, so the same question is put to it once more, by itself.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest
from google.genai.errors import ClientError

from polar.proxy.dialects.arguments import as_input
from polar.schemas import CompletionCaptured, SamplingSpec
from tests.proxy import anthropic_harness, google_harness
from tests.proxy.harness import Door, captured, failed

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("VLLM_BASE_URL" not in os.environ, reason="needs VLLM_BASE_URL"),
    pytest.mark.timeout(300),
    *google_harness.CLEAN,
]
Start = Callable[..., Any]
MODES = ["live", "synthetic", "whole"]
ASKED = "What is the capital of Japan?"
SEEDED = SamplingSpec(seed_calls=True, max_tokens=60)
TRIES = 6
"""Others may ask a shared engine at the same moment, which changes what it samples, and its numbers."""
PATIENCE_S = 120
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}, "required": ["city"]}
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
COMPACT = '{"city":"Oslo","n":1.50,  "u":"\\u00e9"}'
CALL = '<tool_call>\n{"name": "look", "arguments": ' + COMPACT + "}\n</tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A question, and what is asked of its answer."""

    text: str = ASKED
    stream: bool = False
    image: bool = False
    forced: bool = False
    """The one tool has to be called."""
    schema: bool = False
    """The answer is JSON of a schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    text: str
    calls: list[Any]
    """The arguments of each, as an object."""
    given: int
    made: int
    """Tokens of the prompt and of the reply."""


def _object(arguments: str) -> Any:
    return json.loads(as_input(arguments))


async def chat(door: Door, wish: Wish) -> Answered:
    content: Any = wish.text
    if wish.image:
        url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
        content = [{"type": "text", "text": wish.text}, {"type": "image_url", "image_url": {"url": url}}]
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": content}]}
    if wish.forced:
        body["tools"] = [{"type": "function", "function": {"name": "look", "parameters": CITY}}]
        body["tool_choice"] = {"type": "function", "function": {"name": "look"}}
    if wish.schema:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    async with door.client(sampling=SEEDED).with_options(timeout=PATIENCE_S) as client:
        if not wish.stream:
            reply = await client.chat.completions.create(**body)
            message = reply.choices[0].message
            calls = [_object(call.function.arguments) for call in message.tool_calls or ()]  # type: ignore[union-attr]
            assert reply.usage is not None
            return Answered(
                text=message.content or "",
                calls=calls,
                given=reply.usage.prompt_tokens,
                made=reply.usage.completion_tokens,
            )
        text, pieces, called, usage = "", "", False, None
        async for chunk in await client.chat.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    called = True
                    pieces += call.function.arguments or ""  # type: ignore[union-attr]
        assert usage is not None
        return Answered(
            text=text,
            calls=[_object(pieces)] if called else [],
            given=usage.prompt_tokens,
            made=usage.completion_tokens,
        )


async def messages(door: Door, wish: Wish) -> Answered:
    content: list[Any] = [{"type": "text", "text": wish.text}]
    if wish.image:
        data = base64.b64encode(PNG).decode()
        content.append({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}})
    body: dict[str, Any] = {"model": "m", "max_tokens": 60, "messages": [{"role": "user", "content": content}]}
    if wish.forced:
        body |= {"tools": [{"name": "look", "input_schema": CITY}], "tool_choice": {"type": "tool", "name": "look"}}
    if wish.schema:
        body["output_config"] = {"format": {"type": "json_schema", "schema": CITY}}
    async with anthropic_harness.client(door, sampling=SEEDED).with_options(timeout=PATIENCE_S) as client:
        if wish.stream:
            async with client.messages.stream(**body) as events:
                reply = await events.get_final_message()
        else:
            reply = await client.messages.create(**body)
    usage = reply.usage
    return Answered(
        text="".join(block.text for block in reply.content if block.type == "text"),
        calls=[block.input for block in reply.content if block.type == "tool_use"],
        given=usage.input_tokens + (usage.cache_read_input_tokens or 0),
        made=usage.output_tokens,
    )


async def responses(door: Door, wish: Wish) -> Answered:
    content: list[Any] = [{"type": "input_text", "text": wish.text}]
    if wish.image:
        url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
        content.append({"type": "input_image", "image_url": url, "detail": "auto"})
    body: dict[str, Any] = {"model": "m", "input": [{"role": "user", "content": content}]}
    if wish.forced:
        body["tools"] = [{"type": "function", "name": "look", "parameters": CITY, "strict": False}]
        body["tool_choice"] = {"type": "function", "name": "look"}
    if wish.schema:
        body["text"] = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
    async with door.client(sampling=SEEDED).with_options(timeout=PATIENCE_S) as client:
        if wish.stream:
            reply: Any = None
            async for event in await client.responses.create(**body, stream=True):
                if event.type in ("response.completed", "response.incomplete"):
                    reply = event.response
        else:
            reply = await client.responses.create(**body)
    calls = [_object(item.arguments) for item in reply.output if item.type == "function_call"]
    return Answered(text=reply.output_text, calls=calls, given=reply.usage.input_tokens, made=reply.usage.output_tokens)


async def google(door: Door, wish: Wish) -> Answered:
    parts: list[Any] = [{"text": wish.text}]
    if wish.image:
        parts.append({"inline_data": {"mime_type": "image/png", "data": PNG}})
    config: dict[str, Any] = {}
    if wish.forced:
        config["tools"] = [{"function_declarations": [{"name": "look", "parameters_json_schema": CITY}]}]
        config["tool_config"] = {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["look"]}}
    if wish.schema:
        config |= {"response_mime_type": "application/json", "response_json_schema": CITY}
    asked: dict[str, Any] = {"model": "m", "contents": [{"role": "user", "parts": parts}], "config": config}
    models = google_harness.client(door, timeout=PATIENCE_S, sampling=SEEDED).aio.models
    if wish.stream:
        pieces = [piece async for piece in await models.generate_content_stream(**asked)]
    else:
        pieces = [await models.generate_content(**asked)]
    usage = pieces[-1].usage_metadata
    told = [
        part
        for piece in pieces
        for one in piece.candidates or ()
        for part in (one.content.parts if one.content is not None else None) or ()
    ]
    assert usage is not None
    return Answered(
        text="".join(part.text for part in told if part.text),
        calls=[part.function_call.args for part in told if part.function_call is not None],
        given=usage.prompt_token_count or 0,
        made=(usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0),
    )


DIALECTS = {"chat": chat, "anthropic": messages, "responses": responses, "google": google}
REFUSED = (openai.BadRequestError, anthropic.BadRequestError, ClientError)
every_dialect = pytest.mark.parametrize("dialect", DIALECTS)
every_mode = pytest.mark.parametrize("mode", MODES)


@asynccontextmanager
async def engine(path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    """vLLM's own answer."""
    url = os.environ["VLLM_BASE_URL"].removesuffix("/v1") + path
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        told = await response.json()
        assert response.status == 200, told
        yield told


async def own(record: CompletionCaptured, **more: Any) -> tuple[list[int], list[int], list[float], str]:
    """Prompt ids, ids, log-probabilities and text of the same question, put to the engine itself."""
    assert record.sampling.seed is not None
    body = {
        "model": record.engine.model,
        "messages": [{"role": "user", "content": ASKED}],
        "seed": record.sampling.seed,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": record.sampling.max_tokens,
        "logprobs": True,
        "return_token_ids": True,
        **more,
    }
    async with engine("/v1/chat/completions", body) as told:
        choice = told["choices"][0]
        logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
        return told["prompt_token_ids"], choice["token_ids"], logprobs, choice["message"]["content"]


def door_mode(mode: str) -> str:
    return "live" if mode == "whole" else mode


@every_mode
@every_dialect
async def test_what_is_captured_and_told_is_the_engines_own_answer(dialect: str, mode: str, door_to: Start) -> None:
    door: Door = await door_to(os.environ["VLLM_BASE_URL"], stream_mode=door_mode(mode))
    for attempt in range(TRIES):
        told = await DIALECTS[dialect](door, Wish(stream=mode != "whole"))
        record = next(one for one in reversed(await door.settled()) if isinstance(one, CompletionCaptured))
        choice = record.choices[0]
        assert (told.given, told.made, told.text) == (
            len(record.prompt.ids) if record.prompt.base is None else told.given,
            len(choice.ids),
            choice.message["content"],
        )
        prompt, ids, logprobs, text = await own(record)
        assert told.given == len(prompt)
        # a prompt that is found in the engine's cache is computed in other batches
        close = len(ids) == len(choice.ids) and np.allclose(
            choice.logprobs.array, np.array(logprobs, np.float32), atol=1e-5
        )
        if choice.ids.array.tolist() == ids and close:
            break
        assert attempt + 1 < TRIES, "the engine never gave the same tokens twice; is it alone?"
    assert record.prompt.base is not None or record.prompt.ids.array.tolist() == prompt
    assert told.text == text


@every_mode
@every_dialect
async def test_a_tool_that_has_to_be_called_is(dialect: str, mode: str, door_to: Start) -> None:
    door: Door = await door_to(os.environ["VLLM_BASE_URL"], stream_mode=door_mode(mode))
    told = await DIALECTS[dialect](door, Wish(stream=mode != "whole", forced=True))
    record = captured(await door.settled())
    message = record.choices[0].message
    assert told.calls == [_object(one["function"]["arguments"]) for one in message.get("tool_calls", ())]
    # vLLM tells a call that was cut off as a call where it streams, and as text where it does not
    assert told.calls or (message["content"].startswith("<tool_call>") and record.choices[0].finish == "length")
    assert told.text == (message["content"] or "")
    assert record.constraints == ["forced_tool"]
    assert (told.given, told.made) == (len(record.prompt.ids), len(record.choices[0].ids))


@every_mode
@every_dialect
async def test_an_answer_in_a_schemas_form(dialect: str, mode: str, door_to: Start) -> None:
    door: Door = await door_to(os.environ["VLLM_BASE_URL"], stream_mode=door_mode(mode))
    told = await DIALECTS[dialect](door, Wish(stream=mode != "whole", schema=True))
    record = captured(await door.settled())
    # in JSON, white space may go on for ever
    assert record.choices[0].finish == "length" or json.loads(told.text)["city"] in ("Oslo", "Rome")
    assert told.text == record.choices[0].message["content"]
    assert record.constraints == ["grammar"]


@every_mode
async def test_arguments_are_told_and_captured_as_the_model_wrote_them(mode: str, door_to: Start) -> None:
    # a small model calls no tool of its own accord, so a grammar makes it write a call
    door: Door = await door_to(os.environ["VLLM_BASE_URL"], stream_mode=door_mode(mode))
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": ASKED}],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        "extra_body": {"structured_outputs": {"choice": [CALL]}},
    }
    async with door.client(sampling=SamplingSpec(max_tokens=100)) as client:
        if mode == "whole":
            reply = await client.chat.completions.create(**body)
            told = reply.choices[0].message.tool_calls[0].function.arguments  # type: ignore[index,union-attr]
        else:
            told = ""
            async for chunk in await client.chat.completions.create(**body, stream=True):
                for call in chunk.choices[0].delta.tool_calls or ():
                    told += call.function.arguments or ""  # type: ignore[union-attr]
    made = captured(await door.settled()).choices[0].message["tool_calls"][0]["function"]
    assert (told, made["arguments"]) == (COMPACT, COMPACT)


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name != "chat"])
async def test_a_count_is_the_engines(dialect: str, door_to: Start) -> None:
    door: Door = await door_to(os.environ["VLLM_BASE_URL"])
    if dialect == "anthropic":
        async with anthropic_harness.client(door) as client:
            body: Any = [{"role": "user", "content": ASKED}]
            count = (await client.messages.count_tokens(model="m", messages=body)).input_tokens
    elif dialect == "responses":
        async with door.client() as asking:
            count = (await asking.responses.input_tokens.count(model="m", input=ASKED)).input_tokens
    else:
        found = await google_harness.client(door).aio.models.count_tokens(model="m", contents=ASKED)
        count = found.total_tokens or 0
    asked = {"messages": [{"role": "user", "content": ASKED}], "add_generation_prompt": True}
    async with engine("/tokenize", asked) as told:
        assert count == told["count"]
    assert await door.settled() == []


@pytest.mark.parametrize("stream", [False, True])
@every_dialect
async def test_an_overflow_is_refused_with_true_numbers(dialect: str, stream: bool, door_to: Start) -> None:
    door: Door = await door_to(os.environ["VLLM_BASE_URL"])
    long = "word " * 9000
    async with engine("/tokenize", {"messages": [{"role": "user", "content": long}]}) as told:
        count, limit = told["count"], told["max_model_len"]
    with pytest.raises(REFUSED) as raised:
        await DIALECTS[dialect](door, Wish(text=long, stream=stream))
    said = str(raised.value)
    assert "400" in said
    numbers = {"chat": (limit,), "anthropic": (count, limit), "responses": (count, limit), "google": (count, limit)}
    assert all(str(number) in said for number in numbers[dialect]), said
    assert failed(await door.settled()).http_status == 400


@pytest.mark.parametrize("stream", [False, True])
@every_dialect
async def test_a_model_without_eyes_refuses_an_image(dialect: str, stream: bool, door_to: Start) -> None:
    door: Door = await door_to(os.environ["VLLM_BASE_URL"])
    with pytest.raises(REFUSED) as raised:
        await DIALECTS[dialect](door, Wish(image=True, stream=stream))
    assert "400" in str(raised.value)
    end = failed(await door.settled())
    assert (end.http_status, end.failure.retryable) == (400, False)
