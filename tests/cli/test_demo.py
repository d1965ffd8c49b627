"""`polar demo`'s parts: the agent, what is found about tokens, the page, and where runs live."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from tokenizers import Tokenizer

from polar.cli.demo import folders
from polar.cli.demo.folders import Note
from polar.cli.demo.insight import Built, changes, choose, example, invented, read_again
from polar.cli.demo.installed import installed
from polar.cli.demo.page import Findings, Group, page
from polar.cli.demo.tasks import SAMPLES, TASKS, agent_source, request
from polar.cli.tokens import pieces
from polar.cli.up import CannotUp
from polar.cli.up.folder import Folder
from polar.cli.words import EngineTokenizer, NoWords
from polar.devmodel import ChatTokenizer, Match, Reply, Rule, Script, ScriptedEngine
from polar.schemas import Context
from polar.schemas.validation import Limits, check
from tests.cli.records import trace, trajectory

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return ChatTokenizer.small().tokenizer


@pytest.fixture(scope="module")
def agent() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("demo_agent", ROOT / "examples" / "demo_agent.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the agent and its tasks ---


def test_the_example_is_the_agent_that_the_demo_runs() -> None:
    assert (ROOT / "examples" / "demo_agent.py").read_text() == agent_source()


def test_the_agent_is_short_and_has_no_shell() -> None:
    lines = [line for line in agent_source().splitlines() if line.strip()]
    assert len(lines) <= 40
    assert not re.search(r"subprocess|os\.system|popen|exec\(|eval\(|polar\.", agent_source())


def test_every_task_is_one_that_the_scheduler_takes_and_the_agent_knows(agent: types.ModuleType) -> None:
    assert [task.name for task in TASKS] == list(agent.TASKS)
    for task in TASKS:
        asked = request(task)
        check(asked, Limits())
        assert asked.num_samples == SAMPLES == 8
        assert asked.sampling.seed_calls
        assert request(task) == asked  # the same every time, so that a repeated submit is answered as one


ANSWERS = {
    "colors": (["Red, green and blue."], ["Red and red-ish things."]),
    "capitals": (["It is Paris.", "Rome, of course"], ["It is Paris.", "Milan"]),
    "tokyo": (["Tokyo", "People eat Sushi."], ["Kyoto", "People eat sushi in Tokyo."]),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_check_of_a_task_agrees_with_what_the_agent_takes_for_right(
    name: str, agent: types.ModuleType, tmp_path: Path
) -> None:
    (task,) = [one for one in TASKS if one.name == name]
    for answers, right in zip(ANSWERS[name], (True, False), strict=True):
        (tmp_path / "answers.txt").write_text("".join(f"{one}\n" for one in answers))
        graded = subprocess.run(["bash", "-c", task.check], cwd=tmp_path, check=False).returncode == 0
        wanted = [pattern for _, pattern in agent.TASKS[name]]
        taken = all(re.search(one, answer, re.I) for one, answer in zip(wanted, answers, strict=True))
        assert graded == taken == right


async def test_the_agent_says_what_was_wrong_and_asks_again(tmp_path: Path) -> None:
    script = Script(
        rules=[
            Rule(match=Match(last_user="not right.*capital of France"), replies=(Reply(text="Then it is\nParis."),)),
            Rule(match=Match(last_user="France"), replies=(Reply(text="Lyon."),)),
            Rule(match=Match(last_user="Italy"), replies=(Reply(text="Rome."),)),
        ]
    )
    async with ScriptedEngine(script, any_model=True) as engine:
        env = {**os.environ, "OPENAI_BASE_URL": engine.base_url, "OPENAI_API_KEY": "k", "OPENAI_MODEL": "policy"}
        run = [sys.executable, str(ROOT / "examples" / "demo_agent.py"), "capitals"]
        process = await asyncio.create_subprocess_exec(*run, cwd=tmp_path, env=env)
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert len(engine.calls) == 3
    assert await asyncio.to_thread((tmp_path / "answers.txt").read_text) == "Then it is Paris.\nRome.\n"


# --- what is found about tokens ---


def test_text_that_was_sampled_otherwise_than_it_is_encoded_is_found(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("Tell me about it, then ", add_special_tokens=False).ids
    spelled = [tokenizer.encode(one, add_special_tokens=False).ids[0] for one in "another"]
    rest = tokenizer.encode(" of them.", add_special_tokens=False).ids
    found = changes([*plain, *spelled, *rest], tokenizer)
    assert found
    for sampled, again in found:
        assert "".join(text for _, text in sampled) == "".join(text for _, text in again)
        assert [one for one, _ in sampled] != [one for one, _ in again]
    assert "".join(text for sampled, _ in found for _, text in sampled) in "Tell me about it, then another of them."
    assert changes(plain, tokenizer) == []
    assert changes([], tokenizer) == []


def test_half_a_character_is_no_reason_to_fail(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("über 🙂 alles", add_special_tokens=False).ids
    for cut in range(len(ids) + 1):
        for sampled, again in changes(ids[:cut], tokenizer):
            assert sampled != again


def test_the_example_is_the_session_that_shows_most(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("Nothing to see", add_special_tokens=False).ids
    spelled = [tokenizer.encode(one, add_special_tokens=False).ids[0] for one in "something"]
    dull = trajectory(plain, [trace(1, [(1, len(plain))], len(plain))], session_id="dull", reward=1.0)
    telling = trajectory(
        [*plain, *spelled, *plain],
        [trace(len(plain), [(len(plain), len(plain) + len(spelled))], 2 * len(plain) + len(spelled))],
        session_id="telling",
        reward=0.0,
    )
    assert choose([dull, telling], tokenizer) is telling
    assert choose([dull], tokenizer) is dull
    assert choose([trajectory()], tokenizer) is None
    found = example(telling, tokenizer)
    assert found.trained == len(spelled)
    assert 0 < found.changed <= found.trained
    assert "".join(one.text for one in found.tokens) == "Nothing to seesomethingNothing to see"
    assert [one.logprob is None for one in found.tokens].count(False) == len(spelled)
    assert read_again(found) == ""


def test_a_turn_that_was_cut_off_has_an_end_that_nobody_sampled(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a b c d e f", add_special_tokens=False).ids
    one = trace(1, [(1, 3), (4, 6)], 6)
    turns = [
        type(one.turns[0])(completion_id="c0", start=1, end=3, finish="length", truncated=True),
        type(one.turns[0])(completion_id="c1", start=4, end=6, finish="stop", context=Context.RETOKENIZED),
    ]
    found = example(trajectory(ids[:6], [trace(1, [], 6, turns=turns)]), tokenizer)
    assert [number for number, token in enumerate(found.tokens) if token.invented] == [3]
    assert "1 end of a turn" in invented(found.invented)
    assert "Before turn 1" in read_again(found)


async def test_the_engines_own_tokenizer_names_ids_as_the_tokenizer_file_does(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Grüße, naïve 🙂 friend<|im_end|>", add_special_tokens=False).ids

    def ask(url: str) -> tuple[list[str], list[int], str]:
        with EngineTokenizer(url) as words:
            named = pieces(cast(Tokenizer, words), np.array(ids, np.int32))
            return named, words.encode("naïve friend").ids, words.model

    async with ScriptedEngine(Script(), model="some-model") as engine:
        named, encoded, model = await asyncio.to_thread(ask, engine.base_url)
    assert "".join(named) == "".join(pieces(tokenizer, ids))
    assert encoded == tokenizer.encode("naïve friend", add_special_tokens=False).ids
    assert model == "some-model"


def test_an_engine_that_is_not_there_is_said() -> None:
    with EngineTokenizer("http://127.0.0.1:9/v1") as words, pytest.raises(NoWords, match="failed"):
        words.decode([1, 2])


# --- the page ---


def test_the_page_escapes_everything_and_needs_nothing_from_elsewhere(tokenizer: Tokenizer) -> None:
    evil = "<script>alert(1)</script>&"
    ids = tokenizer.encode(evil, add_special_tokens=False).ids
    one = trajectory(ids, [trace(1, [(1, len(ids))], len(ids))], session_id=evil, reward=1.0)
    found = Findings(
        facts=[evil],
        groups=[Group(evil, evil, [one, trajectory(reward=None, sample=1)], {evil: 1.5, "session": None}, 3.0)],
        example=example(one, tokenizer),
        built=[Built("per_request", [[(3, False), (2, True)]], 5, 5, 2, 900)],
        commands=[evil],
    )
    text = page(found)
    assert "<script" not in text
    assert not re.search(r"\b(src|href)=|url\(|@import|<link|<img", text)
    assert "+1.50" in text
    assert "prefers-color-scheme: dark" in text


# --- where runs live ---


def choose_folder(base: Path, *, fresh: bool = False, external: bool = False) -> tuple[Path, Note, bool]:
    return folders.choose(base, fresh=fresh, external=external, new_prefix="polar-demo-x.")


def test_each_run_has_a_new_folder_and_an_interrupted_one_is_gone_on_with(tmp_path: Path) -> None:
    first, note, again = choose_folder(tmp_path)
    assert (first.name, note, again) == ("run-1", Note(), False)
    first.mkdir()
    folders.write(first, note)
    assert choose_folder(tmp_path) == (first, note, True)
    assert choose_folder(tmp_path, fresh=True)[0].name == "run-2"
    folders.write(first, Note(finished=True))
    assert choose_folder(tmp_path) == (tmp_path / "run-2", Note(), False)


def test_a_run_on_another_kafka_goes_on_with_its_own_topics_only(tmp_path: Path) -> None:
    folder, note, _ = choose_folder(tmp_path, external=True)
    assert note.prefix == "polar-demo-x."
    folder.mkdir()
    folders.write(folder, Note(prefix="polar-demo-old."))
    assert choose_folder(tmp_path, external=True) == (folder, Note(prefix="polar-demo-old."), True)
    assert choose_folder(tmp_path)[0].name == "run-2"


def test_two_demos_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path / "run-1")
    with pytest.raises(CannotUp, match="a demo is running in"):
        choose_folder(tmp_path)
    folder.close()


def test_what_is_installed_is_counted() -> None:
    found = installed()
    assert found.packages > 20
    assert found.megabytes > 50
    assert "MB" in str(found)
