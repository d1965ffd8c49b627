"""Fixtures of the broker's suite: the same tests on the embedded broker and on Apache Kafka."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from polar.broker import BrokerProcess, spawn_sync
from tests.broker.cluster import Cluster

BACKENDS = ["embedded", pytest.param("kafka", marks=pytest.mark.kafka)]


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One embedded broker for all conformance tests, with housekeeping often enough to be waited for."""
    with spawn_sync(tmp_path_factory.mktemp("broker"), "--set", "maintenance_interval_s=0.5") as broker:
        yield broker


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def cluster(backend: str, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """The broker under test, with clients that end with the test."""
    if backend == "kafka":
        bootstrap = os.environ.get("KAFKA_BOOTSTRAP", "")
        if not bootstrap:
            pytest.skip("Apache Kafka: KAFKA_BOOTSTRAP is not set")
        cluster = Cluster(bootstrap, is_kafka=True)
    else:
        cluster = Cluster(request.getfixturevalue("embedded").bootstrap, is_kafka=False)
    yield cluster
    await cluster.close()


@pytest.fixture
def data_directory(tmp_path: Path) -> Path:
    """The data directory of a broker that a test starts for itself."""
    return tmp_path / "data"
