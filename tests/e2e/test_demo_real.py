"""The same demo with two addresses changed: on Apache Kafka and on real vLLM."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.bus import BusSettings
from polar.cli.demo.gather import drop_topics
from tests.e2e.commands import assert_ended_once, kill_all, none_left, polar, settings_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.kafka,
    pytest.mark.vllm,
    pytest.mark.sandbox,
    pytest.mark.timeout(600),
]

TASKS = ("colors", "capitals", "tokyo")
SAMPLES = 8


def named(variable: str, what: str) -> str:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"needs {what} ({variable})")
    return value


@pytest.fixture
def addresses() -> tuple[str, str]:
    """Of Apache Kafka and of vLLM."""
    return named("KAFKA_BOOTSTRAP", "Apache Kafka"), named("VLLM_BASE_URL", "a running vLLM")


@pytest.fixture
async def settings(addresses: tuple[str, str], tmp_path: Path) -> AsyncIterator[BusSettings]:
    """Topics of the test's own, which are deleted with it."""
    prefix = f"test-demo-{uuid.uuid4().hex[:8]}."
    found = BusSettings(bootstrap=addresses[0], topic_prefix=prefix, blob_url=(tmp_path / "blobs").as_uri())
    yield found
    await drop_topics(found)


async def test_the_demo_on_apache_kafka_and_vllm_shows_the_same(
    addresses: tuple[str, str], settings: BusSettings, tmp_path: Path
) -> None:
    kafka, vllm = addresses
    env = {"POLAR_KAFKA_BOOTSTRAP": kafka, "POLAR_KAFKA_TOPIC_PREFIX": settings.topic_prefix}
    try:
        done = polar(tmp_path, "demo", "--model-url", vllm, env=env, timeout_s=500)
        assert done.returncode == 0, done.stdout + done.stderr
        none_left(tmp_path)
    finally:
        kill_all(tmp_path)
    text = done.stdout
    print(text)
    assert re.search(
        rf"ready after [\d.]+ s: 5 processes.*; Kafka at {re.escape(kafka)}, the engine at {re.escape(vllm)}", text
    )
    rewards = [re.findall(r"[01]", line) for line in text.splitlines() if line.startswith("reward")]
    assert [len(one) for one in rewards] == [SAMPLES] * len(TASKS)
    # at several calls at a time vLLM samples other tokens every time, so which session gets what is not told here
    assert {value for one in rewards for value in one} == {"0", "1"}
    assert re.search(r"\d+ of \d+ trained tokens would be other ids|would change none of its trained tokens", text)
    assert re.search(r"prefix_merging +\d", text)
    assert (tmp_path / "polar-demo" / "demo.html").is_file()
    state = tmp_path / "polar-demo" / "run-1"
    assert not (state / "kafka").exists()
    for task in TASKS:
        found = await assert_ended_once(settings_of(state), f"demo-{task}", SAMPLES)
        assert {one.outcome.failure for one in found} == {None}
        assert all(one.traces for one in found)
