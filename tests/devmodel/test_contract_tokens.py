"""Tokens in and out: render, generate and derender, on the scripted engine, the CPU model and real vLLM alike."""

from __future__ import annotations

from typing import Any

import pytest

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
HELLO = {"role": "user", "content": "Hello."}


async def rendered(engine: Any, **fields: Any) -> dict[str, Any]:
    status, answer = await engine.post("/v1/chat/completions/render", engine.body(**fields))
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


async def generated(engine: Any, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = await engine.post("/inference/v1/generate", body)
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


async def derendered(engine: Any, ids: list[int], **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": ids}
    response = {"request_id": "r", "prompt_token_ids": [1], "choices": [choice]}
    asked = {"model": engine.model, "messages": [HELLO], "return_token_ids": True, **fields}
    body = {"model": engine.model, "generate_response": response, "chat_request": asked}
    status, answer = await engine.post("/v1/chat/completions/derender", body)
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


async def ids_of(engine: Any, text: str) -> list[int]:
    _, answer = await engine.post("/tokenize", {"model": engine.model, "prompt": text, "add_special_tokens": False})
    return list(answer["tokens"])


async def test_render_gives_the_request_that_chat_generates_from(engine):
    asked = {"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "seed": 3, "cache_salt": "s", "max_tokens": 3}
    request = await rendered(engine, **asked)
    assert set(request) == {
        *("request_id", "token_ids", "token_offsets", "features", "content_parts", "sampling_params", "model"),
        *("reasoning_ended", "reasoning_parser_kwargs", "return_token_ids", "output_mode", "stream", "stream_options"),
        *("cache_salt", "priority", "kv_transfer_params", "ec_transfer_params"),
    }
    assert request["sampling_params"] == {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "seed": 3,
        "stop": [],
        "stop_token_ids": [],
        "max_tokens": 3,
        "logprobs": 0,
        "output_kind": 2,
        "skip_clone": True,
        "bad_words": [],
        "skip_reading_prefix_cache": False,
    }
    chat = await engine.chat(**asked)
    assert request["token_ids"] == chat["prompt_token_ids"]
    assert (request["output_mode"], request["cache_salt"], request["priority"]) == ("tokens", "s", 0)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"n": 2, "temperature": 1}, {"n": 2}),
        ({"stop": ["abc", "x"]}, {"stop": ["abc", "x"], "output_text_buffer_length": 2}),
        ({"stop_token_ids": [5, 4], "min_tokens": 2}, {"stop_token_ids": [4, 5], "min_tokens": 2}),
        ({"logit_bias": {"5": 1}}, {"logit_bias": {"5": 1.0}}),
        ({"tools": TOOLS}, {"skip_special_tokens": False}),
        ({"logprobs": False, "top_logprobs": None}, {}),
    ],
)
async def test_render_tells_how_the_request_samples(engine, fields, shown):
    params = (await rendered(engine, **fields))["sampling_params"]
    params["stop_token_ids"].sort()
    assert {name: params[name] for name in shown} == shown
    assert ("logprobs" in params) == (fields.get("logprobs") is not False)
    optional = {"n", "output_text_buffer_length", "min_tokens", "logit_bias", "skip_special_tokens"}
    assert {name for name in optional if name in params} == optional & set(shown)


async def test_a_history_is_rendered_up_to_its_reply(engine):
    messages = [HELLO, {"role": "assistant", "content": "Hello."}]
    history = (await rendered(engine, messages=messages, add_generation_prompt=False))["token_ids"]
    asked = (await rendered(engine, messages=messages[:1]))["token_ids"]
    whole = (await rendered(engine, messages=[*messages, HELLO]))["token_ids"]
    assert history[: len(asked)] == asked
    assert whole[: len(history)] == history
    assert history[len(asked) :] == [*await ids_of(engine, "Hello."), 2, *await ids_of(engine, "\n")]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"n": 0}, 400, None),
        ({"temperature": -1}, 400, "temperature"),
        ({"model": "nobody"}, 404, "model"),
    ],
)
async def test_render_refuses_what_chat_refuses(engine, fields, status, param):
    told, answer = await engine.post("/v1/chat/completions/render", engine.body(**fields))
    assert (told, answer["error"]["param"], answer["error"]["code"]) == (status, param, status)


async def test_render_refuses_a_prompt_longer_than_the_model(engine):
    _, counted = await engine.post("/tokenize", {"model": engine.model, "prompt": "hi"})
    messages = [{"role": "user", "content": "word " * (counted["max_model_len"] + 10)}]
    status, answer = await engine.post("/v1/chat/completions/render", engine.body(messages=messages))
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "input_tokens", 400)


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_generate_has_exactly_vllms_fields(engine, mode):
    request = await rendered(engine, max_tokens=3)
    answer = await generated(engine, {**request, "output_mode": mode, "return_token_ids": True})
    assert set(answer) == {
        *("request_id", "model", "created", "usage", "prompt_logprobs", "prompt_token_id_logprobs", "output_mode"),
        *("prompt_token_ids", "mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params", "choices"),
    }
    assert answer["prompt_token_ids"] == request["token_ids"]
    assert answer["output_mode"] == mode
    assert set(answer["usage"]) == {
        *("prompt_tokens", "total_tokens", "completion_tokens"),
        *("prompt_tokens_details", "completion_tokens_details"),
    }
    (choice,) = answer["choices"]
    assert set(choice) == {
        *("index", "finish_reason", "stop_reason", "token_ids", "routed_experts", "sampling_mask", "weight_versions"),
        *("logprobs", *(["text"] if mode == "text" else [])),
    }
    entry = choice["logprobs"]["content"][0]
    kind = {"token_id", "rank"} if mode == "tokens" else {"token", "bytes"}
    assert set(entry) == {"logprob", "top_logprobs", *kind}
    (top,) = entry["top_logprobs"]
    assert top == {name: entry[name] for name in ("logprob", *kind)}
    if mode == "tokens":
        assert [one["token_id"] for one in choice["logprobs"]["content"]] == choice["token_ids"]
        assert entry["rank"] >= 1


async def test_generate_samples_as_chat_does(engine):
    chat = await engine.chat(max_tokens=8, return_weight_versions=True)
    request = await rendered(engine, max_tokens=8)
    answer = await generated(engine, {**request, "output_mode": "text"})
    told, sampled = chat["choices"][0], answer["choices"][0]
    assert answer["prompt_token_ids"] is None
    if engine.kind != "scripted":  # whose replies are chosen by the rendered conversation, not by these tokens
        assert sampled["token_ids"] == told["token_ids"]
        assert sampled["text"] == told["message"]["content"]
        assert [one["token"] for one in sampled["logprobs"]["content"]] == [
            one["token"] for one in told["logprobs"]["content"]
        ]
    assert len(sampled["token_ids"]) == len(sampled["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    assert sampled["weight_versions"] == [{"version": "default", "start": 0, "end": len(sampled["token_ids"])}]


async def test_generate_gives_several_choices(engine):
    request = await rendered(engine, n=2, temperature=1.5, seed=5, max_tokens=6)
    answer = await generated(engine, request)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]


async def test_generated_text_ends_before_its_stop_string(engine):
    free = (await engine.chat())["choices"][0]
    text = free["message"]["content"]
    stop = text[3:7]
    request = await rendered(engine, stop=[stop])
    (choice,) = (await generated(engine, {**request, "output_mode": "text"}))["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"sampling_params": {}}, "body.token_ids", "Field required"),
        ({"token_ids": [1, 2]}, "body.sampling_params", "Field required"),
        ({"token_ids": [], "sampling_params": {}}, "body.token_ids", "List should have at least 1 item"),
        ({"token_ids": [2**30], "sampling_params": {}}, None, "Token id 1073741824 is out of vocabulary"),
    ],
)
async def test_generate_refuses(engine, body, param, message):
    status, answer = await engine.post("/inference/v1/generate", {"model": engine.model, **body})
    assert (status, answer["error"]["param"]) == (400, param)
    assert message in answer["error"]["message"]


async def test_generate_refuses_a_prompt_longer_than_the_model(engine):
    _, counted = await engine.post("/tokenize", {"model": engine.model, "prompt": "hi"})
    ids = [5] * (counted["max_model_len"] + 1)
    body = {"model": engine.model, "token_ids": ids, "sampling_params": {"max_tokens": 1}}
    status, answer = await engine.post("/inference/v1/generate", body)
    assert status == 400
    assert answer["error"]["message"].startswith(f"The decoder prompt (length {len(ids)}) is longer than the maximum")


async def test_derender_reads_ids_as_a_message(engine):
    ids = await ids_of(engine, "Hi there.")
    answer = await derendered(engine, ids)
    assert set(answer) == {
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
        *("prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics"),
    }
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "Hi there.",
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        },
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
        "routed_experts": None,
    }
    assert (await derendered(engine, ids, return_token_ids=False))["choices"][0]["token_ids"] is None


async def test_derender_shows_control_tokens(engine):
    # unlike chat: so whoever derenders leaves the end of turn out
    ids = [*await ids_of(engine, "Hi"), 2]
    assert (await derendered(engine, ids))["choices"][0]["message"]["content"] == "Hi<|im_end|>"


async def test_derender_reads_tool_calls_where_tools_were_offered(engine):
    text = 'Look.\n<tool_call>\n{"name": "look", "arguments": {"a": 1.0}}\n</tool_call>'
    ids = await ids_of(engine, text)
    (choice,) = (await derendered(engine, ids, tools=TOOLS))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"a": 1.0}'}
    assert choice["message"]["content"] == "Look.\n"
    assert choice["finish_reason"] == "stop"  # chat says tool_calls
    assert (await derendered(engine, ids))["choices"][0]["message"]["content"] == text


async def test_derender_names_the_tokens_of_log_probabilities(engine):
    ids = await ids_of(engine, "Hi there")
    entries = [{"token_id": one, "logprob": -1.0, "rank": 1} for one in ids]
    choice = {"index": 0, "finish_reason": "length", "token_ids": ids, "logprobs": {"content": entries}}
    body = {
        "model": engine.model,
        "prompt_tokens": 7,
        "chat_request": {"model": engine.model, "messages": [HELLO]},
        "generate_response": {"request_id": "r", "choices": [choice]},
    }
    status, answer = await engine.post("/v1/chat/completions/derender", body)
    assert status == 200, answer
    named = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in named) == "Hi there"
    assert {(entry["logprob"], tuple(entry["top_logprobs"])) for entry in named} == {(-1.0, ())}
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == len(ids)


async def test_derender_refuses(engine):
    response = {"request_id": "r", "choices": [{"index": 0, "finish_reason": "stop", "token_ids": []}]}
    asked = {"model": engine.model, "messages": [HELLO]}
    path = "/v1/chat/completions/derender"
    status, answer = await engine.post(path, {"model": engine.model, "generate_response": response})
    assert (status, answer["error"]["message"].split(" when ")[0]) == (400, "chat_request is required")
    body = {"model": engine.model, "generate_response": response, "chat_request": asked}
    status, answer = await engine.post(path, body)
    assert (status, answer["error"]["message"]) == (400, "choice 0 has empty or null token_ids")
    status, answer = await engine.post(path, {"model": engine.model, "chat_request": asked})
    assert (status, answer["error"]["param"]) == (400, "body.DerenderChatRequest.generate_response")
