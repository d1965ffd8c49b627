"""Fixtures of the broker's suite: the same tests on the embedded broker and on Apache Kafka.

Apache Kafka comes as the one that KAFKA_BOOTSTRAP names and as one that testcontainers starts (`kafka_image`).
"""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from polar.broker import BrokerProcess, spawn_sync
from tests.broker.cluster import Cluster
from tests.broker.kafka_image import KafkaContainer, MissingKafkaImage

BACKENDS = [
    "embedded",
    pytest.param("kafka", marks=pytest.mark.kafka),
    pytest.param("kafka-docker", marks=pytest.mark.docker),
]


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One embedded broker for all conformance tests, with housekeeping often enough to be waited for."""
    with spawn_sync(tmp_path_factory.mktemp("broker"), "--set", "maintenance_interval_s=0.5") as broker:
        yield broker


@pytest.fixture(scope="session")
def kafka() -> str:
    """Where the Apache Kafka is that somebody else started."""
    named = os.environ.get("KAFKA_BOOTSTRAP")
    if not named:
        pytest.skip("Apache Kafka: KAFKA_BOOTSTRAP is not set")
    return named


@pytest.fixture(scope="session")
def kafka_in_docker() -> Iterator[KafkaContainer]:
    """An Apache Kafka in a container, for all conformance tests."""
    with new_kafka_container() as container:
        yield container


@pytest.fixture(scope="session")
def mortal_kafka() -> Iterator[KafkaContainer]:
    """An Apache Kafka in a container, which tests may kill and start again."""
    with new_kafka_container() as container:
        yield container


def new_kafka_container() -> KafkaContainer:
    """Skip, naming what is missing."""
    try:
        return KafkaContainer()
    except MissingKafkaImage as missing:
        pytest.skip(f"Apache Kafka in Docker: {missing}")


@pytest.fixture(params=BACKENDS)
def address(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Kind and address of every broker in turn; not async, since starting one blocks."""
    kind = str(request.param)
    if kind == "kafka":
        return kind, request.getfixturevalue("kafka")
    return kind, request.getfixturevalue("embedded" if kind == "embedded" else "kafka_in_docker").bootstrap


@pytest.fixture
async def cluster(address: tuple[str, str]) -> AsyncIterator[Cluster]:
    """The broker under test, with clients that end with the test."""
    kind, bootstrap = address
    cluster = Cluster(bootstrap, is_kafka=kind != "embedded")
    yield cluster
    await cluster.close()


@pytest.fixture(params=["embedded", "embedded-fsync", pytest.param("kafka-docker", marks=pytest.mark.docker)])
def prepared(request: pytest.FixtureRequest, data_directory: Path) -> BrokerProcess | KafkaContainer:
    """Every broker that can be killed, in turn; not async, since starting one blocks."""
    if request.param == "kafka-docker":
        container: KafkaContainer = request.getfixturevalue("mortal_kafka")
        return container
    return BrokerProcess(data_directory, 0, ("--fsync",) if request.param == "embedded-fsync" else ())


@pytest.fixture
async def mortal(prepared: BrokerProcess | KafkaContainer) -> AsyncIterator[BrokerProcess | KafkaContainer]:
    """A broker that the test may kill, and that runs again after it."""
    if isinstance(prepared, KafkaContainer):
        yield prepared
        if not prepared.is_running:
            await prepared.start()
        return
    async with prepared:
        yield prepared


@pytest.fixture
async def own(mortal: BrokerProcess | KafkaContainer) -> AsyncIterator[Cluster]:
    """Clients of it. Topics stay: clients may not have noticed the last restart yet."""
    cluster = Cluster(mortal.bootstrap, is_kafka=isinstance(mortal, KafkaContainer))
    yield cluster
    if not mortal.is_running:
        await mortal.start()
    await cluster.close(keep_topics=True)


@pytest.fixture
def data_directory(tmp_path: Path) -> Path:
    """The data directory of a broker that a test starts for itself."""
    return tmp_path / "data"
