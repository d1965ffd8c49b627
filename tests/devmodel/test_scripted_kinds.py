"""What the scripted engine can be besides vLLM in development mode."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from polar.devmodel import Reply, Script, ScriptedEngine

BODY = {"messages": [{"role": "user", "content": "Hello."}], "logprobs": True}


async def answer(
    engine: ScriptedEngine, path: str = "/v1/chat/completions", identity: str = "a", **fields: Any
) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(engine.url + path, json=BODY | fields, headers={"X-Request-Id": identity}) as response,
    ):
        return response.status, await response.json()


async def test_a_probe_is_answered_aside_from_script_and_counts() -> None:
    async with ScriptedEngine(Script.say("First.", "Second."), probe=Reply(text="Probed.")) as engine:
        texts = []
        for identity in ("polar-self-test", "a", "polar-self-test", "b"):
            _, body = await answer(engine, identity=identity)
            texts.append(body["choices"][0]["message"]["content"])
        assert texts == ["Probed.", "First.", "Probed.", "Second."]
        assert ([call.id for call in engine.calls], engine.stats.started, engine.stats.finished) == (["a", "b"], 2, 2)
        assert engine.scripted.probed == 2


async def test_without_a_reply_to_probes_they_are_as_any_other() -> None:
    async with ScriptedEngine(Script.say("First."), probe=None) as engine:
        _, body = await answer(engine, identity="polar-self-test")
        assert body["choices"][0]["message"]["content"] == "First."
        assert engine.stats.started == 1


async def test_out_of_development_mode_there_are_no_lifecycle_routes() -> None:
    async with ScriptedEngine(dev_mode=False) as engine:
        assert (await answer(engine, "/pause"))[0] == 404
        assert (await answer(engine))[0] == 200


async def test_sglang_tells_ids_beside_their_log_probabilities() -> None:
    async with ScriptedEngine(Script.say("Yes."), kind="sglang") as engine:
        _, body = await answer(engine, return_meta_info=True, return_prompt_token_ids=True)
        (choice,) = body["choices"]
        truth = engine.calls[0]
        assert choice["prompt_token_ids"] == truth.prompt_ids
        told = choice["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in told] == truth.ids[0]
        assert [logprob for logprob, _, _ in told] == truth.logprobs[0]
        _, body = await answer(engine)
        assert not {"meta_info", "prompt_token_ids", "token_ids"} & set(body["choices"][0])


@pytest.mark.parametrize("path", ["/pause", "/resume", "/inference/v1/generate"])
async def test_sglang_has_not_vllms_routes(path: str) -> None:
    async with ScriptedEngine(kind="sglang") as engine:
        assert (await answer(engine, path))[0] == 404


async def test_sglang_refuses_ids_of_a_stream_in_its_own_shape() -> None:
    async with ScriptedEngine(kind="sglang") as engine:
        status, body = await answer(engine, stream=True, return_prompt_token_ids=True)
        assert (status, body["object"], body["code"]) == (400, "error", 400)
