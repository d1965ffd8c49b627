"""The proxy as a process: settings, several engines, and a broker that goes and comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from polar.broker import spawn
from polar.bus import Bus, BusSettings
from polar.devmodel import Script
from polar.proxy import ProxyService, ProxySettings
from polar.proxy.main import services
from polar.schemas import CallStarted, CompletionCaptured, CompletionFailed
from polar.schemas.topics import Service
from polar.service.host import Host
from polar.service.settings import CommonSettings, describe
from tests.proxy.harness import SECRET, Door, GatedSender, ask, captured, running

Start = Callable[..., Any]
USER = [{"role": "user", "content": "hi"}]


def test_engines_come_from_the_environment_as_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_PROXY_ENGINE_URLS", "http://a:1/v1, http://b:2/v1/")
    monkeypatch.setenv("POLAR_PROXY_ENGINE_API_KEY", "sesame")
    settings = ProxySettings()
    assert settings.engine_urls == ["http://a:1/v1", "http://b:2/v1"]
    assert "sesame" not in describe(settings)


@pytest.mark.parametrize("url", ["a:1/v1", "http://a:1", ""])
def test_what_is_no_engine_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        ProxySettings(engine_urls=url)


async def test_it_is_hosted_like_every_service(bus_settings: BusSettings, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        host = Host(CommonSettings(state_dir=tmp_path), bus_settings, stack)
        (service,) = await services(host)
        assert host.registry.get_sample_value("polar_proxy_running") == 0
        assert not service.ready.is_set()


async def test_a_session_stays_with_its_engine_and_moves_when_it_is_gone(engine_of: Start, door_to: Start) -> None:
    engines = [await engine_of(Script.say("Yes.")) for _ in range(3)]
    door: Door = await door_to(",".join(engine.base_url for engine in engines))
    for session in range(12):
        async with door.client(f"s{session}") as client:
            for _ in range(2):
                await ask(client, stream=False, messages=USER)
    counts = [engine.stats.finished for engine in engines]
    assert all(count % 2 == 0 for count in counts)
    assert sum(count > 0 for count in counts) > 1

    used = next(engine for engine in engines if engine.stats.finished)
    places = {name: captured_at(await door.records(name)) for name in (f"s{i}" for i in range(12))}
    session = next(name for name, place in places.items() if place == used.base_url)
    await used.__aexit__(None, None, None)
    async with door.client(session) as client:
        await ask(client, stream=False, messages=USER)  # nothing had begun there, so it is asked elsewhere at once
    assert captured_at((await door.settled(session))[-2:]) != used.base_url


def captured_at(records: list[Any]) -> str:
    return captured(records[-2:]).engine.endpoint


@pytest.fixture
async def own_broker(tmp_path: Path) -> AsyncIterator[Any]:
    """A broker that the test may stop."""
    broker = await spawn(tmp_path / "broker")
    yield broker
    await broker.stop()


async def test_a_broker_that_goes_and_comes(own_broker: Any, engine_of: Start, tmp_path: Path) -> None:
    engine = await engine_of(Script.say("Yes."))
    settings = BusSettings(
        bootstrap=own_broker.bootstrap, partitions=1, blob_url=(tmp_path / "blobs").as_uri(), delivery_timeout_s=5
    )
    async with Bus(settings, Service.PROXY) as bus:
        await bus.prepare()
        service = ProxyService(
            ProxySettings(port=0, engine_urls=engine.base_url, logprobs_mode="processed_logprobs", start_timeout=1),
            bus,
            SECRET,
        )
        async with running(service):
            door = Door(service, bus, bus, GatedSender(bus))
            async with door.client() as client:
                await ask(client, stream=False, messages=USER)
                before = engine.stats.started
                await own_broker.stop()
                for stream in (False, True):
                    with pytest.raises(Exception, match="nothing was generated"):
                        await ask(client, stream=stream, messages=USER)
                assert engine.stats.started == before
                await own_broker.start()
                records = await door.settled()
                await ask(client, stream=True, messages=USER)
            ends = [one for one in records if not isinstance(one, CallStarted)]
            assert [type(one) for one in ends] == [CompletionCaptured, CompletionFailed, CompletionFailed]
            assert len({one.completion_id for one in ends}) == 3
            assert isinstance((await door.settled())[-1], CompletionCaptured)
