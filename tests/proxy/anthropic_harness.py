"""What the tests of the dialect anthropic.messages share: the official client in front of a proxy, raw events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic

from tests.proxy.harness import Door

USER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "The weather of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
CLOSING = {"content_block_stop", "message_delta", "message_stop"}


def client(door: Door, session: str = "s1", *, key: str | None = None, **changes: Any) -> anthropic.AsyncAnthropic:
    """The official client, without retries of its own."""
    return anthropic.AsyncAnthropic(
        base_url=door.url, api_key=key or door.key(session, **changes), auth_token=None, max_retries=0, timeout=30
    )


def fields(**changes: Any) -> dict[str, Any]:
    return {"model": "claude-x", "max_tokens": 200, "messages": USER, **changes}


def post(door: Door, http: aiohttp.ClientSession, path: str = "/v1/messages", **changes: Any) -> Any:
    """A request without a client library."""
    headers = {"x-api-key": door.key(), "anthropic-version": "2023-06-01"}
    return http.post(door.url + path, json=fields(**changes), headers=headers)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream."""
    async for line in response.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
