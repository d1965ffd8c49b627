"""What the tests of the dialect openai.responses share: raw requests and events, replies, what comes back of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from polar.proxy.calls import Call, Reply, ReplyChoice
from polar.proxy.dialects import Limits, OpenAIResponses, Told
from polar.proxy.dialects.responses import Responses
from polar.schemas import Logprobs, TokenIds
from tests.proxy.harness import Door

ASKED = "What is the weather in Paris?"
USER: list[Any] = [{"role": "user", "content": ASKED}]
FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "note", "description": "Writes a note."}
TOOLS: list[Any] = [
    FUNCTION,
    CUSTOM,
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
    {"type": "namespace", "name": "mcp__files", "description": "Files", "tools": [{**FUNCTION, "name": "look"}]},
]
CLOSING = {
    "response.output_text.done",
    "response.content_part.done",
    "response.reasoning_text.done",
    "response.reasoning_summary_text.done",
    "response.reasoning_summary_part.done",
    "response.function_call_arguments.done",
    "response.custom_tool_call_input.done",
    "response.output_item.done",
    "response.completed",
    "response.incomplete",
    "response.failed",
}
ANY = Limits(max_choices=1)
TOLD = Told("0191-c1", 1, "gpt-x")


def memory() -> Responses:
    return Responses(attempt_bytes=1 << 20, total_bytes=1 << 21)


def dialect() -> OpenAIResponses:
    """A session's, which remembers nothing yet."""
    return OpenAIResponses(memory().nobody())


def parse(limits: Limits = ANY, speaking: OpenAIResponses | None = None, **fields: Any) -> Call:
    body = {"model": "gpt-x", "input": ASKED, **fields}
    return (speaking or dialect()).parse(json.dumps(body).encode(), limits)


def messages(*items: Any, limits: Limits = ANY, **fields: Any) -> list[dict[str, Any]]:
    return parse(limits, input=list(items), **fields).messages


def reply(message: dict[str, Any], finish: str = "stop", usage: dict[str, int] | None = None, **more: Any) -> Reply:
    choice = ReplyChoice(
        index=0,
        ids=TokenIds([1, 2, 3]),
        logprobs=Logprobs([-1.0] * 3),
        message={"role": "assistant", **message},
        finish=finish,
        stop=None,
        **more,
    )
    return Reply(prompt_ids=TokenIds([5] * 7), choices=[choice], usage=usage or {})


def made(name: str, arguments: str, identity: str = "call-1") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def sent_back(output: Sequence[dict[str, Any]], *, answered: bool = True) -> dict[str, Any]:
    """The message that a reply's items make when their client sends them back."""
    items = [{"type": "message", "role": "user", "content": "hi"}, *output]
    if answered:
        items.append({"type": "message", "role": "user", "content": "go on"})
    (message,) = [one for one in parse(input=items).messages if one["role"] == "assistant"]
    return message


def events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream that is over; names and numbers are right."""
    found = []
    for event in data.decode().split("\n\n"):
        if event:
            name, body = event.split("\n")
            found.append(json.loads(body.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def gathered(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The response that the events come to, put together of deltas and checked against what closes them."""
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    items: dict[int, dict[str, Any]] = {}
    said: dict[int, str] = {}
    closed: dict[int, dict[str, Any]] = {}
    for event in told:
        kind, at = event["type"], event.get("output_index", -1)
        if kind == "response.output_item.added":
            assert at == len(items)
            items[at], said[at] = event["item"], ""
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[at]["id"]
            said[at] += event["delta"]
        elif kind.endswith(("text.done", "arguments.done", "input.done")):
            assert said[at] == next(event[name] for name in ("text", "arguments", "input") if name in event)
        elif kind == "response.output_item.done":
            closed[at] = event["item"]
            assert (event["item"]["id"], event["item"]["type"]) == (items[at]["id"], items[at]["type"])
    last = told[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert [closed[at] for at in sorted(closed)] == last["response"]["output"]
    assert closed.keys() == items.keys()
    response: dict[str, Any] = last["response"]
    return response


def fields(**changes: Any) -> dict[str, Any]:
    return {"model": "gpt-x", "input": USER, **changes}


def post(door: Door, http: aiohttp.ClientSession, path: str = "/v1/responses", **changes: Any) -> Any:
    """A request without a client library."""
    return http.post(door.url + path, json=fields(**changes), headers={"Authorization": f"Bearer {door.key()}"})


async def streamed(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, as they come."""
    async for line in response.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
