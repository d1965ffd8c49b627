"""Every version of every API that the embedded broker advertises is read and answered. Embedded only."""

from dataclasses import MISSING, fields, is_dataclass
from datetime import timedelta
from typing import Any, get_args, get_type_hints

from kio.index import load_request_schema

from polar.broker import BrokerProcess
from tests.broker.cluster import Cluster, batch_of

PRODUCE, FIND_COORDINATOR = 0, 10
SAMPLES: dict[str, Any] = {
    "group_id": "versions",
    "member_id": "",
    "transactional_id": None,
    "acks": -1,
    "replication_factor": 1,
    "num_partitions": 1,
    "count": 9,
    "resource_type": 2,
    "session_timeout": timedelta(seconds=10),
    "rebalance_timeout": timedelta(seconds=10),
    "partition_max_bytes": 1000,
    "timestamp": -1,
    "committed_offset": 3,
    "producer_id": -1,
    "producer_epoch": -1,
    "generation_id": -1,
    "replica_id": -1,
    "duration_filter": -1,
    "topic_id": None,
    "include_topic_authorized_operations": False,
    "require_stable": False,
}
TOPIC_NAMES = {"name", "topic", "resource_name"}


def sample(schema: type, topic: str, batch: bytes) -> Any:
    """A request with one of everything in it."""
    hints = get_type_hints(schema)
    values = {}
    for field in fields(schema):
        if field.default is not MISSING and field.metadata.get("tag") is not None:
            continue
        values[field.name] = _value(field.name, hints[field.name], topic, batch)
    return schema(**values)


def _value(name: str, hint: Any, topic: str, batch: bytes) -> Any:
    options = [each for each in get_args(hint) if each is not type(None)] if type(None) in get_args(hint) else [hint]
    kind = options[0]
    inner = get_args(kind)
    if inner:
        if is_dataclass(inner[0]):
            # A manual assignment excludes a partition count.
            return () if name == "assignments" else (sample(inner[0], topic, batch),)  # type: ignore[arg-type]
        if name in ("topic_names",):
            return ("no-such-topic",)
        return (0,) if name.startswith("partition") else ()
    if name in SAMPLES and (SAMPLES[name] is not None or len(get_args(hint)) > 1):
        return SAMPLES[name]
    if name in TOPIC_NAMES:
        return topic
    if name == "records":
        return batch
    if issubclass(kind, bytes):
        return b"m"
    if issubclass(kind, str):
        return None if len(get_args(hint)) > 1 else "consumer"
    if issubclass(kind, timedelta):
        return timedelta(seconds=0)
    return kind(0) if kind is bool else 0


async def test_every_advertised_version_is_answered(embedded: BrokerProcess) -> None:
    cluster = Cluster(embedded.bootstrap, is_kafka=False)
    topic = await cluster.topic()
    raw = await cluster.raw()
    advertised = (await raw.call(18, 0)).api_keys
    assert len(advertised) > 30
    called = 0
    for api in advertised:
        first = 3 if api.api_key == PRODUCE else api.min_version
        for version in range(first, api.max_version + 1):
            request = sample(load_request_schema(api.api_key, version), topic, batch_of(b"v"))
            values = {field.name: getattr(request, field.name) for field in fields(request)}
            if "group_id" in values:
                values["group_id"] = f"versions-{api.api_key}-{version}"  # members of one would wait for each other
            response = await raw.call(api.api_key, version, **values)
            assert response.__version__ == version
            called += 1
    assert called > 120
    await cluster.close()


async def test_an_api_that_is_not_advertised_is_not_spoken(embedded: BrokerProcess) -> None:
    cluster = Cluster(embedded.bootstrap, is_kafka=False)
    raw = await cluster.raw()
    advertised = {api.api_key for api in (await raw.call(18, 3, **_software())).api_keys}
    assert 68 not in advertised, "the group protocol of KIP-848"
    await cluster.close()


def _software() -> dict[str, str]:
    return {"client_software_name": "test", "client_software_version": "1"}
