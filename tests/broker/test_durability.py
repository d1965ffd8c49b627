"""The embedded broker's files and process: torn, corrupt, deleted, shared, left alone. Embedded only."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete

from polar.broker import BrokerProcess, spawn
from tests.broker.cluster import Cluster, batch_of, ends, take, until
from tests.broker.test_groups import RawMember
from tests.broker.test_records import fetch_of


@pytest.fixture(params=[(), ("--fsync",)], ids=["plain", "fsync"])
async def broker(request: pytest.FixtureRequest, data_directory: Path) -> AsyncIterator[BrokerProcess]:
    async with await spawn(data_directory, *request.param) as process:
        yield process


@pytest.fixture
async def own(broker: BrokerProcess) -> AsyncIterator[Cluster]:
    cluster = Cluster(broker.bootstrap, is_kafka=False)
    yield cluster
    if not broker.is_running:
        await broker.start()
    # The directory goes with the test, and its clients may not have noticed the last restart yet.
    await cluster.close(keep_topics=True)


async def test_a_clean_stop_answers_who_waits_and_is_quick(broker: BrokerProcess, own: Cluster) -> None:
    topic = await own.topic()
    raw = await own.raw()
    await raw.send(1, 11, **fetch_of(topic, max_wait=30))
    first, second = RawMember(own, "g", topic), RawMember(own, "g", topic)
    await first.join()
    await first.sync()
    joining = asyncio.create_task(second.join())

    async def is_joining() -> bool:
        return await first.heartbeat() == "rebalance_in_progress"

    await until(is_joining)
    start = time.monotonic()
    assert await broker.stop() == 0
    assert time.monotonic() - start < 3
    assert (await raw.receive(1, 11)).error_code.name == "none"
    assert await joining == "coordinator_not_available"


def segments_of(directory: Path, topic: str, partition: int = 0) -> list[Path]:
    (found,) = (directory / "logs").glob(f"{topic}.*/{partition:05d}")
    return sorted(found.glob("*.log"))


async def test_a_torn_tail_is_cut_and_everything_before_it_is_kept(broker: BrokerProcess, own: Cluster) -> None:
    topic = await own.topic()
    producer = await own.producer()
    for index in range(5):
        await producer.send_and_wait(topic, b"%d" % index)
    await broker.kill()
    (segment,) = segments_of(broker.directory, topic)
    whole = segment.stat().st_size
    with segment.open("ab") as file:
        file.write(batch_of(b"torn" * 100)[:150])
    await broker.start()
    assert segment.stat().st_size == whole
    assert "torn or corrupt end" in (broker.directory / "broker.log").read_text()
    fresh = Cluster(broker.bootstrap, is_kafka=False)
    assert [int(record.value) for record in await fresh.read(topic, 5)] == list(range(5))
    assert (await (await fresh.producer()).send_and_wait(topic, b"5")).offset == 5
    await fresh.close(keep_topics=True)


async def test_a_corrupt_segment_keeps_its_good_prefix_and_the_segments_after_it(
    broker: BrokerProcess, own: Cluster
) -> None:
    topic = await own.topic(segment_bytes=1 << 20)
    producer = await own.producer()
    for index in range(15):
        await producer.send_and_wait(topic, b"%02d" % index + os.urandom(200_000))
    assert await broker.stop() == 0
    segments = segments_of(broker.directory, topic)
    assert len(segments) == 3
    with segments[0].open("r+b") as file:
        file.seek(2 * 200_100 + 1000)
        file.write(b"\0garbage\0")
    await broker.start()
    said = (broker.directory / "broker.log").read_text()
    assert "is corrupt from byte" in said
    assert "records are lost, later segments are kept" in said
    fresh = Cluster(broker.bootstrap, is_kafka=False)
    records = await fresh.read(topic, 12)
    assert [int(record.value[:2]) for record in records] == [0, 1, *range(5, 15)]
    assert await ends(await fresh.consumer(), topic) == 15
    assert list(segments[0].parent.glob("*.corrupt")), "what was cut off is kept aside"
    await fresh.close(keep_topics=True)


async def test_a_second_broker_on_the_same_directory_is_refused(broker: BrokerProcess) -> None:
    process = await asyncio.create_subprocess_exec(
        "python", "-m", "polar.broker", "--dir", str(broker.directory), "--port", "0",
        stderr=asyncio.subprocess.PIPE, env={**os.environ, "PATH": os.path.dirname(sys.executable)},
    )  # fmt: skip
    _, said = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    assert b"is in use by another broker (process %d)" % broker.pid in said


async def test_deleted_topics_and_records_stay_deleted_over_a_kill(broker: BrokerProcess, own: Cluster) -> None:
    gone, kept = await own.topic(), await own.topic()
    producer = await own.producer()
    for index in range(10):
        await producer.send_and_wait(gone, b"%d" % index)
        await producer.send_and_wait(kept, b"%d" % index)
    admin = await own.admin()
    await admin.delete_topics([gone])
    await admin.delete_records({TopicPartition(kept, 0): RecordsToDelete(6)})
    await broker.kill()
    await broker.start()
    fresh = Cluster(broker.bootstrap, is_kafka=False)
    assert gone not in await (await fresh.admin()).list_topics()
    assert [record.offset for record in await fresh.read(kept, 4)] == [6, 7, 8, 9]
    await fresh.close(keep_topics=True)


async def test_the_broker_stops_when_its_parent_is_gone(data_directory: Path) -> None:
    script = (
        "import sys, time; from polar.broker import spawn_sync; "
        f"print(spawn_sync({str(data_directory)!r}).pid, flush=True); time.sleep(60)"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 20))
    parent.kill()
    await parent.wait()

    async def is_gone() -> bool:
        try:
            with open(f"/proc/{pid}/stat") as file:  # noqa: ASYNC230 - a read of procfs does not wait
                return file.read().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    await until(is_gone, 10)


async def test_many_records_are_all_there_after_a_kill(broker: BrokerProcess, own: Cluster) -> None:
    topic = await own.topic(4, segment_bytes=1 << 20)
    producer = await own.producer(linger_ms=5, enable_idempotence=True)
    sends = [await producer.send(topic, b"%06d" % index + b"x" * 500) for index in range(12_000)]
    await asyncio.gather(*sends)
    await broker.kill()
    await broker.start()
    fresh = Cluster(broker.bootstrap, is_kafka=False)
    consumer = await fresh.consumer(topic)
    records = await take(consumer, 12_000, 30)
    assert {int(record.value[:6]) for record in records} == set(range(12_000))
    await fresh.close(keep_topics=True)
