"""The faults that exactly-once has to live with, but for kills (`test_kills.py`) and lost records (`test_cursors.py`).

A pause and a hang are real processes; errors of the broker are raised where aiokafka raises them, before and after what
was asked has happened, and the expiry of ids is Apache Kafka's own.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import uuid
from collections import Counter as Counts
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka
from prometheus_client import CollectorRegistry

from polar.bus import Bus, BusError, BusSettings, Fenced, Out, PartitionWorker, Record, Send, Stuck
from polar.bus import partition as partition_module
from polar.bus import worker as worker_module
from polar.schemas import Cursor
from polar.schemas.topics import Service
from tests.bus.support import Copier, Counter, call, final, report, tick, until
from tests.bus.test_kills import reports, send_sessions, start_worker
from tests.bus.test_worker import at_end, cursors, working

FATAL = [
    kafka.ProducerFenced,
    kafka.InvalidProducerEpoch,
    kafka.InvalidTxnState,
    kafka.InvalidProducerIdMapping,
    kafka.OutOfOrderSequenceNumber,
    kafka.UnknownProducerId,
    kafka.NotCoordinatorError,
    kafka.CoordinatorNotAvailableError,
    kafka.KafkaError,
]


@pytest.fixture
async def buses(bus_settings: BusSettings) -> AsyncIterator[tuple[Bus, Bus]]:
    """The proxy's, which writes the input, and the builder's."""
    async with Bus(bus_settings, Service.PROXY) as proxy, Bus(bus_settings, Service.BUILDER) as builder:
        await builder.prepare()
        yield proxy, builder


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", FATAL, ids=lambda one: one.__name__)
async def test_a_fatal_error_of_the_broker_gets_a_new_producer_and_nothing_is_lost_or_doubled(
    buses: tuple[Bus, Bus], monkeypatch: pytest.MonkeyPatch, error: type[Exception], after: bool
) -> None:
    proxy, builder = buses
    monkeypatch.setattr(partition_module, "RETRY_MOST_S", 0.3)  # what a fenced one waits
    commit, commits = AIOKafkaProducer.commit_transaction, 0

    async def failing(self: Any) -> None:
        nonlocal commits
        commits += 1
        fails = commits in (2, 3, 5)
        if fails and not after:
            raise error()
        await commit(self)
        if fails:
            raise error()

    monkeypatch.setattr(AIOKafkaProducer, "commit_transaction", failing)
    await proxy.send(*[call(number) for number in range(60)])
    async with working(builder, lambda _: Copier(), max_batch=9) as worker:
        await until(at_end(worker, builder))
        assert commits > 5
        # the empty partition writes a cursor, too: that may be what failed, and nobody waits for it to open again
        assert sum(one.opened - 1 for one in worker.progress().values()) >= 2
    assert [number for _, number in await reports(builder)] == list(range(60))


@pytest.mark.timeout(240)
async def test_a_paused_worker_that_wakes_writes_nothing_of_what_its_successor_has_done(
    bus_settings: BusSettings, tmp_path: Path
) -> None:
    randomness = random.Random(3)
    wanted = {f"s{number}": randomness.randint(1, 6) for number in range(400)}
    log = tmp_path / "workers.log"
    workers: list[subprocess.Popen[bytes]] = []
    async with Bus(bus_settings, Service.PROXY) as proxy, Bus(bus_settings, Service.BUILDER) as builder:
        await proxy.prepare()
        try:
            workers += [start_worker(bus_settings, seed, log) for seed in (1, 2)]
            sending = asyncio.create_task(send_sessions(proxy, wanted, randomness))

            async def some_done(least: int) -> bool:
                return len(await reports(builder)) >= least

            for round_ in range(2):
                await until(lambda least=10 * (round_ + 1): some_done(least), 90)
                paused = workers[round_]
                paused.send_signal(signal.SIGSTOP)
                before = await cursors(builder)

                async def all_go_on(before: dict[str, Cursor] = before) -> bool:
                    now = await cursors(builder)
                    return len(before) == 2 and all(now[key].next > before[key].next for key in before)

                await until(all_go_on, 90)  # without it: its share is another's now
                paused.send_signal(signal.SIGCONT)
            await sending
            await until(lambda: some_done(len(wanted)), 90)
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGCONT)
                worker.terminate()
            codes = [worker.wait(30) for worker in workers]
        assert Counts(await reports(builder)) == Counts(wanted.items()), log.read_text()
        assert codes == [0, 0], log.read_text()


@pytest.mark.timeout(120)
async def test_a_worker_that_stands_still_for_good_ends_its_process_with_an_error(
    bus_settings: BusSettings, tmp_path: Path
) -> None:
    settings = bus_settings.model_copy(update={"watchdog_s": 1.0, "watchdog_restarts": 2})
    log = tmp_path / "worker.log"
    async with Bus(settings, Service.PROXY) as proxy:
        await proxy.prepare()
        await proxy.send(call(0))
        worker = start_worker(settings, 1, log, "hang")
        try:
            code = await asyncio.to_thread(worker.wait, 90)
        finally:
            worker.kill()
    said = log.read_text()
    assert code == 1, said
    assert said.count("partition stands still and is started anew") == 2, said
    assert "Stuck" in said
    assert "records wait at offset 0" in said


class HangsOnce(Copier):
    """Waits for ever at its first record, the first time: a connection that was lost without a word."""

    def __init__(self, hung: list[int]) -> None:
        super().__init__()
        self._hung = hung

    async def process(self, record: Record, send: Send) -> None:
        if not self._hung:
            self._hung.append(record.offset)
            await send(report("half", record.offset))
            await asyncio.Event().wait()
        await super().process(record, send)


async def test_the_watchdog_starts_a_partition_anew_and_what_it_had_half_done_is_not_seen(
    buses: tuple[Bus, Bus],
) -> None:
    proxy, _ = buses
    settings = proxy.settings.model_copy(update={"watchdog_s": 1.0})
    registry, hung = CollectorRegistry(), list[int]()
    await proxy.send(*[call(number) for number in range(20)])
    async with Bus(settings, Service.BUILDER) as builder:
        async with working(builder, lambda _: HangsOnce(hung), registry=registry) as worker:
            await until(at_end(worker, builder))
        where = builder.partition_of("completions", "s")
        assert hung == [0]
        assert [number for _, number in await reports(builder)] == list(range(20))
    restarts = registry.get_sample_value("polar_builder_partition_restarts_total", {"partition": str(where)})
    assert restarts == 1


async def test_a_partition_that_nobody_has_gets_its_worker_a_new_membership(
    buses: tuple[Bus, Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, _ = buses
    settings = proxy.settings.model_copy(update={"watchdog_s": 0.5})
    registry, gained = CollectorRegistry(), list[list[int]]()
    gain = PartitionWorker._gain

    def forgets_once(self: PartitionWorker, numbers: list[int]) -> None:
        gained.append(numbers)
        gain(self, numbers if len(gained) > 1 else [])

    monkeypatch.setattr(PartitionWorker, "_gain", forgets_once)
    await proxy.send(*[call(number) for number in range(5)])
    async with Bus(settings, Service.BUILDER) as builder:
        async with working(builder, lambda _: Copier(), registry=registry) as worker:
            await until(at_end(worker, builder))
        assert [number for _, number in await reports(builder)] == list(range(5))
    assert registry.get_sample_value("polar_builder_rejoins_total") == 1


async def test_a_partition_that_cannot_be_stopped_is_an_error_too(
    buses: tuple[Bus, Bus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "CANCEL_S", 0.5)
    proxy, _ = buses
    settings = proxy.settings.model_copy(update={"watchdog_s": 0.5})
    release = asyncio.Event()

    class Deaf(Copier):
        async def process(self, record: Record, send: Send) -> None:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue  # as a library may that catches too much

    await proxy.send(call(0))
    async with Bus(settings, Service.BUILDER) as builder:
        running = asyncio.create_task(PartitionWorker(builder, "completions", "builder", lambda _: Deaf()).run())
        with pytest.raises(Stuck, match="cannot be stopped"):
            await asyncio.wait_for(asyncio.shield(running), 60)
        release.set()


@pytest.fixture
async def forgetful(tmp_path: Path) -> AsyncIterator[BusSettings]:
    """An Apache Kafka of our own that forgets transactional and producer ids after two seconds instead of days."""
    script = os.environ.get("KAFKA_START_SCRIPT")
    if not script:
        pytest.skip("Apache Kafka of one's own: KAFKA_START_SCRIPT is not set")
    folder = Path(os.environ.get("KAFKA_START_DIR", str(tmp_path / "kafka")))
    port = os.environ.get("KAFKA_START_PORT", "19192")
    properties = (
        "transactional.id.expiration.ms=2000 transaction.remove.expired.transaction.cleanup.interval.ms=500 "
        "producer.id.expiration.ms=2000 producer.id.expiration.check.interval.ms=500"
    )
    starting = await asyncio.create_subprocess_exec(
        script, str(folder), port, stdout=subprocess.DEVNULL, env={**os.environ, "KAFKA_PROPERTIES": properties}
    )
    assert await starting.wait() == 0
    pid = int((folder / "pid").read_text())
    try:
        yield BusSettings(
            bootstrap=f"127.0.0.1:{port}",
            topic_prefix=f"test-{uuid.uuid4().hex[:10]}.",
            partitions=2,
            task_partitions=2,
            node_partitions=2,
            transaction_timeout_ms=1_500,
            blob_url=(tmp_path / "blobs").as_uri(),
        )
    finally:
        os.kill(pid, signal.SIGTERM)


@pytest.mark.kafka
@pytest.mark.timeout(240)
async def test_ids_that_expired_while_nothing_was_written_cost_a_new_producer_and_nothing_else(
    forgetful: BusSettings,
) -> None:
    async with (
        Bus(forgetful, Service.SCHEDULER) as bus,
        Bus(forgetful, Service.PROXY) as proxy,
        Bus(forgetful, Service.BUILDER) as builder,
    ):
        await bus.prepare()
        writer = await bus.transactional("writer")
        async with writer.transaction() as opened:
            await opened.send(Out("nodes", "tick", tick(1)))
        await proxy.send(call(0, "a"))
        async with working(builder, lambda _: Counter(), cursor_every_s=0.05) as worker:
            await until(at_end(worker, builder))
            await asyncio.sleep(8)  # the fault itself: nothing is written for longer than the ids live
            with pytest.raises(BusError) as caught:
                async with writer.transaction() as opened:
                    await opened.send(Out("nodes", "tick", tick(2)))
            assert caught.value.retryable or isinstance(caught.value, Fenced)
            assert not writer.usable
            writer = await bus.transactional("writer")
            async with writer.transaction() as opened:
                await opened.send(Out("nodes", "tick", tick(3)))
            await proxy.send(call(1, "a"), final("a"))
            await until(at_end(worker, builder))
        assert await reports(builder) == [("a", 2)]
        reader = await bus.reader(["nodes"])
        ticks = [record.value async for record in reader.to_end()]
        assert [one.number for one in ticks if one is not None] == [1, 3]  # type: ignore[attr-defined]
