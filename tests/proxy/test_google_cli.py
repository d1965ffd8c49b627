"""The real Gemini CLI against the proxy, where it is installed (`gemini` in the PATH, or GEMINI_CLI names it).

npm install --prefix DIR @google/gemini-cli@0.61.0     # then GEMINI_CLI=DIR/node_modules/.bin/gemini
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from polar.devmodel import Failure, Match, Reply, Rule, Script
from polar.schemas import CompletionFailed
from tests.proxy.harness import Door
from tests.proxy.test_anthropic_cli import ends
from tests.proxy.test_calls import assert_as_sampled

CLI = os.environ.get("GEMINI_CLI") or shutil.which("gemini")
pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(CLI is None, reason="needs Gemini CLI (`gemini`, or GEMINI_CLI)"),
    pytest.mark.timeout(300),
]
Start = Callable[..., Any]
PROMPT = "Make hello.txt and tell me what is in it."
SETTINGS = {
    "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False},
}


def shell(command: str) -> dict[str, Any]:
    return {"name": "run_shell_command", "arguments": {"command": command, "description": "As asked"}}


TASK = [
    Rule(
        match=Match(turn=1),
        replies=[Reply(reasoning="A file.", text="I write it.", tool_calls=[shell("echo hi > hello.txt")])],
    ),
    Rule(
        match=Match(turn=2),
        replies=[Reply(reasoning="Two looks.", tool_calls=[shell("cat hello.txt"), shell("ls nothing-of-that-name")])],
    ),
    Rule(match=Match(turn=3), replies=[Reply(text="It says hi.")]),
]


async def run(door: Door, folder: Path, prompt: str = PROMPT, **env: str) -> tuple[int, dict[str, Any], str]:
    """Gemini CLI on `prompt` in an empty folder; its exit code, its result and what it complained of."""
    assert CLI is not None
    for name in ("home/.gemini", "work"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "home" / ".gemini" / "settings.json").write_text(json.dumps(SETTINGS))
    process = await asyncio.create_subprocess_exec(
        *(CLI, "-p", prompt, "--yolo", "--output-format", "json", "-m", "the-policy"),
        cwd=folder / "work",
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "GOOGLE_GEMINI_BASE_URL": f"{door.url}/s/{door.key()}",
            "GEMINI_API_KEY": "in the path",
            "GEMINI_CLI_NO_RELAUNCH": "true",
            **env,
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 240)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    print(out.decode(), err.decode())
    return process.returncode or 0, json.loads(out) if out.strip() else {}, err.decode()


@pytest.mark.parametrize("mode", ["live", "synthetic"])
async def test_a_task_of_several_turns(mode: str, tmp_path: Path, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script(TASK), reasoning=True)
    door: Door = await door_to(engine, stream_mode=mode, delta_prompts=False)
    code, result, _ = await run(door, tmp_path)
    assert (code, result["response"]) == (0, "It says hi.")
    assert (tmp_path / "work" / "hello.txt").read_text() == "hi\n"
    records = ends(await door.settled())
    assert len(records) == len(engine.calls) == 3
    for i, record in enumerate(records):
        assert_as_sampled(record, engine, i)
        assert record.streamed
        assert (record.hints.user_agent or "").startswith("GeminiCLI")
    # what was told came back as it was captured, thinking too, and each history goes on from the one before it
    for before, after in pairwise(records):
        history = [*before.prompt.messages, before.choices[0].message]
        assert after.prompt.messages[: len(history)] == history
    assert records[1].choices[0].message["reasoning"]
    assert [message["role"] for message in records[2].prompt.messages][-3:] == ["assistant", "tool", "tool"]


@pytest.mark.parametrize("silence", [70, 130])
async def test_a_silent_model_is_waited_for_without_a_second_generation(
    silence: int, tmp_path: Path, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Here.", delay=silence)])]))
    door: Door = await door_to(engine)
    code, result, _ = await run(door, tmp_path)
    assert (code, result["response"]) == (0, "Here.")
    assert len(ends(await door.settled())) == engine.stats.started == 1


async def test_an_overload_is_waited_out(tmp_path: Path, engine_of: Start, door_to: Start) -> None:
    full = Reply(error=Failure(status=503, headers={"Retry-After": "1"}))
    rules = [Rule(replies=[full], times=2), Rule(replies=[Reply(text="Here.")])]
    door: Door = await door_to(await engine_of(Script(rules)))
    code, result, _ = await run(door, tmp_path)
    assert (code, result["response"]) == (0, "Here.")
    records = await door.settled()
    assert [one.http_status for one in records if isinstance(one, CompletionFailed)] == [503, 503]


async def test_a_prompt_that_is_too_long_ends_it_in_the_providers_words(
    tmp_path: Path, engine_of: Start, door_to: Start
) -> None:
    door: Door = await door_to(await engine_of(Script.say("Here."), max_model_len=2_000))
    code, result, complaint = await run(door, tmp_path)
    assert code != 0
    assert "exceeds the maximum number of tokens allowed" in json.dumps(result) + complaint
    assert {one.http_status for one in await door.settled() if isinstance(one, CompletionFailed)} == {400}
