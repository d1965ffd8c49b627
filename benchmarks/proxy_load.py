"""The clients of `benchmarks/proxy.py`: so many open streamed calls at a time, and when each was told what.

    python benchmarks/proxy_load.py < PLAN > RESULT

A plan and a result are JSON (`Plan`, `Result`). Raw sockets on uvloop, one connection a client, and nothing parsed but
the two texts that are looked for, so that a token costs some microseconds here and the machine is left to what is
measured. A call that fails, or that ends without its last token, is counted as failed. Times are CLOCK_MONOTONIC, which
all processes of a machine share.
"""

import asyncio
import resource
import sys
import time
from typing import Any, cast

import msgspec
import uvloop

FIRST, LAST = b"alph", b"omeg"
"""Of the first token and of the last one, `alpha` and `omega`: one dialect keeps the last character of a text back."""
END = b"\r\n0\r\n\r\n"
LONGEST_S = 180.0
"""A call that takes longer fails."""
TURN_BYTES = 1_000
WORDS = "the file was read and its tests were run again before anything else in it could be changed by hand "


class Plan(msgspec.Struct, kw_only=True):
    """What to do."""

    port: int
    dialect: str
    keys: list[str]
    """One each client: its session's key. There are as many clients as keys."""
    calls: int
    """Of all clients together."""
    number: int
    """Of the first call; the others follow."""
    prompt_bytes: int
    prompt_tokens: int
    tokens: int
    spread_s: float
    """The clients begin evenly over so long, since those of real agents do not call at once."""


class Result(msgspec.Struct, kw_only=True):
    """What came of it. Seconds on the monotonic clock."""

    calls: list[tuple[int, float, float, float]]
    """Number, sent, first token told, ended."""
    failures: list[str]
    began: float
    ended: float
    cpu_s: float
    """What this process spent."""


def turns(size: int) -> list[dict[str, str]]:
    """A conversation of `size` bytes of text, in turns of about a kilobyte."""
    texts = [(WORDS * (size // len(WORDS) + 1))[at : min(at + TURN_BYTES, size)] for at in range(0, size, TURN_BYTES)]
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


def request(plan: Plan, key: str, number: int) -> bytes:
    """One request, as it goes over the wire."""
    mark = f"bench-{plan.prompt_tokens}-{plan.tokens}-{number};"
    history = turns(plan.prompt_bytes)
    if history[-1]["role"] == "user":
        history[-1]["content"] += mark
    else:
        history.append({"role": "user", "content": mark})
    path, body = "/v1/chat/completions", cast(dict[str, Any], {"model": "policy", "stream": True})
    match plan.dialect:
        case "openai.chat":
            body |= {"messages": history, "max_completion_tokens": plan.tokens}
        case "anthropic.messages":
            path = "/v1/messages"
            body |= {"messages": history, "max_tokens": plan.tokens}
        case "openai.responses":
            path = "/v1/responses"
            body |= {"input": history, "max_output_tokens": plan.tokens, "store": False}
        case "google":
            path = "/v1beta/models/policy:streamGenerateContent?alt=sse"
            roles = {"user": "user", "assistant": "model"}
            contents = [{"role": roles[one["role"]], "parts": [{"text": one["content"]}]} for one in history]
            body = {"contents": contents, "generationConfig": {"maxOutputTokens": plan.tokens}}
        case unknown:
            raise ValueError(f"no dialect {unknown}")
    data = msgspec.json.encode(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{plan.port}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Client(asyncio.Protocol):
    """One client; its calls follow one another on one connection, which is made anew where the other side closes it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[str] | None = None
        self._rest = b""
        self._first = 0.0
        self._last = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        self._over("the connection was closed")

    def data_received(self, data: bytes) -> None:
        seen = self._rest + data
        if not self._first:
            if not seen.startswith(b"HTTP/1.1 200"):
                self._over(seen[:300].decode(errors="replace"))
                return
            if FIRST in seen:
                self._first = time.monotonic()
            else:
                self._rest = seen
                return
        if not self._last and LAST in seen:
            self._last = True
        self._rest = seen[-16:]
        if seen.endswith(END):
            self._over("" if self._last else "the reply ended early")

    def _over(self, failure: str) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(failure)

    async def call(self, port: int, data: bytes) -> tuple[str, float, float, float]:
        """What failed, or empty; when it was sent, its first token was told, and it ended."""
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():
            await loop.create_connection(lambda: self, "127.0.0.1", port)
        assert self._transport is not None
        self._rest, self._first, self._last = b"", 0.0, False
        self._waiting = loop.create_future()
        sent = time.monotonic()
        self._transport.write(data)
        try:
            async with asyncio.timeout(LONGEST_S):
                failure = await self._waiting
        except TimeoutError:
            failure = f"no end after {LONGEST_S:g} s"
        ended = time.monotonic()
        if failure and self._transport is not None:
            self._transport.abort()
        return failure, sent, self._first, ended

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def load(plan: Plan) -> Result:
    result = Result(calls=[], failures=[], began=time.monotonic(), ended=0.0, cpu_s=0.0)
    numbers = iter(range(plan.number, plan.number + plan.calls))

    async def client(place: int, key: str) -> None:
        await asyncio.sleep(plan.spread_s * place / len(plan.keys))
        one = Client()
        for number in numbers:
            failure, sent, first, ended = await one.call(plan.port, request(plan, key, number))
            if failure:
                result.failures.append(failure)
            else:
                result.calls.append((number, sent, first, ended))
        one.close()

    async with asyncio.TaskGroup() as group:
        for place, key in enumerate(plan.keys):
            group.create_task(client(place, key))
    result.ended, result.cpu_s = time.monotonic(), time.process_time()
    return result


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(load(plan))))


if __name__ == "__main__":
    main()
