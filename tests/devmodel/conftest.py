"""Engines for the contract suite: the scripted one, the CPU model, and real vLLM where it runs.

Each is a process of its own (or, for vLLM, an address), reached over HTTP only: what the suite says of one it says of
all.
"""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

Json = dict[str, Any]
ENGINES = ("scripted", "cpu", pytest.param("vllm", marks=pytest.mark.vllm))
# Real models cannot be told what to say, so the script says what any test of this suite needs by default.
SCRIPT = {
    "default": {"texts": ["Red, green and blue are three colors — naïve, but fine 😀.", "The sky is blue today."]}
}


@dataclass(frozen=True)
class Engine:
    """An address and the session to talk to it."""

    kind: str
    url: str
    model: str
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.http.get(self.url + path) as answer:
            return answer.status, await answer.text()

    def body(self, text: str = "Name three colors.", **fields: Any) -> Json:
        """A chat request that asks for everything a trainer needs."""
        asked = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0, "temperature": 0, "max_tokens": 24}
        return {"model": self.model, "messages": [{"role": "user", "content": text}], **asked, **fields}

    async def chat(self, text: str = "Name three colors.", **fields: Any) -> Json:
        """The answer to a question, not streamed."""
        status, answer = await self.post("/v1/chat/completions", self.body(text, **fields))
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    async def stream(self, text: str = "Name three colors.", **fields: Any) -> list[Json]:
        """The chunks of the answer to a question."""
        return await self.stream_body(self.body(text, stream=True, **fields))

    async def stream_body(self, body: Json) -> list[Json]:
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            events = [event async for event in _events(answer)]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield line.removeprefix(b"data: ").decode().rstrip("\n")


def _process(*arguments: str) -> Iterator[str]:
    """A development engine in a process; yields its URL without /v1."""
    command = [sys.executable, "-m", "polar.devmodel", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            word, _, url = process.stdout.readline().partition(" ")
            assert word == "ready", f"{command} did not start"
            yield url.strip().removesuffix("/v1")
        finally:
            process.terminate()
            assert process.wait(10) == 0


def needs_cpu_model() -> None:
    """Skip, naming what is missing."""
    from polar.devmodel.checkpoint import find
    from polar.devmodel.errors import ModelUnavailable

    try:
        find()
    except ModelUnavailable as missing:
        pytest.skip(f"the CPU model is not there: {missing}")


@pytest.fixture(scope="session")
def cpu_url() -> Iterator[str]:
    needs_cpu_model()
    yield from _process("serve")


@pytest.fixture(scope="session")
def scripted_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    script: Path = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps(SCRIPT))
    yield from _process("scripted", "--script", str(script))


@pytest.fixture(scope="session")
def vllm_url() -> str:
    base = os.environ.get("VLLM_BASE_URL")
    if not base:
        pytest.skip("VLLM_BASE_URL is not set: start a vLLM and name its /v1 address")
    return base.removesuffix("/").removesuffix("/v1")


@pytest.fixture(params=ENGINES)
def address(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Kind and URL of every engine in turn; not async, since starting one blocks."""
    return request.param, request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
async def engine(address: tuple[str, str]) -> AsyncIterator[Engine]:
    """Every engine in turn."""
    kind, url = address
    async with aiohttp.ClientSession() as http, http.get(f"{url}/v1/models") as models:
        model = (await models.json())["data"][0]["id"]
        yield Engine(kind, url, model, http)


@pytest.fixture
async def cpu(cpu_url: str) -> AsyncIterator[Engine]:
    async with aiohttp.ClientSession() as http:
        yield Engine("cpu", cpu_url, "smollm2-135m", http)
