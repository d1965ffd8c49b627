"""Whatever is sent to whatever path: an answer, and never an error of the proxy's own making.

Requests are drawn for every route that the application has, so a new one is tried without being named here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from polar.devmodel import Script
from polar.proxy.app import Routes
from polar.proxy.dialects.anthropic import FIELDS as ANTHROPIC
from polar.proxy.dialects.google import FIELDS as GOOGLE
from polar.proxy.dialects.openai_chat import FIELDS as CHAT
from polar.proxy.dialects.responses import FIELDS as RESPONSES
from tests.proxy.harness import Door, captured, one_call
from tests.proxy.kill_harness import proxies

pytestmark = pytest.mark.timeout(300)
Start = Callable[..., Any]
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
TYPES = ("application/json", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x", "")
GENERATING = (
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1beta/models/m:generateContent",
    "/v1beta/models/m:streamGenerateContent",
    "/v1beta/models/m:countTokens",
)
BODY_BYTES = 200 * 1024 * 1024
OURS = (b"internal_error", b"The proxy failed")


class Asked(NamedTuple):
    """A drawn request."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]


# what is drawn ------------------------------------------------------------------------------------------------------

WORDS = (
    *("text", "type", "role", "user", "assistant", "system", "tool", "model", "function", "name", "content", "parts"),
    *("tool_use", "tool_result", "thinking", "signature", "input", "output", "arguments", "id", "call_id", "image"),
    *("function_call", "functionCall", "args", "inlineData", "mimeType", "data", "image_url", "url", "schema", "enum"),
    *("message", "reasoning", "encrypted_content", "item_reference", "json_schema", "object", "string", "parameters"),
)
FIELDS = sorted(
    {one.path for fields in (ANTHROPIC, CHAT, GOOGLE, RESPONSES) for one in fields if one.path.isidentifier()}
)
NUMBERS = st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 2**80, -(2**70), 0.5, 1e308, -1e-300])
TEXTS = st.sampled_from([*WORDS, "", " ", "\x00", "\u2028", "🙂", "\ud800", "x" * 3000, "data:image/png;base64,AAAA"])
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)
PLAUSIBLE: Sequence[dict[str, Any]] = (
    {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]},
    {"model": "m", "input": "hi"},
    {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
)
OBJECTS = st.builds(
    lambda base, more: base | more,
    st.sampled_from(PLAUSIBLE),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
).map(lambda value: json.dumps(value).encode())
"""Of these, escapes of half a character may be part."""
BROKEN = st.sampled_from(
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b"\xff\xfe\x00",
        b'{"model": "\xc3\x28", "messages": []}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"model": "m", "model": 1, "messages": 1e999}',
        b'{"model": "m", "input": ' + b"9" * 6000 + b"}",
        b'{"contents": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"model": "m", "messages": ' + b'[{"content":' * 3_000 + b"1" + b"}]" * 3_000 + b"}",
        b'{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": '
        + b'[{"type": "tool_result", "tool_use_id": "1", "content": ' * 900
        + b'"x"'
        + b"}]" * 900
        + b"}]}",
    ]
)
BODIES = OBJECTS | OBJECTS | OBJECTS | BROKEN | st.binary(max_size=40)
SEGMENTS = st.sampled_from(
    ["v1", "v1beta", "models", "messages", "s", "..", "%2e%2e", "%00", "%ff", "%", "a%2Fb", ":x", "~"]
)


def requests_to(routes: Sequence[tuple[str, str]], key: str) -> st.SearchStrategy[Asked]:
    """Requests to routes, by their own methods mostly, and to paths nearby."""

    def filled(path: str, model: str) -> str:
        named = path.replace("{key}", key)
        for name in ("model", "response", "rest"):
            named = named.replace(f"{{{name}}}", model)
        return named

    known = st.builds(
        lambda route, model, other: (other or route[0], filled(route[1], model)),
        st.sampled_from(routes),
        st.sampled_from(["m", "models/x", "resp_1", quote("é/🙂"), "%ff", "a:b", "x" * 2000, ":generateContent"]),
        st.none() | st.none() | st.sampled_from(METHODS),
    )
    odd = st.tuples(st.sampled_from(METHODS), st.lists(SEGMENTS, max_size=5).map(lambda parts: "/" + "/".join(parts)))
    headers = st.fixed_dictionaries(
        {"Content-Type": st.sampled_from(TYPES)},
        optional={
            "anthropic-version": st.just("2023-06-01"),
            "x-goog-api-key": st.sampled_from([key, "nonsense"]),
            "x-api-key": st.sampled_from([key, "nonsense"]),
            "Content-Encoding": st.sampled_from(["identity", "gzip", "sparkle"]),
            "Upgrade": st.just("websocket"),
        },
    )
    query = st.sampled_from(["", "", "?alt=sse", "?alt=%ff", "?beta=true", "?key=x&key=y", "?%"])
    return st.builds(
        lambda way, query, body, headers, known: Asked(
            way[0], way[1] + query, body, headers | ({"Authorization": f"Bearer {key}"} if known else {})
        ),
        known | known | odd,
        query,
        BODIES,
        headers,
        st.sampled_from([True, True, True, False]),
    )


@pytest.fixture
def applications(monkeypatch: pytest.MonkeyPatch) -> list[web.Application]:
    """The applications that are made."""
    made: list[web.Application] = []
    original = Routes.application

    def application(self: Routes, *given: Any, **named: Any) -> web.Application:
        made.append(original(self, *given, **named))
        return made[-1]

    monkeypatch.setattr(Routes, "application", application)
    return made


def routes_of(application: web.Application) -> list[tuple[str, str]]:
    found = {
        (route.method, route.resource.canonical) for route in application.router.routes() if route.resource is not None
    }
    assert {path for _, path in found} >= {"/v1/messages", "/s/{key}/v1/chat/completions", "/health"}
    return sorted(found)


# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["live", "synthetic"])
async def test_no_request_to_any_route_makes_the_proxy_fail(
    mode: str, applications: list[web.Application], engine_of: Start, door_to: Start
) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")), stream_mode=mode)
    routes = routes_of(applications[0])
    drawn: list[Asked] = []

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(requests_to(routes, door.key()), min_size=4, max_size=6))
    def draw(requests: list[Asked]) -> None:
        drawn.extend(requests)

    await asyncio.to_thread(draw)
    statuses: set[int] = set()
    # a body that cannot be decoded, and that nobody reads, ends its connection once it was answered
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, skip_auto_headers=["Content-Type"]) as http:
        for asked in drawn:
            url = URL(door.url + asked.path, encoded=True)
            async with http.request(asked.method, url, data=asked.body, headers=asked.headers) as response:
                told = await response.read()
            statuses.add(response.status)
            assert response.status < 500, (asked, told)
            assert not any(mark in told for mark in OURS), (asked, told)
            if response.status >= 400 and told:
                assert "error" in json.loads(told), (asked, told)
        async with http.get(f"{door.url}/health") as response:
            assert response.status == 200
    assert statuses >= {200, 400, 404, 405}
    records = await door.settled()
    assert len({one.completion_id for one in records}) * 2 == len(records), "every call has a beginning and one end"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused_and_the_next_request_answered(
    sent: bytes, engine_of: Start, door_to: Start
) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    reader, writer = await asyncio.open_connection("127.0.0.1", door.service.port)
    writer.write(sent)
    writer.write_eof()
    async with asyncio.timeout(30):
        told = await reader.read()
    writer.close()
    assert not told or told.split()[1].startswith(b"4"), told[:200]
    async with aiohttp.ClientSession() as http, http.get(f"{door.url}/health") as response:
        assert response.status == 200
    assert await door.settled() == []


@pytest.mark.parametrize("declared", [True, False])
async def test_200_mb_are_refused_in_bounded_memory_and_nothing_is_generated(
    declared: bool, engine_of: Start, door_to: Start, bus_settings: Any
) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)  # for keys and the log
    async with proxies(bus_settings, engine.base_url, ahead=0) as some:
        victim = await some.next()
        before = _peak(victim.pid)
        for path in GENERATING:
            status, body = await _pour(victim.port, path, door.key(), declared=declared)
            assert status == 413, path
            assert "error" in json.loads(body), path
        assert _peak(victim.pid) - before < BODY_BYTES // 2
    assert engine.stats.started == 0
    assert await door.records() == []


async def test_a_call_after_all_that_is_as_ever(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")), max_body_bytes=1000)
    for path in GENERATING:
        status, _ = await _pour(door.service.port, path, door.key(), declared=True)
        assert status == 413
    async with door.client() as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    records = await door.settled()
    assert captured(records) == one_call(records)


def _peak(pid: int) -> int:
    """The most memory that a process has held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


async def _pour(port: int, path: str, key: str, *, declared: bool) -> tuple[int, bytes]:
    """Send a body of 200 MB until there is an answer; its status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    framing = f"Content-Length: {BODY_BYTES}" if declared else "Transfer-Encoding: chunked"
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{framing}\r\n\r\n".encode())
    piece = b'{"x": "' + b"y" * 65_529
    framed = piece if declared else f"{len(piece):x}\r\n".encode() + piece + b"\r\n"

    async def pour() -> None:
        for _ in range(BODY_BYTES // len(piece)):
            writer.write(framed)
            await writer.drain()

    pouring = asyncio.create_task(pour())
    try:
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
            body = await reader.readexactly(int(lengths[0].split(b":")[1]))
    finally:
        pouring.cancel()
        await asyncio.gather(pouring, return_exceptions=True)
        writer.close()
    return int(head.split()[1]), body
