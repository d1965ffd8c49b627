"""Agents over frameworks, against the proxy: LangChain, OpenAI's Agents SDK, Claude's Agent SDK, each in a box.

AGENT_FRAMEWORKS_PYTHON names the Python of a virtual environment that has them; `.ci/install-harnesses` makes one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from polar.devmodel import Match, Reply, Rule, Script
from polar.gateway.harness import Launch
from tests.harness.place import Place
from tests.harness.python_clis import FRAMEWORKS, whole
from tests.proxy.test_calls import assert_as_sampled

pytestmark = [pytest.mark.harness, pytest.mark.sandbox, FRAMEWORKS.needed, pytest.mark.timeout(300)]
Start = Callable[..., Any]
PROGRAM = Path(__file__).with_name("framework_agents.py")
BROKEN = "def add(a, b):\n    return a - b\n"
AGENTS = {
    "langchain_openai": ("openai.chat", False, False),
    "langchain_responses": ("openai.responses", True, False),
    "langchain_responses_sealed": ("openai.responses", True, True),
    "langchain_anthropic": ("anthropic.messages", True, True),
    "langchain_google": ("google.generate_content", True, True),
    "openai_agents": ("openai.responses", False, True),
    "openai_agents_chat": ("openai.chat", False, False),
    "claude_agent_sdk": ("anthropic.messages", True, True),
}
"""By name: the dialect it speaks, whether it streams, and whether it sends back what the model thought."""


def task(tool: str) -> Script:
    def calls(*commands: str) -> list[dict[str, Any]]:
        return [{"name": tool, "arguments": {"command": command}} for command in commands]

    return Script(
        [
            Rule(match=Match(turn=1), replies=[Reply(text="I look.", tool_calls=calls("cat sums.py", "ls nothing"))]),
            Rule(
                match=Match(turn=2, any_message="return a - b"),
                replies=[Reply(reasoning="A minus.", tool_calls=calls("sed -i 's/a - b/a + b/' sums.py"))],
            ),
            Rule(match=Match(turn=3, last_message="exit 0"), replies=[Reply(text="It adds now.")]),
        ]
    )


@pytest.mark.parametrize("name", AGENTS)
async def test_a_task_of_several_turns(name: str, engine_of: Start, door_to: Start, places: Start) -> None:
    tool = "mcp__box__run" if name == "claude_agent_sdk" else "run"
    engine = await engine_of(task(tool), reasoning=True)
    place: Place = await places(await door_to(engine), **await FRAMEWORKS.shown())
    told = place.told("Mend sums.py.")
    program = f"{told.session_dir}/agent.py"
    files = {program: await asyncio.to_thread(PROGRAM.read_bytes), f"{told.workdir}/sums.py": BROKEN.encode()}
    env = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    ran = await place.run(Launch(command=("python", program, name, told.instruction), env=env, files=files), told)
    assert (ran.code, ran.out.strip()) == (0, "It adds now.")
    assert await place.file("sums.py") == BROKEN.replace("-", "+")
    records = whole(await place.records())
    assert len(records) == len(engine.calls) == len(place.exchanges) == 3
    dialect, streams, keeps = AGENTS[name]
    for i, record in enumerate(records):
        assert_as_sampled(record, engine, i)
        assert (record.dialect, record.streamed) == (dialect, streams)
    for before, after in pairwise(records):
        replied = before.choices[0].message
        if not keeps:
            replied = {key: value for key, value in replied.items() if key != "reasoning"}
        history = [*before.prompt.messages, replied]
        assert after.prompt.messages[: len(history)] == history
