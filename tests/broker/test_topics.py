"""Metadata, topics and their configs, on both brokers."""

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.admin import NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import InvalidPartitionsError, UnknownTopicOrPartitionError

from tests.broker.cluster import Cluster, structs, until

TOPIC_ALREADY_EXISTS, UNKNOWN_TOPIC, INVALID_TOPIC, INVALID_PARTITIONS, INVALID_REPLICATION, INVALID_CONFIG = (
    36,
    3,
    17,
    37,
    38,
    40,
)


async def configs_of(cluster: Cluster, topic: str) -> dict[str, str]:
    admin = await cluster.admin()
    (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    assert response.resources[0][0] == 0, response
    return {entry[0]: entry[1] for entry in response.resources[0][4]}


async def create(cluster: Cluster, *topics: NewTopic, validate_only: bool = False) -> list[int]:
    admin = await cluster.admin()
    response = await admin.create_topics(list(topics), validate_only=validate_only)
    return [each[1] for each in response.topic_errors]


async def test_metadata_names_the_brokers_and_the_controller(cluster: Cluster) -> None:
    admin = await cluster.admin()
    found = await admin.describe_cluster()
    nodes = {broker["node_id"]: (broker["host"], broker["port"]) for broker in found["brokers"]}
    assert found["controller_id"] in nodes
    host, _, port = cluster.bootstrap.rpartition(":")
    assert (host, int(port)) in nodes.values()


async def test_a_topic_is_created_with_partitions_and_configs(cluster: Cluster) -> None:
    topic = await cluster.topic(5, retention_ms=123456, cleanup_policy="compact,delete", max_message_bytes=5000000)
    admin = await cluster.admin()
    (found,) = await admin.describe_topics([topic])
    assert sorted(partition["partition"] for partition in found["partitions"]) == [0, 1, 2, 3, 4]
    configs = await configs_of(cluster, topic)
    assert configs["retention.ms"] == "123456"
    assert configs["cleanup.policy"] == "compact,delete"
    assert configs["max.message.bytes"] == "5000000"
    assert configs["min.insync.replicas"] == "1"
    assert topic in await admin.list_topics()


async def test_the_described_configs_have_the_names_and_defaults_of_apache_kafka(cluster: Cluster) -> None:
    configs = await configs_of(cluster, await cluster.topic())
    assert {
        "cleanup.policy": "delete",
        "compression.type": "producer",
        "delete.retention.ms": "86400000",
        "max.message.bytes": "1048588",
        "message.timestamp.type": "CreateTime",
        "min.cleanable.dirty.ratio": "0.5",
        "retention.bytes": "-1",
        "retention.ms": "604800000",
        "segment.ms": "604800000",
    }.items() <= configs.items()


async def test_creating_a_topic_twice_is_an_error(cluster: Cluster) -> None:
    topic = await cluster.topic()
    assert await create(cluster, NewTopic(topic, 1, 1)) == [TOPIC_ALREADY_EXISTS]


@pytest.mark.parametrize(
    ("name", "partitions", "replicas", "configs", "code"),
    [
        ("bad name", 1, 1, {}, INVALID_TOPIC),
        ("x" * 250, 1, 1, {}, INVALID_TOPIC),
        ("..", 1, 1, {}, INVALID_TOPIC),
        ("conformance-refused", 0, 1, {}, INVALID_PARTITIONS),
        ("conformance-refused", 1, 3, {}, INVALID_REPLICATION),
        ("conformance-refused", 1, 1, {"retention.ms": "soon"}, INVALID_CONFIG),
        ("conformance-refused", 1, 1, {"no.such.config": "1"}, INVALID_CONFIG),
        ("conformance-refused", 1, 1, {"segment.bytes": "1000"}, INVALID_CONFIG),
        ("conformance-refused", 1, 1, {"cleanup.policy": "shred"}, INVALID_CONFIG),
    ],
)
async def test_a_topic_that_cannot_be_is_refused(
    cluster: Cluster, name: str, partitions: int, replicas: int, configs: dict[str, str], code: int
) -> None:
    assert await create(cluster, NewTopic(name, partitions, replicas, topic_configs=configs)) == [code]


async def test_names_that_differ_only_in_dot_and_underscore_collide(cluster: Cluster) -> None:
    topic = await cluster.topic(name=cluster.name() + ".a")
    assert await create(cluster, NewTopic(topic.replace(".", "_"), 1, 1)) == [INVALID_TOPIC]


async def test_validate_only_creates_nothing(cluster: Cluster) -> None:
    name = cluster.name()
    assert await create(cluster, NewTopic(name, 1, 1), validate_only=True) == [0]
    assert name not in await (await cluster.admin()).list_topics()


async def test_one_bad_topic_does_not_keep_the_others_from_being_created(cluster: Cluster) -> None:
    existing, name = await cluster.topic(), cluster.name()
    assert sorted(await create(cluster, NewTopic(existing, 1, 1), NewTopic(name, 2, 1))) == [0, TOPIC_ALREADY_EXISTS]
    await (await cluster.admin()).delete_topics([name])


async def test_missing_topics_are_reported(cluster: Cluster) -> None:
    admin = await cluster.admin()
    name = cluster.name()
    (found,) = await admin.describe_topics([name])
    assert found["error_code"] == UNKNOWN_TOPIC
    response = await admin.delete_topics([name])
    assert [each[1] for each in response.topic_error_codes] == [UNKNOWN_TOPIC]
    (described,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
    assert described.resources[0][0] == UNKNOWN_TOPIC


async def test_nothing_creates_a_topic_by_using_it(cluster: Cluster) -> None:
    name = cluster.name()
    producer = await cluster.producer(request_timeout_ms=1500)
    with pytest.raises(UnknownTopicOrPartitionError):
        await producer.send_and_wait(name, b"x")
    consumer = await cluster.consumer()
    consumer.subscribe([name])
    await consumer.getmany(timeout_ms=300)
    assert name not in await (await cluster.admin()).list_topics()


async def test_partitions_can_be_added_and_not_taken_away(cluster: Cluster) -> None:
    topic = await cluster.topic(2)
    admin = await cluster.admin()
    response = await admin.create_partitions({topic: NewPartitions(4)})
    assert [each[1] for each in response.topic_errors] == [0]

    async def has_four() -> bool:
        (found,) = await admin.describe_topics([topic])
        return len(found["partitions"]) == 4

    await until(has_four)
    with pytest.raises(InvalidPartitionsError):
        await admin.create_partitions({topic: NewPartitions(3)})
    producer = await cluster.producer()
    assert (await producer.send_and_wait(topic, b"x", partition=3)).offset == 0


async def test_alter_configs_replaces_them_all(cluster: Cluster) -> None:
    topic = await cluster.topic(retention_ms=111, max_message_bytes=2222)
    await cluster.set_configs(topic, retention_ms=333)

    async def replaced() -> bool:
        configs = await configs_of(cluster, topic)
        return (configs["retention.ms"], configs["max.message.bytes"]) == ("333", "1048588")

    await until(replaced)


async def test_alter_configs_refuses_what_it_does_not_know(cluster: Cluster) -> None:
    topic = await cluster.topic(retention_ms=111)
    admin = await cluster.admin()
    resource = ConfigResource(ConfigResourceType.TOPIC, topic, configs={"retention.ms": "x"})
    (response,) = await admin.alter_configs([resource])
    assert response.resources[0][0] == INVALID_CONFIG
    assert (await configs_of(cluster, topic))["retention.ms"] == "111"


async def test_incremental_alter_configs_changes_only_what_it_names(cluster: Cluster) -> None:
    v1 = structs(44, 1)
    topic = await cluster.topic(retention_ms=111, max_message_bytes=2222)
    raw = await cluster.raw()
    change = v1.AlterableConfig(name="retention.ms", config_operation=0, value="444")
    reset = v1.AlterableConfig(name="max.message.bytes", config_operation=1, value=None)
    append = v1.AlterableConfig(name="cleanup.policy", config_operation=2, value="compact")
    response = await raw.call(
        44,
        1,
        resources=(v1.AlterConfigsResource(resource_type=2, resource_name=topic, configs=(change, reset, append)),),
        validate_only=False,
    )
    assert response.responses[0].error_code == 0

    async def changed() -> bool:
        configs = await configs_of(cluster, topic)
        return (configs["retention.ms"], configs["max.message.bytes"], configs["cleanup.policy"]) == (
            "444",
            "1048588",
            "delete,compact",
        )

    await until(changed)


async def test_a_deleted_topic_is_gone_and_can_be_created_again_empty(cluster: Cluster) -> None:
    topic = await cluster.topic()
    producer = await cluster.producer()
    for _ in range(3):
        await producer.send_and_wait(topic, b"old")
    admin = await cluster.admin()
    response = await admin.delete_topics([topic])
    assert [each[1] for each in response.topic_error_codes] == [0]

    async def is_gone() -> bool:
        return topic not in await admin.list_topics()

    await until(is_gone)

    async def is_back() -> bool:
        return await create(cluster, NewTopic(topic, 1, 1)) == [0]

    await until(is_back)
    fresh = await cluster.producer()
    assert (await fresh.send_and_wait(topic, b"new")).offset == 0
    assert [record.value for record in await cluster.read(topic, 1)] == [b"new"]


async def test_a_consumer_goes_on_when_its_topic_is_deleted_and_created_again(cluster: Cluster) -> None:
    topic = await cluster.topic()
    producer = await cluster.producer()
    for index in range(3):
        await producer.send_and_wait(topic, b"old%d" % index)
    consumer = await cluster.consumer(topic, metadata_max_age_ms=300)
    seen = [record.value for record in (await consumer.getmany(timeout_ms=5000)).popitem()[1]]
    assert seen[0] == b"old0"
    admin = await cluster.admin()
    await admin.delete_topics([topic])

    async def is_back() -> bool:
        return await create(cluster, NewTopic(topic, 1, 1)) == [0]

    await until(is_back)
    fresh = await cluster.producer()
    await fresh.send_and_wait(topic, b"new")

    async def read_new() -> bool:
        batches = await consumer.getmany(timeout_ms=200)
        return any(record.value == b"new" for batch in batches.values() for record in batch)

    await until(read_new, 30)


async def test_many_topics_with_many_partitions_are_one_subscription(cluster: Cluster) -> None:
    prefix = cluster.name("wide")
    names = [f"{prefix}-{index:02d}" for index in range(40)]
    assert set(await create(cluster, *[NewTopic(name, 12, 1) for name in names])) == {0}
    try:
        producer = await cluster.producer(linger_ms=20)
        sends = []
        for name in names:
            for partition in range(12):
                sends.append(await producer.send(name, name.encode(), partition=partition))
        for each in sends:
            await each
        consumer: AIOKafkaConsumer = await cluster.consumer()
        consumer.subscribe(pattern=f"{prefix}-.*")
        seen: set[tuple[str, int]] = set()

        async def read_all() -> bool:
            for place in await consumer.getmany(timeout_ms=500):
                seen.add((place.topic, place.partition))
            return len(seen) == 480

        await until(read_all, 60)
    finally:
        await (await cluster.admin()).delete_topics(names)


async def test_a_pattern_finds_topics_that_come_later(cluster: Cluster) -> None:
    prefix = cluster.name("pattern")
    first = await cluster.topic(name=f"{prefix}-a")
    consumer = await cluster.consumer(group_id=cluster.name("g"), metadata_max_age_ms=300)
    consumer.subscribe(pattern=f"{prefix}-.*")
    producer = await cluster.producer()
    await producer.send_and_wait(first, b"1")
    assert (await consumer.getone()).topic == first
    second = await cluster.topic(name=f"{prefix}-b")
    await producer.send_and_wait(second, b"2")

    async def read_second() -> bool:
        batches = await consumer.getmany(timeout_ms=200)
        return any(place.topic == second for place in batches)

    await until(read_second, 30)
