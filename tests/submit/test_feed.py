"""The view's reader on a real broker: nothing missed, nothing twice, poison passed over, a broken reader replaced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from faststream.security import BaseSecurity, SASLPlaintext, SASLScram512
from prometheus_client import CollectorRegistry, generate_latest

from polar.bus import Bus, BusSettings, Out
from polar.schemas import Stage
from polar.schemas.topics import Service
from polar.submit.feed import ViewFeed, security_of
from polar.submit.metrics import SubmitMetrics
from polar.submit.view import Settled, View
from tests.submit.conftest import eventually
from tests.submit.records import accepted, beat, moved, session_result, task_result


class Reading:
    """A feed that runs, and what it told."""

    def __init__(self, bus: Bus, view: View | None = None, batch_records: int = 100) -> None:
        self.view = view or View()
        self.changes: list[object] = []
        self.metrics = SubmitMetrics(CollectorRegistry())
        self.feed = ViewFeed(bus, self.view, self.metrics, [self.changes.append], batch_records=batch_records)
        self.task = asyncio.create_task(self.feed.run())

    async def ready(self) -> None:
        async with asyncio.timeout(30):
            await self.feed.ready.wait()

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def metric(self) -> str:
        return generate_latest(self.metrics.registry).decode()


@pytest.fixture
async def bus(bus_settings: BusSettings) -> AsyncIterator[Bus]:
    async with Bus(bus_settings, Service.SCHEDULER) as made:
        await made.prepare()
        yield made


async def write(bus: Bus, *tasks: str) -> None:
    for task in tasks:
        await bus.send(
            Out("stages", task, accepted(task)),
            Out("stages", f"{task}-0", moved(f"{task}-0", Stage.RUNNING)),
            Out("results", f"s/{task}-0", session_result(f"{task}-0")),
            Out("results", f"t/{task}", task_result(task)),
        )


async def test_what_was_there_before_is_read_before_it_is_ready(bus: Bus) -> None:
    await write(bus, *(f"t{number}" for number in range(20)))
    reading = Reading(bus, batch_records=7)
    try:
        await reading.ready()
        assert len(reading.view.tasks) == 20
        assert {task.status for task in reading.view.tasks.values()} == {"completed"}
        assert sum(isinstance(one, Settled) for one in reading.changes) == 20
    finally:
        await reading.stop()


async def test_an_empty_log_is_ready_at_once_and_followed(bus: Bus) -> None:
    reading = Reading(bus)
    try:
        await reading.ready()
        await write(bus, "t")
        await eventually(lambda: any(isinstance(one, Settled) for one in reading.changes))
        await bus.send(Out("nodes", "n1", beat()))
        await eventually(lambda: "n1" in reading.view.nodes)
        await bus.send(Out("nodes", "n1", None))
        await eventually(lambda: not reading.view.nodes)
    finally:
        await reading.stop()


async def test_aborted_transactions_are_not_seen_and_their_marks_do_not_keep_it_from_being_ready(bus: Bus) -> None:
    writer = await bus.transactional("polar-scheduler")

    with suppress(InterruptedError):
        async with writer.transaction() as transaction:
            await transaction.send(Out("stages", "gone", accepted("gone")))
            raise InterruptedError
    async with writer.transaction() as transaction:
        await transaction.send(Out("stages", "kept", accepted("kept")))
    reading = Reading(bus)
    try:
        await reading.ready()
        assert set(reading.view.tasks) == {"kept"}
    finally:
        await reading.stop()


async def test_poison_is_passed_over_and_counted(bus: Bus, bus_settings: BusSettings) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=bus_settings.bootstrap)
    await producer.start()
    try:
        topic = bus_settings.full("stages")
        bad = [b"\xff\xff", b"", b'{"type": "Nonsense"}', b"\x80"]
        for value in bad:
            await producer.send_and_wait(topic, value, key=b"k", headers=[("x", b"\xff\xfe")])
        await producer.send_and_wait(topic, b"x", key=b"\xff")
        await producer.send_and_wait(topic, None, key=b"k")
    finally:
        await producer.stop()
    await write(bus, "t")
    reading = Reading(bus)
    try:
        await reading.ready()
        assert reading.view.tasks["t"].status == "completed"
        assert 'polar_submit_view_poison_total{topic="stages"} 5.0' in reading.metric()
    finally:
        await reading.stop()


async def test_a_listener_that_fails_does_not_stop_the_view(bus: Bus) -> None:
    reading = Reading(bus)

    def broken(change: object) -> None:
        raise ValueError("a bug")

    reading.feed._listeners = [broken, reading.changes.append]
    try:
        await reading.ready()
        await write(bus, "t")
        await eventually(lambda: "t" in reading.view.tasks and reading.view.tasks["t"].settled)
    finally:
        await reading.stop()


async def test_a_new_reader_goes_on_where_the_view_is(bus: Bus) -> None:
    await write(bus, "a")
    first = Reading(bus)
    await first.ready()
    await first.stop()
    await write(bus, "b")
    second = Reading(bus, first.view)
    try:
        await eventually(lambda: "b" in second.view.tasks and second.view.tasks["b"].settled)
        assert [one.task.task_id for one in second.changes if isinstance(one, Settled)] == ["b"]
        assert 'view_records_total{topic="stages"} 2.0' in second.metric()
    finally:
        await second.stop()


async def test_a_reader_that_failed_is_replaced(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(bus)
    real, failed = reading.feed._watch, asyncio.Event()

    async def fail_once(consumer: AIOKafkaConsumer, places: list[TopicPartition]) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError("the connection is gone")
        await real(consumer, places)

    monkeypatch.setattr(reading.feed, "_watch", fail_once)
    try:
        await reading.ready()
        await write(bus, "t")
        await eventually(lambda: "t" in reading.view.tasks and reading.view.tasks["t"].settled)
        assert "view_restarts_total 1.0" in reading.metric()
    finally:
        await reading.stop()


async def test_a_reader_that_is_behind_and_stands_still_is_replaced(
    bus_settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bus(bus_settings.model_copy(update={"stuck_after_s": 0.5}), Service.SCHEDULER) as bus:
        await bus.prepare()
        await write(bus, "t")
        reading = Reading(bus)
        real, paused = reading.feed._watch, asyncio.Event()

        async def pause_once(consumer: AIOKafkaConsumer, places: list[TopicPartition]) -> None:
            if not paused.is_set():
                paused.set()
                consumer.pause(*places)
            await real(consumer, places)

        monkeypatch.setattr(reading.feed, "_watch", pause_once)
        try:
            await reading.ready()
            assert reading.view.tasks["t"].settled
            assert "view_restarts_total 1.0" in reading.metric()
        finally:
            await reading.stop()


def test_security_as_faststream_wants_it() -> None:
    def of(**settings: str) -> BaseSecurity | None:
        return security_of(BusSettings(**settings))

    assert of() is None
    plain = of(security_protocol="SASL_PLAINTEXT", sasl_username="u", sasl_password="p")
    assert isinstance(plain, SASLPlaintext)
    assert (plain.username, plain.password, plain.use_ssl) == ("u", "p", False)
    scram = of(security_protocol="SASL_SSL", sasl_mechanism="SCRAM-SHA-512", sasl_username="u", sasl_password="p")
    assert isinstance(scram, SASLScram512)
    assert scram.use_ssl
    assert scram.ssl_context is not None
    tls = of(security_protocol="SSL")
    assert type(tls) is BaseSecurity
    assert tls.use_ssl
