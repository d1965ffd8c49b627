"""Memory for open sessions: bounded, spilled in order, let go; and what the processor does with it."""

from __future__ import annotations

import gc
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from polar.builder.bodies import BodyStore
from polar.builder.metrics import BuilderMetrics
from polar.builder.processor import SessionProcessor
from polar.bus import BusError, Out, Record
from polar.schemas import CompletionCaptured, RecordRef, StageChanged, Trajectory, encode
from polar.schemas.catalog import BUILDERS
from polar.service.clock import ManualClock
from tests.builder.toy import Session, say, user


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[BodyStore]:
    found = BodyStore(tmp_path / "cache", 1000)
    yield found
    await found.close()


def calls(count: int) -> list[CompletionCaptured]:
    session = Session()
    chance = random.Random(0)
    return [session.call([user(f"a{number}")], say("b", chance)) for number in range(count)]


async def test_what_is_over_the_limit_is_read_back_in_order(store: BodyStore) -> None:
    one, other = store.scope(), store.scope()
    events = calls(6)
    for number, event in enumerate(events):
        one.put("s", number, event, 400)
        other.put("s", number, event, 10)
        assert store.memory <= 1000
    await one.settle()
    assert store.spilled
    assert await one.use("s", list) == events
    assert await other.use("s", list) == events
    one.drop("s")
    assert await one.use("s", list) == []
    assert await other.use("s", list) == events


async def test_a_session_larger_than_the_memory_still_fits(store: BodyStore) -> None:
    bodies = store.scope()
    (event,) = calls(1)
    bodies.put("s", 0, event, 5000)
    assert store.memory == 0
    assert await bodies.use("s", list) == [event]


async def test_what_a_lost_partition_held_is_let_go(store: BodyStore) -> None:
    bodies = store.scope()
    (event,) = calls(1)
    bodies.put("s", 0, event, 900)
    del bodies
    gc.collect()
    store.scope().put("t", 0, event, 10)
    assert store.memory == 10


async def test_a_full_disk_is_an_error_that_may_pass(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    store = BodyStore(tmp_path / "taken", 0)
    bodies = store.scope()
    (event,) = calls(1)
    bodies.put("s", 0, event, 10)
    with pytest.raises(BusError) as raised:
        await bodies.settle()
    assert raised.value.retryable
    await store.close()


class Sent:
    """Stands for the transaction of a batch."""

    def __init__(self) -> None:
        self.outs: list[Out] = []

    async def __call__(self, *outs: Out) -> list[RecordRef]:
        self.outs += outs
        return [RecordRef(topic=one.topic, partition=0, offset=len(self.outs)) for one in outs]


def record(session: Session, number: int) -> Record:
    ref, event = session.records[number]
    return Record(ref.topic, ref.partition, ref.offset, 0, session.session_id, event, raw=encode(event))


async def test_late_records_and_those_of_unknown_sessions_are_counted_and_kept_nowhere(store: BodyStore) -> None:
    registry = CollectorRegistry()
    processor = SessionProcessor(store.scope(), BuilderMetrics(registry), ManualClock(), ())
    session = Session()
    chance = random.Random(0)
    session.call([user("a")], say("b", chance))
    session.close()
    session.call([user("a")], say("c", chance))
    session.final()
    session.call([user("a")], say("d", chance))
    sent = Sent()
    for number in range(len(session.records)):
        await processor.process(record(session, number), sent)
    assert [type(one.value) for one in sent.outs] == [Trajectory, StageChanged]
    assert registry.get_sample_value("polar_builder_records_total", {"verdict": "late"}) == 4
    assert store.memory == 0
    assert processor.replay_from(1000) == 1000


async def test_replay_leaves_the_state_that_processing_leaves_and_emits_nothing(store: BodyStore) -> None:
    sessions = [Session(session_id=name, first_offset=first) for name, first in (("one", 0), ("other", 50))]
    chance = random.Random(0)
    for session in sessions:
        session.call([user("a")], say("b", chance))
        session.close()
        session.final()
    one, other = sessions
    order = [(one, 0), (other, 0), (one, 1), (other, 1), (other, 2), (other, 3), (one, 2), (other, 4)]
    rest = [(one, 3), (one, 4)]

    async def answer(replayed: int) -> list[bytes]:
        processor = SessionProcessor(store.scope(), BuilderMetrics(CollectorRegistry()), ManualClock(), ())
        sent = Sent()
        for session, number in order[:replayed]:
            processor.replay(record(session, number))
        for session, number in order[replayed:]:
            await processor.process(record(session, number), sent)
        assert processor.replay_from(99) == 0
        for session, number in rest:
            await processor.process(record(session, number), sent)
        return [encode(out.value) for out in sent.outs if isinstance(out.value, Trajectory)]

    whole = await answer(0)
    assert len(whole) == 2
    for replayed in range(1, len(order) + 1):
        emitted = await answer(replayed)
        assert emitted == whole[-len(emitted) :]


def test_the_catalog_names_what_is_built_in() -> None:
    from polar.builder.registry import BUILT_IN, load

    assert set(BUILT_IN) == set(BUILDERS.names())
    assert all(load(name).version for name in BUILT_IN)
