"""Tool calls in text: this package's parser against real vLLM's, chunk by chunk, on texts that vLLM had to sample."""

import os

import aiohttp
import pytest

from polar.devmodel.parse import CallStream, read_calls

from .conftest import Engine

TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}]
TEXTS = {
    "one call": '<tool_call>\n{"name": "get", "arguments": {"a": "xé"}}\n</tool_call>',
    "text and two calls": (
        'Sure <b.\n<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get", "arguments":{}}\n</tool_call> ok'
    ),
    "cut inside": 'a <tool_call>\n{"name": "get", "argu',
    "no arguments": '<tool_call>\n{"name": "get"}\n</tool_call>',
    "no end": '<tool_call>\n{"name": "nope", "arguments": {"a": [1,2]}}',
    "no json": "<tool_call>\nnot json\n</tool_call>",
    "white space first": '  \n<tool_call>\n{"name": "get", "arguments": {"b":1}}\n</tool_call>',
    "half a tag": "a <",
}


@pytest.fixture
async def vllm(vllm_url):
    async with aiohttp.ClientSession() as http:
        yield Engine("vllm", vllm_url, os.environ.get("VLLM_MODEL", "smollm2-135m"), http)


def functions(calls):
    return [call["function"] for call in calls]


def without_ids(deltas):
    """What is left to compare: ids are random."""
    return [{key: value for key, value in delta.items() if key != "id"} for delta in deltas]


@pytest.mark.vllm
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
async def test_calls_are_found_as_vllm_finds_them(vllm, text):
    forced = {"tools": TOOLS, "structured_outputs": {"choice": [text]}, "max_tokens": 120}
    message = (await vllm.chat(**forced))["choices"][0]["message"]
    content, calls = read_calls(text)
    assert (message["content"], functions(message.get("tool_calls") or [])) == (content, functions(calls))

    parser = CallStream()
    for chunk in (await vllm.stream(**forced))[1:]:
        (choice,) = chunk["choices"]
        sampled = "".join(entry["token"] for entry in choice["logprobs"]["content"]).removesuffix("<|im_end|>")
        content, calls = parser.feed(sampled)
        told = choice["delta"].get("tool_calls") or []
        assert (choice["delta"].get("content") or "", without_ids(told)) == (content, without_ids(calls))
    assert (choice["finish_reason"] == "tool_calls") is parser.any_call
