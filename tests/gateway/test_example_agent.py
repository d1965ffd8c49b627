"""The example agent in a box, with the official client, against an engine at its door."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from polar.devmodel import Script, ScriptedEngine
from polar.schemas import PrepareAction, Stage, StageChanged
from tests.gateway.desk import Desk, Site, shell_task

AGENT = Path(__file__).parents[2] / "examples" / "capitals_agent.py"


async def agent_run(desk: Desk, site: Site, engine_url: str, model: str) -> tuple[StageChanged, str]:
    """The report of the agent's end, and the answer it has written."""
    source = await asyncio.to_thread(AGENT.read_text)
    upload = PrepareAction(type="upload_file", target="capitals_agent.py", content=source)
    address = urlsplit(engine_url).netloc
    async with site.gateway(proxy_address=address, model_name=model):
        task = shell_task("python3 capitals_agent.py Japan", prepare=[upload], artifacts=["answer.txt"])
        event = await desk.assign(await desk.boot(), task)
        ended = await desk.reached(event, Stage.ENDED)
    assert ended.exit is not None
    assert ended.exit.exit_code == 0, ended.exit.output_tail
    (answer,) = [one for one in ended.artifacts if one.name == "answer.txt"]
    return ended, (await desk.bus.blobs.get(answer.claim)).decode()


async def test_the_agent_goes_on_until_the_answer_is_right(desk: Desk, site: Site):
    script = Script.say("I do not know.", "It is Tokyo.", "never asked")
    async with ScriptedEngine(script, model="policy") as engine:
        ended, answer = await agent_run(desk, site, engine.base_url, "policy")
        calls = [[message["role"] for message in call.body["messages"]] for call in engine.calls]
    assert answer == "It is Tokyo.\n"
    assert calls == [["user"], ["user", "assistant", "user"]]
    assert ended.exit is not None
    assert ended.exit.output_tail == "turn 1: I do not know.\nturn 2: It is Tokyo.\n"


@pytest.mark.vllm
async def test_the_agent_works_with_a_real_small_model(desk: Desk, site: Site):
    url = os.environ.get("VLLM_BASE_URL")
    if url is None:
        pytest.skip("VLLM_BASE_URL is not set")
    _, answer = await agent_run(desk, site, url, os.environ["VLLM_MODEL"])
    assert answer.strip()
