"""A coding CLI whose context fills up asks for a summary and goes on from it: captured, and told apart.

Gemini CLI is not among them: it compacts between two prompts of a user's, and these runs have one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from polar.devmodel import Match, Reply, Rule, Script
from polar.devmodel.script import View
from polar.gateway.harness import Launch
from tests.harness.adapters import HOME, Adapter
from tests.harness.building import OTHER_TEMPLATE, Told, built, expected, traces
from tests.harness.place import MODEL, Place, captures
from tests.harness.running import each_cli, place_for

pytestmark = [pytest.mark.harness, pytest.mark.sandbox, pytest.mark.timeout(240)]
Start = Callable[..., Any]
Change = Callable[[Launch], Launch]
SUMMARY = "It was looked at the numbers."
ASKS = re.compile(r"(?i)summar|state_snapshot|checkpoint")


def variables(**env: str) -> Change:
    return lambda launch: dataclasses.replace(launch, env={**launch.env, **env})


def arguments(*more: str) -> Change:
    return lambda launch: dataclasses.replace(launch, command=[*launch.command, *more])


def config(name: str, change: Callable[[dict[str, Any]], None]) -> Change:
    """With a changed JSON file in the home folder."""

    def changed(launch: Launch) -> Launch:
        path = f"{HOME}/{name}"
        value = json.loads(launch.files[path])
        change(value)
        return dataclasses.replace(launch, files={**launch.files, path: json.dumps(value).encode()})

    return changed


def opencode_limit(value: dict[str, Any]) -> None:
    value["provider"]["polar"]["models"][MODEL]["limit"] = {"context": 24_000, "output": 8_000}


def qwen_window(value: dict[str, Any]) -> None:
    value["model"] = {"generationConfig": {"contextWindowSize": 60_000}}


SQUEEZED: Mapping[str, Change] = {
    "claude-code": variables(CLAUDE_CODE_MAX_CONTEXT_TOKENS="51000"),
    "codex": arguments("-c", "model_auto_compact_token_limit=14000"),
    "qwen-code": config(".qwen/settings.json", qwen_window),
    "opencode": config(".config/opencode/opencode.json", opencode_limit),
}
"""A context that the first prompt fits into and the second fills: CLIs keep room for a reply and a margin."""


def asked_for_summary(view: View) -> bool:
    asked = view.text("system", first=True)[:300] + view.text("user")[-4_000:]
    return bool(ASKS.search(asked)) and SUMMARY not in asked


@pytest.mark.parametrize("cli", [each for each in each_cli() if each.id in SQUEEZED])
async def test_a_compaction_is_captured_and_told_apart(
    cli: Adapter, engine_of: Start, door_to: Start, places: Start
) -> None:
    summary = f"<analysis>Short.</analysis><state_snapshot><summary>{SUMMARY}</summary></state_snapshot>"
    rules = [
        Rule(match=Match(system="title generator"), replies=[Reply(text="A title")]),
        Rule(match=asked_for_summary, replies=[Reply(text=summary)]),
        Rule(match=Match(turn=1), replies=[Reply(tool_calls=[cli.shell("seq 100000 108000")])], times=1),
        Rule(match=Match(turn=2), replies=[Reply(tool_calls=[cli.shell("echo more")])], times=1),
        Rule(replies=[Reply(text="Done.")]),
    ]
    engine = await engine_of(Script(rules))
    place: Place = await place_for(cli, await door_to(engine, delta_prompts=False), places)
    told = place.told("Look at the numbers.")
    ran = await place.run(SQUEEZED[cli.name](cli.launch(told)), told)
    assert (ran.code, cli.words(ran)) == (0, "Done.")
    records = captures(await place.records())
    await place.dump(f"{cli.name}-compaction")
    kinds = [one.hints.request_kind for one in records]
    assert kinds.count("compaction") == 1
    at = kinds.index("compaction")
    assert SUMMARY in str(records[at].choices[0].message["content"])
    assert [SUMMARY in json.dumps(one.prompt.messages) for one in records] == [i > at for i in range(len(records))]
    assert len(records) - at > 1
    if not OTHER_TEMPLATE:
        found = traces(await built(place))
        mains = [one for one in found if one.label == "main"]
        assert found == expected(cli, *mains, Told("compaction", 1))
        # one until the compaction, one that goes on from its summary
        assert {one.ends for one in mains} == {"compaction", None}
        assert len(mains) == 2
