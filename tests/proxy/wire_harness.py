"""What tests that look at bytes share: one request in each dialect, connections that end at a byte, what was told.

No client library here: a test says at which byte a connection ends, and how.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.proxy import anthropic_harness, google_harness, responses_harness
from tests.proxy.harness import Door
from tests.proxy.test_calls import TOOLS, USER

GOOGLE = f"/v1beta/models/{google_harness.MODEL}"


@dataclass(frozen=True)
class Speaking:
    """One dialect as it is asked."""

    name: str
    path: str
    body: dict[str, Any]
    stream_path: str | None = None
    """Where a stream is asked for by the path; else by the body."""
    several: str | None = None
    """The field for several replies."""

    def request(self, *, stream: bool, **changes: Any) -> tuple[str, bytes]:
        """Path and body."""
        if self.stream_path is not None:
            return self.stream_path if stream else self.path, json.dumps({**self.body, **changes}).encode()
        return self.path, json.dumps({**self.body, "stream": stream, **changes}).encode()


CHAT = Speaking("openai.chat", "/v1/chat/completions", {"model": "m", "messages": USER, "tools": TOOLS}, several="n")
ANTHROPIC = Speaking(
    "anthropic.messages", "/v1/messages", anthropic_harness.fields(tools=anthropic_harness.TOOLS, model="m")
)
RESPONSES = Speaking(
    "openai.responses", "/v1/responses", responses_harness.fields(tools=[responses_harness.FUNCTION], model="m")
)
GENERATE = Speaking(
    "google.generate_content",
    f"{GOOGLE}:generateContent",
    google_harness.fields(tools=google_harness.TOOLS),
    stream_path=f"{GOOGLE}:streamGenerateContent?alt=sse",
)
DIALECTS = {one.name: one for one in (CHAT, ANTHROPIC, RESPONSES, GENERATE)}


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what tells nobody that it has happened."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Connection:
    """One request on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.seen = b""

    async def until(self, text: bytes) -> bytes:
        """Read until `text` was told; returns all that was."""
        async with asyncio.timeout(30):
            while text not in self.seen:
                data = await self._reader.read(65536)
                assert data, f"{text!r} was not told, but {self.seen!r}"
                self.seen += data
        return self.seen

    async def exactly(self, count: int) -> None:
        """Read exactly so many more."""
        async with asyncio.timeout(30):
            self.seen += await self._reader.readexactly(count)

    async def more(self) -> None:
        """Read what comes next."""
        async with asyncio.timeout(30):
            data = await self._reader.read(65536)
        assert data, "the connection has ended"
        self.seen += data

    async def silent_for(self, seconds: float) -> bool:
        """Whether nothing comes for so long."""
        try:
            async with asyncio.timeout(seconds):
                data = await self._reader.read(65536)
        except TimeoutError:
            return True
        self.seen += data
        return False

    async def rest(self) -> bytes:
        """Read to the end of the connection; returns all that was told."""
        async with asyncio.timeout(30):
            self.seen += await self._reader.read()
        return self.seen

    def close(self) -> None:
        """Close it now, whatever is still to be read."""
        self._writer.close()

    def half_close(self) -> None:
        """Say that nothing more will be sent, and go on reading."""
        self._writer.write_eof()

    @property
    def status(self) -> int:
        return int(self.seen.split(b" ", 2)[1])

    @property
    def body(self) -> bytes:
        """What was told after the headers, without chunks' lengths."""
        head, _, rest = self.seen.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head.lower():
            return rest
        found = b""
        while b"\r\n" in rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            found, rest = found + rest[:length], rest[length + 2 :]
        return found


async def connect(
    door: Door,
    speaking: Speaking,
    *,
    stream: bool,
    session: str = "s1",
    headers: dict[str, str] | None = None,
    buffer: int | None = None,
    **body: Any,
) -> Connection:
    """Ask on a new connection, which the server closes after its answer. `buffer`: bytes that the client's system takes
    though the client reads nothing.
    """
    at = urlsplit(door.url)
    sock = socket.socket()
    sock.setblocking(False)
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    await asyncio.get_running_loop().sock_connect(sock, (at.hostname, at.port))
    reader, writer = await asyncio.open_connection(sock=sock)
    door.closing.callback(writer.close)
    path, data = speaking.request(stream=stream, **body)
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {at.netloc}",
        f"Authorization: Bearer {door.key(session, not_after_ms=4_000_000_000_000)}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    await writer.drain()
    return Connection(reader, writer)


@asynccontextmanager
async def connected(door: Door, speaking: Speaking, **fields: Any) -> AsyncIterator[Connection]:
    """As `connect`, closed at the end."""
    connection = await connect(door, speaking, **fields)
    try:
        yield connection
    finally:
        connection.close()


def sse(body: bytes) -> list[dict[str, Any]]:
    """The events told so far; one that stands half told is passed over."""
    lines = body.split(b"\n")[:-1]
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: ") and not line.endswith(b"[DONE]")]


def understood(name: str, body: bytes, *, stream: bool) -> dict[str, Any]:
    """The reply as a client of the dialect has it in the end, without what differs from call to call."""
    whole = _GATHER[name](sse(body)) if stream else json.loads(body)
    found: dict[str, Any] = _without_ids(whole)
    return found


def text_of(name: str, body: bytes) -> str:
    """The text told so far in a stream."""
    found = []
    for event in sse(body):
        match name:
            case CHAT.name:
                found += [choice["delta"].get("content") or "" for choice in event["choices"]]
            case ANTHROPIC.name:
                found += [event["delta"].get("text", "")] if event["type"] == "content_block_delta" else []
            case RESPONSES.name:
                found += [event["delta"]] if event["type"] == "response.output_text.delta" else []
            case _:
                parts = [part for one in event["candidates"] for part in one["content"].get("parts", ())]
                found += [part["text"] for part in parts if "text" in part and not part.get("thought")]
    return "".join(found)


def gathered_chat(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Chunks put together as the official client does it."""
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for event in events:
        for told in event["choices"]:
            choice = choices.setdefault(told["index"], {"message": {}, "finish_reason": None, "logprobs": []})
            assert choice["finish_reason"] is None, "something is told of a choice that has ended"
            message, delta = choice["message"], told["delta"]
            for field in ("content", "reasoning", "reasoning_content"):
                if delta.get(field):
                    message[field] = message.get(field, "") + delta[field]
            for piece in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):
                    calls.append({"id": piece["id"], "function": {"name": piece["function"]["name"], "arguments": ""}})
                calls[piece["index"]]["function"]["arguments"] += piece["function"].get("arguments", "")
            choice["finish_reason"] = told["finish_reason"]
            choice["logprobs"] += (told.get("logprobs") or {}).get("content", [])
        whole |= {"model": event["model"], **({"usage": event["usage"]} if event.get("usage") else {})}
    return whole | {"choices": [choices[index] for index in sorted(choices)]}


def gathered_messages(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Anthropic's events put together, each block in its turn."""
    whole: dict[str, Any] = {}
    closed = True
    for event in events:
        match event["type"]:
            case "message_start":
                whole = {**event["message"], "content": []}
            case "content_block_start":
                assert (event["index"], closed) == (len(whole["content"]), True)
                block = dict(event["content_block"])
                if block["type"] == "tool_use":
                    block["input"] = ""
                whole["content"].append(block)
                closed = False
            case "content_block_delta":
                assert event["index"] == len(whole["content"]) - 1
                block, delta = whole["content"][-1], event["delta"]
                field = delta["type"].removesuffix("_delta")
                said = delta[{"input_json": "partial_json"}.get(field, field)]
                field = {"input_json": "input"}.get(field, field)
                block[field] = block[field] + said
            case "content_block_stop":
                closed = True
            case "message_delta":
                whole |= event["delta"]
                whole["usage"] = event["usage"]
    for block in whole["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"] or "{}")
    return whole


_GATHER: dict[str, Callable[[Sequence[dict[str, Any]]], dict[str, Any]]] = {
    CHAT.name: gathered_chat,
    ANTHROPIC.name: gathered_messages,
    RESPONSES.name: responses_harness.gathered,
    GENERATE.name: google_harness.gathered,
}
CLOSES: dict[str, Callable[[bytes], bool]] = {
    CHAT.name: lambda body: any(one["finish_reason"] for event in sse(body) for one in event["choices"]),
    ANTHROPIC.name: lambda body: any(event["type"] in anthropic_harness.CLOSING for event in sse(body)),
    RESPONSES.name: lambda body: any(event["type"] in responses_harness.CLOSING for event in sse(body)),
    GENERATE.name: lambda body: any(google_harness.closes(event) for event in sse(body)),
}
"""Whether a client would act on what was told."""
DIFFERING = {
    "id",
    "call_id",
    "created",
    "created_at",
    "responseId",
    "thoughtSignature",
    "signature",
    "system_fingerprint",
}


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ids(item) for key, item in value.items() if key not in DIFFERING}
    return [_without_ids(item) for item in value] if isinstance(value, list) else value
