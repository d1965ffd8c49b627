"""An engine that is all timetable, for `benchmarks/proxy.py`: vLLM 0.32's streamed chat answers, made beforehand.

    python benchmarks/proxy_stub.py --port PORT [--first 0.5] [--over 2.0]

A call says in its last message what it wants, `bench-<prompt tokens>-<tokens>-<number>;`, and gets
the first token `first` seconds after it came and the others evenly `over` seconds more: one chunk a token, with ids and
log-probabilities where it asked for them, as vLLM would. What is due together is written together. `GET /times` tells
when each call came, and when its first token and its end were written (CLOCK_MONOTONIC, which all processes of a
machine share), and forgets them. Nothing is parsed but the head and the mark, so that it takes some microseconds a
token; it is no HTTP server for anything else.
"""

import argparse
import asyncio
import json
import random
import re
import resource
import time
from typing import Any, cast

import uvloop

MODEL = "policy"
FIRST, WORDS, LAST = "alpha", (" the", " of", " answer", " model", ",", " that", " token", " is"), " omega"
"""The texts of the tokens: a client knows by them which is the first one and which the last."""
MARK = re.compile(rb"bench-(\d+)-(\d+)-(\d+);")
HEAD = {"id": "chatcmpl-0f3a9c51d2e84b67", "object": "chat.completion.chunk", "created": 1_795_286_055, "model": MODEL}
STREAMS = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
MOST_TOKENS = 2_000


def framed(value: Any) -> bytes:
    """A server-sent event as a chunk of HTTP."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


class Chunks:
    """What is written, made once. `rich`: with ids and log-probabilities."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, bool], tuple[bytes, list[bytes]]] = {}

    def of(self, prompt: int, tokens: int, rich: bool) -> tuple[bytes, list[bytes]]:
        """The first chunk, and one for each token."""
        key = (prompt, tokens, rich)
        if key not in self._made:
            self._made[key] = self._begin(prompt, rich), [self._token(i, tokens, rich) for i in range(tokens)]
        return self._made[key]

    def _begin(self, prompt: int, rich: bool) -> bytes:
        ids = [random.Random(place).randrange(49_152) for place in range(prompt)] if rich else None
        delta = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return framed({**HEAD, "choices": [delta], "prompt_token_ids": ids, "prompt_text": None})

    def _token(self, place: int, tokens: int, rich: bool) -> bytes:
        last = place == tokens - 1
        text = LAST if last and place else FIRST if place == 0 else WORDS[place % len(WORDS)]
        chance = random.Random(place)
        entry = {"token": text, "logprob": -chance.expovariate(2.0), "bytes": list(text.encode()), "top_logprobs": []}
        choice: dict[str, Any] = {
            "index": 0,
            "delta": {"content": text},
            "logprobs": {"content": [entry]} if rich else None,
            "finish_reason": "stop" if last else None,
        }
        choice |= {"stop_reason": None} if last else {}
        choice["token_ids"] = [chance.randrange(49_152)] if rich else None
        return framed({**HEAD, "choices": [choice]})

    def end(self, prompt: int, tokens: int, usage: bool) -> bytes:
        counts = {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}
        counted = {**HEAD, "choices": [], "usage": counts, "system_fingerprint": "vllm-0.32.0-stub"}
        return (framed(counted) if usage else b"") + framed("[DONE]") + b"0\r\n\r\n"


def one_token() -> Any:
    """The whole answer to a call without a mark: a proxy's question whether the engine tells what it needs."""
    entry = {"token": FIRST, "logprob": -0.5, "bytes": list(FIRST.encode())}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": FIRST},
        "logprobs": {"content": [entry | {"top_logprobs": [entry]}]},
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [1],
    }
    usage = {"prompt_tokens": 4, "total_tokens": 5, "completion_tokens": 1}
    return {**HEAD, "object": "chat.completion", "choices": [choice], "usage": usage, "prompt_token_ids": [1, 2, 3, 4]}


class Engine:
    """What its connections share."""

    def __init__(self, first: float, over: float) -> None:
        self.first = first
        self.over = over
        self.chunks = Chunks()
        self.times: list[tuple[int, float, float, float]] = []
        """Per call that ended: number, came, first token written, end written."""

    def answer(self, path: bytes) -> bytes:
        match path:
            case b"/v1/models":
                model = {"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 131_072}
                told: Any = {"object": "list", "data": [model]}
            case b"/version":
                told = {"version": "0.32.0"}
            case b"/weight_info":
                told = {"weight_version": "default"}
            case b"/times":
                told, self.times = self.times, []
            case b"/v1/chat/completions":
                told = one_token()
            case _:
                told = None
        body = json.dumps(told).encode()
        status = b"404 Not Found" if told is None else b"200 OK"
        return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
            status,
            len(body),
            body,
        )


class Connection(asyncio.Protocol):
    """One connection; one request at a time, as all clients here do."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._got = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, _: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._got += data
        end = self._got.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._got[:end])
        length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
        size = end + 4 + (int(length[1]) if length else 0)
        if len(self._got) < size:
            return
        body = bytes(self._got[end + 4 : size])
        del self._got[:size]
        if head.startswith(b"POST"):
            self._begin(body)
        else:
            self._transport.write(self._engine.answer(head.split(b" ", 2)[1]))

    def _begin(self, body: bytes) -> None:
        mark = MARK.search(body, max(body.rfind(b"bench-"), 0))
        if mark is None:
            self._transport.write(self._engine.answer(b"/v1/chat/completions"))
            return
        self._came = time.monotonic()
        prompt, tokens, self._number = (int(one) for one in mark.groups())
        tokens = min(max(tokens, 1), MOST_TOKENS)
        compact = body.replace(b" ", b"")
        self._start, self._chunks = self._engine.chunks.of(prompt, tokens, b'"return_token_ids":true' in compact)
        self._end = self._engine.chunks.end(prompt, tokens, b'"include_usage":true' in compact)
        self._told = 0
        self._each = self._engine.over / tokens
        self._zero = self._loop.time() + self._engine.first
        self._timer = self._loop.call_at(self._zero, self._due)

    def _due(self) -> None:
        """Write the tokens whose time has come."""
        began, chunks = self._told, self._chunks
        # a timer may fire a moment early: the one it was set for is due
        told = min(max(int((self._loop.time() - self._zero) / self._each) + 1, began + 1), len(chunks))
        self._told = told
        data = b"".join(chunks[began:told])
        if began == 0:
            data = STREAMS + self._start + data
            self._first = time.monotonic()
        if told < len(chunks):
            self._transport.write(data)
            self._timer = self._loop.call_at(self._zero + told * self._each, self._due)
            return
        self._timer = None
        self._engine.times.append((self._number, self._came, self._first, time.monotonic()))
        self._transport.write(data + self._end)


async def serve(engine: Engine, port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=1_024)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="An engine of precomputed chunks on a timetable.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first", type=float, default=0.5, help="seconds until the first token")
    parser.add_argument("--over", type=float, default=2.0, help="seconds for all tokens")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(serve(Engine(options.first, options.over), options.port))


if __name__ == "__main__":
    main()
