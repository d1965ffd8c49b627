"""A whole process of submit: API, view, scheduler and callbacks together, and how it stops."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polar.bus import BrokerUnavailable, Bus, BusSettings, Out
from polar.schemas import CancelRequest
from polar.schemas.topics import Service
from polar.service.settings import CommonSettings
from polar.submit.scheduler.settings import SchedulerSettings
from polar.submit.service import ListenFailed, SubmitService
from polar.submit.settings import SubmitSettings
from tests.submit.conftest import task_body

QUICK = SchedulerSettings(tick_seconds=0.2, final_grace=2)


def service(bus: BusSettings, tmp_path: Path, **settings: Any) -> SubmitService:
    common = CommonSettings(state_dir=tmp_path / "state")
    return SubmitService(common, bus, SubmitSettings(**{"port": 0, "shutdown_s": 0.5, **settings}), QUICK)


@asynccontextmanager
async def running(made: SubmitService) -> AsyncIterator[tuple[asyncio.Task[None], aiohttp.ClientSession]]:
    task = asyncio.create_task(made.run())
    listening = asyncio.create_task(made.listening.wait())
    try:
        async with asyncio.timeout(30):
            await asyncio.wait({task, listening}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        async with aiohttp.ClientSession(f"http://127.0.0.1:{made.port}") as http:
            yield task, http
    finally:
        listening.cancel()
        task.cancel()
        await asyncio.gather(task, listening, return_exceptions=True)


async def ready(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(30):
        while (await http.get("/ready")).status != 200:  # noqa: ASYNC110 - as a supervisor would
            await asyncio.sleep(0.05)


async def test_the_scheduler_answers_what_the_api_publishes(bus_settings: BusSettings, tmp_path: Path) -> None:
    async with running(service(bus_settings, tmp_path)) as (_, http):
        await ready(http)
        answer = await http.post("/rollout/task/submit", json=task_body(task_id="t1", num_samples=2))
        assert answer.status == 200, await answer.text()
        assert len((await answer.json())["session_ids"]) == 2
        again = await http.post("/rollout/task/submit", json=task_body(task_id="t1", num_samples=2))
        assert again.status == 200, await again.text()
        other = await http.post("/rollout/task/submit", json=task_body(task_id="t1", num_samples=3))
        assert other.status == 409, await other.text()
        line = (await (await http.get("/tasks")).json())["tasks"][0]
        assert (line["task_id"], line["total_sessions"], line["status"]) == ("t1", 2, "running")
        status = await (await http.get("/rollout/status")).json()
        assert status["pipeline"]["pending_sessions"] == 2


async def test_a_long_instruction_is_the_same_task_by_http_and_by_hand(
    bus_settings: BusSettings, tmp_path: Path
) -> None:
    body = task_body(task_id="t1", instruction="x" * 100_000)
    async with running(service(bus_settings, tmp_path)) as (_, http):
        await ready(http)
        for _ in range(2):
            answer = await http.post("/rollout/task/submit", json=body)
            assert answer.status == 200, await answer.text()


async def test_a_restart_knows_what_was_before(bus_settings: BusSettings, tmp_path: Path) -> None:
    async with running(service(bus_settings, tmp_path)) as (_, http):
        await ready(http)
        assert (await http.post("/rollout/task/submit", json=task_body(task_id="t1"))).status == 200
    async with running(service(bus_settings, tmp_path)) as (_, http):
        await ready(http)
        assert (await (await http.get("/rollout/task/t1")).json())["status"] == "running"


async def test_an_api_without_a_scheduler_shows_the_same(bus_settings: BusSettings, tmp_path: Path) -> None:
    async with running(service(bus_settings, tmp_path)) as (_, http):
        await ready(http)
        async with running(service(bus_settings, tmp_path / "b", scheduler=False)) as (_, other):
            await ready(other)
            answer = await other.post("/rollout/task/submit", json=task_body(task_id="t1"))
            assert answer.status == 200, await answer.text()
            async with asyncio.timeout(30):  # the other view reads the same log, in its own time
                while (await http.get("/rollout/task/t1", params={"wait": "0"})).status == 404:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (await http.get("/rollout/task/t1", params={"wait": "0"})).status == 200


async def test_watchers_and_waiting_requests_do_not_hold_the_stop_up(bus_settings: BusSettings, tmp_path: Path) -> None:
    async with running(service(bus_settings, tmp_path)) as (task, http):
        await ready(http)
        await http.post("/rollout/task/submit", json=task_body(task_id="t1"))
        stream = await http.get("/events")
        await stream.content.readline()
        waiting = asyncio.create_task(http.get("/rollout/task/t1", params={"wait": "60"}))
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        text = (await stream.content.read()).decode()
        assert "event: cut" in text
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_broker_that_is_away_at_start_is_one_clear_error(tmp_path: Path) -> None:
    away = BusSettings(bootstrap="127.0.0.1:1", connect_timeout_s=1.0, blob_url=(tmp_path / "b").as_uri())
    with pytest.raises(BrokerUnavailable, match=r"cannot reach Kafka at 127\.0\.0\.1:1: start one or set POLAR_KAFKA"):
        await service(away, tmp_path).run()


async def test_a_port_that_is_taken_is_one_clear_error(bus_settings: BusSettings, tmp_path: Path) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    try:
        with pytest.raises(ListenFailed, match=f"cannot listen on 127.0.0.1:{port} .*POLAR_SUBMIT_PORT"):
            await service(bus_settings, tmp_path, port=port).run()
    finally:
        taken.close()


async def test_a_cancel_by_hand_ends_a_queued_task(bus_settings: BusSettings, tmp_path: Path) -> None:
    """Nothing runs here: the sessions end without a box, as cancelled."""
    made = service(bus_settings, tmp_path)
    async with running(made) as (_, http), Bus(bus_settings, Service.USER) as bus:
        await ready(http)
        await http.post("/rollout/task/submit", json=task_body(task_id="t1"))
        await bus.send(Out("tasks", "t1", CancelRequest(task_id="t1")))
        seen: list[Any] = []

        async def look() -> None:
            while not seen:
                document = await (await http.get("/tasks/t1/sessions")).json()
                seen.extend(one for one in document["sessions"] if one["outcome"] is not None)
                await asyncio.sleep(0.05)

        async with asyncio.timeout(30):
            await look()
        assert seen[0]["outcome"] == "cancelled"


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_SUBMIT_PORT", "9999")
    monkeypatch.setenv("POLAR_SUBMIT_ALLOW_NETWORKS", "proxy-only, host")
    monkeypatch.setenv("POLAR_SUBMIT_IMPORT_PATHS", "mine:Agent")
    settings = SubmitSettings()
    assert settings.port == 9999
    assert settings.limits().allow_networks == {"proxy-only", "host"}
    assert settings.limits().import_paths == {"mine:Agent"}


def test_every_setting_is_described() -> None:
    assert [name for name, field in SubmitSettings.model_fields.items() if not field.description] == []
