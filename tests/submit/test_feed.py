"""The view's reader on a real broker: nothing missed, nothing twice, poison passed over, a broken reader replaced."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import RecordsToDelete
from faststream.security import BaseSecurity, SASLPlaintext, SASLScram512
from prometheus_client import CollectorRegistry, generate_latest

from polar.bus import Bus, BusSettings, Out
from polar.schemas import Stage
from polar.schemas.topics import Service
from polar.submit.entries import Change, Moved, Settled, TaskEntry, ViewLimits
from polar.submit.feed import ViewFeed, identity_of, security_of
from polar.submit.metrics import SubmitMetrics
from polar.submit.view import View
from polar.submit.viewlock import ViewBroken, ViewUnusable
from tests.conftest import delete_topics
from tests.submit.conftest import eventually
from tests.submit.records import accepted, beat, moved, session_result, task_result


class Reading:
    """A feed that runs, and what it told."""

    def __init__(self, bus: Bus, view: View, batch_records: int = 100, events_kept: int = 0) -> None:
        self.view = view
        self.changes: list[Change] = []
        self.metrics = SubmitMetrics(CollectorRegistry())
        self.feed = ViewFeed(
            bus, view, self.metrics, [self.changes.append], batch_records=batch_records, events_kept=events_kept
        )
        self.task = asyncio.create_task(self.feed.run())

    async def ready(self) -> None:
        async with asyncio.timeout(30):
            await self.feed.ready.wait()

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.view.close()

    def metric(self) -> str:
        return generate_latest(self.metrics.registry).decode()

    def settled(self) -> list[str]:
        return [one.task_id for one in self.changes if isinstance(one, Settled)]

    async def until_settled(self, task_id: str) -> None:
        await eventually(lambda: task_id in self.settled())

    async def known(self) -> set[str]:
        return set(await self.view.everything())


Read = Callable[..., Awaitable[Reading]]


@pytest.fixture
async def read(tmp_path: Path) -> AsyncIterator[Read]:
    """Starts a feed with a view in the file of that name."""
    async with AsyncExitStack() as stack:

        async def make(bus: Bus, name: str = "view", limits: ViewLimits | None = None, **more: Any) -> Reading:
            view = await View.open(tmp_path / f"{name}.sqlite", limits, identity=identity_of(bus.settings))
            made = Reading(bus, view, **more)
            stack.push_async_callback(made.stop)
            return made

        yield make


@pytest.fixture
async def bus(bus_settings: BusSettings) -> AsyncIterator[Bus]:
    async with Bus(bus_settings, Service.SCHEDULER) as made:
        await made.prepare()
        yield made


async def everything(view: View) -> dict[str, TaskEntry | None]:
    """All that is known of every task and its sessions."""
    return {name: await view.task(name) for name in await view.everything()}


async def write(bus: Bus, *tasks: str) -> None:
    for task in tasks:
        await bus.send(
            Out("stages", task, accepted(task)),
            Out("stages", f"{task}-0", moved(f"{task}-0", Stage.RUNNING)),
            Out("results", f"s/{task}-0", session_result(f"{task}-0")),
            Out("results", f"t/{task}", task_result(task)),
        )


async def test_what_was_there_before_is_read_before_it_is_ready(bus: Bus, read: Read) -> None:
    await write(bus, *(f"t{number}" for number in range(20)))
    reading = await read(bus, batch_records=7)
    await reading.ready()
    assert len(await reading.known()) == 20
    assert set((await reading.view.statuses()).values()) == {"completed"}
    assert len(reading.settled()) == 20


async def test_an_empty_log_is_ready_at_once_and_followed(bus: Bus, read: Read) -> None:
    reading = await read(bus)
    await reading.ready()
    await write(bus, "t")
    await reading.until_settled("t")
    await bus.send(Out("nodes", "n1", beat()))
    await eventually(lambda: "n1" in reading.view.nodes)
    await bus.send(Out("nodes", "n1", None))
    await eventually(lambda: not reading.view.nodes)


async def test_aborted_transactions_are_not_seen_and_their_marks_do_not_keep_it_from_being_ready(
    bus: Bus, read: Read
) -> None:
    writer = await bus.transactional("polar-scheduler")

    with suppress(InterruptedError):
        async with writer.transaction() as transaction:
            await transaction.send(Out("stages", "gone", accepted("gone")))
            raise InterruptedError
    async with writer.transaction() as transaction:
        await transaction.send(Out("stages", "kept", accepted("kept")))
    reading = await read(bus)
    await reading.ready()
    assert await reading.known() == {"kept"}


async def test_poison_is_passed_over_and_counted(bus: Bus, bus_settings: BusSettings, read: Read) -> None:
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
    reading = await read(bus)
    await reading.ready()
    assert await reading.view.statuses() == {"t": "completed"}
    assert 'polar_submit_view_poison_total{topic="stages"} 5.0' in reading.metric()


async def test_a_listener_that_fails_does_not_stop_the_view(bus: Bus, read: Read) -> None:
    reading = await read(bus)

    def broken(change: object) -> None:
        raise ValueError("a bug")

    reading.feed._listeners = [broken, reading.changes.append]
    await reading.ready()
    await write(bus, "t")
    await reading.until_settled("t")


async def test_a_start_goes_on_where_the_file_is_and_tells_watchers_the_last_events_again(bus: Bus, read: Read) -> None:
    await write(bus, "a")
    first = await read(bus)
    await first.ready()
    await first.stop()
    await write(bus, "b")
    second = await read(bus, events_kept=100)
    await second.until_settled("b")
    await second.ready()
    assert second.settled() == ["b"], "what had ended before is not told as new"
    assert 'view_records_total{topic="stages"} 2.0' in second.metric()
    assert await second.view.statuses() == {"a": "completed", "b": "completed"}
    moves = [one.event.task_id for one in second.changes if isinstance(one, Moved)]
    assert sorted(map(str, moves)) == ["a", "a", "b", "b"]
    assert second.view.path == first.view.path


async def test_a_deleted_file_is_built_from_the_log(bus: Bus, read: Read) -> None:
    await write(bus, "a", "b")
    first = await read(bus)
    await first.ready()
    whole = await everything(first.view)
    await first.stop()
    first.view.path.unlink()
    second = await read(bus)
    await second.ready()
    assert await everything(second.view) == whole
    assert "view_rebuilds_total 0.0" in second.metric()


async def test_two_views_of_one_folder_have_files_of_their_own(bus: Bus, read: Read) -> None:
    await write(bus, "a")
    first, second = await read(bus), await read(bus)
    await first.ready()
    await second.ready()
    assert first.view.path != second.view.path
    assert await everything(first.view) == await everything(second.view)


async def test_topics_that_were_made_anew_are_read_from_their_start(bus: Bus, read: Read, capsys: Any) -> None:
    await write(bus, *(f"t{number}" for number in range(10)))
    first = await read(bus)
    await first.ready()
    await first.stop()
    await delete_topics(bus.settings)
    await bus.ensure_topics()
    await write(bus, "new")
    second = await read(bus)
    await second.ready()
    assert await second.known() == {"new"}
    assert "view_rebuilds_total 1.0" in second.metric()
    assert capsys.readouterr().out.count("thrown away") == 1


async def test_topics_that_are_made_anew_under_a_running_view_are_read_from_their_start(bus: Bus, read: Read) -> None:
    await write(bus, *(f"t{number}" for number in range(10)))
    reading = await read(bus)
    await reading.ready()
    await delete_topics(bus.settings)
    await bus.ensure_topics()
    await write(bus, "new")
    async with asyncio.timeout(60):
        while await reading.known() != {"new"}:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.1)


async def test_what_was_deleted_before_it_was_read_makes_it_start_over(bus: Bus, read: Read) -> None:
    await write(bus, "a", "b")
    first = await read(bus)
    await first.ready()
    await first.stop()
    await write(bus, "c", "d")
    places = {TopicPartition(bus.settings.full("stages"), number): number for number in range(2)}
    admin = await bus.clients.admin()
    consumer = await bus.clients.reading(committed=True)
    try:
        ends = await consumer.end_offsets(list(places))
        await admin.delete_records({place: RecordsToDelete(end) for place, end in ends.items()})
    finally:
        await consumer.stop()
        await admin.close()
    second = await read(bus)
    await second.ready()
    assert "view_rebuilds_total 1.0" in second.metric()
    assert await second.view.statuses() == dict.fromkeys("abcd", "completed"), "their results are still there"


async def test_a_file_that_breaks_under_it_is_built_anew(bus: Bus, read: Read) -> None:
    await write(bus, *(f"t{number}" for number in range(200)))
    reading = await read(bus)
    await reading.ready()
    whole = await everything(reading.view)

    def damage() -> None:
        with sqlite3.connect(reading.view.path) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with reading.view.path.open("r+b") as file:
            file.seek(4_096)
            file.write(b"\xff" * 400_000)

    await asyncio.to_thread(damage)
    reading.feed.ready.clear()
    with suppress(ViewBroken):
        await everything(reading.view)
    await write(bus, "more")
    async with asyncio.timeout(60):
        while not (reading.feed.ready.is_set() and "more" in await reading.known()):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.1)
    again = await everything(reading.view)
    del again["more"]
    assert again == whole
    assert "view_rebuilds_total 1.0" in reading.metric()


async def test_a_reader_that_failed_is_replaced(bus: Bus, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = await read(bus)
    real, failed = reading.feed._watch, asyncio.Event()

    async def fail_once(consumer: AIOKafkaConsumer) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError("the connection is gone")
        await real(consumer)

    monkeypatch.setattr(reading.feed, "_watch", fail_once)
    await reading.ready()
    await write(bus, "t")
    await reading.until_settled("t")
    assert "view_restarts_total 1.0" in reading.metric()


async def test_a_full_disk_is_waited_out_and_nothing_is_lost(
    bus: Bus, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = await read(bus)
    await reading.ready()
    real, failures = reading.view.apply, 0

    async def full(*args: Any) -> Any:
        nonlocal failures
        failures += 1
        if failures <= 2:
            raise ViewUnusable("database or disk is full")
        return await real(*args)

    monkeypatch.setattr(reading.view, "apply", full)
    await write(bus, "a", "b")
    await reading.until_settled("b")
    assert sorted(reading.settled()) == ["a", "b"]


async def test_a_reader_that_is_behind_and_stands_still_is_replaced(
    bus_settings: BusSettings, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Bus(bus_settings.model_copy(update={"stuck_after_s": 0.5}), Service.SCHEDULER) as bus:
        await bus.prepare()
        await write(bus, "t")
        reading = await read(bus)
        real, paused = reading.feed._watch, asyncio.Event()

        async def pause_once(consumer: AIOKafkaConsumer) -> None:
            if not paused.is_set():
                paused.set()
                consumer.pause(*consumer.assignment())
            await real(consumer)

        monkeypatch.setattr(reading.feed, "_watch", pause_once)
        await reading.ready()
        await reading.until_settled("t")
        assert "view_restarts_total 1.0" in reading.metric()
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
