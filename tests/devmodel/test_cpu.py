"""The CPU model: exact arithmetic that no neighbour changes, bounded memory, clear refusals; checked against vLLM."""

import asyncio
import json
import os
import threading

import numpy as np
import pytest

from .conftest import Engine, needs_cpu_model

PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 11173, 30, 2, 198, 1, 4093, 198, 5820, 1296, 4683, 30, 2, 198, 1, 520]


@pytest.fixture(scope="module")
def model():
    """The model in this process, for what HTTP does not show."""
    needs_cpu_model()
    from polar.devmodel.checkpoint import find, read
    from polar.devmodel.llama import Llama

    return Llama(read(find()))


def forced(model, prompt, ids):
    """Log-probabilities [len(ids), vocabulary] when `ids` follow `prompt`."""
    cache = model.cache(len(prompt) + len(ids))
    for at in range(0, len(prompt), 128):
        hidden = model.read(prompt[at : at + 128], cache)
    rows = [model.logits(hidden[np.newaxis])[0]]
    rows += [model.step([token], [cache])[0] for token in ids[:-1]]
    logits = np.array(rows, np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_a_row_has_the_same_bits_in_any_company(model):
    def decode(company, steps=3):
        prompts = [PROMPT, *([PROMPT[: 5 + i % 9] for i in range(company)])]
        caches = [model.cache(64) for _ in prompts]
        first = [model.read(prompt, cache) for prompt, cache in zip(prompts, caches, strict=True)]
        ids = [int(model.logits(hidden[np.newaxis])[0].argmax()) for hidden in first]
        told = []
        for _ in range(steps):
            logits = model.step(ids, caches)
            told.append(logits[0].copy())
            ids = [int(row.argmax()) for row in logits]
        return np.array(told)

    alone = decode(0)
    for company in (1, 2, 7, 15):
        assert np.array_equal(decode(company), alone), f"beside {company} others"


def test_reading_and_decoding_agree(model):
    ids = [504, 768, 5452, 2380, 282, 260]
    cache = model.cache(64)
    read = model.logits(model.read([*PROMPT, *ids], cache)[np.newaxis])[0]
    stepped = forced(model, PROMPT, [*ids, 0])[-1]
    read = read - read.max() - np.log(np.exp(read - read.max()).sum())
    assert np.abs(read - stepped).max() < 1e-3


def test_a_matrix_without_kind_blas_goes_row_by_row(model):
    from polar.devmodel.llama import Matrix

    weight = model.checkpoint.layers[0].qkv
    rows = np.random.default_rng(1).standard_normal((5, weight.shape[1]), dtype=np.float32)
    fallback = Matrix(weight, None)
    whole = fallback.apply(rows)
    assert np.allclose(whole, rows @ weight.T, atol=1e-3)
    assert all(np.array_equal(fallback.apply(rows[i : i + 1])[0], whole[i]) for i in range(5))


async def test_same_seed_gives_the_same_ids_whatever_runs_beside(cpu):
    async def sample(seed, text="Tell me something."):
        answer = await cpu.chat(text, seed=seed, temperature=1, max_tokens=20)
        (choice,) = answer["choices"]
        return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]

    alone = await sample(3)
    crowd = await asyncio.gather(sample(3), *(sample(i, "word " * 30 * i) for i in range(9)))
    assert crowd[0] == alone
    assert await sample(4) != alone


async def test_calls_that_do_not_fit_wait_their_turn(cpu):
    # each may need 8,000 of 32,768 positions, so four run and the others wait
    answers = await asyncio.gather(*(cpu.chat(max_tokens=8000, stop=["."], seed=i) for i in range(7)))
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a"]}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        {"bad_words": ["x"]},
        {"prompt_logprobs": 1},
    ],
    ids=lambda fields: [*fields][-1],
)
async def test_what_it_cannot_do_is_refused_by_name(cpu, fields):
    status, answer = await cpu.post("/v1/chat/completions", cpu.body(**fields))
    (name,) = [*fields][-1:]
    assert (status, answer["error"]["param"]) == (400, name)
    assert "use vLLM" in answer["error"]["message"]


async def test_text_format_and_neutral_settings_are_taken(cpu):
    neutral = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    plain = await cpu.chat(max_tokens=4)
    asked = await cpu.chat(max_tokens=4, response_format={"type": "text"}, top_p=1, cache_salt="x", **neutral)
    assert asked["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]


async def test_it_knows_the_capital_of_japan(cpu):
    answers = await asyncio.gather(
        *(cpu.chat("What is the capital of Japan?", seed=i, temperature=0.7) for i in range(8))
    )
    right = sum("Tokyo" in answer["choices"][0]["message"]["content"] for answer in answers)
    assert right >= 3  # 27 of 32 on real vLLM at temperature 1.0


async def test_a_broken_model_ends_its_calls():
    from polar.devmodel.batcher import Batcher, Job
    from polar.devmodel.request import Sampling
    from polar.devmodel.sampler import Sampler

    class Broken:
        def cache(self, size):
            raise MemoryError("no memory for a cache")

    batcher = Batcher(Broken, kv_tokens=100, max_rows=2)
    await batcher.start()
    sampler = Sampler(Sampling(), [1], [], 0)
    job = Job(prompt_ids=[1], max_tokens=2, min_tokens=0, stops=frozenset(), sampler=sampler)
    batcher.submit(job)
    with pytest.raises(MemoryError):
        await anext(job.tokens())
    await batcher.close()
    assert not any(thread.name == "devmodel" for thread in threading.enumerate())


async def test_too_many_waiting_calls_are_refused_for_now():
    from polar.devmodel.cpu import CpuBackend
    from polar.devmodel.engine import Call
    from polar.devmodel.errors import ApiError
    from polar.devmodel.request import Sampling

    with pytest.raises(ApiError, match="waiting already") as refused:
        await CpuBackend(max_waiting=0).prepare(Call("a", [1], Sampling(), 1))
    assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "1"})


async def test_a_file_that_is_no_model_is_named(tmp_path):
    from polar.devmodel.cpu import CpuBackend
    from polar.devmodel.errors import ModelUnavailable

    file = tmp_path / "empty.gguf"
    file.write_bytes(b"nothing")
    backend = CpuBackend(model_path=file)
    with pytest.raises(ModelUnavailable, match=r"empty\.gguf"):
        await backend.start()
    await backend.close()


@pytest.mark.vllm
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_log_probabilities_agree_with_vllm_on_the_same_ids(model, vllm_url, temperature):
    import aiohttp

    async with aiohttp.ClientSession() as http:
        vllm = Engine("vllm", vllm_url, os.environ.get("VLLM_MODEL", "smollm2-135m"), http)
        answer = await vllm.chat("What is the capital of France?", temperature=temperature, seed=2, max_tokens=48)
    (choice,) = answer["choices"]
    ids = choice["token_ids"]
    told = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]])
    ours = forced(model, answer["prompt_token_ids"], ids)[np.arange(len(ids)), ids]
    # vLLM computes in bfloat16, whose logits near 20 are 0.125 apart
    assert np.abs(told - ours).mean() < 0.08
    assert np.abs(told - ours).max() < 0.5


@pytest.mark.vllm
async def test_prompts_agree_with_vllm_id_by_id(cpu, vllm_url):
    texts = [
        "Hello!",
        "x = 3.14159  # 2026",
        "naïve 😀 日本",
        "  spaces\n\n\ttabs",
        "<|im_end|>",
        "don't I'll we've",
        "a" * 50,
    ]
    import aiohttp

    async with aiohttp.ClientSession() as http:
        vllm = Engine("vllm", vllm_url, os.environ.get("VLLM_MODEL", "smollm2-135m"), http)
        for text in texts:
            asked = {"messages": [{"role": "user", "content": text}]}
            (_, one), (_, two) = [await each.post("/tokenize", {"model": each.model, **asked}) for each in (cpu, vllm)]
            assert one["tokens"] == two["tokens"], json.dumps(text)
