"""What the tests of the dialect google.generate_content share: the official client in front of a proxy, raw events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest
from google import genai
from google.genai import types

from tests.proxy.harness import Door

CLEAN = [
    pytest.mark.filterwarnings("error"),
    # newer versions of the client derive from aiohttp's
    pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning"),
]
MODEL = "gemini-x"
TEXT = "What is the weather in Paris?"
USER: list[Any] = [{"role": "user", "parts": [{"text": TEXT}]}]
CHAT: list[Any] = [{"role": "user", "content": TEXT}]
"""The same as messages."""
TOOLS: list[Any] = [
    {
        "functionDeclarations": [
            {
                "name": "get_weather",
                "description": "The weather of a city",
                "parameters": {
                    "type": "OBJECT",
                    "properties": {"city": {"type": "STRING"}},
                    "required": ["city"],
                },
            }
        ]
    }
]


def client(
    door: Door, session: str = "s1", *, key: str | None = None, path: str = "", timeout: int = 30, **changes: Any
) -> genai.Client:
    """The official client, without retries of its own; it is closed with the door."""
    options = types.HttpOptions(base_url=door.url + path, timeout=timeout * 1000)
    found = genai.Client(api_key=key or door.key(session, **changes), vertexai=False, http_options=options)
    door.closing.push_async_callback(_close, found)
    return found


async def _close(client: Any) -> None:
    if hasattr(client.aio, "aclose"):
        client.close()
        await client.aio.aclose()
    else:  # older versions leave that to the garbage collector
        client._api_client._httpx_client.close()
        await client._api_client._async_httpx_client.aclose()


def fields(**changes: Any) -> dict[str, Any]:
    return {"contents": USER, **changes}


def post(
    door: Door, http: aiohttp.ClientSession, action: str = "generateContent", *, version: str = "v1beta", **changes: Any
) -> Any:
    """A request without a client library."""
    headers = {"x-goog-api-key": door.key()}
    return http.post(f"{door.url}/{version}/models/{MODEL}:{action}", json=fields(**changes), headers=headers)


SSE = "streamGenerateContent?alt=sse"
ARRAY = "streamGenerateContent"


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream; an error stands alone, without `data:`."""
    async for line in response.content:
        if line.strip():
            yield json.loads(line.removeprefix(b"data: "))


def gathered(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The reply that pieces come to: texts of one kind put together, the signature of the first kept."""
    found: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for piece in pieces:
        for candidate in piece.get("candidates", ()):
            known = found.setdefault(candidate["index"], {"content": {"role": "model"}})
            parts = candidate["content"].get("parts")
            assert parts != []
            known |= {name: value for name, value in candidate.items() if name != "content"}
            for part in parts or ():
                told = known["content"].setdefault("parts", [])
                last = told[-1] if told else {}
                if "text" in part and "text" in last and part.get("thought") == last.get("thought"):
                    last["text"] += part["text"]
                    if part["text"] == "":
                        last |= part | {"text": last["text"]}
                else:
                    told.append(dict(part))
        whole |= {name: value for name, value in piece.items() if name != "candidates"}
    return whole | {"candidates": [found[index] for index in sorted(found)]}


def closes(piece: dict[str, Any]) -> bool:
    """Whether a client would act on this piece."""
    return "usageMetadata" in piece or any(
        "finishReason" in candidate or any("functionCall" in part for part in candidate["content"].get("parts", ()))
        for candidate in piece["candidates"]
    )
