"""`polar replay`: what stands on `polar.trajectories` is published again, unchanged and in order."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from polar.bus import Bus, BusSettings, Out
from polar.bus.clients import stop_admin
from polar.cli.main import app
from polar.cli.replay_plan import Evidence
from polar.schemas import Lease, Phase, TaskCounts, TaskResult, TaskState, Trajectory
from polar.schemas.base import RecordRef
from polar.schemas.topics import Service
from tests.builder.replaying import At, committed, forget, played
from tests.cli.conftest import Polar
from tests.cli.finished import World, closed, ids, run, world
from tests.cli.records import group as closed_group
from tests.cli.records import trajectory

DAY = 86_400_000

pytestmark = pytest.mark.timeout(300)  # several runs of the command each, on a busy machine


@pytest.fixture
async def log(bus_settings: BusSettings, tmp_path: Path) -> AsyncIterator[World]:
    """Tasks `one` and `two`, closed; `three` with one of its two sessions published."""
    async with world(bus_settings.model_copy(update={"partitions": 2}), tmp_path / "services") as made:
        await made.build(
            {
                "one": [closed(played(f"one-{number}", 2, number)) for number in range(3)],
                "two": [closed(played("two-0", 1, 7))],
                "three": [closed(played(f"three-{number}", 1, 8 + number)) for number in range(2)],
            }
        )
        await made.finish({"one-0": 1.0, "one-1": 0.0, "one-2": None, "two-0": 0.5, "three-1": 1.0})
        await made.close("one")
        await made.close("two")
        yield made


async def test_a_tasks_trajectories_and_then_its_group_are_published_byte_for_byte(log: World, polar: Polar) -> None:
    name = f"{log.settings.topic_prefix}copy.trajectories"
    done = await run(polar, "replay", "--task", "one", "--to-topic", name)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 trajectories of 1 task and 1 closed group (" in done.stdout
    assert f"published again to topic {name} (2 partitions, made now)" in done.stdout
    before = [one for one in await committed(log.proxy, "trajectories") if one.key == "one"]
    after = await log.records(name)
    assert ids(after) == ids(before)
    assert ids(after)[-1] == "group one"
    for old, new in zip(before, after, strict=True):
        place = f"trajectories/{old.partition}/{old.offset}".encode()
        assert (new.key, new.raw) == (old.key, old.raw)
        assert dict(new.headers) == {**old.headers, "replayed-from": place}
    # again, of the group, to the same topic: twice the same records, told by their ids
    done = await run(polar, "replay", "--group", "one", "--to-topic", name, "--json")
    assert json.loads(done.stdout)["trajectories"] == 3
    twice = await log.records(name)
    assert [one.raw for one in twice] == [one.raw for one in before] * 2
    assert len({one.value.trajectory_id for one in twice if isinstance(one.value, Trajectory)}) == 3


async def test_what_is_unknown_unfinished_or_gone_is_said_and_nothing_is_published(log: World, polar: Polar) -> None:
    name = f"{log.settings.topic_prefix}part.trajectories"
    done = await run(polar, "replay", "--task", "one", "--task", "three", "--task", "nobody", "--to-topic", name)
    assert done.returncode == 1
    assert "task three is not finished: 1 of 2 trajectories so far" in done.stderr
    assert "task nobody is not known" in done.stderr
    assert "--partial publishes what there is" in done.stderr
    done = await run(polar, "replay", "--group", "three", "--to-topic", name)
    assert (done.returncode, "group three is not decided yet" in done.stderr) == (1, True)
    counts, place = TaskCounts(accepted=1), RecordRef(topic="tasks", partition=0, offset=0)
    state = TaskState(
        task_id="queued", body_sha256="", source=place, group_id="queued", counts=counts, accepted_at_ms=1
    )
    lease = Lease(session_id="q", task_id="queued", group_id="queued", sample=0, phase=Phase.QUEUED, queued_at_ms=1)
    result = TaskResult(task_id="past", group_id="past", status="completed", counts=counts, at_ms=1)
    await log.scheduler.send(
        Out("leases", "t/queued", state), Out("leases", "q", lease), Out("results", "t/past", result)
    )
    done = await run(polar, "replay", "--task", "queued", "--task", "past", "--to-topic", name)
    assert done.returncode == 1
    assert "task queued is not finished: none of its sessions is" in done.stderr
    assert "task past has finished, but polar.trajectories no longer has anything of it" in done.stderr
    # retention takes the first trajectory of a closed group
    first = next(one for one in await committed(log.proxy, "trajectories") if one.key == "one")
    await forget(log.proxy, "trajectories", {first.partition: first.offset + 1})
    done = await run(polar, "replay", "--task", "one", "--to-topic", name)
    assert done.returncode == 1
    assert "task one: polar.trajectories no longer has 1 of its 3 trajectories" in done.stderr
    admin = await log.proxy.clients.admin()
    assert name not in await admin.list_topics(), "the topic is not even made"
    await stop_admin(admin)
    done = await run(polar, "replay", "--task", "one", "--task", "three", "--to-topic", name, "--partial")
    assert (done.returncode, done.stderr.count("warning:")) == (0, 2)
    assert len(await log.records(name)) == len(
        [one for one in await committed(log.proxy, "trajectories") if one.key in ("one", "three")]
    )


async def test_a_time_chooses_by_when_it_was_published_at_the_rate_asked_for(
    bus_settings: BusSettings, polar: Polar, tmp_path: Path
) -> None:
    now = int(time.time() * 1000)
    clock = At(now - 3 * DAY)
    async with world(bus_settings, tmp_path / "services", clock) as made:
        for number in range(4):
            clock.ms = now - (4 - number) * DAY
            event = trajectory(session_id=f"s{number}", task_id="t", group_id=f"g{number % 2}")
            async with Bus(bus_settings, Service.FINISHER, clock=clock) as finisher:
                await finisher.send(Out("trajectories", event.group_id, event))
        name = f"{bus_settings.topic_prefix}days.trajectories"
        started = time.monotonic()
        done = await run(
            polar, "replay", "--since", "84h", "--until", "36h", "--to-topic", name, "--rate", "2/s", "--json"
        )
        assert done.returncode == 0
        assert json.loads(done.stdout)["trajectories"] == 2
        assert time.monotonic() - started > 0.5
        assert sorted(ids(await made.records(name))) == ["s1", "s2"]
        done = await run(polar, "replay", "--since", "1h", "--to-topic", name)
        assert (done.returncode, done.stdout) == (0, "nothing was published in that time\n")


OPTIONS = [
    (["--to-topic", "x"], "choose one of --task, --group, and a time"),
    (["--task", "a", "--group", "b", "--to-topic", "x"], "choose one of"),
    (["--task", "a", "--since", "1h", "--to-topic", "x"], "choose one of"),
    (["--task", "a"], "--to-topic says where to"),
    (["--task", "a", "--to-topic", "x", "--rate", "fast"], "--rate 'fast' is no rate like 50/s"),
    (["--task", "a", "--to-topic", "x", "--rate", "0"], "is no rate"),
    (["--until", "soon", "--to-topic", "x"], "--until 'soon' is neither"),
]


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(("arguments", "message"), OPTIONS)
def test_wrong_options_are_told_by_name(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["replay", *arguments])
    assert result.exit_code == 2
    assert message in result.output


@given(st.integers(1, 6), st.data())
def test_a_task_is_whole_exactly_when_all_its_sessions_and_its_decision_are_there(
    size: int, data: st.DataObject
) -> None:
    sessions = [f"s{number}" for number in range(size)]
    have = data.draw(st.lists(st.sampled_from(sessions), unique=True))
    decided = data.draw(st.booleans())
    members = data.draw(st.lists(st.sampled_from(sessions), unique=True)) if decided else []
    evidence = Evidence(tasks=frozenset({"t"}))
    for name in have:
        assert evidence.take(trajectory(session_id=name, task_id="t", group_id="g", num_samples=size))
    assert not evidence.take(trajectory(session_id="x", task_id="other", group_id="g2"))
    if decided:
        event = closed_group(dict.fromkeys(members, 1.0), members, group_id="g", tasks=["t"])
        assert evidence.take(event)
    whole = len(have) == size and decided
    problems = evidence.problems(running=frozenset({"t"}))
    assert (problems == []) == whole
    if set(members) - set(have):
        assert "polar.trajectories no longer has" in problems[0]


def test_a_session_that_is_a_group_of_its_own_needs_no_decision() -> None:
    evidence = Evidence(tasks=frozenset({"t"}))
    for name in ("a", "b"):
        evidence.take(trajectory(session_id=name, task_id="t", group_id=name, num_samples=2))
    assert evidence.problems() == []


def test_a_group_of_several_tasks_is_told_of_when_only_one_is_published() -> None:
    evidence = Evidence(tasks=frozenset({"t"}))
    evidence.take(trajectory(session_id="a", task_id="t", group_id="g", num_samples=1))
    event = closed_group({"a": 1.0}, ["a"], group_id="g", tasks=["t", "u"])
    other = closed_group({"b": 1.0}, ["b"]).members[0]
    evidence.take(replace(event, members=[*event.members, replace(other, task_id="u")]))
    assert evidence.problems() == []
    assert evidence.notices() == ["task t: its group lists 1 session of other tasks, not published here"]
