"""Consume, transform, produce exactly once while the workers and the broker are killed, on both brokers."""

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from polar.broker import BrokerProcess
from tests.broker.cluster import Cluster, ends, until
from tests.broker.kafka_image import KafkaContainer

RECORDS = 1_000
PARTITIONS = 3


def start_worker(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.broker.copier", *arguments],
            stdout=out,
            stderr=out,
            cwd=Path(__file__).parents[2],
        )


async def send_all(cluster: Cluster, topic: str) -> None:
    """Every number once, over the time that the killing takes."""
    producer = await cluster.producer(enable_idempotence=True, request_timeout_ms=60_000)
    for start in range(0, RECORDS, 10):
        sends = [await producer.send(topic, b"%d" % each, key=b"%d" % each) for each in range(start, start + 10)]
        await asyncio.gather(*sends)
        await asyncio.sleep(0.05)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "prepared", ["embedded", pytest.param("kafka-docker", marks=pytest.mark.docker)], indirect=True
)
async def test_records_are_copied_exactly_once_while_workers_and_broker_are_killed(
    mortal: BrokerProcess | KafkaContainer, own: Cluster, tmp_path: Path
) -> None:
    source, target, group = await own.topic(PARTITIONS), await own.topic(PARTITIONS), own.name("g")
    await own.topic(PARTITIONS, name=f"{target}-cursors", cleanup_policy="compact")
    log = tmp_path / "workers.log"
    arguments = (mortal.bootstrap, source, target, group)
    workers = [start_worker(log, *arguments) for _ in range(2)]
    try:
        sending = asyncio.create_task(send_all(own, source))
        watcher = await own.consumer()

        async def has_copied(least: int) -> bool:
            return sum([await ends(watcher, target, each) for each in range(PARTITIONS)]) >= least

        for number, victim in enumerate((0, None, 1, None, 0), start=1):
            await until(partial(has_copied, 150 * number), 90)
            if victim is None:
                await mortal.kill()
                await mortal.start()
            else:
                workers[victim].send_signal(signal.SIGKILL)
                workers[victim].wait()
                workers[victim] = start_worker(log, *arguments)
        await sending
        reader = await own.consumer(target, isolation_level="read_committed")
        copied: Counter[int] = Counter()

        async def all_copied() -> bool:
            for batch in (await reader.getmany(timeout_ms=200)).values():
                copied.update(int(record.value) for record in batch)
            return len(copied) == RECORDS

        await until(all_copied, 90)
    finally:
        for worker in workers:
            worker.terminate()
        codes = [await asyncio.to_thread(worker.wait, 20) for worker in workers]
    records = await own.read(target, RECORDS, isolation_level="read_committed")
    assert Counter(int(record.value) for record in records) == Counter(range(RECORDS)), log.read_text()
    assert set(copied.values()) == {1}, log.read_text()
    # One that was started just now may not have got as far as handling SIGTERM.
    assert set(codes) <= {0, -signal.SIGTERM}, log.read_text()
