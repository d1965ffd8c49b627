"""The builder on a real log: exactly one trajectory per session, whatever is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from polar.builder import Entry, rebuild
from polar.builder.service import BuilderService
from polar.builder.settings import BuilderSettings
from polar.bus import Bus, BusSettings, Out, Record
from polar.schemas import Stage, StageChanged, Status, Trajectory, encode
from polar.schemas.prompts import MAX_CHAIN
from polar.schemas.topics import Service
from tests.builder.toy import Session, say, user

PATIENCE_S = 60.0
SCRIPT = Path(__file__).parent / "run_builder.py"


@pytest.fixture
async def proxy(bus_settings: BusSettings) -> AsyncIterator[Bus]:
    """Writes `completions`, for scheduler and proxy alike."""
    async with Bus(bus_settings, Service.PROXY) as bus:
        await bus.prepare()
        yield bus


@asynccontextmanager
async def building(settings: BusSettings, folder: Path, **more: object) -> AsyncIterator[BuilderService]:
    async with Bus(settings, Service.BUILDER) as bus:
        service = BuilderService(bus, BuilderSettings(**more), state_dir=folder)
        task = asyncio.create_task(service.run())
        try:
            yield service
        finally:
            task.cancel()
            await asyncio.wait([task])


async def write(bus: Bus, entries: Iterable[Entry]) -> list[Entry]:
    """Writes records in order; as they stand on the log."""
    entries = list(entries)
    refs = await bus.send(*(Out("completions", one.event.session_id, one.event) for one in entries))  # type: ignore[attr-defined]
    return [Entry(ref, entry.event) for ref, entry in zip(refs, entries, strict=True)]


async def committed(bus: Bus, topic: str) -> list[Record]:
    """All that a reader of `topic` sees now."""
    reader = await bus.reader([topic])
    try:
        return [record async for record in reader.to_end()]
    finally:
        await reader.close()


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await check():  # noqa: ASYNC110 - what is awaited happens at the broker
            await asyncio.sleep(0.1)


async def built(bus: Bus, count: int) -> dict[str, Trajectory]:
    """Trajectories by session, once there are `count`; fails where one session has two."""

    async def there() -> bool:
        return len(await committed(bus, "built")) >= count

    await until(there)
    found: dict[str, Trajectory] = {}
    for record in await committed(bus, "built"):
        assert isinstance(record.value, Trajectory)
        assert record.value.session_id not in found, "built twice"
        found[record.value.session_id] = record.value
    return found


def played(name: str, calls: int, seed: int) -> Session:
    """A linear session, not closed yet."""
    session = Session(seed=seed, session_id=name)
    chance = random.Random(seed)
    messages = [user("ab" * 5)]
    for _ in range(calls):
        reply = say("abc", chance)
        session.call(messages, reply)
        messages = [*messages, reply.message, user("d")]
    return session


async def test_a_closed_session_is_built_once_and_reported(
    bus_settings: BusSettings, proxy: Bus, tmp_path: Path
) -> None:
    session = played("s-1", 3, 1)
    session.close()
    entries = await write(proxy, session.records)
    async with building(bus_settings, tmp_path):
        (trajectory,) = (await built(proxy, 1)).values()
        session.final()
        await write(proxy, session.records[-1:])
    assert encode(trajectory) == encode(rebuild(entries))
    (record,) = await committed(proxy, "built")
    (report,) = [one.value for one in await committed(proxy, "stages")]
    assert isinstance(report, StageChanged)
    assert (report.stage, report.built, report.attempt) == (Stage.BUILT, record.ref, 1)
    assert report.summary is not None
    assert (report.summary.captured, report.summary.failure) == (3, None)
    assert record.headers["source"] == f"completions/{entries[-1].ref.partition}/{entries[-1].ref.offset}".encode()


async def test_sessions_beyond_the_memory_go_through_the_cache_file_unchanged(
    bus_settings: BusSettings, proxy: Bus, tmp_path: Path
) -> None:
    sessions = [played(f"s-{number}", 4, number) for number in range(8)]
    for session in sessions:
        session.close()
    longest = max(len(one.records) for one in sessions)
    mixed = [one.records[i] for i in range(longest) for one in sessions if i < len(one.records)]
    entries = await write(proxy, mixed)
    async with building(bus_settings, tmp_path, memory_bytes=2000, max_batch=7):
        found = await built(proxy, len(sessions))
    for name, trajectory in found.items():
        own = [one for one in entries if one.event.session_id == name]  # type: ignore[attr-defined]
        assert encode(trajectory) == encode(rebuild(own))
    assert list((tmp_path / "builder").iterdir()) == []  # the file has no name and goes with the process


async def test_delta_prompts_are_resolved_from_memory_and_from_the_cache_file(
    bus_settings: BusSettings, proxy: Bus, tmp_path: Path
) -> None:
    def played_long(name: str, delta: bool) -> Session:
        session = Session(seed=int(name[2:]), session_id=name, delta=delta)
        messages = [user("abcd" * 50)]
        for _ in range(MAX_CHAIN + 3):
            reply = say("abc", session.chance)
            session.call(messages, reply)
            messages = [*messages, reply.message, user("d" * 9)]
        session.close()
        return session

    names = [f"s-{number}" for number in range(4)]
    sessions = [played_long(name, delta=True) for name in names]
    longest = max(len(one.records) for one in sessions)
    entries = await write(proxy, [one.records[i] for i in range(longest) for one in sessions if i < len(one.records)])
    async with building(bus_settings, tmp_path, memory_bytes=5_000, max_batch=20):
        found = await built(proxy, len(sessions))
    for name, trajectory in found.items():
        own = [one for one in entries if one.event.session_id == name]  # type: ignore[attr-defined]
        assert encode(trajectory) == encode(rebuild(own))
        assert (trajectory.captured, trajectory.set_aside, len(trajectory.traces)) == (MAX_CHAIN + 3, [], 1)
        whole = [
            Entry(written.ref, plain.event)
            for written, plain in zip(own, played_long(name, delta=False).records, strict=True)
        ]
        assert encode(trajectory) == encode(rebuild(whole))


async def test_a_trajectory_too_large_for_a_record_is_an_error_without_traces(
    bus_settings: BusSettings, tmp_path: Path
) -> None:
    small = bus_settings.model_copy(update={"max_record_bytes": 20_000})
    session = Session()
    for number in range(10):
        session.call([user("abcd" * 100 + str(number))], say("abcd" * 500, random.Random(number)))
    session.close()
    async with Bus(small, Service.PROXY) as bus:
        await bus.prepare()
        await write(bus, session.records)
        async with building(small, tmp_path):
            (trajectory,) = (await built(bus, 1)).values()
    assert (trajectory.status, trajectory.traces) == (Status.ERROR, [])
    assert trajectory.error is not None
    assert "MAX_RECORD_BYTES" in trajectory.error.message
    assert {one.completion_id for one in trajectory.set_aside} == set(session.started)


async def start_process(settings: BusSettings, folder: Path) -> asyncio.subprocess.Process:
    env = {
        **os.environ,
        "POLAR_KAFKA_BOOTSTRAP": settings.bootstrap,
        "POLAR_KAFKA_TOPIC_PREFIX": settings.topic_prefix,
        "POLAR_KAFKA_PARTITIONS": str(settings.partitions),
        "POLAR_KAFKA_TASK_PARTITIONS": str(settings.task_partitions),
        "POLAR_KAFKA_NODE_PARTITIONS": str(settings.node_partitions),
        "POLAR_KAFKA_BLOB_URL": settings.blob_url,
        "POLAR_BUILDER_MEMORY_BYTES": "3000",
    }
    return await asyncio.create_subprocess_exec(sys.executable, str(SCRIPT), str(folder), env=env)


async def test_a_builder_killed_between_interleaved_sessions_loses_nothing_and_doubles_nothing(
    bus_settings: BusSettings, tmp_path: Path
) -> None:
    settings = bus_settings.model_copy(update={"partitions": 1, "transaction_timeout_ms": 5_000})
    async with Bus(settings, Service.PROXY) as proxy:
        await proxy.prepare()
        one, other, third = played("one", 4, 1), played("other", 3, 2), played("third", 2, 3)
        for session in (one, other, third):
            session.close()
        # `one` is open over the whole life of `other`, and `third` begins before the kill and ends after it
        before = [*one.records[:5], *other.records, *third.records[:3]]
        after = [*one.records[5:], *third.records[3:]]
        process = await start_process(settings, tmp_path)
        try:
            entries = await write(proxy, before)
            assert set(await built(proxy, 1)) == {"other"}
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        entries += await write(proxy, after)
        process = await start_process(settings, tmp_path)
        try:
            found = await built(proxy, 3)
        finally:
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        assert len(await committed(proxy, "stages")) == 3
    for name, trajectory in found.items():
        own = [entry for entry in entries if entry.event.session_id == name]  # type: ignore[attr-defined]
        assert encode(trajectory) == encode(rebuild(own))
        assert trajectory.error is None


async def test_kills_at_any_moment_leave_one_trajectory_per_session(bus_settings: BusSettings, tmp_path: Path) -> None:
    settings = bus_settings.model_copy(update={"partitions": 1, "transaction_timeout_ms": 5_000})
    chance = random.Random(7)
    sessions = [played(f"s-{number}", chance.randint(1, 4), number) for number in range(30)]
    for session in sessions:
        session.close()
        session.final()
    queues = [list(session.records) for session in sessions]
    mixed: list[Entry] = []
    while queues:
        queue = chance.choice(queues)
        mixed.append(queue.pop(0))
        queues = [one for one in queues if one]
    async with Bus(settings, Service.PROXY) as proxy:
        await proxy.prepare()
        entries: list[Entry] = []
        process = await start_process(settings, tmp_path)
        try:
            for share in range(3):
                part = mixed[share * len(mixed) // 3 : (share + 1) * len(mixed) // 3]
                entries += await write(proxy, part)
                closed = {entry.event.session_id for entry in entries if type(entry.event).__name__ == "SessionClosed"}  # type: ignore[attr-defined]
                await built(proxy, max(1, len(closed) - 2))  # somewhere in the middle of the last ones
                process.send_signal(signal.SIGKILL)
                await process.wait()
                process = await start_process(settings, tmp_path)
            found = await built(proxy, len(sessions))
        finally:
            process.kill()
            await process.wait()
    assert set(found) == {session.session_id for session in sessions}
    for name, trajectory in found.items():
        own = [entry for entry in entries if entry.event.session_id == name]  # type: ignore[attr-defined]
        assert encode(trajectory) == encode(rebuild(own))


async def test_a_session_whose_bare_account_fits_no_record_still_gets_its_ending(
    proxy: Bus, bus_settings: BusSettings, tmp_path: Path
) -> None:
    session = Session(session_id="busy")
    for _ in range(400):
        session.fail(session.start())
    session.close()
    await write(proxy, session.records)
    small = bus_settings.model_copy(update={"max_record_bytes": 16_384})
    async with building(small, tmp_path):
        (trajectory,) = (await built(proxy, 1)).values()
    assert trajectory.status is Status.ERROR
    assert trajectory.error is not None
    (report,) = [one.value for one in await committed(proxy, "stages") if isinstance(one.value, StageChanged)]
    assert report.summary is not None
    assert report.summary.set_aside == {"failed": 400}, "what has no place is counted"
