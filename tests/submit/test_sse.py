"""`GET /events` on a real broker: every stage, from where a watcher was, and an end for those who do not read."""

import asyncio
import json
from typing import Any

from polar.schemas import Stage
from tests.submit.conftest import Start, Submit, eventually


class Stream:
    """Reads server-sent events."""

    def __init__(self, response: Any) -> None:
        self.response = response
        self.id = ""

    async def next(self, kind: str) -> dict[str, Any]:
        """The next event of that kind."""
        fields: dict[str, str] = {}
        async with asyncio.timeout(20):
            async for raw in self.response.content:
                line = raw.decode().rstrip("\n")
                if line:
                    name, _, value = line.partition(": ")
                    fields[name] = value
                    continue
                self.id = fields.get("id", self.id)
                if fields.get("event") == kind:
                    return dict(json.loads(fields["data"]))
                fields = {}
        raise AssertionError(f"the stream ended before a `{kind}`")


async def test_the_stream_tells_every_stage_and_goes_on_where_it_was(submit: Submit) -> None:
    async with submit.client.get("/events") as response:
        assert response.content_type == "text/event-stream"
        stream = Stream(response)
        await submit.submit(task_id="t1")
        assert (await stream.next("task_accepted"))["task_id"] == "t1"
        session = await submit.scheduler.stage("t1", Stage.INITIALIZING, node="n1")
        told = await stream.next("stage")
        assert (told["session_id"], told["stage"], told["node_id"]) == (session, "INITIALIZING", "n1")
    await submit.scheduler.stage("t1", Stage.READY)
    await submit.scheduler.stage("t1", Stage.RUNNING)
    await submit.until(lambda: submit.view.in_flight().get(Stage.RUNNING) == 1)
    async with submit.client.get("/events", headers={"Last-Event-ID": stream.id}) as response:
        again = Stream(response)
        assert [(await again.next("stage"))["stage"] for _ in range(2)] == ["READY", "RUNNING"]


async def test_another_process_tells_what_was_missed_at_the_first(submit: Submit, start: Start) -> None:
    async with submit.client.get("/events") as response:
        stream = Stream(response)
        await submit.submit(task_id="t1")
        await stream.next("task_accepted")
    await submit.scheduler.stage("t1", Stage.RUNNING)
    other = await start()
    async with asyncio.timeout(30):
        await other.feed.ready.wait()
    async with other.client.get("/events", params={"last_event_id": stream.id, "task_id": "t1"}) as response:
        assert (await Stream(response).next("stage"))["stage"] == "RUNNING"


async def test_watchers_are_bounded_and_told_when_the_process_stops(start: Start) -> None:
    submit = await start(event_watchers=1)
    async with submit.client.get("/events") as response:
        await response.content.readline()
        assert (await submit.client.get("/events")).status == 503
        submit.hub.close()
        assert (await Stream(response).next("cut"))["code"] == "shutdown"
    await eventually(lambda: len(submit.hub) == 0)


async def test_a_watcher_that_takes_no_bytes_is_cut_off(start: Start) -> None:
    submit = await start(event_write_timeout_s=0.3, event_queue=50)
    async with asyncio.timeout(30):
        await submit.feed.ready.wait()
    await submit.submit(task_id="t1")
    response = await submit.client.get("/events")
    assert len(submit.hub) == 1
    # the client reads nothing more: its buffers and the server's fill, and then the write stands still
    for _ in range(400):
        if not len(submit.hub):
            break
        await submit.scheduler.stage("t1", Stage.RUNNING, node="n" * 60_000)
    await eventually(lambda: len(submit.hub) == 0)
    response.close()
    assert "watchers_cut_total 1.0" in await (await submit.client.get("/metrics")).text()
