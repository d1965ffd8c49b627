"""The dialect anthropic.messages: every refusal in its shape, and routes that never generate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import anthropic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.devmodel import Failure, Reply, Rule, Script
from polar.schemas import ControlState, FailureKind
from polar.service.clock import SystemClock
from tests.proxy.anthropic_harness import TOOLS, USER, client, fields, post
from tests.proxy.harness import Door, captured, failed
from tests.proxy.test_anthropic_requests import NAMES, NEARLY
from tests.proxy.test_failures import DAMAGES

pytestmark = pytest.mark.filterwarnings("error")
Start = Callable[..., Any]


async def refused(door: Door, *, key: str | None = None, **changes: Any) -> anthropic.APIStatusError:
    async with client(door, key=key) as asking:
        with pytest.raises(anthropic.APIStatusError) as raised:
            await asking.messages.create(**fields(**changes))
    check_shape(raised.value.response.status_code, raised.value.response.json(), raised.value.response.headers)
    return raised.value


def check_shape(status: int, body: Any, headers: Any) -> None:
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["message"]
    assert headers["request-id"] == body["request_id"]
    assert status >= 400


ENGINE_ERRORS = {
    "broken": (Failure(status=500), 502, "api_error", "true"),
    "refuses": (Failure(status=400, param="body.x", message="bad x"), 400, "invalid_request_error", None),
    "full": (Failure(status=503, headers={"Retry-After": "3"}), 529, "overloaded_error", "true"),
    "its key": (Failure(status=401), 502, "api_error", "true"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ENGINE_ERRORS)
async def test_an_engines_error_has_the_providers_status(
    name: str, stream: bool, engine_of: Start, door_to: Start
) -> None:
    error, status, kind, retry = ENGINE_ERRORS[name]
    door: Door = await door_to(await engine_of(Script([Rule(replies=[Reply(error=error)])])))
    told = await refused(door, stream=stream)
    assert (told.status_code, told.type) == (status, kind)
    assert told.response.headers.get("x-should-retry") == retry
    if name == "full":
        assert told.response.headers["retry-after"] == "3"
    end = failed(await door.settled())
    assert (end.failure.kind, end.http_status) == (FailureKind.PROVIDER, status)
    assert told.response.headers["request-id"] == end.completion_id


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_told_by_its_length(stream: bool, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes."), max_model_len=64))
    long: Any = [{"role": "user", "content": "word " * 200}]
    async with client(door) as asking:
        count = (await asking.messages.count_tokens(model="m", messages=long)).input_tokens
    told = await refused(door, messages=long, stream=stream)
    assert (told.status_code, told.type) == (400, "invalid_request_error")
    assert told.response.json()["error"]["message"] == f"prompt is too long: {count} tokens > 64 maximum"
    assert failed(await door.settled()).http_status == 400


async def test_max_tokens_beyond_the_model_are_refused_in_its_words(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes."), max_model_len=512))
    told = await refused(door, max_tokens=9000)
    assert told.status_code == 400
    assert told.response.json()["error"]["message"].startswith("max_tokens: 9000 > 512, which is the maximum")


async def test_an_engine_that_is_down_is_overload(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    await engine.__aexit__(None, None, None)
    told = await refused(door)
    assert (told.status_code, told.type) == (529, "overloaded_error")
    assert float(told.response.headers["retry-after"]) > 0
    async with client(door) as asking:
        with pytest.raises(anthropic.APIStatusError) as raised:
            await asking.messages.count_tokens(model="m", messages=USER)
    assert raised.value.status_code == 529


async def test_a_full_proxy_is_overload(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Yes.", gate="go")])]))
    door: Door = await door_to(engine, max_concurrent=1, retry_after=7)
    free = door.service.slots.take()
    told = await refused(door)
    assert (told.status_code, told.type) == (529, "overloaded_error")
    assert told.response.headers["retry-after"] == "7"
    free()


@pytest.mark.parametrize("damage", DAMAGES[:3])
async def test_an_answer_that_is_not_token_exact_is_refused(damage: str, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script([Rule(replies=[Reply(text="Sunny.", damage=damage)])])))
    told = await refused(door)
    assert (told.status_code, told.type) == (502, "api_error")
    assert told.response.headers["x-should-retry"] == "false"


KEYS: dict[str, tuple[Any, int, str]] = {
    "none": (lambda door: "-", 401, "authentication_error"),
    "expired": (lambda door: door.key(not_after_ms=SystemClock().now_ms() - 1), 401, "authentication_error"),
    "forged": (lambda door: door.key()[:-4] + "AAAA", 401, "authentication_error"),
}


@pytest.mark.parametrize("name", KEYS)
async def test_a_key_that_admits_nothing(name: str, engine_of: Start, door_to: Start) -> None:
    make, status, kind = KEYS[name]
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    told = await refused(door, key=make(door))
    assert (told.status_code, told.type) == (status, kind)
    assert told.response.headers["x-should-retry"] == "false"
    assert await door.settled() == []


@pytest.mark.parametrize(
    ("state", "status", "kind"),
    [(ControlState.CLOSED, 401, "authentication_error"), (ControlState.FENCED, 409, "conflict_error")],
)
async def test_a_session_that_is_over(
    state: ControlState, status: int, kind: str, engine_of: Start, door_to: Start
) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    await door.control("s1", state)
    told = await refused(door)
    assert (told.status_code, told.type) == (status, kind)


async def test_bad_bodies_are_answered_and_nothing_is_generated(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine, max_body_bytes=100_000)
    bodies: list[tuple[bytes, int, str]] = [
        (b"", 400, "invalid_request_error"),
        (b"{", 400, "invalid_request_error"),
        (b"\xff\xfe", 400, "invalid_request_error"),
        (b'{"model": "m"}', 400, "invalid_request_error"),
        (b"x" * 200_000, 413, "request_too_large"),
        (json.dumps(fields(top_k=2**80)).encode(), 400, "invalid_request_error"),
        (
            json.dumps(fields(tools=[{**TOOLS[0], "input_schema": {"maximum": 2**80}}])).encode(),
            400,
            "invalid_request_error",
        ),
    ]
    headers = {"x-api-key": door.key()}
    async with aiohttp.ClientSession(headers=headers) as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            for body, status, kind in bodies:
                if path.endswith("count_tokens") and b"12089258196146291747061" in body:
                    continue  # a record could not hold it; a count can
                async with http.post(door.url + path, data=body) as response:
                    told = await response.json()
                    check_shape(response.status, told, response.headers)
                    assert (response.status, told["error"]["type"]) == (status, kind), body[:50]
    assert engine.stats.started == 0
    assert await door.settled() == []


async def test_what_is_not_a_generation_never_generates(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    key = f"/s/{door.key()}"
    taken = [
        ("HEAD", "/api/hello", 200),
        ("GET", "/api/hello", 200),
        ("HEAD", f"{key}/api/hello", 200),
        ("POST", "/api/event_logging/batch", 204),
        ("POST", f"{key}/api/event_logging/v2/batch", 204),
        ("POST", "/api/claude_code/metrics", 204),
        ("POST", "/api/claude_cli_feedback", 204),
    ]
    none = [
        ("POST", "/v1/messages/batches", 404),
        ("GET", "/v1/messages/batches/x", 404),
        ("POST", "/v1/messages/", 404),
        ("POST", f"{key}/v1/messages/other", 404),
        ("GET", "/v1/messages", 405),
        ("GET", "/api/claude_code/settings", 404),
        ("POST", "/api/hello", 405),
        ("POST", "/v1/complete", 404),
    ]
    async with aiohttp.ClientSession(headers={"anthropic-version": "2023-06-01"}) as http:
        for method, path, status in taken:
            async with http.request(method, door.url + path, json={"events": []} if method == "POST" else None) as got:
                assert got.status == status, path
        for method, path, status in none:
            async with http.request(method, door.url + path, json={"messages": USER}) as got:
                assert got.status == status, path
                check_shape(got.status, await got.json(), got.headers)
    assert engine.stats.started == 0
    assert await door.settled() == []


async def test_marks_of_the_client_are_on_the_record(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    marks = {"X-Claude-Code-Session-Id": "abc", "x-claude-code-agent-id": "sub-1", "anthropic-beta": "x"}
    async with client(door) as asking:
        await asking.messages.create(**fields(), extra_headers=marks)
    told = captured(await door.settled()).hints
    assert (told.session, told.subagent, told.parent, told.request_kind) == ("abc", "sub-1", None, None)


async def test_any_version_header_will_do(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    async with aiohttp.ClientSession() as http:
        async with http.post(
            f"{door.url}/v1/messages", json=fields(), headers={"Authorization": f"Bearer {door.key()}"}
        ) as response:
            assert response.status == 200
        async with post(door, http, path="/v1/messages?beta=true") as response:
            assert response.status == 200


async def test_no_request_makes_the_proxy_fail(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    parts = NEARLY | st.lists(st.dictionaries(NAMES, NEARLY, max_size=6), max_size=3)
    names = ["messages", "system", "tools", "tool_choice", "thinking", "metadata", "output_config", "stop_sequences"]

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(
        bodies=st.lists(st.dictionaries(st.sampled_from(names), parts), min_size=1, max_size=5), stream=st.booleans()
    )
    def ask(bodies: list[dict[str, Any]], stream: bool) -> None:
        drawn.extend((body, stream) for body in bodies)

    drawn: list[tuple[dict[str, Any], bool]] = []
    ask()
    statuses = set()
    async with aiohttp.ClientSession() as http:
        for i, (body, stream) in enumerate(drawn):
            path = "/v1/messages" if i % 2 else "/v1/messages/count_tokens"
            async with post(door, http, path=path, stream=stream, **body) as response:
                told = await response.read()
                statuses.add(response.status)
                if response.status != 200:
                    check_shape(response.status, json.loads(told), response.headers)
                assert b'"type":"error"' not in told or response.status == 400, body
    assert statuses <= {200, 400}
    assert statuses == {200, 400}
