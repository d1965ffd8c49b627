"""Fixtures of the chaos suite: a broker that may be killed, a paced engine, an installation."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from .brokers import KAFKA_DIR, KAFKA_START, ApacheKafka, Embedded, KillableBroker
from .installation import Installation
from .pace import PacedEngine

Install = Callable[..., Installation]


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
async def broker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[KillableBroker]:
    """Each of the two, started for the test alone."""
    one: KillableBroker
    if request.param == "embedded":
        if os.environ.get("KAFKA_BOOTSTRAP"):
            pytest.skip("KAFKA_BOOTSTRAP asks for Apache Kafka; the embedded broker is killed where it is not set")
        one = await Embedded.new(tmp_path / "broker")
    else:
        folder, command = os.environ.get(KAFKA_DIR), os.environ.get(KAFKA_START)
        if not folder or not command:
            pytest.skip(f"needs an Apache Kafka that may be killed ({KAFKA_DIR}, {KAFKA_START})")
        one = ApacheKafka(Path(folder), command)
        await one.start()
    try:
        yield one
    finally:
        await one.stop()
        print("--- the broker", one.tail(), sep="\n")  # shown where the test has failed


@pytest.fixture
async def paced_engine() -> AsyncIterator[PacedEngine]:
    one = PacedEngine()
    async with one:
        yield one


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What aiokafka says of a broker that is away on purpose would bury what failed."""
    caplog.set_level(logging.CRITICAL, "aiokafka")


@pytest.fixture
async def install(tmp_path: Path) -> AsyncIterator[Install]:
    """Makes installations on a broker; what still runs of them at the end is stopped."""
    made: list[Installation] = []

    def make(bootstrap: str, engine_url: str, **options: object) -> Installation:
        root = tmp_path / f"stack{len(made)}"
        prefix = f"chaos-{uuid.uuid4().hex[:8]}."
        made.append(Installation(root, bootstrap, engine_url, prefix=prefix, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        await asyncio.to_thread(one.stop)
