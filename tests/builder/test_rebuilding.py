"""Building again from a real log: the same bytes, another builder, what is selected and what is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.builder import rebuild
from polar.builder import rebuilding as rebuilding_module
from polar.builder.rebuild_select import MARGIN_MS, Selection
from polar.bus import Bus, BusSettings
from polar.schemas import BuilderSpec, Status, Trajectory, encode
from polar.schemas.topics import Service
from tests.builder.replaying import (
    At,
    again,
    at,
    committed,
    forget,
    leftovers,
    mixed,
    names,
    of_every_kind,
    of_task,
    played,
    session_of,
    write,
)

PATIENCE_S = 60.0
SCRIPT = Path(__file__).parent / "run_builder.py"
DAY = 86_400_000


@pytest.fixture
async def settings(bus_settings: BusSettings) -> BusSettings:
    return bus_settings.model_copy(update={"partitions": 1, "transaction_timeout_ms": 5_000})


@pytest.fixture
async def proxy(settings: BusSettings) -> AsyncIterator[Bus]:
    """Writes `completions`, for scheduler and proxy alike."""
    async with Bus(settings, Service.PROXY) as bus:
        await bus.prepare()
        yield bus


async def build(settings: BusSettings, bus: Bus, folder: Path, count: int) -> dict[str, tuple[bytes, bytes]]:
    """What the builder's own process writes to `built`: bytes and source header by session."""
    env = {
        **os.environ,
        "POLAR_KAFKA_BOOTSTRAP": settings.bootstrap,
        "POLAR_KAFKA_TOPIC_PREFIX": settings.topic_prefix,
        "POLAR_KAFKA_PARTITIONS": str(settings.partitions),
        "POLAR_KAFKA_TASK_PARTITIONS": str(settings.task_partitions),
        "POLAR_KAFKA_NODE_PARTITIONS": str(settings.node_partitions),
        "POLAR_KAFKA_BLOB_URL": settings.blob_url,
        "POLAR_KAFKA_MAX_RECORD_BYTES": str(settings.max_record_bytes),
        "POLAR_BUILDER_MEMORY_BYTES": "3000",
    }
    process = await asyncio.create_subprocess_exec(sys.executable, str(SCRIPT), str(folder), env=env)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(await committed(bus, "built")) < count:  # noqa: ASYNC110 - what is awaited happens at the broker
                await asyncio.sleep(0.2)
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()
    records = await committed(bus, "built")
    assert len(records) == count
    return {one.key or "": (one.raw or b"", one.headers["source"]) for one in records}


def source(trajectory: Trajectory) -> bytes:
    return f"completions/{trajectory.closing.partition}/{trajectory.closing.offset}".encode()


async def test_sessions_of_every_kind_get_the_bytes_that_the_builders_process_wrote(
    settings: BusSettings, proxy: Bus, tmp_path: Path
) -> None:
    sessions = of_every_kind()
    entries = await write(proxy, mixed(sessions))
    built = await build(settings, proxy, tmp_path / "builder", len(sessions))
    found, left = await again(proxy, tmp_path)
    assert set(found) == names(sessions)
    assert {name: (one.value, source(one.trajectory)) for name, one in found.items()} == built
    for name, one in found.items():
        own = [entry for entry in entries if session_of(entry.event) == name]
        assert one.value == encode(rebuild(own)), "and of the pure function"
    reasons = {one.reason for each in found.values() for one in each.trajectory.set_aside}
    assert reasons >= {"fenced", "late", "unfinished", "failed"}, "the sessions are of every kind"
    assert (left.lost.total, left.unfinished.total, left.unknown, left.failed) == (0, 0, (), {})
    assert [one.trajectory.closing.offset for one in found.values()] == sorted(
        one.trajectory.closing.offset for one in found.values()
    ), "in the order of their closing records"


async def test_what_the_builder_found_too_large_is_so_again(settings: BusSettings, proxy: Bus, tmp_path: Path) -> None:
    sessions = [played("small", 2, 1), played("large", 60, 2)]
    for session in sessions:
        session.close()
        session.final()
    await write(proxy, mixed(sessions))
    small = settings.model_copy(update={"max_record_bytes": 16_384})
    built = await build(small, proxy, tmp_path / "builder", 2)
    async with Bus(small, Service.USER) as reader:
        found, _ = await again(reader, tmp_path)
    assert {name: one.value for name, one in found.items()} == {name: value for name, (value, _) in built.items()}
    error = found["large"].trajectory.error
    assert error is not None
    assert "MAX_RECORD_BYTES" in error.message


async def test_another_builder_gives_another_trajectory_with_an_id_of_its_own(proxy: Bus, tmp_path: Path) -> None:
    sessions = [played("one", 4, 1), played("two", 3, 2)]
    for session in sessions:
        session.close()
    entries = await write(proxy, mixed(sessions))
    before, _ = await again(proxy, tmp_path)
    ids = {one.trajectory.trajectory_id for one in before.values()}
    for spec, allowed in (
        (BuilderSpec(strategy="per_request"), ()),
        (BuilderSpec(config={"train_greedy": True}), ()),
        (BuilderSpec(strategy="tests.builder.own:Reversed"), ("tests.builder.own:Reversed",)),
    ):
        found, _ = await again(proxy, tmp_path, spec=spec, allowed=allowed)
        for name, one in found.items():
            own = [entry for entry in entries if session_of(entry.event) == name]
            assert one.value == encode(rebuild(own, spec, allowed=allowed))
            assert one.trajectory.builder == spec
            assert one.trajectory.error is None
        new = {one.trajectory.trajectory_id for one in found.values()}
        assert ids.isdisjoint(new), "derived from session, attempt and builder"
        ids |= new
        repeated, _ = await again(proxy, tmp_path, spec=spec, allowed=allowed)
        assert {name: one.value for name, one in repeated.items()} == {name: one.value for name, one in found.items()}


async def test_a_strategy_that_raises_makes_an_error_of_its_session(proxy: Bus, tmp_path: Path) -> None:
    session = played("one", 2, 1)
    session.close()
    await write(proxy, session.records)
    spec = BuilderSpec(strategy="tests.builder.own:Raises")
    found, left = await again(proxy, tmp_path, spec=spec, allowed=["tests.builder.own:Raises"])
    assert found["one"].trajectory.status is Status.ERROR
    assert (left.failed, left.unfinished.total) == ({}, 0)


async def written_in_time(settings: BusSettings, now: int) -> dict[str, int]:
    """Sessions that closed one, two, … days before `now`; the eldest began twenty days before. Closes by session."""
    closes: dict[str, int] = {}
    clock = At(now - 20 * DAY)
    async with Bus(settings, Service.PROXY, clock=clock) as bus:
        await bus.prepare()
        eldest = played("eldest", 3, 50)
        opening = len(eldest.records)
        eldest.close()
        eldest.final()
        await write(bus, at(eldest.records[:opening], clock.ms))
        for days in range(9, 0, -1):
            clock.ms = now - days * DAY
            session = played(f"d{days}", 2, days)
            session.close()
            session.final()
            await write(bus, at(session.records, clock.ms))
            closes[session.session_id] = clock.ms
        clock.ms = now - DAY // 2
        await write(bus, at(eldest.records[opening:], clock.ms))
        closes["eldest"] = clock.ms
    return closes


async def test_a_time_selects_by_the_close_and_reads_back_to_the_first_record(
    settings: BusSettings, proxy: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polar.builder.rebuild_select.FIRST_LOOK_BACK", 3)  # several steps back
    monkeypatch.setattr(rebuilding_module, "SKIP_RECORDS", 1)  # and seeks ahead
    now = proxy.clock.now_ms()
    closes = await written_in_time(settings, now)
    everything, _ = await again(proxy, tmp_path)
    assert set(everything) == set(closes)
    for since, until in (
        (now - DAY * 3, None),
        (now - DAY, None),
        (None, now - DAY * 4),
        (now - DAY * 7, now - DAY * 2),
    ):
        found, left = await again(proxy, tmp_path, Selection(since_ms=since, until_ms=until))
        expected = {
            name
            for name, closed in closes.items()
            if (since is None or closed >= since) and (until is None or closed < until)
        }
        assert set(found) == expected
        assert all(one.value == everything[name].value for name, one in found.items())
        assert (left.lost.total, left.unfinished.total) == (0, 0)


async def test_a_time_reads_no_more_of_the_log_than_it_needs(
    settings: BusSettings, proxy: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polar.builder.rebuild_select.FIRST_LOOK_BACK", 3)
    monkeypatch.setattr(rebuilding_module, "SKIP_RECORDS", 1)
    now = proxy.clock.now_ms()
    async with Bus(settings, Service.PROXY, clock=At(now - 5 * DAY)) as bus:
        for number in range(40):
            session = played(f"old-{number}", 2, number)
            session.close()
            session.final()
            await write(bus, at(session.records, now - 5 * DAY))
    straddling = played("straddling", 2, 90)
    async with Bus(settings, Service.PROXY, clock=At(now - 2 * DAY)) as bus:
        await write(bus, at(straddling.records, now - 2 * DAY))
    straddling.close()
    await write(proxy, at(straddling.records[-1:], now))
    seen: list[tuple[str, int, int]] = []
    found, _ = await again(proxy, tmp_path, Selection(since_ms=now - DAY), watch=lambda *told: seen.append(told))
    assert set(found) == {"straddling"}
    looked = [done for what, done, _ in seen if what == "looking for sessions"]
    assert looked[-1] < 20, "of more than 280 records"


async def test_a_session_whose_start_is_gone_is_named_and_the_others_are_built(
    settings: BusSettings, proxy: Bus, tmp_path: Path
) -> None:
    now = proxy.clock.now_ms()
    closes = await written_in_time(settings, now)
    await forget(proxy, "completions", {0: 3})  # of the eldest's start
    for selection in (Selection(), Selection(since_ms=now - 5 * DAY)):
        found, left = await again(proxy, tmp_path, selection)
        assert "eldest" not in found
        assert (left.lost.total, left.lost.names) == (1, ["eldest"])
        expected = {name for name, closed in closes.items() if selection.in_time(closed)} - {"eldest"}
        assert set(found) == expected
    _, left = await again(proxy, tmp_path, Selection(since_ms=now - 5 * DAY, tasks=frozenset({"another"})))
    assert left.unknown == ("task another",)


async def test_what_is_lost_of_a_task_is_told_by_its_calls_or_at_least_counted(
    settings: BusSettings, proxy: Bus, tmp_path: Path
) -> None:
    first, second = played("first", 3, 1), played("second", 2, 2)
    for session in (first, second):
        session.close()
        session.final()
    entries = [
        *of_task(first.records, "task", num_samples=2),
        *of_task(second.records, "task", num_samples=2),
    ]
    await write(proxy, entries)
    wanted = Selection(tasks=frozenset({"task"}))
    await forget(proxy, "completions", {0: 2})
    found, left = await again(proxy, tmp_path, wanted)
    assert (set(found), left.lost.names, left.strangers) == ({"second"}, ["first"], 0)
    await forget(proxy, "completions", {0: len(first.records) - 2})  # its close only is left, which names no task
    found, left = await again(proxy, tmp_path, wanted)
    assert (set(found), left.lost.names, left.strangers) == ({"second"}, [], 1)
    assert left.unknown == ("1 of the 2 sessions of task task",)


async def test_tasks_and_sessions_select_and_what_is_not_finished_is_named(
    bus_settings: BusSettings, tmp_path: Path
) -> None:
    async with Bus(bus_settings, Service.PROXY) as bus:
        await bus.prepare()
        sessions = [played(f"s{number}", 2, number) for number in range(6)]
        for session in sessions[:4]:
            session.close()
        sessions[4].start()
        sessions[4].close()  # a call is open: its closing record is to come
        entries = [entry for number, one in enumerate(sessions) for entry in of_task(one.records, f"t{number % 2}")]
        await write(bus, entries)
        found, left = await again(bus, tmp_path)
        assert set(found) == {"s0", "s1", "s2", "s3"}
        assert left.unfinished.names == ["s4", "s5"]
        found, left = await again(bus, tmp_path, Selection(tasks=frozenset({"t1"})))
        assert (set(found), left.unfinished.names) == ({"s1", "s3"}, ["s5"])
        found, left = await again(bus, tmp_path, Selection(sessions=frozenset({"s2", "s4", "nobody"})))
        assert (set(found), left.unfinished.names, left.unknown) == ({"s2"}, ["s4"], ("session nobody",))
        found, _ = await again(bus, tmp_path, Selection(sessions=frozenset({"s2"}), tasks=frozenset({"t1"})))
        assert not found
    assert leftovers(tmp_path) == [], "scratch files have no name"


async def test_a_final_record_after_the_time_asked_for_ends_a_session_that_closed_in_it(
    settings: BusSettings, proxy: Bus, tmp_path: Path
) -> None:
    session = played("open-call", 2, 1)
    session.start()
    session.close()
    now = proxy.clock.now_ms() - 10 * MARGIN_MS
    clock = At(now)
    other = played("other", 1, 2)
    other.close()
    async with Bus(settings, Service.PROXY, clock=clock) as bus:
        await write(bus, at(session.records, clock.ms))
        clock.ms += 2 * MARGIN_MS
        await write(bus, at(other.records, clock.ms))
        session.final()
        await write(bus, at(session.records[-1:], clock.ms))
    found, left = await again(proxy, tmp_path, Selection(until_ms=now + 1))
    assert set(found) == {"open-call"}
    assert [one.reason for one in found["open-call"].trajectory.set_aside] == ["unfinished"]
    assert left.unfinished.total == 0


async def test_an_unreadable_record_is_left_out_as_the_builder_does(
    settings: BusSettings, proxy: Bus, tmp_path: Path
) -> None:
    session = played("one", 3, 1)
    session.close()
    await write(proxy, session.records[:4])
    producer = await proxy.clients.producer()
    await producer.send_and_wait(settings.full("completions"), key=b"one", value=b"\xc1 no record", partition=0)
    await producer.stop()
    await write(proxy, session.records[4:])
    built = await build(settings, proxy, tmp_path / "builder", 1)
    found, left = await again(proxy, tmp_path)
    assert {name: one.value for name, one in found.items()} == {name: value for name, (value, _) in built.items()}
    assert left.unreadable == 1
