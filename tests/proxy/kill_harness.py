"""What the tests of a proxy that is killed share: proxies in processes, a relay that counts events, eager clients.

A client here is as eager as any harness was seen to be: it runs a tool as soon as the call's arguments are whole,
whether or not the event that closes the call has come.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anthropic
import openai
from google import genai
from google.genai import types

from polar.bus import BusSettings
from tests.proxy.anthropic_harness import TOOLS as ANTHROPIC_TOOLS
from tests.proxy.google_harness import TOOLS as GOOGLE_TOOLS
from tests.proxy.harness import SECRET
from tests.proxy.responses_harness import FUNCTION
from tests.proxy.test_calls import TOOLS

SCRIPT = Path(__file__).parent / "run_proxy.py"
ASKED = "What is the weather in Paris?"
BREAKS = (openai.APIError, anthropic.APIError, aiohttp.ClientError, genai.errors.APIError, OSError)
"""What the official clients raise when the other side is gone in the middle of an answer; and `broke_off`."""


# proxies ------------------------------------------------------------------------------------------------------------


STARTS = 3
"""Proxies that are tried before a test gives up: a busy machine may let one down."""


class Victim(NamedTuple):
    """A proxy in a process of its own."""

    pid: int
    port: int

    def kill(self) -> None:
        """SIGKILL; nothing if it is dead already."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Proxies:
    """Proxies with the same settings, one for each kill; some are ready ahead."""

    def __init__(
        self, process: asyncio.subprocess.Process, env: dict[str, str], broken: str | None, ahead: int
    ) -> None:
        self._process = process
        self._asked = {"env": env, "broken": broken}
        self._ready: deque[asyncio.Future[Any]] = deque()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._made = 0
        self._ahead = ahead
        self.reading = asyncio.create_task(self._read())

    async def next(self) -> Victim:
        """One that is ready, and nobody else's; another one where that could not start."""
        for _ in range(STARTS):
            while len(self._ready) <= self._ahead:
                self._ask()
            ready = self._ready.popleft()
            either: list[asyncio.Future[Any]] = [ready, self.reading]
            await asyncio.wait(either, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert not self.reading.done(), f"what starts the proxies has ended: {self.reading!r}"
            if ready.done() and isinstance(ready.result(), Victim):
                return ready.result()
            print("no proxy:", ready.result() if ready.done() else "not ready within 60 s")
        raise AssertionError(f"{STARTS} proxies in a row could not start")

    def _ask(self) -> None:
        self._made += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[self._made] = future
        self._ready.append(future)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": self._made, **self._asked}).encode() + b"\n")

    async def _read(self) -> None:
        """Hear who is ready, to the end of the process."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(b'{"id"'):
                told = json.loads(line)
                victim = Victim(told["pid"], told["port"]) if "port" in told else told["failed"]
                if (waiting := self._waiting.pop(told["id"], None)) is not None:
                    waiting.set_result(victim)


@asynccontextmanager
async def proxies(
    settings: BusSettings, engine_url: str, *, broken: str | None = None, ahead: int = 2, **changes: str
) -> AsyncIterator[Proxies]:
    """Proxies on the topics of `settings`; what still runs of them at the end is killed."""
    env = {
        "POLAR_KAFKA_BOOTSTRAP": settings.bootstrap,
        "POLAR_KAFKA_TOPIC_PREFIX": settings.topic_prefix,
        "POLAR_KAFKA_PARTITIONS": str(settings.partitions),
        "POLAR_KAFKA_TASK_PARTITIONS": str(settings.task_partitions),
        "POLAR_KAFKA_NODE_PARTITIONS": str(settings.node_partitions),
        "POLAR_KAFKA_BLOB_URL": settings.blob_url,
        "POLAR_PROXY_PORT": "0",
        "POLAR_PROXY_ENGINE_URLS": engine_url,
        "POLAR_PROXY_LOGPROBS_MODE": "processed_logprobs",
        "POLAR_PROXY_STREAM_STEP": "0",  # each chunk is told as it comes
        **{f"POLAR_PROXY_{name.upper()}": value for name, value in changes.items()},
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), SECRET, "--fork"),
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    found = Proxies(process, env, broken, ahead)
    try:
        yield found
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.gather(found.reading, return_exceptions=True)


# what stands between ------------------------------------------------------------------------------------------------


class Relay:
    """Lets connections through to `port`, and of what comes back exactly so much; `reached` is called then.

    So much: `events`, ended by blank lines, or `octets`, heads of answers included; neither: all. `seen` and `octets`
    count what was let through.
    """

    def __init__(self, to: int) -> None:
        self.port = 0
        self.url = ""
        self.seen = 0
        self.octets = 0
        self._to = to
        self._cut: tuple[int | None, int | None] = (None, None)
        self._reached: Callable[[], object] = lambda: None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def arm(self, reached: Callable[[], object], *, events: int | None = None, octets: int | None = None) -> None:
        """Count from now."""
        self.seen = self.octets = 0
        self._cut = (events, octets)
        self._reached = reached

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connection(client, to_client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            server, to_server = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            to_client.close()
            return
        asking = asyncio.create_task(_copy(client, to_server))
        try:
            # whose other side is gone is gone too
            with suppress(OSError):
                await self._answer(server, to_client)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            for writer in (to_server, to_client):
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before = b""
        while data := await reader.read(65536):
            through = self._through(before, data)
            writer.write(data[:through])
            await writer.drain()
            self.octets += through
            if self._cut in ((self.seen, None), (None, self.octets)):
                self._cut = (None, None)  # other connections go on
                self._reached()
                while await reader.read(65536):
                    pass  # until the other side is dead, nobody hears of what it says
                return
            before = data[-1:]

    def _through(self, before: bytes, data: bytes) -> int:
        """How much of `data` passes; `before` is the byte that came before it.

        Heads of answers and the framing of chunks end their lines with CR LF, so a blank line is an event's.
        """
        events, octets = self._cut
        if octets is not None:
            return min(len(data), octets - self.octets)
        text, at = before + data, 0
        while self.seen != events and (found := text.find(b"\n\n", at)) >= 0:
            at = found + 2
            self.seen += 1
        return max(at - len(before), 0) if self.seen == events else len(data)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


# clients ------------------------------------------------------------------------------------------------------------


class Acted(NamedTuple):
    """A tool that a client has run."""

    id: str
    name: str
    arguments: Any


@dataclass
class Harness:
    """A client, what it was told of calls, and which tools it has run."""

    acted: list[Acted] = field(default_factory=list)
    ended: bool = False
    """It was told its reply's end."""
    _growing: dict[Any, list[str]] = field(default_factory=dict)

    def begun(self, call: Any, identity: str, name: str) -> None:
        self._growing[call] = [identity, name, ""]

    def more(self, call: Any, piece: str) -> None:
        self._growing[call][2] += piece
        self._act(call)

    def whole(self, identity: str | None, name: str | None, arguments: Any) -> None:
        one = Acted(identity or "", name or "", arguments)
        if one not in self.acted:
            self.acted.append(one)

    def _act(self, call: Any) -> None:
        identity, name, arguments = self._growing[call]
        with suppress(ValueError):
            self.whole(identity, name, json.loads(arguments))


async def chat(url: str, key: str, stream: bool, harness: Harness) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        messages: Any = [{"role": "user", "content": ASKED}]
        if not stream:
            reply = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            for call in reply.choices[0].message.tool_calls or ():
                assert call.type == "function"
                harness.whole(call.id, call.function.name, json.loads(call.function.arguments))
            harness.ended = True
            return
        async with await client.chat.completions.create(
            model="m", messages=messages, tools=TOOLS, stream=True
        ) as chunks:
            async for chunk in chunks:
                for piece in chunk.choices[0].delta.tool_calls or ():
                    assert piece.function is not None
                    if piece.function.name is not None:
                        harness.begun(piece.index, piece.id or "", piece.function.name)
                    harness.more(piece.index, piece.function.arguments or "")
                harness.ended = harness.ended or chunk.choices[0].finish_reason is not None


async def messages(url: str, key: str, stream: bool, harness: Harness) -> None:
    asked: Any = {
        "model": "m",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": ASKED}],
        "tools": ANTHROPIC_TOOLS,
    }
    async with anthropic.AsyncAnthropic(
        base_url=url, api_key=key, auth_token=None, max_retries=0, timeout=60
    ) as client:
        if not stream:
            for block in (await client.messages.create(**asked)).content:
                if block.type == "tool_use":
                    harness.whole(block.id, block.name, block.input)
            harness.ended = True
            return
        async with await client.messages.create(**asked, stream=True) as events:
            async for event in events:
                if event.type == "content_block_start" and event.content_block.type == "tool_use":
                    harness.begun(event.index, event.content_block.id, event.content_block.name)
                elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                    harness.more(event.index, event.delta.partial_json)
                harness.ended = harness.ended or event.type == "message_delta"


async def responses(url: str, key: str, stream: bool, harness: Harness) -> None:
    asked: Any = {"model": "m", "input": ASKED, "tools": [FUNCTION]}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        if not stream:
            for item in (await client.responses.create(**asked)).output:
                if item.type == "function_call":
                    harness.whole(item.call_id, item.name, json.loads(item.arguments))
            harness.ended = True
            return
        async with await client.responses.create(**asked, stream=True) as events:
            async for event in events:
                if event.type == "response.output_item.added" and event.item.type == "function_call":
                    harness.begun(event.item.id, event.item.call_id, event.item.name)
                elif event.type == "response.function_call_arguments.delta":
                    harness.more(event.item_id, event.delta)
                elif event.type == "response.output_item.done" and event.item.type == "function_call":
                    harness.whole(event.item.call_id, event.item.name, json.loads(event.item.arguments))
                harness.ended = harness.ended or event.type == "response.completed"


async def google(url: str, key: str, stream: bool, harness: Harness) -> None:
    # without options of its own it asks a dead proxy once more, after up to ten seconds
    once = types.HttpRetryOptions(attempts=1)
    options = types.HttpOptions(base_url=url, timeout=60_000, retry_options=once)
    asked: Any = {
        "model": "gemini-x",
        "contents": ASKED,
        "config": {"tools": GOOGLE_TOOLS, "thinking_config": {"include_thoughts": True}},
    }
    client = genai.Client(api_key=key, vertexai=False, http_options=options)

    def told(reply: types.GenerateContentResponse) -> None:
        for candidate in reply.candidates or ():
            for part in (candidate.content.parts if candidate.content is not None else None) or ():
                if part.function_call is not None:
                    harness.whole(part.function_call.id, part.function_call.name, part.function_call.args)
            harness.ended = harness.ended or candidate.finish_reason is not None

    try:
        if not stream:
            told(await client.aio.models.generate_content(**asked))
            return
        async for piece in await client.aio.models.generate_content_stream(**asked):
            told(piece)
    finally:
        client.close()
        await client.aio.aclose()


CLIENTS = {"chat": chat, "anthropic": messages, "responses": responses, "google": google}


async def asked_of(dialect: str, url: str, key: str, *, stream: bool) -> Harness:
    """A client's call, to its end or to the proxy's."""
    harness = Harness()
    try:
        await CLIENTS[dialect](url, key, stream, harness)
    except BREAKS:
        pass
    except Exception as error:
        if not broke_off(error):
            raise
    return harness


def broke_off(error: Exception) -> bool:
    """Whether an error is of httpx's transport: versions of the clients let it through, under one of its names."""
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
