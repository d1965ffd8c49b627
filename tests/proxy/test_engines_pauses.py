"""Pauses for new weights, asked for here or made by somebody else, and who may ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest

from polar.devmodel import Reply, Rule, Script
from polar.proxy.engine import cache_salt
from polar.proxy.upstreams.trainers import key_of_installation
from polar.schemas import CompletionCaptured
from tests.proxy.engines_harness import DIALECTS, QUICK, asked, refusal_of, sample, upstream_of
from tests.proxy.harness import SECRET, Door, captured, failed
from tests.proxy.test_calls import MODES, USER
from tests.proxy.test_engines import gated, in_flight
from tests.proxy.test_told import until

Start = Callable[..., Any]
OPERATOR = key_of_installation(SECRET)
HALF = Script([Rule(replies=[Reply(text="It is sunny in Paris.", gate="go", gate_after=2)])])


async def trainer(door: Door, path: str = "", *, key: str = OPERATOR, **body: Any) -> tuple[int, Any]:
    """Status and body of a trainer's request."""
    url, headers = f"{door.url}/polar/v1/engines{path}", {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        request = http.post(url, json=body) if path else http.get(url)
        async with request as response:
            return response.status, await response.json()


async def state(door: Door) -> dict[str, Any]:
    """Of its only engine."""
    _, told = await trainer(door)
    (one,) = told["engines"]
    assert isinstance(one, dict)
    return one


async def opened(door: Door, session: str = "s1", *, stream: bool) -> tuple[Any, asyncio.Task[Any]]:
    """A call that has its first tokens, as far as its client can see them: its stream, and the rest of it."""
    client = await door.closing.enter_async_context(door.client(session))
    call = client.chat.completions.create(model="m", messages=USER, stream=stream)  # type: ignore[call-overload]
    if not stream:
        return None, asyncio.ensure_future(call)
    answer = await call
    seen = []
    async for chunk in answer:
        seen.append(chunk)
        if len(seen) == 3:
            break

    async def rest() -> None:
        async for chunk in answer:
            seen.append(chunk)

    return seen, asyncio.ensure_future(rest())


async def test_drain_lets_calls_end_holds_new_ones_and_resume_reads_the_version_anew(
    engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(gated())
    door: Door = await door_to(engine)
    line = upstream_of(door, engine.base_url).line
    running = in_flight(door, "running")
    await engine.until(lambda stats: stats.running == 1)

    status, told = await trainer(door, "/pause", mode="drain", within_s=0.1)
    assert (status, told["error"]["code"]) == (504, "calls_still_run")
    draining = asyncio.create_task(trainer(door, "/pause", mode="drain"))
    waiting = in_flight(door, "waiting", stream=True)
    await until(lambda: line.sizes == (1, 1))
    engine.open("go")
    await running
    status, told = await draining
    assert (status, told["engines"][0]["calls"], told["engines"][0]["paused"]) == (200, 0, "drain")
    assert (line.sizes, engine.stats.started) == ((0, 1), 1)
    assert sample(door, "polar_proxy_engine_paused", engine=engine.base_url) == 1

    engine.lifecycle.version = "step-2"
    status, told = await trainer(door, "/resume")
    assert (status, told["engines"][0]["weight_version"], told["engines"][0]["paused"]) == (200, "step-2", None)
    await waiting
    for session, version in (("running", "default"), ("waiting", "step-2")):
        (span,) = captured(await door.settled(session)).choices[0].spans
        assert (span.version, span.exact) == (version, True)
    assert [call.body["cache_salt"] for call in engine.calls] == [
        cache_salt("default", version) for version in ("default", "step-2")
    ]


@pytest.mark.parametrize("dev_mode", [True, False])
@pytest.mark.parametrize("mode", [*MODES, "whole"])
async def test_abort_ends_calls_at_once_and_keeps_what_they_have(
    mode: str, dev_mode: bool, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(HALF, dev_mode=dev_mode)
    door: Door = await door_to(engine, stream_mode="live" if mode == "whole" else mode, **QUICK)
    stream = mode != "whole"
    if mode == "live":
        seen, call = await opened(door, stream=True)
    else:
        seen, call = [], in_flight(door, stream=stream)
        await engine.until(lambda stats: stats.running == 1)
    status, told = await trainer(door, "/pause", mode="abort", within_s=20)
    assert (status, told["engines"][0]["calls"]) == (200, 0)
    assert engine.lifecycle.paused == dev_mode
    with pytest.raises(openai.APIError) as raised:
        await call
    assert raised.value.code == "engine_unavailable"
    if mode != "live":
        assert isinstance(raised.value, openai.APIStatusError)
        assert (raised.value.status_code, float(raised.value.response.headers["retry-after"])) == (503, 1.0)
    assert not any(choice.finish_reason for chunk in seen for choice in chunk.choices)
    records = await door.settled()
    if dev_mode or mode == "live":
        record = captured(records)
        assert (record.complete, len(record.choices[0].ids)) == (False, 2)
        assert record.choices[0].finish == ("abort" if dev_mode else None)
    else:
        # nothing of an unstreamed answer is told before its end
        assert failed(records).http_status == 503

    waiting = in_flight(door, "next")
    await until(lambda: upstream_of(door, engine.base_url).line.sizes == (0, 1))
    engine.open("go")
    assert (await trainer(door, "/resume"))[0] == 200
    assert not engine.lifecycle.paused
    await waiting
    assert captured(await door.settled("next")).complete


async def test_a_call_that_outlives_the_engines_abort_is_cut_here(
    engine_of: Start, door_to: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polar.proxy.upstreams.pausing.ABORT_GRACE_S", 0.2)
    # it hangs in the engine before its first token, as calls do in vLLM 0.32 that come after the pause
    engine = await engine_of(gated())
    door: Door = await door_to(engine)
    call = in_flight(door)
    await engine.until(lambda stats: stats.running == 1)
    assert (await trainer(door, "/pause", mode="abort"))[0] == 200
    with pytest.raises(openai.APIStatusError) as raised:
        await call
    assert (raised.value.status_code, raised.value.response.headers["retry-after"]) == (503, "1")
    assert failed(await door.settled()).failure.retryable
    engine.open("go")
    assert (await trainer(door, "/resume"))[0] == 200
    assert not engine.lifecycle.paused
    await asked(door, "chat")


async def test_replicas_see_each_others_aborts(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(HALF)
    one, two = [await door_to(engine, **QUICK) for _ in range(2)]
    call = in_flight(two, "theirs")
    await engine.until(lambda stats: stats.running == 1)
    assert (await trainer(one, "/pause", mode="abort"))[0] == 200
    with pytest.raises(openai.APIStatusError) as raised:
        await call
    assert raised.value.status_code == 503
    theirs = upstream_of(two, engine.base_url)
    await until(lambda: theirs.is_paused)
    call = in_flight(two, "waits")
    await until(lambda: theirs.line.sizes == (0, 1))
    engine.open("go")
    assert (await trainer(one, "/resume"))[0] == 200
    await call


async def test_keep_freezes_calls_which_go_on_with_both_versions_in_their_spans(
    engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(HALF)
    door: Door = await door_to(engine)
    _, call = await opened(door, stream=True)
    status, told = await trainer(door, "/pause", mode="keep")
    assert (status, told["engines"][0]["paused"], told["engines"][0]["calls"]) == (200, "keep", 1)
    engine.open("go")
    engine.lifecycle.version = "step-2"
    assert (await trainer(door, "/resume"))[0] == 200
    await call
    record = captured(await door.settled())
    assert record.complete
    spans = record.choices[0].spans
    assert [span.version for span in spans] == ["default", "step-2"]
    assert (spans[0].start, spans[-1].end) == (0, len(record.choices[0].ids))


async def test_keep_is_refused_where_the_engine_cannot(engine_of: Start, door_to: Start) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes."), dev_mode=False))
    status, told = await trainer(door, "/pause", mode="keep")
    assert (status, told["error"]["code"]) == (409, "cannot_keep")
    await asked(door, "chat")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_pause_that_lasts_is_told_in_every_dialect(dialect: str, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine, engine_wait=0.2)
    assert (await trainer(door, "/pause"))[0] == 200
    status, body, headers = await refusal_of(door, dialect)
    assert status == (529 if dialect == "anthropic" else 503)
    assert "paused for new weights" in body
    assert float(headers["retry-after"]) > 0
    assert failed(await door.settled()).failure.retryable
    assert sample(door, "polar_proxy_engine_refused_total", reason="paused") == 1
    await trainer(door, "/resume")
    await asked(door, dialect)


@pytest.mark.parametrize("refuses", [False, True])
async def test_somebody_elses_pause_is_waited_for(refuses: bool, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."), refuse_when_paused=refuses)
    door: Door = await door_to(engine, **(QUICK if not refuses else {"engine_probe_every": 30}))
    upstream = upstream_of(door, engine.base_url)
    await asked(door, "chat", "first")
    await engine.lifecycle.pause("wait")
    if not refuses:
        # vLLM 0.32 lets calls hang: the proxy sees the pause at its next look
        await until(lambda: upstream.is_paused)
        assert (await state(door))["paused"] == "engine"
    # vLLM 0.33 refuses, and the proxy looks why
    call = in_flight(door)
    await until(lambda: upstream.line.sizes == (0, 1))
    assert engine.stats.started == 1
    engine.lifecycle.resume()
    if refuses:
        assert (await trainer(door, "/resume"))[0] == 200
    await call
    assert captured(await door.settled()).complete


async def test_calls_caught_in_somebody_elses_pause_end_after_the_longest_silence(
    engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(HALF)
    door: Door = await door_to(engine, engine_silence=0.5, **QUICK)
    call = in_flight(door)
    await engine.until(lambda stats: stats.running == 1)
    await engine.lifecycle.pause("keep")
    with pytest.raises(openai.APIStatusError) as raised:
        await call
    assert (raised.value.status_code, raised.value.code) == (504, "engine_timeout")
    assert "paused" in raised.value.message
    assert failed(await door.settled()).http_status == 504
    engine.lifecycle.resume()


async def test_a_pause_of_one_engine_leaves_the_others_alone(engine_of: Start, door_to: Start) -> None:
    engines = [await engine_of(Script.say("Yes.")) for _ in range(2)]
    door: Door = await door_to(",".join(one.base_url for one in engines))
    status, told = await trainer(door, "/pause", endpoints=[engines[0].url])
    assert (status, [one["endpoint"] for one in told["engines"]]) == (200, [engines[0].base_url])
    calls = [in_flight(door, f"s{number}") for number in range(8)]
    theirs = upstream_of(door, engines[0].base_url)
    await until(lambda: theirs.line.sizes[1] + engines[1].stats.finished == 8)
    assert (engines[0].stats.started, theirs.line.sizes[1] > 0, engines[1].stats.finished > 0) == (0, True, True)
    await trainer(door, "/resume", endpoints=[engines[0].base_url])
    await asyncio.gather(*calls)


async def test_the_routes_take_the_operators_key_only(engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script.say("Yes."))
    door: Door = await door_to(engine, operator_key="the operator's own")
    for key in (door.key(), SECRET, "nonsense", ""):
        for path in ("", "/pause", "/resume"):
            status, told = await trainer(door, path, key=key)
            assert (status, told["error"]["code"]) == (401, "invalid_api_key")
    status, told = await trainer(door, key="the operator's own")
    (one,) = told["engines"]
    assert status == 200
    await until(lambda: upstream_of(door, engine.base_url).endpoint.engine is not None)
    _, told = await trainer(door, key="the operator's own")
    (one,) = told["engines"]
    assert one == {
        "endpoint": engine.base_url,
        "model": "*",
        "kind": "vllm",
        "served": "scripted",
        "build": "vllm 0.32.0",
        "logprobs_mode": "processed_logprobs",
        "usable": True,
        "reason": None,
        "paused": None,
        "calls": 0,
        "waiting": 0,
        "weight_version": "default",
    }


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/pause", {"mode": "gently"}, 400),
        ("/pause", {"within_s": 0}, 400),
        ("/pause", {"within_s": "long"}, 400),
        ("/pause", {"modes": "drain"}, 400),
        ("/pause", {"endpoints": ["http://nobody/v1"]}, 404),
        ("/resume", {"endpoints": "all"}, 400),
        ("/resume", {"mode": "drain"}, 400),
    ],
)
async def test_a_request_that_is_wrong_changes_nothing(
    path: str, body: dict[str, Any], status: int, engine_of: Start, door_to: Start
) -> None:
    door: Door = await door_to(await engine_of(Script.say("Yes.")))
    assert (await trainer(door, path, **body))[0] == status
    assert (await state(door))["paused"] is None
    await asked(door, "chat")
    assert isinstance((await door.settled())[-1], CompletionCaptured)
