"""The dialect openai.responses: every refusal in its shape, and routes that never generate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.devmodel import Failure, Reply, Rule, Script
from polar.schemas import ControlState, FailureKind
from polar.service.clock import SystemClock
from tests.proxy.harness import Door, failed
from tests.proxy.responses_harness import FUNCTION, USER, fields, post
from tests.proxy.test_failures import DAMAGES
from tests.proxy.test_responses_requests import FIELDS, NAMES, NEARLY

pytestmark = pytest.mark.filterwarnings("error")
Start = Callable[..., Any]


async def refused(door: Door, *, key: str | None = None, **changes: Any) -> openai.APIStatusError:
    async with door.client(key=key) as asking:
        with pytest.raises(openai.APIStatusError) as raised:
            await asking.responses.create(**fields(**changes))
    check_shape(raised.value.response.json(), raised.value.response.headers)
    return raised.value


def check_shape(body: Any, headers: Any) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert headers["x-request-id"]


ENGINE_ERRORS = {
    "broken": (Failure(status=500), 502, "server_error", "true"),
    "refuses": (Failure(status=400, param="body.x", message="bad x"), 400, "invalid_request_error", None),
    "full": (Failure(status=503, headers={"Retry-After": "3"}), 503, "server_error", "true"),
    "its key": (Failure(status=401), 502, "server_error", "true"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ENGINE_ERRORS)
async def test_an_engines_error_has_a_true_status(name: str, stream: bool, engine_of: Start, door_to: Start) -> None:
    error, status, kind, retry = ENGINE_ERRORS[name]
    door: Door = await door_to(await engine_of(Script([Rule(replies=[Reply(error=error)])])))
    told = await refused(door, stream=stream)
    assert (told.status_code, told.type) == (status, kind)
    assert told.response.headers.get("x-should-retry") == retry
    if name == "full":
        assert told.response.headers["retry-after"] == "3"
    end = failed(await door.settled())
    assert (end.failure.kind, end.http_status) == (FailureKind.PROVIDER, status)
    assert told.response.headers["x-request-id"] == end.completion_id


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_told_as_such(stream: bool, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes."), max_model_len=64))
    told = await refused(door, input="word " * 200, stream=stream)
    assert (told.status_code, told.type, told.code) == (400, "invalid_request_error", "context_length_exceeded")
    assert told.param == "input"
    assert failed(await door.settled()).http_status == 400


async def test_an_engine_that_is_down_is_overload(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    await engine.__aexit__(None, None, None)
    told = await refused(door)
    assert told.status_code == 503
    assert float(told.response.headers["retry-after"]) > 0


async def test_a_full_proxy_is_overload(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")), max_concurrent=1, retry_after=7)
    free = door.service.slots.take()
    told = await refused(door)
    assert (told.status_code, told.response.headers["retry-after"]) == (503, "7")
    free()


@pytest.mark.parametrize("damage", DAMAGES[:3])
async def test_an_answer_that_is_not_token_exact_is_refused(damage: str, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script([Rule(replies=[Reply(text="Sunny.", damage=damage)])])))
    told = await refused(door)
    assert (told.status_code, told.response.headers["x-should-retry"]) == (502, "false")


KEYS: dict[str, Any] = {
    "none": lambda door: "-",
    "expired": lambda door: door.key(not_after_ms=SystemClock().now_ms() - 1),
    "forged": lambda door: door.key()[:-4] + "AAAA",
}


@pytest.mark.parametrize("name", KEYS)
async def test_a_key_that_admits_nothing(name: str, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    told = await refused(door, key=KEYS[name](door))
    assert (told.status_code, told.code) == (401, "invalid_api_key")
    assert await door.settled() == []


@pytest.mark.parametrize(("state", "status"), [(ControlState.CLOSED, 401), (ControlState.FENCED, 409)])
async def test_a_session_that_is_over(state: ControlState, status: int, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    await door.control("s1", state)
    assert (await refused(door)).status_code == status


async def test_bad_bodies_are_answered_and_nothing_is_generated(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine, max_body_bytes=100_000)
    huge = json.dumps(fields(tools=[{**FUNCTION, "parameters": {"maximum": 2**80}}])).encode()
    bodies: list[tuple[bytes, int]] = [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"model": "m"}', 400),
        (json.dumps(fields(background=True)).encode(), 400),
        (json.dumps(fields(previous_response_id="resp_x")).encode(), 400),
        (b"x" * 200_000, 413),
        (huge, 400),
    ]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {door.key()}"}) as http:
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            for body, status in bodies:
                if path.endswith("input_tokens") and body == huge:
                    continue  # a record could not hold it; a count can
                async with http.post(door.url + path, data=body) as response:
                    check_shape(await response.json(), response.headers)
                    assert response.status == status, body[:50]
    assert engine.stats.started == 0
    assert await door.settled() == []


async def test_what_is_not_a_generation_never_generates(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    key = f"/s/{door.key()}"
    none = [
        ("GET", f"{key}/v1/responses/resp_none", 404),
        ("GET", "/v1/responses/resp_none", 401),
        ("GET", "/v1/responses", 405),
        ("GET", f"{key}/v1/responses", 405),
        ("DELETE", f"{key}/v1/responses/resp_none", 405),
        ("POST", f"{key}/v1/responses/resp_none/cancel", 404),
        ("POST", f"{key}/v1/responses/compact", 405),
        ("GET", f"{key}/v1/responses/resp_none/input_items", 404),
        ("POST", f"{key}/v1/responses/", 404),
    ]
    async with aiohttp.ClientSession() as http:
        for method, path, status in none:
            async with http.request(method, door.url + path, json={"input": USER, "model": "m"}) as got:
                assert got.status == status, path
                check_shape(await got.json(), got.headers)
    assert engine.stats.started == 0
    assert await door.settled() == []


async def test_no_request_makes_the_proxy_fail(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    parts = NEARLY | st.lists(st.dictionaries(NAMES, NEARLY, max_size=6), max_size=3)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(
        bodies=st.lists(st.dictionaries(st.sampled_from(FIELDS), parts), min_size=1, max_size=5), stream=st.booleans()
    )
    def ask(bodies: list[dict[str, Any]], stream: bool) -> None:
        drawn.extend((body, stream) for body in bodies)

    drawn: list[tuple[dict[str, Any], bool]] = []
    ask()
    statuses = set()
    async with aiohttp.ClientSession() as http:
        for i, (body, stream) in enumerate(drawn):
            path = "/v1/responses" if i % 3 else "/v1/responses/input_tokens"
            async with post(door, http, path=path, stream=stream, **body) as response:
                told = await response.read()
                statuses.add(response.status)
                if response.status != 200:
                    check_shape(json.loads(told), response.headers)
                assert b"response.failed" not in told, body
    assert statuses <= {200, 400, 404}
    assert statuses >= {200, 400}
