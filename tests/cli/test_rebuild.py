"""`polar rebuild` as a user runs it, on a log that the real builder and finisher wrote."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from polar.builder.build import FORMAT
from polar.bus import Bus, BusSettings, Out
from polar.bus.clients import Clients
from polar.bus.topics import ensure_topics
from polar.cli.main import app
from polar.client.files import read_trajectories, read_values
from polar.schemas import GroupClosed, Trajectory, encode
from polar.schemas.topics import TABLE, Service, topic
from tests.builder.replaying import committed, forget, of_every_kind, played
from tests.cli.conftest import Polar
from tests.cli.finished import World, clean, closed, run, world
from tests.cli.test_whole import on_terminal

pytestmark = pytest.mark.timeout(300)  # several runs of the command each, on a busy machine


@pytest.fixture
async def log(bus_settings: BusSettings, tmp_path: Path) -> AsyncIterator[World]:
    """Task `one`: three sessions, one of them without a reward; task `two`: sessions of every kind; both closed."""
    async with world(bus_settings, tmp_path / "services") as made:
        one = [closed(played(f"one-{number}", 2 + number, number)) for number in range(3)]
        await made.build({"one": one, "two": of_every_kind()})
        two = {session.session_id: 0.5 for session in of_every_kind()}
        await made.finish({"one-0": 1.0, "one-1": None, "one-2": 0.25, **two})
        await made.close("one")
        await made.close("two")
        yield made


def target(log: World, name: str) -> str:
    """A topic of the test's, deleted with its others; readable as `trajectories` behind a longer prefix."""
    return f"{log.settings.topic_prefix}{name}.trajectories"


async def test_the_same_builder_gives_the_published_bytes_again_reward_and_closed_groups_with_it(
    log: World, polar: Polar, tmp_path: Path
) -> None:
    name = target(log, "again")
    done = await run(polar, "rebuild", "--to-topic", name)
    assert done.returncode == 1, "config-wrong is an error without traces, which is said"
    assert "12 sessions" in done.stdout
    assert f"to topic {name} (2 partitions, made now)" in done.stdout
    assert "11 with a reward, 0 of them revised; 2 groups closed" in done.stdout
    assert "1 session became an error without traces" in done.stderr
    published = await committed(log.proxy, "trajectories")
    again = await log.records(name)
    key = lambda record: (record.key, record.raw)  # noqa: E731
    assert sorted(map(key, again)) == sorted(map(key, published)), "value and key, byte for byte"
    assert [one.key for one in again if isinstance(one.value, GroupClosed)] == ["one", "two"]
    for group in ("one", "two"):
        order = [type(one.value).__name__ for one in again if one.key == group]
        assert order == ["Trajectory"] * (len(order) - 1) + ["GroupClosed"]
    for record in again:
        if isinstance(record.value, Trajectory):
            closing = record.value.closing
            assert record.headers["source"].decode() == f"completions/{closing.partition}/{closing.offset}"
            assert record.headers["reward-source"].startswith(b"trajectories/")
        else:
            assert record.headers["source"].startswith(b"trajectories/")
        assert record.headers["polar-schema"] == f"{type(record.value).__name__}.v1".encode()
    before = len(again)
    done = await run(polar, "rebuild", "--to-topic", name, "--task", "one")
    assert (done.returncode, "made now" in done.stdout) == (0, False)
    twice = await log.records(name)
    assert len(twice) == before + 4
    assert len({one.value.trajectory_id for one in twice if isinstance(one.value, Trajectory)}) == 12
    path = tmp_path / "built.msgpack"
    done = await run(polar, "rebuild", "--no-rewards", "--to-file", str(path))
    assert "with a reward" not in done.stdout
    assert set(read_values(path)) == {one.raw for one in await committed(log.proxy, "built")}
    assert clean(polar.folder) == []


async def test_check_compares_with_what_the_builder_wrote_and_names_what_differs(log: World, polar: Polar) -> None:
    done = await run(polar, "rebuild", "--check")
    assert (done.returncode, done.stderr) == (0, "")
    assert "12 sessions built again" in done.stdout
    assert "12 byte for byte as in polar.built" in done.stdout
    code, shown = await asyncio.to_thread(on_terminal, "rebuild", "--check", env=polar.env, cwd=polar.folder)
    assert (code, "looking for sessions" in shown, "12 byte for byte" in shown) == (0, True, True), "with a bar"
    # what another version of the builder would have written
    (record,) = [one for one in await committed(log.proxy, "built") if one.key == "one-1"]
    assert isinstance(record.value, Trajectory)
    await log.build({"three": [closed(played("three-0", 1, 9))]})
    other = replace(record.value, session_id="three-0", models=["another"], builder_version="0.9")
    await forget(log.proxy, "built", {0: await ends(log, 0), 1: await ends(log, 1)})
    async with Bus(log.settings, Service.BUILDER) as builder:
        await builder.send(Out("built", "three-0", other))
    done = await run(polar, "rebuild", "--check", "--session", "three-0")
    assert done.returncode == 1
    assert "session three-0 differs: builder version 0.9 there" in done.stderr
    assert "models" in done.stderr
    done = await run(polar, "rebuild", "--check", "--json")
    summary = json.loads(done.stdout)
    assert (summary["expired"], list(summary["different"]), summary["same"]) == (12, ["three-0"], 0)


def folder_of(path: Path) -> list[Path]:
    return list(path.iterdir())


async def ends(log: World, partition: int) -> int:
    reader = await log.proxy.reader(["built"])
    try:
        return (await reader.ends())["built", partition]
    finally:
        await reader.close()


async def test_what_the_builder_should_have_written_and_did_not_is_a_difference(log: World, polar: Polar) -> None:
    await log.proxy.send(
        *(Out("completions", "unbuilt", entry.event) for entry in closed(played("unbuilt", 1, 3)).records)
    )
    done = await run(polar, "rebuild", "--check")
    assert done.returncode == 1
    assert "session unbuilt differs: no record in `built`" in done.stderr


async def test_another_builder_with_revised_rewards_in_files_of_both_kinds(
    log: World, polar: Polar, tmp_path: Path
) -> None:
    await log.revise("one-1", 0.75)
    await log.revise("one-0", 0.125, revision=2)
    await log.revise("one-0", 0.1, revision=1)  # late: the higher revision stays
    lines, packed = tmp_path / "again.jsonl", tmp_path / "again.msgpack"
    for path in (lines, packed):
        done = await run(polar, "rebuild", "--builder", "per_request", "--task", "one", "--to-file", str(path))
        assert done.returncode == 0, done.stderr
        assert "3 sessions" in done.stdout
        assert "3 with a reward, 2 of them revised; 1 group closed" in done.stdout
    found = list(read_trajectories(packed))
    assert list(map(encode, read_trajectories(lines))) == list(map(encode, found)) == list(read_values(packed))
    trajectories = {one.session_id: one for one in found if isinstance(one, Trajectory)}
    assert {name: one.reward for name, one in trajectories.items()} == {"one-0": 0.125, "one-1": 0.75, "one-2": 0.25}
    assert {one.builder.strategy for one in trajectories.values()} == {"per_request"}
    assert [len(trajectories[f"one-{number}"].traces) for number in range(3)] == [2, 3, 4]
    assert all(trace.reward == one.reward for one in trajectories.values() for trace in one.traces)
    assert (trajectories["one-0"].evaluator_version, trajectories["one-2"].evaluator_version) == ("2", "1")
    assert trajectories["one-2"].timing_ms["run_ms"] == 7.5
    published = [one.value for one in await committed(log.proxy, "trajectories")]
    ids_before = {one.trajectory_id for one in published if isinstance(one, Trajectory)}
    assert ids_before.isdisjoint(one.trajectory_id for one in trajectories.values())
    (group,) = [one for one in found if isinstance(one, GroupClosed)]
    assert {one.session_id: one.reward for one in group.members} == {
        name: one.reward for name, one in trajectories.items()
    }
    assert found[-1] is group
    done = await run(polar, "rebuild", "--to-file", str(packed))
    assert done.returncode == 2
    assert "is there already" in done.stderr
    # a strategy from outside, where the operator allows it by name, with its configuration in a file
    (tmp_path / "own.json").write_text('{"train_greedy": true}')
    mine = ["--builder", "tests.builder.own:Reversed", "--builder-config", "@own.json"]
    path = tmp_path / "own.jsonl"
    done = await run(
        polar,
        *("rebuild", *mine, "--session", "one-2", "--to-file", str(path)),
        POLAR_BUILDER_ALLOW='["tests.builder.own:Reversed"]',
        PYTHONPATH=str(Path(__file__).parents[2]),
    )
    assert done.returncode == 0, done.stderr
    (own,) = read_trajectories(path)
    assert isinstance(own, Trajectory)
    assert (own.builder.config, own.builder_version, own.reward) == ({"train_greedy": True}, f"{FORMAT}.own-1", 0.25)


async def test_what_is_lost_unfinished_or_unknown_is_said_and_fails(log: World, polar: Polar, tmp_path: Path) -> None:
    open_session, waiting = played("open", 1, 1), played("one-9", 1, 2)
    waiting.close()
    await log.proxy.send(
        *(Out("completions", "open", entry.event) for entry in open_session.records),
        *(Out("completions", "one-9", entry.event) for entry in waiting.records),
    )
    path = str(tmp_path / "one.jsonl")
    done = await run(polar, "rebuild", "--session", "open", "--session", "one-1", "--to-file", path)
    assert done.returncode == 1
    assert "1 session not finished yet: open" in done.stderr
    assert "1 group not closed there" in done.stdout
    assert len(list(read_trajectories(Path(path)))) == 1
    done = await run(polar, "rebuild", "--task", "nothing", "--to-file", str(tmp_path / "two.jsonl"))
    assert (done.returncode, "task nothing: nothing is on the log" in done.stderr) == (1, True)
    assert not any(one.name.startswith("two.jsonl") for one in folder_of(tmp_path)), "an empty file helps nobody"
    done = await run(polar, "rebuild", "--session", "one-9", "--to-file", str(tmp_path / "three.jsonl"))
    assert (done.returncode, "1 have no outcome on the log yet" in done.stdout) == (0, True)
    # retention takes the first records of each partition
    await forget(log.proxy, "completions", {0: 1, 1: 1})
    done = await run(polar, "rebuild", "--to-file", str(tmp_path / "four.jsonl"), "--json")
    summary = json.loads(done.stdout)
    assert done.returncode == 1
    assert summary["lost"]["total"] == len(summary["lost"]["sessions"]) == 2
    assert summary["sessions"] + summary["lost"]["total"] + summary["unfinished"]["total"] == 14


async def test_a_time_that_reaches_back_beyond_what_is_kept_is_warned_of(
    log: World, polar: Polar, tmp_path: Path
) -> None:
    done = await run(polar, "rebuild", "--since", "25d", "--until", "1d", "--to-file", str(tmp_path / "none.jsonl"))
    assert done.returncode == 0
    assert "sessions of that time may be lost: `completions` keeps 30 days, wanted 32 days or more" in done.stderr
    assert "no session to build" in done.stdout
    done = await run(polar, "rebuild", "--since", "1h", "--to-file", str(tmp_path / "some.jsonl"))
    # the toy's sessions closed in 1970, by the scheduler's clock
    assert (done.stderr, "no session to build" in done.stdout) == ("", True)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("command", [["rebuild"], ["replay", "--task", "t"]])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((f"polar.{spec.name}", f"polar.{spec.name} is one of Polar's own topics") for spec in TABLE),
        ("__consumer_offsets", "Kafka's own"),
        ("no/slash", "letters, digits"),
        ("..", "letters, digits"),
    ],
)
def test_polars_own_topics_and_what_is_no_name_are_refused(command: list[str], name: str, why: str) -> None:
    result = CliRunner().invoke(app, [*command, "--to-topic", name])
    assert result.exit_code == 2
    assert why in result.output


async def test_a_compacted_topic_is_refused(bus_settings: BusSettings, polar: Polar) -> None:
    async with Bus(bus_settings, Service.USER) as bus:
        await bus.prepare()
        name = f"{bus_settings.topic_prefix}compacted"
        plain = bus_settings.model_copy(update={"topic_prefix": ""})
        await ensure_topics(Clients(plain, "tests"), [topic("policy")._replace(name=name)])
    done = await run(polar, "rebuild", "--to-topic", name)
    assert (done.returncode, "is compacted" in done.stderr) == (2, True)


OPTIONS = [
    (["--builder", "per_request"], "choose one of --to-topic, --to-file and --check"),
    (["--check", "--to-file", "a.jsonl"], "choose one of"),
    (["--check", "--builder", "per_request"], "leave --builder out"),
    (["--to-file", "a.txt"], "ends neither in .jsonl nor in .msgpack"),
    (["--to-file", "a.jsonl", "--builder", "no_such"], "--builder: no builder 'no_such' is allowed here"),
    (["--to-file", "a.jsonl", "--builder", "x:Y"], "POLAR_BUILDER_ALLOW"),
    (["--to-file", "a.jsonl", "--builder-config", "{}"], "--builder-config needs --builder"),
    (["--to-file", "a.jsonl", "--builder", "per_request", "--builder-config", "{"], "--builder-config is not JSON"),
    (["--to-file", "a.jsonl", "--builder", "per_request", "--builder-config", "[]"], "is not a JSON object"),
    (["--to-file", "a.jsonl", "--builder", "per_request", "--builder-config", "@none"], "cannot read none"),
    (["--to-file", "a.jsonl", "--builder", "per_request", "--builder-config", '{"x": 1}'], "--builder-config: builder"),
    (["--check", "--since", "yesterday"], "--since 'yesterday' is neither a span"),
    (["--check", "--until", "2026-05-01T12:00"], "--until '2026-05-01T12:00' names no time zone"),
    (["--check", "--since", "1h", "--until", "2h"], "--until 2h is not after --since 1h"),
]


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(("arguments", "message"), OPTIONS)
def test_wrong_options_are_told_by_name_before_anything_is_read(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["rebuild", *arguments])
    assert result.exit_code == 2
    assert message in result.output
