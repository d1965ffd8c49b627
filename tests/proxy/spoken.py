"""What the conformance suite of dialects needs to know of each: how it is asked, and what its events mean.

A new dialect is a row here, and passes `test_told`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import anthropic
import openai
from google.genai.errors import APIError as GoogleError

from tests.proxy import anthropic_harness, google_harness, responses_harness
from tests.proxy.harness import Door, ask, rest_of
from tests.proxy.test_anthropic_replies import gathered as anthropic_gathered
from tests.proxy.test_calls import TOOLS, USER

Event = Any
Seen = list[Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a stream came to."""

    text: str
    tokens: int | None
    """Of the prompt, as the client is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """One dialect."""

    post: Callable[..., Any]
    """`(door, http, stream=…, tools=…)`: a request without a client library, as a context manager."""
    events: Callable[[aiohttp.ClientResponse], AsyncIterator[Event]]
    closes: Callable[[Event], bool]
    """Whether a client would act on an event."""
    live: Callable[[Event], set[str]]
    """Which of reasoning, text and call an event tells more of."""
    text: Callable[[Event], str]
    """More of the reply's text."""
    tells: dict[str, set[str]]
    """What is told live of a reply, by the reply's name."""
    told: Callable[[Seen], Told]
    """What the events of a whole stream come to, checked."""
    count: Callable[[Door], Any]
    """The prompt's length by the dialect's own route for it; None: it has none."""
    error: Callable[[Event], tuple[Any, ...]]
    """What an error says, as a body or in a stream."""
    is_error: Callable[[Event], bool]
    official: Callable[[Door, bool, Seen], Any]
    """The official client's call to its end; raises `refusals`."""
    refusals: type[Exception]
    errors: dict[str, tuple[Any, ...]]
    """By what went wrong: what an error says."""
    away: int = 503
    """The status of what may be tried again."""


async def sse(response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    """The data of each event; `DONE` for the last of Chat's."""
    async for line in response.content:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            yield "DONE" if data == b"[DONE]" else json.loads(data)


# OpenAI Chat Completions --------------------------------------------------------------------------------------------


def _chat_post(door: Door, http: aiohttp.ClientSession, *, stream: bool = True, tools: bool = False) -> Any:
    body: dict[str, Any] = {"model": "m", "messages": USER, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    body |= {"tools": TOOLS} if tools else {}
    return http.post(f"{door.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {door.key()}"})


def _chat_closes(event: Event) -> bool:
    if event == "DONE" or not event.get("choices"):
        return "error" not in event
    return any(choice["finish_reason"] for choice in event["choices"])


def _chat_live(event: Event) -> set[str]:
    found = set()
    for choice in () if event == "DONE" else event.get("choices", ()):
        delta = choice["delta"]
        found |= {"reasoning"} if delta.get("reasoning") else set()
        found |= {"text"} if delta.get("content") else set()
        found |= {"call"} if delta.get("tool_calls") else set()
    return found


def _chat_text(event: Event) -> str:
    if event == "DONE":
        return ""
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _chat_told(seen: Seen) -> Told:
    assert seen[-1] == "DONE"
    assert sum(map(_chat_closes, seen)) == 3
    return Told(text="".join(map(_chat_text, seen)), tokens=seen[-2]["usage"]["prompt_tokens"])


async def _chat_official(door: Door, stream: bool, seen: Seen) -> None:
    async with door.client() as client:
        await ask(client, messages=USER, stream=stream, seen=seen)


async def _no_count(door: Door) -> None:
    return None


CHAT = Spoken(
    post=_chat_post,
    events=sse,
    closes=_chat_closes,
    live=_chat_live,
    text=_chat_text,
    tells={
        "text": {"text"},
        "thinking": {"reasoning", "text"},
        "text and calls": {"text"},
        "thinking and a call": {"reasoning", "call"},
        "call": {"call"},
    },
    told=_chat_told,
    count=_no_count,
    error=lambda event: (event["error"]["code"],),
    is_error=lambda event: event != "DONE" and "error" in event,
    official=_chat_official,
    refusals=openai.APIError,
    errors={
        "log": ("log_unavailable",),
        "record": ("record_too_large",),
        "engine": ("engine_error",),
        "silence": ("engine_timeout",),
        "long": ("context_length_exceeded",),
    },
)


# Anthropic Messages -------------------------------------------------------------------------------------------------


def _messages_post(door: Door, http: aiohttp.ClientSession, *, stream: bool = True, tools: bool = False) -> Any:
    more: dict[str, Any] = {"tools": anthropic_harness.TOOLS} if tools else {}
    return anthropic_harness.post(door, http, stream=stream, **more)


def _messages_live(event: Event) -> set[str]:
    kinds = {"text_delta": "text", "thinking_delta": "reasoning", "input_json_delta": "call"}
    return {kinds[event["delta"]["type"]]} if event["type"] == "content_block_delta" else set()


def _messages_told(seen: Seen) -> Told:
    message = anthropic_gathered(seen)
    assert [event["type"] for event in seen].count("message_start") == 1
    called = any(block["type"] == "tool_use" for block in message["content"])
    assert message["stop_reason"] == ("tool_use" if called else "end_turn")
    text = "".join(block["text"] for block in message["content"] if block["type"] == "text")
    return Told(text=text, tokens=seen[0]["message"]["usage"]["input_tokens"])


async def _messages_official(door: Door, stream: bool, seen: Seen) -> None:
    async with anthropic_harness.client(door) as client:
        if not stream:
            await client.messages.create(**anthropic_harness.fields())
            return
        await rest_of(await client.messages.create(**anthropic_harness.fields(stream=True)), seen)


async def _messages_count(door: Door) -> int:
    async with anthropic_harness.client(door) as client:
        found = await client.messages.count_tokens(model="m", messages=anthropic_harness.USER)
    return found.input_tokens


ANTHROPIC = Spoken(
    post=_messages_post,
    events=anthropic_harness.events,
    closes=lambda event: event["type"] in anthropic_harness.CLOSING,
    live=_messages_live,
    text=lambda event: event["delta"]["text"] if "text" in _messages_live(event) else "",
    # one block is open at a time: what comes after it would close it
    tells={
        "text": {"text"},
        "thinking": {"reasoning"},
        "text and calls": {"text"},
        "thinking and a call": {"reasoning"},
        "call": set(),
    },
    told=_messages_told,
    count=_messages_count,
    error=lambda event: (event["error"]["type"],),
    is_error=lambda event: event["type"] == "error",
    official=_messages_official,
    refusals=anthropic.APIStatusError,
    errors={
        "log": ("overloaded_error",),
        "record": ("request_too_large",),
        "engine": ("api_error",),
        "silence": ("timeout_error",),
        "long": ("invalid_request_error",),
    },
    away=529,
)


# OpenAI Responses ---------------------------------------------------------------------------------------------------


def _responses_post(door: Door, http: aiohttp.ClientSession, *, stream: bool = True, tools: bool = False) -> Any:
    more: dict[str, Any] = {"tools": responses_harness.TOOLS} if tools else {}
    return responses_harness.post(door, http, stream=stream, **more)


def _responses_live(event: Event) -> set[str]:
    kinds = {
        "response.output_text.delta": "text",
        "response.reasoning_text.delta": "reasoning",
        "response.function_call_arguments.delta": "call",
        "response.custom_tool_call_input.delta": "call",
    }
    return {kinds[event["type"]]} if event["type"].endswith(".delta") else set()


def _responses_told(seen: Seen) -> Told:
    response = responses_harness.gathered(seen)
    texts = [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"]
    return Told(text="".join(texts), tokens=response["usage"]["input_tokens"])


async def _responses_official(door: Door, stream: bool, seen: Seen) -> None:
    async with door.client() as client:
        if not stream:
            await client.responses.create(**responses_harness.fields())
            return
        async for event in await client.responses.create(**responses_harness.fields(stream=True)):
            event.model_dump_json()
            seen.append(event)
            if event.type == "error":
                # this client hands an error over as an event
                raise openai.APIError(event.message, request=None, body={"code": event.code})  # type: ignore[arg-type]


async def _responses_count(door: Door) -> int:
    async with door.client() as client:
        found = await client.responses.input_tokens.count(model="m", input=responses_harness.fields()["input"])
    return found.input_tokens


def _responses_error(event: Event) -> tuple[Any, ...]:
    return (event["code"] if event.get("type") == "error" else event["error"]["code"],)


RESPONSES = Spoken(
    post=_responses_post,
    events=responses_harness.streamed,
    closes=lambda event: event["type"] in responses_harness.CLOSING - {"response.failed"},
    live=_responses_live,
    text=lambda event: event["delta"] if "text" in _responses_live(event) else "",
    tells={
        "text": {"text"},
        "thinking": {"reasoning", "text"},
        "text and calls": {"text"},
        "thinking and a call": {"reasoning", "call"},
        "call": {"call"},
        "custom": {"text"},
    },
    told=_responses_told,
    count=_responses_count,
    error=_responses_error,
    is_error=lambda event: event["type"] == "error",
    official=_responses_official,
    refusals=openai.APIError,
    errors={
        "log": ("log_unavailable",),
        "log in stream": ("rate_limit_exceeded",),
        "record": ("record_too_large",),
        "engine in stream": ("server_error",),
        "silence in stream": ("server_error",),
        "long": ("context_length_exceeded",),
    },
)


# Google generateContent ---------------------------------------------------------------------------------------------


def _google_post(door: Door, http: aiohttp.ClientSession, *, stream: bool = True, tools: bool = False) -> Any:
    more: dict[str, Any] = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
    more |= {"tools": google_harness.TOOLS} if tools else {}
    return google_harness.post(door, http, google_harness.SSE if stream else "generateContent", **more)


def _google_live(event: Event) -> set[str]:
    parts = [part for one in event["candidates"] for part in one["content"].get("parts", ())]
    return {
        "call" if "functionCall" in part else "reasoning" if part.get("thought") else "text"
        for part in parts
        if part.get("text") != ""
    }


def _google_text(event: Event) -> str:
    parts = [part for one in event["candidates"] for part in one["content"].get("parts", ())]
    return "".join(part.get("text", "") for part in parts if not part.get("thought"))


def _google_told(seen: Seen) -> Told:
    message = google_harness.gathered(seen)
    (candidate,) = message["candidates"]
    assert candidate["finishReason"] == "STOP"
    parts = candidate["content"].get("parts", ())
    text = "".join(part.get("text", "") for part in parts if not part.get("thought"))
    return Told(text=text, tokens=message["usageMetadata"]["promptTokenCount"])


async def _google_official(door: Door, stream: bool, seen: Seen) -> None:
    models = google_harness.client(door).aio.models
    asked: dict[str, Any] = {"model": google_harness.MODEL, "contents": google_harness.TEXT}
    if not stream:
        await models.generate_content(**asked)
        return
    await rest_of(await models.generate_content_stream(**asked), seen)


async def _google_count(door: Door) -> int:
    async with aiohttp.ClientSession() as http, google_harness.post(door, http, "countTokens") as response:
        return int((await response.json())["totalTokens"])


GOOGLE = Spoken(
    post=_google_post,
    events=google_harness.events,
    closes=google_harness.closes,
    live=_google_live,
    text=_google_text,
    # a function call is one part
    tells={
        "text": {"text"},
        "thinking": {"reasoning", "text"},
        "text and calls": {"text"},
        "thinking and a call": {"reasoning"},
        "call": set(),
    },
    told=_google_told,
    count=_google_count,
    error=lambda event: (event["error"]["code"], event["error"]["status"]),
    is_error=lambda event: "error" in event,
    official=_google_official,
    refusals=GoogleError,
    errors={
        "log": (503, "UNAVAILABLE"),
        "record": (413, "INVALID_ARGUMENT"),
        "engine": (500, "INTERNAL"),
        "silence": (504, "DEADLINE_EXCEEDED"),
        "long": (400, "INVALID_ARGUMENT"),
    },
)

DIALECTS: dict[str, Spoken] = {"chat": CHAT, "anthropic": ANTHROPIC, "responses": RESPONSES, "google": GOOGLE}


def expected(spoken: Spoken, what: str, *, in_stream: bool = False) -> tuple[Any, ...]:
    """What an error says of what went wrong."""
    found = spoken.errors.get(f"{what} in stream") if in_stream else None
    return spoken.errors[what] if found is None else found
