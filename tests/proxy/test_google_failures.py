"""The dialect google.generate_content: every refusal in its shape, and routes that never generate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from google.genai.errors import APIError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.devmodel import Failure, Reply, Rule, Script
from polar.schemas import ControlState, FailureKind
from polar.service.clock import SystemClock
from tests.proxy.google_harness import ARRAY, CLEAN, MODEL, SSE, TEXT, TOOLS, USER, client, fields, post
from tests.proxy.harness import Door, captured, failed
from tests.proxy.test_failures import DAMAGES
from tests.proxy.test_google_requests import BODIES

pytestmark = CLEAN
Start = Callable[..., Any]
GENERATE = "generateContent"


async def refused(
    door: Door, *, action: str = GENERATE, key: str | None = None, **changes: Any
) -> tuple[int, dict[str, Any], Any]:
    """Status, error and headers of an answer that is a refusal."""
    headers = {"x-goog-api-key": door.key() if key is None else key}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{door.url}/v1beta/models/{MODEL}:{action}", json=fields(**changes)) as response,
    ):
        body = await response.json()
        check_shape(response.status, body, response.headers)
        return response.status, body["error"], response.headers


def check_shape(status: int, body: Any, headers: Any) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) - {"details"} == {"code", "message", "status"}
    assert body["error"]["code"] == status >= 400
    assert body["error"]["message"]
    assert body["error"]["status"].isupper()
    assert headers["X-Request-Id"]


ENGINE_ERRORS = {
    "broken": (Failure(status=500), 500, "INTERNAL", "true"),
    "refuses": (Failure(status=400, param="body.x", message="bad x"), 400, "INVALID_ARGUMENT", None),
    "full": (Failure(status=503, headers={"Retry-After": "3"}), 503, "UNAVAILABLE", "true"),
    "its key": (Failure(status=401), 500, "INTERNAL", "true"),
}


@pytest.mark.parametrize("action", [GENERATE, SSE, ARRAY])
@pytest.mark.parametrize("name", ENGINE_ERRORS)
async def test_an_engines_error_has_the_providers_status(
    name: str, action: str, engine_of: Start, door_to: Start
) -> None:
    failure, code, status, retry = ENGINE_ERRORS[name]
    door: Door = await door_to(await engine_of(Script([Rule(replies=[Reply(error=failure)])])))
    told, error, headers = await refused(door, action=action)
    assert (told, error["status"], headers.get("X-Should-Retry")) == (code, status, retry)
    if name == "full":
        assert headers["Retry-After"] == "3"
        assert error["details"] == [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "3s"}]
    end = failed(await door.settled())
    assert (end.failure.kind, end.http_status) == (FailureKind.PROVIDER, code)
    assert headers["X-Request-Id"] == end.completion_id


@pytest.mark.parametrize("action", [GENERATE, SSE])
async def test_a_prompt_that_is_too_long_is_told_by_its_length(action: str, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes."), max_model_len=64))
    long = "word " * 200
    count = (await client(door).aio.models.count_tokens(model=MODEL, contents=long)).total_tokens
    code, error, _ = await refused(door, action=action, contents=[{"role": "user", "parts": [{"text": long}]}])
    assert (code, error["status"]) == (400, "INVALID_ARGUMENT")
    assert error["message"] == f"The input token count ({count}) exceeds the maximum number of tokens allowed (64)."
    assert failed(await door.settled()).http_status == 400


async def test_max_tokens_beyond_the_model_are_refused_in_its_words(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes."), max_model_len=512))
    code, error, _ = await refused(door, generationConfig={"maxOutputTokens": 9000})
    assert code == 400
    assert "maxOutputTokens value of 9000" in error["message"]


async def test_an_engine_that_is_down_is_unavailable(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    await engine.__aexit__(None, None, None)
    for action in (GENERATE, "countTokens"):
        code, error, headers = await refused(door, action=action)
        assert (code, error["status"]) == (503, "UNAVAILABLE")
        assert float(headers["Retry-After"]) > 0


async def test_a_full_proxy_is_unavailable(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")), max_concurrent=1, retry_after=7)
    free = door.service.slots.take()
    code, error, headers = await refused(door)
    assert (code, error["details"][0]["retryDelay"], headers["Retry-After"]) == (503, "7s", "7")
    free()


@pytest.mark.parametrize("damage", DAMAGES[:3])
async def test_an_answer_that_is_not_token_exact_is_refused(damage: str, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script([Rule(replies=[Reply(text="Sunny.", damage=damage)])])))
    code, error, headers = await refused(door)
    assert (code, error["status"], headers["X-Should-Retry"]) == (500, "INTERNAL", "false")


KEYS: dict[str, Any] = {
    "none": lambda door: "",
    "expired": lambda door: door.key(not_after_ms=SystemClock().now_ms() - 1),
    "forged": lambda door: door.key()[:-4] + "AAAA",
}


@pytest.mark.parametrize("name", KEYS)
async def test_a_key_that_admits_nothing(name: str, engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    code, error, headers = await refused(door, key=KEYS[name](door))
    assert (code, error["status"], headers["X-Should-Retry"]) == (401, "UNAUTHENTICATED", "false")
    with pytest.raises(APIError) as raised:
        await client(door, key=KEYS[name](door) or "-").aio.models.generate_content(model=MODEL, contents=TEXT)
    assert (raised.value.code, raised.value.status) == (401, "UNAUTHENTICATED")
    assert await door.settled() == []


@pytest.mark.parametrize(
    ("state", "code", "status"), [(ControlState.CLOSED, 401, "UNAUTHENTICATED"), (ControlState.FENCED, 409, "ABORTED")]
)
async def test_a_session_that_is_over(
    state: ControlState, code: int, status: str, engine_of: Start, door_to: Start
) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    await door.control("s1", state)
    told, error, _ = await refused(door)
    assert (told, error["status"]) == (code, status)


async def test_bad_bodies_are_answered_and_nothing_is_generated(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine, max_body_bytes=100_000)
    big = {"functionDeclarations": [{"name": "x", "parametersJsonSchema": {"maximum": 2**80}}]}
    bodies: list[tuple[bytes, int]] = [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"{}", 400),
        (b"x" * 200_000, 413),
        (json.dumps(fields(generationConfig={"topK": 2**80})).encode(), 400),
        (json.dumps(fields(tools=[big])).encode(), 400),
    ]
    async with aiohttp.ClientSession(headers={"x-goog-api-key": door.key()}) as http:
        for action in (GENERATE, SSE, "countTokens"):
            for body, status in bodies:
                if action == "countTokens" and b"12089258196146291747061" in body:
                    continue  # a record could not hold it; a count can
                async with http.post(f"{door.url}/v1beta/models/{MODEL}:{action}", data=body) as response:
                    check_shape(response.status, await response.json(), response.headers)
                    assert response.status == status, body[:50]
    assert engine.stats.started == 0
    assert await door.settled() == []


async def test_what_is_not_a_generation_never_generates(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    key = f"/s/{door.key()}"
    none = [
        ("POST", f"/v1beta/models/{MODEL}:embedContent"),
        ("POST", f"/v1beta/models/{MODEL}:batchEmbedContents"),
        ("POST", f"{key}/v1/models/{MODEL}:predict"),
        ("POST", f"/v1beta/models/{MODEL}"),
        ("POST", f"{key}/v1beta/models/:generateContent"),
        ("GET", f"/v1beta/tunedModels/{MODEL}"),
        ("POST", f"/v1beta/tunedModels/{MODEL}:generateContent"),
        ("POST", "/v1beta/cachedContents"),
        ("GET", f"{key}/v1beta/files"),
        ("POST", "/upload/v1beta/files"),
        ("POST", "/v1internal:loadCodeAssist"),
        ("POST", "/v1internal:recordCodeAssistMetrics"),
        ("DELETE", f"/v1beta/models/{MODEL}"),
        ("POST", "/v1beta/openai/chat/completions"),
    ]
    async with aiohttp.ClientSession() as http:
        for method, path in none:
            async with http.request(method, door.url + path, json={"contents": USER}) as got:
                assert got.status == 404, path
                check_shape(got.status, await got.json(), got.headers)
        # as any dialect's path, with Google's key in the header
        async with http.post(f"{door.url}/nowhere", headers={"x-goog-api-key": "k"}) as got:
            check_shape(404, await got.json(), got.headers)
        async with http.get(f"{door.url}/v1beta/models") as got:
            check_shape(401, await got.json(), got.headers)
    assert engine.stats.started == 0
    assert await door.settled() == []


async def test_a_request_that_has_only_a_providers_tools_is_refused(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine)
    code, error, _ = await refused(door, tools=[{"googleSearch": {}}])
    assert (code, error["status"]) == (400, "INVALID_ARGUMENT")
    assert "googleSearch" in error["message"]
    assert engine.stats.started == 0


async def test_fields_that_nobody_knows_are_counted(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    async with aiohttp.ClientSession() as http, post(door, http, sparkle=1, tools=TOOLS) as response:
        assert response.status == 200
    captured(await door.settled())
    labels = {"dialect": "google.generate_content"}
    assert door.service.registry.get_sample_value("polar_proxy_unknown_fields_total", labels) == 1


async def test_no_request_makes_the_proxy_fail(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    drawn: list[dict[str, Any]] = []

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(bodies=st.lists(BODIES, min_size=1, max_size=5))
    def ask(bodies: list[dict[str, Any]]) -> None:
        drawn.extend(bodies)

    ask()
    statuses = set()
    async with aiohttp.ClientSession() as http:
        for i, body in enumerate(drawn):
            action = (GENERATE, SSE, ARRAY, "countTokens")[i % 4]
            async with post(door, http, action, **body) as response:
                told = await response.read()
                statuses.add(response.status)
                if response.status != 200:
                    check_shape(response.status, json.loads(told), response.headers)
                assert b'"error"' not in told or response.status == 400, body
    assert statuses == {200, 400}
