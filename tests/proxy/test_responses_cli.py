"""The real Codex against the proxy, where CODEX_CLI names it.

npm install --prefix DIR @openai/codex@0.169.0     # then CODEX_CLI=DIR/node_modules/.bin/codex
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from polar.devmodel import Failure, Match, Reply, Rule, Script
from polar.schemas import CallStarted, CompletionCaptured, CompletionFailed
from tests.proxy.harness import Door
from tests.proxy.test_calls import assert_as_sampled

CLI = os.environ.get("CODEX_CLI")
pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(CLI is None, reason="needs Codex: CODEX_CLI"),
    pytest.mark.timeout(300),
]
Start = Callable[..., Any]
PROMPT = "Make hello.txt and tell me what is in it."


def shell(command: str) -> dict[str, Any]:
    # spelled as no client would, so that only its very bytes match
    return {"name": "exec_command", "arguments": f'{{"cmd":  {json.dumps(command)}}}'}


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


async def run(
    door: Door, folder: Path, *more: str, prompt: str = PROMPT, model: str = "the-policy"
) -> tuple[int, str, list[dict[str, Any]]]:
    """Codex on `prompt` in an empty folder; its exit code, its last words and its events."""
    assert CLI is not None
    for name in ("home", "work"):
        (folder / name).mkdir(exist_ok=True)
    provider = f'{{name="polar", base_url="{door.url}/s/{door.key()}/v1", env_key="KEY", wire_api="responses"}}'
    process = await asyncio.create_subprocess_exec(
        *(CLI, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"),
        *("-m", model, "-c", 'model_provider="polar"', "-c", f"model_providers.polar={provider}"),
        *("-c", "analytics.enabled=false", "--disable", "plugins", "-o", "last.txt", *more, prompt),
        cwd=folder / "work",
        env={"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "KEY": "in the path"},
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
    last = folder / "work" / "last.txt"
    events = [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]
    return process.returncode or 0, last.read_text() if last.exists() else "", events


def ends(records: list[Any]) -> list[CompletionCaptured]:
    """The captured calls; there is nothing else, and every call that began has ended."""
    found = [one for one in records if isinstance(one, CompletionCaptured)]
    assert len(found) * 2 == len(records)
    assert {one.completion_id for one in records if isinstance(one, CallStarted)} == {
        one.completion_id for one in found
    }
    return found


def failures(records: list[Any]) -> list[int | None]:
    return [one.http_status for one in records if isinstance(one, CompletionFailed)]


@pytest.mark.parametrize("summary", ["auto", "none"])
@pytest.mark.parametrize("mode", ["live", "synthetic"])
async def test_a_task_of_several_turns(
    mode: str, summary: str, tmp_path: Path, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script(TASK), reasoning=True)
    door: Door = await door_to(engine, stream_mode=mode, delta_prompts=False)
    code, last, events = await run(door, tmp_path, "-c", f'model_reasoning_summary="{summary}"')
    assert (code, last) == (0, "It says hi.")
    assert (tmp_path / "work" / "hello.txt").read_text() == "hi\n"
    records = ends(await door.settled())
    assert len(records) == len(engine.calls) == 3
    for i, record in enumerate(records):
        assert_as_sampled(record, engine, i)
        assert record.streamed
        assert record.hints.session == events[0]["thread_id"]
        assert record.hints.request_kind == "turn"
        assert "codex" in (record.hints.user_agent or "")
    # what was told came back as it was captured, byte for byte, and each history goes on from the one before it
    for before, after in pairwise(records):
        history = [*before.prompt.messages, before.choices[0].message]
        assert after.prompt.messages[: len(history)] == history
    assert [message["role"] for message in records[2].prompt.messages][-3:] == ["assistant", "tool", "tool"]
    usage = events[-1]["usage"]
    assert [usage[name] for name in ("input_tokens", "output_tokens")] == [
        sum(len(record.prompt.ids) for record in records),
        sum(len(record.choices[0].ids) for record in records),
    ]


async def test_a_sub_agent_is_marked(tmp_path: Path, engine_of: Start, door_to: Start) -> None:
    asked = {"message": "Count to three."}
    rules = [
        Rule(match=Match(last_user="Count to three", turn=1), replies=[Reply(text="One, two, three.")]),
        Rule(
            match=Match(turn=1),
            replies=[Reply(tool_calls=[{"name": "multi_agent_v1__spawn_agent", "arguments": asked}])],
        ),
        Rule(replies=[Reply(text="It counts.", delay=2.0)]),
    ]
    door: Door = await door_to(await engine_of(Script(rules)))
    code, last, _ = await run(door, tmp_path, prompt="Let an agent count.")
    assert (code, last) == (0, "It counts.")
    records = ends(await door.settled())
    assert len({record.hints.session for record in records}) == 1
    assert [record.hints.subagent for record in records].count("collab_spawn") == 1
    (agent,) = [record for record in records if record.hints.subagent is not None]
    assert agent.hints.parent


async def test_freeform_tools_of_a_known_model(tmp_path: Path, engine_of: Start, door_to: Start) -> None:
    patch = "*** Begin Patch\n*** Add File: hello.txt\n+hi \u00e4\n*** End Patch\n"
    rules = [
        Rule(match=Match(turn=1), replies=[Reply(tool_calls=[{"name": "apply_patch", "arguments": {"input": patch}}])]),
        Rule(replies=[Reply(text="Done.")]),
    ]
    door: Door = await door_to(await engine_of(Script(rules)), delta_prompts=False)
    code, last, _ = await run(door, tmp_path, model="gpt-5.5")
    assert (code, last) == (0, "Done.")
    assert (tmp_path / "work" / "hello.txt").read_text() == "hi \u00e4\n"
    first, second = ends(await door.settled())
    assert second.prompt.messages[len(first.prompt.messages)] == first.choices[0].message


@pytest.mark.parametrize("silence", [70, 130])
async def test_a_silent_model_is_waited_for_without_a_second_generation(
    silence: int, tmp_path: Path, engine_of: Start, door_to: Start
) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Here.", delay=silence)])]))
    door: Door = await door_to(engine)
    code, last, _ = await run(door, tmp_path)
    assert (code, last) == (0, "Here.")
    ends(await door.settled())
    assert engine.stats.started == 1


async def test_keep_alives_reset_its_idle_timer(tmp_path: Path, engine_of: Start, door_to: Start) -> None:
    engine = await engine_of(Script([Rule(replies=[Reply(text="Here.", delay=9)])]))
    door: Door = await door_to(engine, early_headers_after=0.5, keepalive_every=1)
    code, last, _ = await run(door, tmp_path, "-c", "model_providers.polar.stream_idle_timeout_ms=3000")
    assert (code, last) == (0, "Here.")
    assert engine.stats.started == 1


async def test_an_overload_is_waited_out(tmp_path: Path, engine_of: Start, door_to: Start) -> None:
    full = Reply(error=Failure(status=503, headers={"Retry-After": "1"}))
    rules = [Rule(replies=[full], times=2), Rule(replies=[Reply(text="Here.")])]
    door: Door = await door_to(await engine_of(Script(rules)))
    code, last, _ = await run(door, tmp_path)
    assert (code, last) == (0, "Here.")
    assert failures(await door.settled()) == [503, 503]


@pytest.mark.parametrize("status", [500, 503])
async def test_an_error_within_the_stream_is_tried_again(
    status: int, tmp_path: Path, engine_of: Start, door_to: Start
) -> None:
    broken = Reply(delay=1.0, error=Failure(status=status, headers={"Retry-After": "1"}))
    engine = await engine_of(Script([Rule(replies=[broken], times=1), Rule(replies=[Reply(text="Here.")])]))
    door: Door = await door_to(engine, early_headers_after=0.3)
    code, last, _ = await run(door, tmp_path)
    assert (code, last) == (0, "Here.")
    assert failures(await door.settled()) == [200]


async def test_a_prompt_that_is_too_long_ends_it_in_its_own_words(
    tmp_path: Path, engine_of: Start, door_to: Start
) -> None:
    door: Door = await door_to(await engine_of(Script.say("Here."), max_model_len=2_000))
    code, _, events = await run(door, tmp_path)
    assert code == 1
    assert "context window" in json.dumps(events)
    assert set(failures(await door.settled())) == {400}
