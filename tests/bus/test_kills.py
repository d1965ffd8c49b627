"""Exactly once while workers are killed, and going on while the broker is."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from polar.broker import spawn
from polar.bus import Bus, BusError, BusSettings, Out, PartitionWorker, Record
from polar.schemas import StageChanged, Tick
from polar.schemas.topics import Service
from tests.bus.support import Copier, call, final, tick, until


def start_worker(settings: BusSettings, seed: int, log: Path, *more: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.bus.worker_process", settings.model_dump_json(), str(seed), *more],
            stdout=out,
            stderr=out,
            cwd=Path(__file__).parents[2],
        )


async def reports(bus: Bus) -> list[tuple[str, int]]:
    reader = await bus.reader(["stages"])
    values = [record.value async for record in reader.to_end()]
    await reader.close()
    return [(value.session_id, value.attempt) for value in values if isinstance(value, StageChanged)]


async def send_sessions(bus: Bus, wanted: dict[str, int], randomness: random.Random) -> None:
    """Sessions of interleaved calls, each with its final record, a few at a time."""
    rest = dict(wanted)
    numbers = Counter[str]()
    while rest:
        burst: list[Out] = []
        for session in randomness.sample(sorted(rest), k=min(4, len(rest))):
            if rest[session] == 0:
                burst.append(final(session))
                del rest[session]
            else:
                burst.append(call(numbers[session], session))
                numbers[session] += 1
                rest[session] -= 1
        await bus.send(*burst)
        await asyncio.sleep(randomness.random() * 0.1)


@pytest.mark.timeout(180)
async def test_two_workers_under_sigkill_neither_lose_nor_double(bus_settings: BusSettings, tmp_path: Path) -> None:
    randomness = random.Random(7)
    wanted = {f"s{number}": randomness.randint(1, 6) for number in range(80)}
    log = tmp_path / "workers.log"
    workers: list[subprocess.Popen[bytes]] = []
    async with Bus(bus_settings, Service.PROXY) as proxy, Bus(bus_settings, Service.BUILDER) as builder:
        await proxy.prepare()
        try:
            workers += [start_worker(bus_settings, seed, log) for seed in (1, 2)]
            sending = asyncio.create_task(send_sessions(proxy, wanted, randomness))

            async def some_done(least: int) -> bool:
                return len(await reports(builder)) >= least

            for round_ in range(4):
                # kill while there is work, and not before this one has had its chance
                await until(lambda least=8 * (round_ + 1): some_done(least), 60)
                victim = round_ % 2
                workers[victim].send_signal(signal.SIGKILL)
                workers[victim].wait()
                workers[victim] = start_worker(bus_settings, 10 + round_, log)
            await sending
            await until(lambda: some_done(len(wanted)), 60)
        finally:
            for worker in workers:
                worker.terminate()
            codes = [worker.wait(20) for worker in workers]
        assert Counter(await reports(builder)) == Counter(wanted.items()), log.read_text()
        # the last one to be started may not have come far enough to stop in order
        assert set(codes) <= {0, -signal.SIGTERM}, log.read_text()


@dataclass
class Restartable:
    """A broker that a test may kill."""

    settings: BusSettings
    kill: Callable[[], Awaitable[object]]
    start: Callable[[], Awaitable[object]]


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
async def broker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Restartable]:
    """The embedded broker, and Apache Kafka where KAFKA_START_SCRIPT names a script that starts one: it is called with
    a folder and a port, and leaves its process id in the folder's `pid`."""

    def settings(bootstrap: str) -> BusSettings:
        return BusSettings(
            bootstrap=bootstrap,
            partitions=2,
            task_partitions=2,
            node_partitions=2,
            blob_url=(tmp_path / "blobs").as_uri(),
        )

    if request.param == "embedded":
        async with await spawn(tmp_path / "broker") as process:
            yield Restartable(settings(process.bootstrap), process.kill, process.start)
        return
    script = os.environ.get("KAFKA_START_SCRIPT")
    if not script:
        pytest.skip("Apache Kafka of one's own: KAFKA_START_SCRIPT is not set")
    folder = Path(os.environ.get("KAFKA_START_DIR", str(tmp_path / "kafka")))
    port = os.environ.get("KAFKA_START_PORT", "19192")

    async def start() -> None:
        starting = await asyncio.create_subprocess_exec(script, str(folder), port, stdout=subprocess.DEVNULL)
        assert await starting.wait() == 0

    async def end(how: signal.Signals) -> None:
        pid = int((folder / "pid").read_text())
        os.kill(pid, how)
        await until(lambda: not alive(pid), 30)

    await start()
    try:
        yield Restartable(
            settings(f"127.0.0.1:{port}").model_copy(update={"topic_prefix": f"test-{uuid.uuid4().hex[:10]}."}),
            lambda: end(signal.SIGKILL),
            start,
        )
    finally:
        await end(signal.SIGTERM)


def alive(pid: int) -> bool:
    try:
        # a child of ours that has ended is a zombie until somebody waits for it
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def numbers(records: list[Record]) -> list[int]:
    return [record.value.number for record in records if isinstance(record.value, Tick)]


@pytest.mark.timeout(240)
async def test_reader_sender_and_worker_go_on_when_the_broker_is_killed_and_comes_back(broker: Restartable) -> None:
    async with Bus(broker.settings, Service.SCHEDULER) as bus, Bus(broker.settings, Service.BUILDER) as builder:
        await bus.prepare()
        worker = PartitionWorker(builder, "completions", "builder", lambda _: Copier())
        working = asyncio.create_task(worker.run())
        reader = await bus.reader(["nodes"], start="latest")
        seen: list[int] = []

        async def follow() -> None:
            while True:
                seen.extend(numbers(await reader.poll()))

        following = asyncio.create_task(follow())
        acknowledged: list[int] = []
        refused: list[BusError] = []
        counting = iter(range(100_000))

        async def send_on() -> None:
            while True:
                number = next(counting)
                try:
                    await bus.send(Out("nodes", "tick", tick(number)), call(number, f"s{number % 5}"))
                    acknowledged.append(number)
                except BusError as error:
                    refused.append(error)
                await asyncio.sleep(0.01)

        sending = asyncio.create_task(send_on())
        for _ in range(2):
            have = len(acknowledged)
            await until(lambda have=have: len(acknowledged) > have + 30, 60)
            await broker.kill()
            under_way = len(acknowledged)
            await asyncio.sleep(1.0)  # the outage itself
            assert len(acknowledged) <= under_way + 1
            await broker.start()
        have = len(acknowledged)
        await until(lambda: len(acknowledged) > have + 30, 60)
        sending.cancel()
        await asyncio.wait([sending])
        assert all(error.retryable for error in refused)
        await until(lambda: set(acknowledged) <= set(seen), 60)

        async def all_copied() -> bool:
            return {number for _, number in await reports(builder)} >= set(acknowledged)

        await until(all_copied, 60)
        copied = Counter(number for _, number in await reports(builder))
        assert set(copied.values()) == {1}, "a record was processed twice"
        assert len(seen) == len(set(seen)), "a record was sent or read twice"
        assert seen == sorted(seen)
        for task in (following, working):
            assert not task.done(), task
            task.cancel()
        await asyncio.wait([following, working])


@pytest.mark.timeout(120)
async def test_a_transaction_that_the_broker_did_not_survive_can_be_made_anew(broker: Restartable) -> None:
    settings = broker.settings.model_copy(update={"delivery_timeout_s": 3.0})
    async with Bus(settings, Service.SCHEDULER) as bus:
        await bus.prepare()
        writer = await bus.transactional("writer")

        async def interrupted() -> None:
            async with writer.transaction() as opened:
                await opened.send(Out("nodes", "tick", tick(1)))
                await broker.kill()

        with pytest.raises(BusError) as caught:
            await interrupted()
        assert caught.value.retryable
        assert not writer.usable
        await writer.close()
        await broker.start()
        writer = await bus.transactional("writer")
        async with writer.transaction() as opened:
            await opened.send(Out("nodes", "tick", tick(2)))
        reader = await bus.reader(["nodes"])
        assert numbers([record async for record in reader.to_end()]) == [2]
