"""Topics are made as the table wants them, and what differs is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiokafka.admin import NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from polar.bus import Bus, BusSettings, TopicProblem, TopicsWrong
from polar.bus.clients import stop_admin
from polar.bus.topics import ensure_topics
from polar.schemas.topics import TABLE, Service


@pytest.fixture
async def bus(bus_settings: BusSettings) -> AsyncIterator[Bus]:
    async with Bus(bus_settings, Service.SCHEDULER) as bus:
        yield bus


async def test_all_topics_are_made_and_found_right(bus: Bus) -> None:
    assert sorted(await ensure_topics(bus.clients)) == sorted(bus.settings.full(spec.name) for spec in TABLE)
    assert await ensure_topics(bus.clients) == [], "a second time there is nothing to make"
    await bus.check_topics()


async def test_processes_that_start_together_may_all_make_them(bus: Bus) -> None:
    await asyncio.gather(*[bus.prepare() for _ in range(3)])


async def test_missing_topics_are_named(bus: Bus) -> None:
    await ensure_topics(bus.clients, [spec for spec in TABLE if spec.name not in ("ready", "dead")])
    with pytest.raises(TopicsWrong) as caught:
        await bus.check_topics()
    assert [(one.topic, one.found) for one in caught.value.problems] == [
        (bus.settings.full("ready"), "missing"),
        (bus.settings.full("dead"), "missing"),
    ]
    assert not caught.value.retryable


async def test_a_service_that_may_not_make_topics_does_not(bus_settings: BusSettings) -> None:
    async with Bus(bus_settings.model_copy(update={"create_topics": False}), Service.PROXY) as bus:
        with pytest.raises(TopicsWrong, match="missing"):
            await bus.prepare()


async def test_a_wrong_partition_count_names_topic_found_and_wanted(bus: Bus) -> None:
    await bus.ensure_topics()
    other = bus.settings.model_copy(update={"task_partitions": 5})
    async with Bus(other, Service.SCHEDULER) as differing:
        with pytest.raises(TopicsWrong) as caught:
            await differing.check_topics()
    assert caught.value.problems == [TopicProblem(bus.settings.full("tasks"), "partitions", "2", "5")]
    assert f"{bus.settings.full('tasks')}: partitions is 2, wanted 5" in str(caught.value)


async def test_a_wrong_setting_names_topic_setting_found_and_wanted(bus: Bus) -> None:
    admin = await bus.clients.admin()
    wrong = {"cleanup.policy": "delete", "max.message.bytes": "1048588", "retention.ms": "60000"}
    try:
        await admin.create_topics(
            [
                NewTopic(bus.settings.full("control"), 2, 1, topic_configs=wrong),
                NewTopic(bus.settings.full("results"), 2, 1, topic_configs={"cleanup.policy": "delete,compact"}),
            ]
        )
    finally:
        await stop_admin(admin)
    await bus.ensure_topics()
    with pytest.raises(TopicsWrong) as caught:
        await bus.check_topics()
    name = bus.settings.full("control")
    found = {(one.topic, one.setting): one for one in caught.value.problems}
    assert found[name, "cleanup.policy"].found == "delete"
    assert found[name, "cleanup.policy"].wanted == "compact,delete"
    assert found[name, "max.message.bytes"].wanted == f"{bus.settings.max_record_bytes} or more"
    assert found[name, "retention.ms"].found == "60000"
    assert (bus.settings.full("results"), "cleanup.policy") not in found, "the order of policies means nothing"


async def test_longer_retention_and_larger_records_are_an_operators_choice(bus: Bus) -> None:
    await bus.ensure_topics()
    admin = await bus.clients.admin()
    try:
        kept = {"cleanup.policy": "delete", "retention.ms": "-1", "max.message.bytes": "33554432"}
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, bus.settings.full("completions"), kept)])
    finally:
        await stop_admin(admin)
    await bus.check_topics()
