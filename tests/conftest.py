"""Fixtures for every suite: a broker, settings with topics of their own, and a guard against blocking the loop."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import types
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog
from blockbuster import blockbuster_ctx
from hypothesis import settings

from polar.broker import spawn_sync
from polar.bus import BusSettings
from polar.bus.clients import Clients, stop_admin

ROOT = Path(__file__).parent.parent
# examples take as long as a shared machine lets them; what hangs is pytest-timeout's
settings.register_profile("polar", deadline=None)
settings.load_profile("polar")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell's background jobs ignore it, and so would every program under test that gets Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

REAL_PARTS = {"kafka", "vllm", "chaos"}
"""Marks of suites that differ by what stands behind them, whatever fixtures they use."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--with-real-parts", action="store_true", help="Only what touches a broker or an engine: the rest ran before."
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--with-real-parts"):
        return
    left_out = [one for one in items if not _touches(one)]
    items[:] = [one for one in items if _touches(one)]
    config.hook.pytest_deselected(items=left_out)


def _touches(item: pytest.Item) -> bool:
    marks = {mark.name for mark in item.iter_markers()}
    return "bootstrap" in getattr(item, "fixturenames", ()) or bool(marks & REAL_PARTS)


@pytest.fixture(scope="session")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Apache Kafka where KAFKA_BOOTSTRAP names one, else the embedded broker."""
    named = os.environ.get("KAFKA_BOOTSTRAP")
    if named:
        yield named
        return
    with spawn_sync(tmp_path_factory.mktemp("broker")) as broker:
        yield broker.bootstrap


@pytest.fixture
async def bus_settings(bootstrap: str, tmp_path: Path) -> AsyncIterator[BusSettings]:
    """Few partitions, and a prefix of the test's own; its topics are deleted afterwards."""
    settings = BusSettings(
        bootstrap=bootstrap,
        topic_prefix=f"test-{uuid.uuid4().hex[:10]}.",
        partitions=2,
        task_partitions=2,
        node_partitions=2,
        blob_url=(tmp_path / "blobs").as_uri(),
    )
    yield settings
    await delete_topics(settings)


@pytest.fixture(autouse=True)
def logs_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command that a test runs in this process sets up logs; the next test finds them as they were."""
    root, configure = logging.getLogger(), structlog.configure
    handlers, level = root.handlers[:], root.level
    # loggers that remember how they were set up could not be given back
    monkeypatch.setattr(
        structlog, "configure", lambda **options: configure(**{**options, "cache_logger_on_first_use": False})
    )
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        root.handlers[:] = handlers
        root.setLevel(level)


async def delete_topics(settings: BusSettings) -> None:
    """Deletes whatever has the settings' prefix."""
    admin = await Clients(settings, "tests").admin()
    try:
        names = [name for name in await admin.list_topics() if name.startswith(settings.topic_prefix)]
        if names:
            await admin.delete_topics(names)
    finally:
        await stop_admin(admin)


def _root(folder: str) -> types.ModuleType:
    """Stands for a folder of packages: `polar` is a namespace without a path of its own."""
    root = types.ModuleType(folder)
    root.__path__ = [str(ROOT / folder)]
    return root


@pytest.fixture(autouse=True)
def blockbuster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails an async test in which code of Polar's blocks the event loop."""
    if not inspect.iscoroutinefunction(getattr(request.node, "function", None)):
        yield
        return
    # the embedded broker writes its log from its own loop on purpose, and the CLI has no loop to share
    excluded = [_root("libs/polar/broker"), _root("libs/polar/cli")]
    with blockbuster_ctx([_root("libs"), _root("services"), _root("schemas")], excluded_modules=excluded):
        yield
