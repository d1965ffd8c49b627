"""Callbacks on a real broker and a real receiver: at least once, rarely twice, never elsewhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiokafka import AIOKafkaProducer
from msgspec.structs import replace
from prometheus_client import generate_latest

from polar.schemas import Trajectory
from polar.submit.callbacks import Callbacks
from polar.submit.sent import SentFile
from tests.submit.conftest import Start, Submit, eventually, task_body
from tests.submit.records import trajectory

QUICK = {"callback_backoff_s": 0.01, "callback_backoff_max_s": 0.05, "callback_timeout_s": 5.0}

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Receiver:
    """A trainer's HTTP server; `answer` can be replaced."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.keys: list[str] = []
        self.statuses: list[int] = []
        """To answer with, first to last; then 200."""
        self.hold = asyncio.Event()
        self.hold.set()
        app = web.Application()
        app.router.add_post("/{path:.*}", self._take)
        self.server = TestServer(app)

    async def _take(self, request: web.Request) -> web.StreamResponse:
        await self.hold.wait()
        self.bodies.append(json.loads(await request.read()))
        self.keys.append(request.headers["Idempotency-Key"])
        if request.path.startswith("/redirect/"):
            raise web.HTTPTemporaryRedirect(request.query.get("to", request.path))
        return web.Response(status=self.statuses.pop(0) if self.statuses else 200)

    def url(self, path: str = "/done") -> str:
        return str(self.server.make_url(path))


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    async with made.server:
        yield made


class Running:
    """A callback sender beside a submit."""

    def __init__(self, submit: Submit, file: Path, *, leading: bool) -> None:
        self.leading = asyncio.Event()
        if leading:
            self.leading.set()
        self.callbacks = Callbacks(
            submit.bus, submit.view, submit.settings, submit.metrics, SentFile(file, limit=100), self.leading
        )
        submit.listeners.append(self.callbacks.tell)
        self.task = asyncio.create_task(self.callbacks.run())
        self._metrics = submit.metrics

    def count(self, outcome: str) -> float:
        for line in generate_latest(self._metrics.registry).decode().splitlines():
            if line.startswith(f'polar_submit_callbacks_total{{outcome="{outcome}"}}'):
                return float(line.split()[-1])
        return 0.0

    async def until(self, outcome: str, count: int = 1) -> None:
        await eventually(lambda: self.count(outcome) >= count)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


Run = Callable[..., Awaitable[tuple[Submit, Running]]]


@pytest.fixture
async def run(start: Start, tmp_path: Path) -> AsyncIterator[Run]:
    async with AsyncExitStack() as stack:

        async def make(*, leading: bool = True, **settings: Any) -> tuple[Submit, Running]:
            submit = await start(**{**QUICK, **settings})
            running = Running(submit, tmp_path / "state" / "sent", leading=leading)
            stack.push_async_callback(running.stop)
            return submit, running

        yield make


async def done(submit: Submit, task_id: str, url: str | None, **more: Any) -> None:
    """Submit a task that reports to `url`, and end it."""
    extra = {} if url is None else {"callback_url": url}
    await submit.submit(task_id=task_id, **extra)
    await submit.scheduler.finish(task_id, **more)


async def test_the_end_of_a_task_is_told_in_upstreams_shape(run: Run, receiver: Receiver) -> None:
    submit, running = await run()
    await done(submit, "t1", receiver.url(), reward=0.5)
    await running.until("delivered")
    (body,) = receiver.bodies
    assert set(body) >= {"task_id", "status", "results", "result_paths"}
    assert (body["task_id"], body["status"]) == ("t1", "completed")
    assert body["results"][0]["reward"] == 0.5
    assert body["results"][0]["trajectory"] is None
    assert body == await submit.task("t1"), "the same as asking"


async def test_a_task_without_a_callback_calls_nobody(run: Run, receiver: Receiver) -> None:
    submit, running = await run()
    await done(submit, "quiet", None)
    await done(submit, "loud", receiver.url())
    await running.until("delivered")
    assert [body["task_id"] for body in receiver.bodies] == ["loud"]


async def test_a_receiver_that_is_busy_is_asked_again(run: Run, receiver: Receiver) -> None:
    submit, running = await run()
    receiver.statuses = [503, 500, 429]
    await done(submit, "t1", receiver.url())
    await running.until("delivered")
    assert len(receiver.bodies) == 4
    assert len(set(receiver.keys)) == 1


async def test_a_receiver_that_says_no_is_not_asked_again(run: Run, receiver: Receiver) -> None:
    submit, running = await run()
    receiver.statuses = [404]
    await done(submit, "t1", receiver.url())
    await running.until("refused")
    assert len(receiver.bodies) == 1


async def test_a_receiver_that_is_away_is_given_up(run: Run, receiver: Receiver) -> None:
    submit, running = await run(callback_attempts=3)
    await done(submit, "t1", "http://127.0.0.1:1/nobody")
    await running.until("given_up")
    assert "polar_submit_callback_tries_total 3.0" in generate_latest(submit.metrics.registry).decode()
    await done(submit, "t2", receiver.url())
    await running.until("delivered")


@pytest.mark.parametrize("url", ["http://", "http://[", "https://exa mple/\x00", "http://a:99999999/"])
async def test_an_address_that_is_none_is_refused(run: Run, receiver: Receiver, url: str) -> None:
    submit, running = await run(callback_attempts=2)
    await done(submit, "t1", url)
    await eventually(lambda: running.count("refused") + running.count("given_up") == 1)
    await done(submit, "t2", receiver.url())
    await running.until("delivered")


async def test_a_redirect_on_the_same_host_is_followed(run: Run, receiver: Receiver) -> None:
    submit, running = await run()
    await done(submit, "t1", receiver.url("/redirect/here?to=/there"))
    await running.until("delivered")
    assert len(receiver.bodies) == 2
    assert receiver.bodies[0] == receiver.bodies[1]


async def test_a_redirect_to_another_host_is_not_followed(run: Run, receiver: Receiver) -> None:
    other = Receiver()
    async with other.server:
        submit, running = await run()
        await done(submit, "t1", f"{receiver.url('/redirect/away')}?to={other.url()}")
        await running.until("refused")
    assert other.bodies == []


async def test_a_circle_of_redirects_ends(run: Run, receiver: Receiver) -> None:
    submit, running = await run()
    await done(submit, "t1", receiver.url("/redirect/round"))
    await running.until("refused")
    assert len(receiver.bodies) == 4


async def test_a_slow_receiver_does_not_hold_the_others_up(run: Run, receiver: Receiver) -> None:
    """While it waits for its next try it takes no slot."""
    submit, running = await run(
        callback_concurrency=1, callback_backoff_s=30.0, callback_backoff_max_s=60.0, callback_attempts=10
    )
    for number in range(3):
        await done(submit, f"dead{number}", "http://127.0.0.1:1/nobody")
    await done(submit, "t1", receiver.url())
    await running.until("delivered")
    assert [body["task_id"] for body in receiver.bodies] == ["t1"]


async def test_open_callbacks_are_bounded_and_the_rest_waits(run: Run, receiver: Receiver) -> None:
    submit, running = await run(callback_open=2)
    receiver.hold.clear()
    for number in range(5):
        await done(submit, f"t{number}", receiver.url())
    await submit.settled(*(f"t{number}" for number in range(5)))
    receiver.hold.set()
    await running.until("delivered", 5)
    assert sorted(body["task_id"] for body in receiver.bodies) == [f"t{number}" for number in range(5)]


async def test_only_the_leader_sends(run: Run, receiver: Receiver) -> None:
    submit, running = await run(leading=False)
    await done(submit, "t1", receiver.url())
    await submit.settled("t1")
    assert receiver.bodies == []
    running.leading.set()
    await running.until("delivered")


async def test_a_restart_sends_what_is_due_and_nothing_twice(run: Run, receiver: Receiver) -> None:
    submit, running = await run()
    await done(submit, "t1", receiver.url())
    await running.until("delivered")
    await running.stop()
    submit.listeners.remove(running.callbacks.tell)
    await done(submit, "t2", receiver.url())
    await submit.settled("t2")

    _, again = await run()
    await again.until("delivered")
    assert [body["task_id"] for body in receiver.bodies] == ["t1", "t2"]


async def test_what_ended_before_a_process_began_and_stands_in_its_views_file_is_sent(
    start: Start, receiver: Receiver, tmp_path: Path
) -> None:
    """The view does not tell of it again: it goes on behind it."""
    submit = await start(**QUICK)
    await done(submit, "t1", receiver.url())
    await submit.settled("t1")
    running = Running(submit, tmp_path / "sent", leading=True)
    try:
        await running.until("delivered")
    finally:
        await running.stop()
    assert [body["task_id"] for body in receiver.bodies] == ["t1"]


async def test_a_lost_memory_sends_again_rather_than_not_at_all(run: Run, receiver: Receiver, tmp_path: Path) -> None:
    submit, running = await run()
    await done(submit, "t1", receiver.url())
    await running.until("delivered")
    await running.stop()
    submit.listeners.remove(running.callbacks.tell)
    (tmp_path / "state" / "sent").unlink()
    _, again = await run()
    await again.until("delivered")
    assert len(receiver.bodies) == 2
    assert len(set(receiver.keys)) == 1, "the receiver can tell"


async def test_what_ended_too_long_ago_is_left_alone(run: Run, receiver: Receiver) -> None:
    submit, running = await run(callback_memory_s=0.0)
    await done(submit, "t1", receiver.url())
    await submit.settled("t1")
    assert receiver.bodies == []
    assert running.count("delivered") == 0


async def test_a_task_written_by_a_plain_kafka_client_is_reported_too(run: Run, receiver: Receiver) -> None:
    submit, running = await run()
    producer = AIOKafkaProducer(bootstrap_servers=submit.bus.settings.bootstrap)
    await producer.start()
    try:
        body = json.dumps(task_body(task_id="plain", callback_url=receiver.url())).encode()
        await producer.send_and_wait(submit.bus.settings.full("tasks"), body)
    finally:
        await producer.stop()

    async def accepted() -> bool:
        return await submit.known("plain") is not None

    await submit.until(accepted)
    await submit.scheduler.finish("plain")
    await running.until("delivered")


async def test_trajectories_where_the_settings_say_so(run: Run, receiver: Receiver) -> None:
    def whole(session: str) -> Trajectory:
        return replace(trajectory(), session_id=session)

    submit, running = await run(callback_trajectories=True)
    await done(submit, "t1", receiver.url(), trajectory=whole)
    await running.until("delivered")
    assert receiver.bodies[0]["results"][0]["trajectory"]["traces"][0]["response_ids"] == [4, 5, 6, 7]


# --- the file ---


def test_the_file_forgets_what_is_old_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "sent"
    path.write_text("100 old/1\n500 new/2\nnonsense\n600 other/3\n70")
    sent = SentFile(path, limit=10)
    assert sent.load(400) == {"new/2", "other/3"}
    assert path.read_text() == "500 new/2\n600 other/3\n"
    assert [one.name for one in tmp_path.iterdir()] == ["sent"]


def test_the_file_stays_small(tmp_path: Path) -> None:
    sent = SentFile(tmp_path / "deep" / "sent", limit=10)
    assert sent.load(0) == set()
    for number in range(100):
        sent.note(f"t{number}/1", number)
    lines = (tmp_path / "deep" / "sent").read_text().splitlines()
    assert len(lines) <= 20
    assert lines[-1] == "99 t99/1"
