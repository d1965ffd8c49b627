"""The embedded broker's limits, address rules and long polls, inside the test's own loop. Embedded only."""

import asyncio
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import NewTopic

from polar.broker import Broker, BrokerSettings
from polar.broker.errors import BrokerError, DirectoryInUse, RemoteBindRefused, StorageFailed
from tests.broker.cluster import Cluster, RawConnection, batch_of, structs, until

Start = Callable[..., Awaitable[Broker]]


@pytest.fixture
async def start(data_directory: Path) -> AsyncIterator[Start]:
    """Starts brokers in this loop that stop with the test."""
    async with AsyncExitStack() as stack:

        async def make(**settings: Any) -> Broker:
            broker = Broker(BrokerSettings(**{"directory": data_directory, **settings}))
            await broker.start()
            stack.push_async_callback(broker.stop)
            return broker

        yield make


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org"])
def test_an_address_others_can_reach_is_refused_unless_it_is_allowed(tmp_path: Path, host: str) -> None:
    with pytest.raises(RemoteBindRefused, match="no authentication"):
        BrokerSettings(directory=tmp_path, host=host)
    assert BrokerSettings(directory=tmp_path, host=host, allow_remote=True).host == host


@pytest.mark.parametrize("bad", [{"port": 70_000}, {"max_connections": 0}, {"max_inflight_bytes": 10}])
def test_settings_that_cannot_work_are_refused(tmp_path: Path, bad: dict[str, int]) -> None:
    with pytest.raises(BrokerError):
        BrokerSettings(directory=tmp_path, **bad)  # type: ignore[arg-type]


async def test_a_directory_and_a_port_belong_to_one_broker(start: Start, data_directory: Path, tmp_path: Path) -> None:
    first = await start()
    with pytest.raises(DirectoryInUse):
        await start()
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(BrokerError, match="cannot listen"):
        await start(directory=tmp_path / "other", port=port)
    await first.stop()
    await start(port=port)


async def test_a_request_over_the_limit_closes_its_connection_and_no_other(start: Start) -> None:
    broker = await start(max_request_bytes=10_000)
    big, other = await RawConnection.open(broker.address), await RawConnection.open(broker.address)
    big.send_bytes(struct.pack(">i", 10_001))
    assert await big.is_closed_by_peer()
    assert (await other.call(18, 0)).error_code == 0
    await other.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        struct.pack(">i", 4) + b"abcd",
        struct.pack(">ihhi", 8, 999, 0, 1),
        struct.pack(">ihhi", 8, 0, 99, 1),
        struct.pack(">ihhih", 10, 3, 1, 1, -1),
        struct.pack(">ihhihi", 14, 3, 1, 1, -1, 1 << 30),
    ],
    ids=["negative size", "too short", "unknown api", "unknown version", "ends early", "impossible array"],
)
async def test_what_is_no_request_closes_its_connection_and_no_other(start: Start, frame: bytes) -> None:
    broker = await start()
    broken, other = await RawConnection.open(broker.address), await RawConnection.open(broker.address)
    broken.send_bytes(frame)
    assert await broken.is_closed_by_peer()
    assert (await other.call(18, 0)).error_code == 0
    await other.close()


async def test_an_unknown_version_of_api_versions_is_answered_in_the_oldest(start: Start) -> None:
    broker = await start()
    raw = await RawConnection.open(broker.address)
    raw.send_bytes(struct.pack(">ihhih", 10, 18, 99, 1, -1))
    answer = await raw.receive(18, 0)
    assert answer.error_code.name == "unsupported_version"
    assert 18 in {each.api_key for each in answer.api_keys}
    assert (await raw.call(18, 3, client_software_name="t", client_software_version="1")).error_code == 0
    await raw.close()


async def test_connections_over_the_limit_are_closed_and_a_free_place_is_taken(start: Start) -> None:
    broker = await start(max_connections=2)
    first, second = await RawConnection.open(broker.address), await RawConnection.open(broker.address)
    assert (await first.call(18, 0)).error_code == 0
    assert (await second.call(18, 0)).error_code == 0
    third = await RawConnection.open(broker.address)
    assert await third.is_closed_by_peer()
    await first.close()

    async def is_forgotten() -> bool:
        return broker.server.connections < 2

    await until(is_forgotten)
    fourth = await RawConnection.open(broker.address)
    assert (await fourth.call(18, 0)).error_code == 0
    for each in (second, fourth):
        await each.close()


async def test_requests_wait_while_too_many_bytes_are_under_way(start: Start) -> None:
    broker = await start(max_request_bytes=1_000_000, max_inflight_bytes=1_000_000)
    slow, other = await RawConnection.open(broker.address), await RawConnection.open(broker.address)
    slow.send_bytes(struct.pack(">i", 1_000_000))  # announced, and not sent
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(other.call(18, 0))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    await slow.close()
    assert (await asyncio.wait_for(waiting, 5)).error_code == 0
    await other.close()


async def test_an_idle_connection_is_closed(start: Start) -> None:
    broker = await start(connection_idle_s=0.2, maintenance_interval_s=0.1)
    raw = await RawConnection.open(broker.address)
    assert (await raw.call(18, 0)).error_code == 0
    assert await raw.is_closed_by_peer()


async def test_partitions_over_the_limit_are_refused(start: Start) -> None:
    broker = await start(max_partitions=5)
    cluster = Cluster(broker.address, is_kafka=False)
    await cluster.topic(3)
    response = await (await cluster.admin()).create_topics([NewTopic("more", 3, 1)])
    assert response.topic_errors[0][1] == 44  # PolicyViolation
    await cluster.close()


async def test_an_idle_consumer_makes_one_fetch_per_wait(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = await start()
    cluster = Cluster(broker.address, is_kafka=False)
    topic = await cluster.topic(12)
    fetches = 0
    api = broker.server.apis[1]

    async def counted(request: Any, context: Any) -> Any:
        nonlocal fetches
        fetches += 1
        return await api.handler(request, context)

    monkeypatch.setattr(broker.server, "apis", {**broker.server.apis, 1: api._replace(handler=counted)})
    consumer = await cluster.consumer(topic, fetch_max_wait_ms=400)
    await consumer.getmany(timeout_ms=1)
    before = fetches
    await consumer.getmany(timeout_ms=2000)
    assert 3 <= fetches - before <= 7
    await cluster.close()


async def test_a_write_without_acknowledgement_that_fails_closes_the_connection(start: Start) -> None:
    v9 = structs(0, 9)
    broker = await start()
    raw = await RawConnection.open(broker.address)
    data = v9.PartitionProduceData(index=0, records=batch_of(b"v"))
    topic = v9.TopicProduceData(name="unknown", partition_data=(data,))
    await raw.send(0, 9, transactional_id=None, acks=0, timeout=timedelta(seconds=1), topic_data=(topic,))
    assert await raw.is_closed_by_peer()


async def test_a_full_disk_is_an_error_for_the_writer_and_leaves_the_log_whole(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await start()
    cluster = Cluster(broker.address, is_kafka=False)
    topic = await cluster.topic()
    raw = await cluster.raw()
    assert (await raw.produce(topic, batch_of(b"0"))).base_offset == 0
    real = os.pwritev

    def half_full(descriptor: int, parts: Any, position: int) -> int:
        if half_full.calls:  # type: ignore[attr-defined]
            raise OSError(28, "No space left on device")
        half_full.calls += 1  # type: ignore[attr-defined]
        return real(descriptor, [bytes(parts[0])[:10]], position)

    half_full.calls = 0  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", half_full)
        assert (await raw.produce(topic, batch_of(b"1"))).error_code.name == "kafka_storage_error"
    assert (await raw.produce(topic, batch_of(b"1"))).base_offset == 1
    assert [record.value for record in await cluster.read(topic, 2)] == [b"0", b"1"]
    await cluster.close()


async def test_a_failed_fsync_stops_the_broker_before_it_acknowledges(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await start(fsync=True)
    cluster = Cluster(broker.address, is_kafka=False)
    topic = await cluster.topic()
    raw = await RawConnection.open(broker.address)

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await raw.produce(topic, batch_of(b"0"))
        with pytest.raises(StorageFailed):
            await asyncio.wait_for(broker.failed, 5)
    await cluster.close()
