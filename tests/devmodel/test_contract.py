"""What every engine promises its callers, on the scripted engine, the CPU model and real vLLM alike."""

import asyncio
import json
import re
from typing import Any

import pytest

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a client makes of a stream's choice."""
    ids: list[int] = []
    logprobs: list[float] = []
    content, finish, stop = "", None, None
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            content += choice["delta"].get("content") or ""
            ids += choice.get("token_ids") or []
            logprobs += [entry["logprob"] for entry in (choice["logprobs"] or {"content": []})["content"]]
            if choice["finish_reason"]:
                finish, stop = choice["finish_reason"], choice["stop_reason"]
    return {"content": content, "ids": ids, "logprobs": logprobs, "finish": finish, "stop": stop}


async def test_answer_has_exactly_vllms_fields(engine):
    answer = await engine.chat()
    assert set(answer) == {
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
        *("prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics"),
    }
    (choice,) = answer["choices"]
    assert set(choice) == {
        *("index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"),
    }
    assert set(choice["message"]) == {
        *("role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"),
    }
    assert set(choice["logprobs"]["content"][0]) == {"token", "logprob", "bytes", "top_logprobs"}
    assert answer["id"].startswith("chatcmpl-")


async def test_every_id_has_its_log_probability(engine):
    answer = await engine.chat(temperature=1, seed=4)
    (choice,) = answer["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"] > 0
    assert all(-100 < entry["logprob"] <= 0 for entry in entries)


async def test_stream_tells_the_same_as_the_whole_answer(engine):
    whole = await engine.chat()
    (choice,) = whole["choices"]
    told = joined(await engine.stream())
    assert told["ids"] == choice["token_ids"]
    assert told["content"] == choice["message"]["content"]
    assert told["finish"] == choice["finish_reason"]
    assert told["logprobs"] == pytest.approx([entry["logprob"] for entry in choice["logprobs"]["content"]], abs=1e-3)


async def test_first_chunk_carries_the_prompt_and_the_others_their_ids(engine):
    first, *rest = await engine.stream()
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["prompt_token_ids"]
    assert "token_ids" not in first["choices"][0]
    for chunk in rest:
        (choice,) = chunk["choices"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) > 0
        assert "prompt_token_ids" not in chunk


async def test_usage_comes_in_a_last_chunk_only_when_asked(engine):
    assert not any("usage" in chunk for chunk in await engine.stream())
    *chunks, last = await engine.stream(stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(joined(chunks)["ids"])
    assert last["usage"]["prompt_tokens"] == len(chunks[0]["prompt_token_ids"])


async def test_ids_are_null_unless_asked(engine):
    answer = await engine.chat(return_token_ids=False, logprobs=False, top_logprobs=None)
    assert answer["prompt_token_ids"] is None
    assert answer["choices"][0]["token_ids"] is None
    assert answer["choices"][0]["logprobs"] is None


async def test_tokenize_counts_the_prompt_that_the_engine_sees(engine):
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "seen"},
    ]
    answer = await engine.chat(messages=history, tools=TOOLS, max_tokens=1)
    status, counted = await engine.post("/tokenize", {"model": engine.model, "messages": history, "tools": TOOLS})
    assert status == 200
    assert counted["tokens"] == answer["prompt_token_ids"]
    assert counted["count"] == len(counted["tokens"]) == answer["usage"]["prompt_tokens"]
    status, text = await engine.post("/detokenize", {"model": engine.model, "tokens": counted["tokens"]})
    assert "one\ntwo" in text["prompt"]
    assert '{"name": "look", "arguments": {"a": 1}}' in text["prompt"]
    assert text["prompt"].endswith("<|im_start|>assistant\n")


async def test_text_is_cut_before_a_stop_string_but_its_ids_stay(engine):
    free = (await engine.chat())["choices"][0]
    text = free["message"]["content"]
    stop = text[3:7]
    at = text.index(stop)
    for answer in (
        (await engine.chat(stop=["never this", stop]))["choices"][0],
        (await engine.chat(stop=stop))["choices"][0],
    ):
        assert answer["message"]["content"] == text[:at]
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)
        assert answer["token_ids"] == free["token_ids"][: len(answer["token_ids"])]
        assert len(answer["token_ids"]) == len(answer["logprobs"]["content"])
    told = joined(await engine.stream(stop=[stop]))
    assert told["content"] == text[:at]
    assert (told["finish"], told["stop"]) == ("stop", stop)
    kept = (await engine.chat(stop=[stop], include_stop_str_in_output=True))["choices"][0]
    assert kept["message"]["content"] == text[: at + len(stop)]


async def test_a_stop_token_ends_the_turn_and_is_told(engine):
    free = (await engine.chat())["choices"][0]["token_ids"]
    wanted = free[3]
    answer = (await engine.chat(stop_token_ids=[wanted]))["choices"][0]
    assert answer["token_ids"] == free[: free.index(wanted) + 1]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", wanted)


async def test_max_tokens_ends_with_length(engine):
    answer = (await engine.chat(max_tokens=3))["choices"][0]
    assert (len(answer["token_ids"]), answer["finish_reason"], answer["stop_reason"]) == (3, "length", None)
    newer = (await engine.chat(max_tokens=9, max_completion_tokens=2))["choices"][0]
    assert len(newer["token_ids"]) == 2


async def test_end_of_turn_token_is_sampled_told_and_not_shown(engine):
    bias = {} if engine.kind == "scripted" else {"logit_bias": {"2": 100}}
    answer = (await engine.chat(max_tokens=64, **bias))["choices"][0]
    assert (answer["token_ids"][-1], answer["finish_reason"], answer["stop_reason"]) == (2, "stop", None)
    assert answer["logprobs"]["content"][-1]["token"] == "<|im_end|>"
    assert "<|im_end|>" not in answer["message"]["content"]


async def test_log_probability_entries_name_the_text_they_complete(engine):
    entries = (await engine.chat(max_tokens=64))["choices"][0]["logprobs"]["content"]
    text = "".join(entry["token"] for entry in entries).removesuffix("<|im_end|>")
    assert text == (await engine.chat(max_tokens=64))["choices"][0]["message"]["content"]
    assert all(entry["bytes"] == list(entry["token"].encode()) for entry in entries)


async def test_top_log_probabilities_start_with_the_sampled_token(engine):
    answer = (await engine.chat(temperature=1, seed=7, top_logprobs=3, max_tokens=4))["choices"][0]
    for entry in answer["logprobs"]["content"]:
        top = entry["top_logprobs"]
        assert [top[0]["token"], top[0]["logprob"]] == [entry["token"], entry["logprob"]]
        others = [other["logprob"] for other in top[1:]]
        assert len(top) == 3
        assert others == sorted(others, reverse=True)


async def test_choices_have_seeds_of_their_own(engine):
    first = await engine.chat(n=3, seed=11, temperature=1.5)
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in first["choices"]}) > 1
    chunks = await engine.stream(n=2, seed=11, temperature=1.5)
    assert all(joined(chunks, index)["finish"] for index in (0, 1))


async def test_models_names_the_model_and_its_length(engine):
    assert (await engine.get("/health"))[0] == 200
    status, text = await engine.get("/v1/models")
    (model,) = json.loads(text)["data"]
    _, counted = await engine.post("/tokenize", {"model": engine.model, "prompt": "hi"})
    assert (status, model["id"], model["max_model_len"]) == (200, engine.model, counted["max_model_len"])


REFUSED = [
    ({"temperature": -1}, "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)"),
    ({"top_p": 2}, "top_p must be in (0, 1], got 2.0. (parameter=top_p, value=2.0)"),
    ({"top_k": -3}, "top_k must be 0 (disable), or at least 1, got -3."),
    ({"min_p": 3}, "min_p must be in [0, 1], got 3.0."),
    ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0."),
    ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero, got 0.0."),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"),
    ({"min_tokens": 99}, "min_tokens must be less than or equal to max_tokens=24, got 99."),
    ({"n": 0}, "n must be at least 1, got 0."),
    ({"n": 2}, "n must be 1 when using greedy sampling, got 2."),
    ({"stop": ""}, "stop cannot contain an empty string."),
    (
        {"stream_options": {"include_usage": True}},
        "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
    ),
    (
        {"logprobs": False, "top_logprobs": 2},
        "when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)",
    ),
    (
        {"top_logprobs": 25},
        "Requested sample logprobs of 25, which is greater than max allowed: 20 (parameter=logprobs, value=25)",
    ),
    ({"tool_choice": "auto"}, "When using `tool_choice`, `tools` must be set. (parameter=tool_choice)"),
    (
        {"logit_bias": {"a": 1}},
        "logit_bias contains key(s) that cannot be converted to integer token IDs: ['a'] "
        "(parameter=logit_bias, value=['a'])",
    ),
    ({"messages": []}, "Cannot apply chat template to an empty conversation. Provide at least one message."),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[" ".join(fields) for fields, _ in REFUSED])
async def test_bad_values_are_refused_in_vllms_words(engine, fields, message):
    status, answer = await engine.post("/v1/chat/completions", engine.body(**fields))
    named = re.search(r"\(parameter=(\w+)", message)
    param = named.group(1) if named else None
    assert (status, answer) == (
        400,
        {"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}},
    )


async def test_bad_types_are_refused_all_at_once(engine):
    status, answer = await engine.post("/v1/chat/completions", engine.body(max_tokens="a", temperature="b"))
    assert status == 400
    error = answer["error"]
    assert (error["type"], error["param"], error["code"]) == ("Bad Request", "body.max_tokens", 400)
    assert error["message"].startswith("2 validation errors:\n  {'type': 'int_parsing', 'loc': 'body.max_tokens'")
    assert "'loc': 'body.temperature'" in error["message"]


async def test_broken_json_is_refused(engine):
    async with engine.http.post(
        f"{engine.url}/v1/chat/completions", data=b"{bad", headers={"Content-Type": "application/json"}
    ) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["type"], error["param"]) == (400, "Bad Request", "body.1")


async def test_unknown_model_and_route_are_404(engine):
    status, answer = await engine.post("/v1/chat/completions", engine.body(model="nope"))
    assert (status, answer["error"]["type"], answer["error"]["param"]) == (404, "NotFoundError", "model")
    assert answer["error"]["message"] == f"The model `nope` does not exist. Valid aliases: {engine.model}."
    assert await engine.post("/nope", {}) == (404, {"detail": "Not Found"})


@pytest.mark.parametrize("streamed", [False, True])
async def test_prompt_that_is_too_long_is_a_400_before_any_stream(engine, streamed):
    status, models = await engine.post("/tokenize", {"model": engine.model, "prompt": "hi"})
    limit = models["max_model_len"]
    text = "word " * (limit + 10)
    status, answer = await engine.post("/v1/chat/completions", engine.body(text, stream=streamed))
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "input_tokens", 400)
    assert answer["error"]["message"].startswith(f"This model's maximum context length is {limit} tokens.")
    status, answer = await engine.post("/v1/chat/completions", engine.body(max_tokens=limit + 1))
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


async def test_a_client_that_leaves_ends_its_generation(engine):
    if engine.kind == "scripted":
        pytest.skip("its answers are short; test_scripted.py holds one open instead")
    body = engine.body("Count to a thousand.", stream=True, max_tokens=4000, ignore_eos=True)
    async with engine.http.post(f"{engine.url}/v1/chat/completions", json=body) as answer:
        await answer.content.readline()
        assert await running(engine) >= 1
    # by itself it would run for minutes
    for _ in range(400):
        if not await running(engine):
            return
        await asyncio.sleep(0.05)
    pytest.fail("the generation went on without its client")


async def running(engine) -> float:
    _, text = await engine.get("/metrics")
    found = re.search(r"^vllm:num_requests_running\{.*\} ([\d.]+)$", text, re.MULTILINE)
    assert found
    return float(found.group(1))


async def test_token_in_token_out_samples_as_chat_does(engine):
    if engine.kind == "scripted":
        pytest.skip("a script answers messages")
    chat = (await engine.chat(max_tokens=8))["choices"][0]
    prompt = (await engine.chat(max_tokens=1))["prompt_token_ids"]
    sampling = {"max_tokens": 8, "temperature": 0, "logprobs": 0}
    status, answer = await engine.post(
        "/inference/v1/generate", {"model": engine.model, "token_ids": prompt, "sampling_params": sampling}
    )
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["token_ids"] == chat["token_ids"]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 8}]
