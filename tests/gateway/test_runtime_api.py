"""The runtime API: who may come in, and what a grader can do in a session's box."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from polar.gateway import GatewayService
from polar.schemas import SessionAssigned, Stage
from polar.service.clock import SystemClock
from polar.service.tokens import SessionToken, sign_session
from tests.gateway.desk import WAIT_AT_DOOR, Desk, ModelDoor, Site, shell_task


@dataclass
class Grader:
    http: aiohttp.ClientSession
    base: str
    site: Site
    event: SessionAssigned

    def key(self, *, life_ms: int = 60_000) -> str:
        return self.site.box_key(self.event, not_after_ms=SystemClock().now_ms() + life_ms)

    def url(self, what: str, event: SessionAssigned | None = None) -> str:
        event = event or self.event
        return f"{self.base}/v1/boxes/{event.session_id}/{event.attempt}/{what}"

    async def call(self, method: str, url: str, *, key: str | None = "", **more: Any) -> tuple[int, Any]:
        headers = {} if key is None else {"Authorization": f"Bearer {key or self.key()}"}
        async with self.http.request(method, url, headers=headers, **more) as answer:
            if answer.content_type == "application/json":
                return answer.status, await answer.json()
            return answer.status, await answer.read()

    async def exec(self, command: str | list[str], **more: Any) -> tuple[int, Any]:
        return await self.call("POST", self.url("exec"), json={"command": command, **more})

    async def refused(self, method: str, url: str, **more: Any) -> tuple[int, str]:
        status, body = await self.call(method, url, **more)
        assert body["error"]["message"]
        return status, body["error"]["code"]


@pytest.fixture
async def gateway(site: Site) -> AsyncIterator[GatewayService]:
    async with site.gateway(api_max_bytes=1 << 20) as gateway:
        yield gateway


@pytest.fixture
async def grader(gateway: GatewayService, desk: Desk, site: Site) -> AsyncIterator[Grader]:
    event = await desk.assign(await desk.boot(), shell_task("echo done > work.txt"))
    await desk.reached(event, Stage.ENDED)
    assert gateway.runtime_api is not None
    async with aiohttp.ClientSession() as http:
        yield Grader(http, gateway.runtime_api, site, event)


async def test_commands_run_in_the_session_s_box_after_its_end(grader: Grader, desk: Desk):
    beat = await desk.beat()
    assert beat.runtime_api == grader.base
    status, answer = await grader.exec("cat work.txt; echo $X >&2; exit 5", env={"X": "why"})
    assert status == 200
    assert answer == {"return_code": 5, "stdout": "done\n", "stderr": "why\n", "timed_out": False, "truncated": False}
    assert (await grader.exec(["cat"], stdin="in"))[1]["stdout"] == "in"
    assert (await grader.exec("pwd", cwd="/tmp"))[1]["stdout"] == "/tmp\n"


async def test_a_command_whose_time_is_up_is_dead(grader: Grader):
    status, answer = await grader.exec("echo first; sleep 1000", timeout_s=0.5)
    assert status == 200
    assert (answer["return_code"], answer["timed_out"], answer["stdout"]) == (None, True, "first\n")
    assert await grader.site.processes(grader.event) == []


async def test_a_client_that_goes_away_ends_its_command(grader: Grader):
    task = asyncio.create_task(grader.exec("sleep 1000"))
    await grader.site.until_running(grader.event)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await grader.site.until_running(grader.event, False)


async def test_files_go_in_and_out(grader: Grader):
    data = bytes(range(256))
    assert await grader.call("PUT", grader.url("file"), params={"path": "tests/data.bin"}, data=data) == (204, b"")
    assert await grader.call("GET", grader.url("file"), params={"path": "tests/data.bin"}) == (200, data)
    whole = "/polar/session/workspace/tests/data.bin"
    assert await grader.call("GET", grader.url("file"), params={"path": whole}) == (200, data)
    assert await grader.refused("GET", grader.url("file"), params={"path": "none"}) == (404, "no_file")
    assert await grader.refused("GET", grader.url("file")) == (422, "malformed")
    assert await grader.refused("GET", grader.url("file"), params={"path": "/etc/shadow"}) == (422, "path_refused")
    assert await grader.refused("GET", grader.url("file"), params={"path": "../../../x"}) == (422, "path_refused")
    await grader.exec("ln -s /etc/passwd link; head -c 2000000 /dev/zero > big")
    assert (await grader.call("GET", grader.url("file"), params={"path": "link"}))[0] == 422
    assert await grader.refused("GET", grader.url("file"), params={"path": "big"}) == (413, "too_large")
    large = b"x" * (2 << 20)
    assert await grader.refused("PUT", grader.url("file"), params={"path": "x"}, data=large) == (413, "too_large")


async def test_only_the_box_s_own_key_opens_it(grader: Grader, desk: Desk, site: Site):
    url = grader.url("exec")
    body = {"json": {"command": "true"}}
    assert await grader.refused("POST", url, key=None, **body) == (401, "no_key")
    assert await grader.refused("POST", url, key="nonsense", **body) == (401, "key_malformed")
    assert await grader.refused("POST", url, key=grader.key(life_ms=-1), **body) == (401, "key_expired")
    head, payload, _ = grader.key().split(".")
    forged = f"{head}.{payload}.{'A' * 43}"
    assert await grader.refused("POST", url, key=forged, **body) == (401, "key_forged")
    session = SessionToken(
        session_id=grader.event.session_id,
        attempt=1,
        task_id="t",
        group_id="g",
        sample=0,
        model="m",
        not_after_ms=SystemClock().now_ms() + 60_000,
    )
    assert await grader.refused("POST", url, key=sign_session(session, site.secret), **body) == (401, "key_forged")
    other = desk.assignment(grader.event.boot, shell_task("true"))
    assert await grader.refused("POST", grader.url("exec", other), **body) == (403, "other_box")
    assert (await grader.exec("true"))[0] == 200


async def test_a_box_is_open_from_the_end_of_its_attempt_to_its_release(grader: Grader, desk: Desk, door: ModelDoor):
    running = await desk.assign(grader.event.boot, shell_task(WAIT_AT_DOOR))
    await door.knocks(1)
    own = Grader(grader.http, grader.base, grader.site, running)
    assert await own.refused("POST", own.url("exec"), json={"command": "true"}) == (409, "not_ended")
    await desk.release(grader.event)
    await desk.beat(lambda beat: len(beat.held) == 1)
    assert await grader.refused("POST", grader.url("exec"), json={"command": "true"}) == (404, "no_box")


async def test_a_release_under_a_running_command_is_told(grader: Grader, desk: Desk):
    task = asyncio.create_task(grader.exec("sleep 1000"))
    await grader.site.until_running(grader.event)
    await desk.release(grader.event)
    status, body = await task
    assert (status, body["error"]["code"]) == (409, "box_gone")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"command": 3}', b'{"command": ""}', b'{"command": "x", "timeout_s": 0}', b'{"comand": "x"}']
)
async def test_malformed_requests_say_what_is_wrong(grader: Grader, body: bytes):
    assert await grader.refused("POST", grader.url("exec"), data=body) == (422, "malformed")


async def test_other_paths_are_answered_in_json(grader: Grader):
    assert await grader.refused("GET", f"{grader.base}/") == (404, "http")
    assert await grader.refused("GET", grader.url("exec")) == (405, "http")
