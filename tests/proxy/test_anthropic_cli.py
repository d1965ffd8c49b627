"""The real Claude Code against the proxy, where it is installed (`claude` in the PATH, or CLAUDE_CODE_CLI names it).

npm install --prefix DIR @anthropic-ai/claude-code@2.1.329     # then CLAUDE_CODE_CLI=DIR/node_modules/.bin/claude
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
from polar.schemas import CallStarted, CompletionCaptured, CompletionFailed
from tests.proxy.harness import Door
from tests.proxy.test_calls import assert_as_sampled

CLI = os.environ.get("CLAUDE_CODE_CLI") or shutil.which("claude")
pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(CLI is None, reason="needs Claude Code (`claude`, or CLAUDE_CODE_CLI)"),
    pytest.mark.timeout(300),
]
Start = Callable[..., Any]
PROMPT = "Make hello.txt and tell me what is in it."


def bash(command: str) -> dict[str, Any]:
    return {"name": "Bash", "arguments": {"command": command, "description": "As asked"}}


TASK = [
    Rule(
        match=Match(turn=1),
        replies=[Reply(reasoning="A file.", text="I write it.", tool_calls=[bash("echo hi > hello.txt")])],
    ),
    Rule(
        match=Match(turn=2),
        replies=[Reply(reasoning="Two looks.", tool_calls=[bash("cat hello.txt"), bash("ls nothing-of-that-name")])],
    ),
    Rule(match=Match(turn=3), replies=[Reply(text="It says hi.")]),
]


async def run(door: Door, folder: Path, *more: str, prompt: str = PROMPT, **env: str) -> tuple[int, dict[str, Any]]:
    """Claude Code on `prompt` in an empty folder; its exit code and its result."""
    assert CLI is not None
    for name in ("home", "work"):
        (folder / name).mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        *(CLI, "-p", prompt, "--allowedTools", "Bash,Edit,Write,Read,Agent", "--model", "the-policy"),
        *("--output-format", "json", *more),
        cwd=folder / "work",
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "ANTHROPIC_BASE_URL": f"{door.url}/s/{door.key()}",
            "ANTHROPIC_AUTH_TOKEN": "in the path",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
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
    print(err.decode())
    return process.returncode or 0, json.loads(out) if out.strip() else {}


def ends(records: list[Any]) -> list[CompletionCaptured]:
    """The captured calls; there is nothing else, and every call that began has ended."""
    found = [one for one in records if isinstance(one, CompletionCaptured)]
    assert len(found) * 2 == len(records)
    assert {one.completion_id for one in records if isinstance(one, CallStarted)} == {
        one.completion_id for one in found
    }
    return found


@pytest.mark.parametrize("mode", ["live", "synthetic"])
async def test_a_task_of_several_turns(mode: str, tmp_path: Path, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script(TASK), reasoning=True)
    door: Door = await door_to(engine, stream_mode=mode, delta_prompts=False)
    code, result = await run(door, tmp_path)
    assert (code, result["is_error"], result["result"]) == (0, False, "It says hi.")
    assert (tmp_path / "work" / "hello.txt").read_text() == "hi\n"
    records = ends(await door.settled())
    assert len(records) == len(engine.calls) == 3
    for i, record in enumerate(records):
        assert_as_sampled(record, engine, i)
        assert record.streamed
        assert record.hints.session == result["session_id"]
        assert "claude-cli" in (record.hints.user_agent or "")
        assert "billing" not in json.dumps(record.prompt.messages[0])
    # what was told came back as it was captured, and each history goes on from the one before it
    for before, after in pairwise(records):
        history = [*before.prompt.messages, before.choices[0].message]
        assert [without_spaces(one) for one in after.prompt.messages[: len(history)]] == [
            without_spaces(one) for one in history
        ]
    assert [message["role"] for message in records[2].prompt.messages][-3:] == ["assistant", "tool", "tool"]
    assert [result["usage"][name] for name in ("input_tokens", "output_tokens")] == [
        sum(len(record.prompt.ids) for record in records),
        sum(len(record.choices[0].ids) for record in records),
    ]


def without_spaces(message: dict[str, Any]) -> dict[str, Any]:
    """The client leaves out white space at the end of a text."""
    content = message.get("content")
    return {**message, "content": content.rstrip() if isinstance(content, str) else content}


async def test_a_sub_agent_is_marked(tmp_path: Path, engine_of: Start, door_to: Start) -> None:
    asked = {"description": "Count", "prompt": "Count to three.", "subagent_type": "general-purpose"}
    rules = [
        Rule(
            match=Match(any_message="Count to three", turn=1),
            replies=[Reply(text="One, two, three.")],
        ),
        Rule(match=Match(turn=1), replies=[Reply(tool_calls=[{"name": "Agent", "arguments": asked}])]),
        Rule(replies=[Reply(text="It counted.")]),
    ]
    door: Door = await door_to(await engine_of(Script(rules)))
    code, result = await run(door, tmp_path, prompt="Let an agent count.")
    assert (code, result["is_error"]) == (0, False)
    records = ends(await door.settled())
    assert len({record.hints.session for record in records}) == 1
    marked = [record.hints.subagent is not None for record in records]
    assert sum(marked) == 1
    assert marked[0] is False


@pytest.mark.parametrize("silence", [70, 130])
async def test_a_silent_model_is_waited_for_without_a_second_generation(
    silence: int, tmp_path: Path, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Here.", delay=silence)])]))
    door: Door = await door_to(engine)
    code, result = await run(door, tmp_path)
    assert (code, result["result"]) == (0, "Here.")
    (record,) = ends(await door.settled())
    assert engine.stats.started == 1
    assert result["usage"]["input_tokens"] == len(record.prompt.ids)


async def test_an_overload_is_waited_out(tmp_path: Path, engine_of: Start, door_to: Start) -> None:
    full = Reply(error=Failure(status=503, headers={"Retry-After": "1"}))
    rules = [Rule(replies=[full], times=2), Rule(replies=[Reply(text="Here.")])]
    door: Door = await door_to(await engine_of(Script(rules)))
    code, result = await run(door, tmp_path)
    assert (code, result["result"]) == (0, "Here.")
    records = await door.settled()
    assert [one.http_status for one in records if isinstance(one, CompletionFailed)] == [529, 529]


async def test_a_prompt_that_is_too_long_ends_it_in_its_own_words(
    tmp_path: Path, engine_of: Start, door_to: Start
) -> None:
    door: Door = await door_to(await engine_of(Script.say("Here."), max_model_len=2_000))
    code, result = await run(door, tmp_path, CLAUDE_CODE_MAX_RETRIES="1")
    assert code == 1
    assert "too long" in result["result"].lower()
    assert {one.http_status for one in await door.settled() if isinstance(one, CompletionFailed)} == {400}
