"""The one topic table is whole and consistent: everything else is made from it."""

import importlib
import pkgutil

import pytest

import polar.schemas
from polar.schemas import Event
from polar.schemas.topics import TABLE, Service, topic


def every_event() -> set[type[Event]]:
    for module in pkgutil.iter_modules(polar.schemas.__path__):
        importlib.import_module(f"polar.schemas.{module.name}")
    found: set[type[Event]] = set()
    left = [Event]
    while left:
        for kind in left.pop().__subclasses__():
            if kind.__module__.startswith("polar.schemas."):
                found.add(kind)
                left.append(kind)
    return found


def test_every_event_stands_in_a_row() -> None:
    placed = {kind for spec in TABLE for kind in spec.values}
    assert {one.__name__ for one in every_event() - placed} == set()
    assert placed <= every_event()


def test_every_event_is_public() -> None:
    missing = {kind.__name__ for kind in every_event()} - set(polar.schemas.__all__)
    assert missing == set()


def test_public_names_exist_once() -> None:
    assert len(set(polar.schemas.__all__)) == len(polar.schemas.__all__)
    assert [name for name in polar.schemas.__all__ if not hasattr(polar.schemas, name)] == []


def test_names_are_unique_and_found() -> None:
    names = [spec.name for spec in TABLE]
    assert len(set(names)) == len(names)
    assert all(topic(name).name == name for name in names)
    with pytest.raises(KeyError, match=r"no topic 'polar\.tasks'; known: tasks"):
        topic("polar.tasks")


@pytest.mark.parametrize("spec", TABLE, ids=lambda spec: spec.name)
def test_every_row_is_complete(spec) -> None:
    assert spec.key
    assert spec.values
    assert spec.writers
    assert spec.readers
    assert isinstance(spec.partitions, int) or spec.partitions in ("partitions", "task_partitions", "node_partitions")
    tags = [kind.__struct_config__.tag for kind in spec.values]
    assert tags == [kind.__name__ for kind in spec.values], "the tag on the wire is the class's name"


@pytest.mark.parametrize("spec", TABLE, ids=lambda spec: spec.name)
def test_compacted_or_kept_for_a_time(spec) -> None:
    config = spec.config(1_000_000)
    assert config["max.message.bytes"] == "1000000"
    policies = set(config["cleanup.policy"].split(","))
    assert policies <= {"compact", "delete"}
    assert ("compact" in policies) is spec.compacted
    # nothing is thrown away by a default that nobody chose
    assert config["retention.ms"] == ("-1" if spec.retention_ms is None else str(spec.retention_ms))
    if "delete" in policies:
        assert spec.retention_ms is not None
    # Apache Kafka takes no smaller segment
    assert int(config.get("segment.bytes", 1024 * 1024)) >= 1024 * 1024


def test_copartitioned_topics_share_one_count() -> None:
    assert {topic(name).partitions for name in ("completions", "built", "graded", "cursors")} == {"partitions"}


def test_node_topics_share_one_count() -> None:
    assert topic("assignments").partitions == topic("ready").partitions == "node_partitions"
    assert topic("nodes").partitions == topic("leases").partitions == 1


def test_what_leases_refer_to_outlives_the_memory_of_tasks() -> None:
    task_memory_ms = 7 * 86_400_000
    tasks, stages = topic("tasks").retention_ms, topic("stages").retention_ms
    assert tasks is not None
    assert stages is not None
    assert tasks > task_memory_ms + stages - 1, "task_memory plus the longest session"


def test_exactly_the_transactional_writers_write_transactional_topics() -> None:
    """Who writes only in transactions; a topic that one of them writes must be read committed."""
    inside = {Service.SCHEDULER, Service.BUILDER, Service.FINISHER}
    for spec in TABLE:
        if inside & set(spec.writers) and spec.name != "dead":
            assert spec.transactional, spec.name


def test_rows_say_who_decides() -> None:
    """One decider: endings, leases and control are the scheduler's alone."""
    for name in ("leases", "assignments", "control", "graded"):
        assert topic(name).writers == (Service.SCHEDULER,)
    assert Service.SUBMIT in topic("tasks").writers
    assert topic("tasks").readers == (Service.SCHEDULER,)
