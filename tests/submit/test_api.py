"""The HTTP API on a real broker: what is taken, what is refused, what is told."""

import asyncio
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete
from msgspec.structs import replace

from polar.schemas import Claim, Problem, Stage, TaskRejected, TaskRequest, Trajectory
from tests.submit.conftest import Start, Submit, eventually, task_body
from tests.submit.records import CANCELLED, TIMED_OUT, beat, ref, tick, trajectory


def trajectory_of(session: str) -> Trajectory:
    return replace(trajectory(), session_id=session)


async def error_of(response: Any, status: int, code: str) -> Any:
    assert response.status == status, await response.text()
    assert response.content_type == "application/json"
    error = (await response.json())["error"]
    assert error["code"] == code
    assert error["message"]
    return error


# --- submit ---


async def test_a_task_is_taken_once_the_scheduler_says_so(submit: Submit) -> None:
    answer = await submit.submit(task_id="t1", num_samples=3)
    assert answer["task_id"] == "t1"
    assert answer["status"] == "running"
    assert len(answer["session_ids"]) == 3
    assert answer["warnings"] == []
    (record,) = await submit.scheduler.seen(1)
    assert record.key == "t1"
    assert isinstance(record.value, TaskRequest)
    document = await submit.task("t1")
    assert (document["status"], document["total_sessions"], document["completed_sessions"]) == ("running", 3, 0)
    assert document["results"] == []


async def test_a_task_without_an_id_gets_one_that_sorts_by_time(submit: Submit) -> None:
    one = await submit.submit()
    other = await submit.submit()
    assert one["task_id"] != other["task_id"]
    assert one["task_id"][14] == "7", "UUIDv7"
    assert (await submit.task(one["task_id"]))["status"] == "running"


async def test_the_same_body_again_is_the_same_task(submit: Submit) -> None:
    one = await submit.submit(task_id="t1")
    other = await submit.submit(task_id="t1")
    assert one == other
    assert submit.view.counts.tasks == 1


async def test_another_body_with_the_same_id_is_a_conflict(submit: Submit) -> None:
    await submit.submit(task_id="t1")
    response = await submit.client.post("/rollout/task/submit", json=task_body(task_id="t1", num_samples=2))
    error = await error_of(response, 409, "conflict")
    assert error["problems"] == [{"code": "conflict", "field": "task_id", "message": "has another body"}]
    assert error["task_id"] == "t1"
    assert (await submit.task("t1"))["total_sessions"] == 1, "the first one is as it was"


async def test_where_no_more_sessions_may_be_open_a_task_is_to_be_sent_again_later(submit: Submit) -> None:
    submit.scheduler.busy = True
    response = await submit.client.post("/rollout/task/submit", json=task_body(task_id="t1"))
    error = await error_of(response, 503, "busy")
    assert int(response.headers["Retry-After"]) > 0
    assert error["problems"] == [
        {"code": "busy", "field": "num_samples", "message": "8 sessions are open, and 8 may be"}
    ]
    submit.scheduler.busy = False
    assert (await submit.submit(task_id="t1"))["status"] == "running"


async def test_warnings_are_told(submit: Submit) -> None:
    answer = await submit.submit(runtime={"network": "host"})
    assert answer["warnings"][0]["field"] == "runtime.network"
    assert (await submit.task(answer["task_id"]))["warnings"] == answer["warnings"]


async def test_a_refused_task_says_every_field_and_reason_and_is_not_published(submit: Submit) -> None:
    bad = task_body(
        task_id="a/b", num_samples=0, timeout_seconds=-1, agent={"harness": "emacs"}, builder={"strategy": "x"}
    )
    error = await error_of(await submit.client.post("/rollout/task/submit", json=bad), 422, "invalid")
    found = {one["field"]: one["code"] for one in error["problems"]}
    assert found == {
        "task_id": "invalid",
        "num_samples": "invalid",
        "timeout_seconds": "invalid",
        "agent.harness": "unknown_name",
        "builder.strategy": "unknown_name",
    }
    await submit.submit(task_id="good")
    assert len(await submit.scheduler.seen(1)) == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 200_000])
async def test_what_is_no_json_object_is_refused(submit: Submit, body: bytes) -> None:
    response = await submit.client.post("/rollout/task/submit", data=body, headers={"Content-Type": "application/json"})
    error = await error_of(response, 422, "invalid")
    assert error["problems"][0]["field"] == ""


async def test_a_cancel_is_no_task(submit: Submit) -> None:
    body = {"type": "CancelRequest", "task_id": "t1"}
    error = await error_of(await submit.client.post("/rollout/task/submit", json=body), 422, "invalid")
    assert error["problems"][0]["field"] == "type"


async def test_a_form_is_refused(submit: Submit) -> None:
    """Also what keeps a web page in somebody's browser from submitting tasks."""
    response = await submit.client.post("/rollout/task/submit", data={"instruction": "x"})
    error = await error_of(response, 415, "unsupported_media_type")
    assert error["problems"][0]["field"] == "Content-Type"


async def test_a_body_over_the_limit_is_refused(start: Start) -> None:
    submit = await start(max_body_bytes=1024)
    response = await submit.client.post("/rollout/task/submit", json=task_body(instruction="x" * 2_000))
    await error_of(response, 413, "too_large")


async def test_an_instruction_of_five_megabytes_becomes_a_claim(submit: Submit) -> None:
    text = "é" * 2_500_000
    await submit.submit(task_id="t1", instruction=text)
    (record,) = await submit.scheduler.seen(1)
    assert isinstance(record.value, TaskRequest)
    claim = record.value.instruction
    assert isinstance(claim, Claim)
    assert claim.size == 5_000_000
    assert (await submit.bus.blobs.get(claim)).decode() == text
    assert len(record.raw or b"") < 2_000


async def test_a_task_that_no_record_holds_is_refused(submit: Submit) -> None:
    response = await submit.client.post("/rollout/task/submit", json=task_body(metadata={"blob": "x" * 9_000_000}))
    error = await error_of(response, 413, "too_large")
    assert "metadata" in error["message"]


async def test_without_an_answer_in_time_the_id_is_told_and_sending_again_is_fine(start: Start) -> None:
    submit = await start(accept_timeout_s=0.3)
    submit.scheduler.mute = True
    response = await submit.client.post("/rollout/task/submit", json=task_body())
    error = await error_of(response, 503, "unavailable")
    assert response.headers["Retry-After"] == "5"
    task_id = error["task_id"]
    await submit.scheduler.seen(1)
    submit.scheduler.mute = False
    second = await start()
    answer = await second.submit(task_id=task_id)
    assert answer["task_id"] == task_id


async def test_too_many_waiting_are_told_to_come_back(start: Start) -> None:
    submit = await start(max_waiting=1)
    submit.scheduler.mute = True
    first = asyncio.create_task(submit.client.post("/rollout/task/submit", json=task_body(task_id="t1")))
    await submit.scheduler.seen(1)
    response = await submit.client.post("/rollout/task/submit", json=task_body(task_id="t2"))
    await error_of(response, 503, "unavailable")
    assert len(submit.scheduler.records) == 1, "what could not be answered is not published"
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_a_task_written_to_kafka_by_hand_is_known_too(submit: Submit) -> None:
    rejected = TaskRejected(
        task_id="byhand",
        answers=ref(1_000, topic="tasks"),
        problems=[Problem(field="agent", message="is required", code="missing")],
        at_ms=1,
    )
    await submit.scheduler.write("stages", "byhand", rejected)

    async def told() -> bool:
        return await submit.view.rejected("byhand") is not None

    await submit.until(told)
    document = await submit.task("byhand")
    assert document["status"] == "failed"
    assert document["error"] == "agent: is required"
    assert document["problems"] == [{"code": "missing", "field": "agent", "message": "is required"}]


# --- looking ---


async def test_the_end_of_a_task_with_upstreams_fields(submit: Submit) -> None:
    await submit.submit(task_id="t1", num_samples=2)
    await submit.scheduler.finish("t1", TIMED_OUT, reward=0.25)
    document = await submit.task("t1", wait="20")
    assert set(document) >= {"task_id", "status", "total_sessions", "completed_sessions", "results", "result_paths"}
    assert document["status"] == "completed"
    assert document["completed_sessions"] == 2
    result = document["results"][0]
    assert set(result) >= {"session_id", "task_id", "status", "trajectory", "timing", "node_id", "error", "metadata"}
    assert (result["status"], result["reward"], result["error"]) == ("TIMEOUT", 0.25, "timeout: time is up")
    assert result["trajectory"] is None, "no tokens unless asked for"


async def test_a_task_of_many_sessions(submit: Submit) -> None:
    await submit.submit(task_id="t1", num_samples=300)
    await submit.scheduler.finish("t1")
    document = await submit.task("t1", wait="30")
    assert [one["status"] for one in document["results"]] == ["COMPLETED"] * 300


async def test_trajectories_on_request(submit: Submit) -> None:
    await submit.submit(task_id="t1", num_samples=2)
    await submit.scheduler.finish("t1", trajectory=trajectory_of)
    lean = await submit.task("t1", wait="20")
    assert len(lean["result_paths"]) == 2
    whole = await submit.task("t1", trajectories="1")
    assert {name: value for name, value in whole.items() if name != "results"} == {
        name: value for name, value in lean.items() if name != "results"
    }
    for result in whole["results"]:
        (trace,) = result["trajectory"]["traces"]
        assert trace["prompt_ids"] == [1, 2, 3]
        assert trace["loss_mask"] == [1, 1, 0, 0]
        assert "trajectory_error" not in result


async def test_a_trajectory_that_the_log_lost_says_so(submit: Submit) -> None:
    await submit.submit(task_id="t1")
    await submit.scheduler.finish("t1", trajectory=trajectory_of)
    document = await submit.task("t1", wait="20")
    place = document["results"][0]["trajectory_ref"]
    where = TopicPartition(submit.bus.settings.full(place["topic"]), place["partition"])
    admin = await submit.bus.clients.admin()
    try:
        await admin.delete_records({where: RecordsToDelete(place["offset"] + 1)})
    finally:
        await admin.close()
    (result,) = (await submit.task("t1", trajectories="1"))["results"]
    assert result["trajectory"] is None
    assert "trajectories" in result["trajectory_error"]
    assert result["reward"] == 1.0, "the result itself is still there"


async def test_a_session_without_a_trajectory_says_so(submit: Submit) -> None:
    await submit.submit(task_id="t1")
    await submit.scheduler.finish("t1")
    await submit.task("t1", wait="20")
    (result,) = (await submit.task("t1", trajectories="1"))["results"]
    assert (result["trajectory"], result["trajectory_error"]) == (None, "no trajectory was published")


async def test_waiting_for_the_end(submit: Submit) -> None:
    await submit.submit(task_id="t1")
    waiting = asyncio.create_task(submit.task("t1", wait="30"))
    early = await submit.task("t1", wait="0.05")
    assert early["status"] == "running"
    await submit.scheduler.finish("t1")
    async with asyncio.timeout(20):
        assert (await waiting)["status"] == "completed"


async def test_sessions_of_a_task(submit: Submit) -> None:
    await submit.submit(task_id="t1", num_samples=2)
    session = await submit.scheduler.stage("t1", Stage.RUNNING, 1, node="n1")
    await submit.until(lambda: submit.view.in_flight().get(Stage.RUNNING) == 1)
    response = await submit.client.get("/tasks/t1/sessions")
    document = await response.json()
    assert [one["status"] for one in document["sessions"]] == ["REGISTERED", "RUNNING"]
    assert document["sessions"][1]["session_id"] == session
    assert document["sessions"][1]["node_id"] == "n1"


async def test_status_and_nodes(submit: Submit) -> None:
    await submit.submit(task_id="t1", num_samples=2)
    await submit.scheduler.stage("t1", Stage.RUNNING)
    await submit.scheduler.write("nodes", "tick", tick(1))
    await submit.until(lambda: submit.view.in_flight().get(Stage.RUNNING) == 1)
    await eventually(lambda: submit.view.tick is not None)
    status = await (await submit.client.get("/rollout/status")).json()
    assert status["tasks"] == {"t1": "running"}
    assert status["pipeline"]["pending_sessions"] == 1
    assert status["pipeline"]["sessions"] == {"REGISTERED": 1, "RUNNING": 1}
    assert status["nodes"]["scheduler"]["leader_id"] == "l"
    nodes = await (await submit.client.get("/nodes")).json()
    assert nodes["nodes"] == []
    assert beat().node_id == "n1"


async def test_listing_tasks(submit: Submit) -> None:
    for number in range(4):
        await submit.submit(task_id=f"t{number}")
    await submit.scheduler.finish("t1", reward=0.5)
    await submit.task("t1", wait="20")

    async def ids(**query: str) -> list[str]:
        response = await submit.client.get("/tasks", params=query)
        assert response.status == 200, await response.text()
        return [one["task_id"] for one in (await response.json())["tasks"]]

    assert sorted(await ids()) == ["t0", "t1", "t2", "t3"]
    assert await ids(status="completed") == ["t1"]
    assert await ids(status="failed") == []
    assert len(await ids(harness="shell")) == 4
    assert await ids(harness="codex") == []
    assert len(await ids(limit="2")) == 2
    assert await ids(since="2999-01-01T00:00:00Z") == []
    assert len(await ids(since="0")) == 4
    newest_task = await submit.known("t3")
    assert newest_task is not None
    newest = newest_task.since_ms
    assert (await ids(since=str(newest)))[0] == "t3"
    line = (await (await submit.client.get("/tasks", params={"status": "completed"})).json())["tasks"][0]
    assert line["mean_reward"] == 0.5


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/tasks?status=done", "status"),
        ("/tasks?limit=0", "limit"),
        ("/tasks?limit=x", "limit"),
        ("/tasks?limit=99999", "limit"),
        ("/tasks?since=yesterday", "since"),
        ("/tasks?colour=red", "colour"),
        ("/rollout/task/t1?wait=-1", "wait"),
        ("/rollout/task/t1?wait=nan", "wait"),
        ("/rollout/task/t1?wait=x", "wait"),
        ("/rollout/task/t1?trajectories=maybe", "trajectories"),
        ("/rollout/task/a%2Fb", "task_id"),
        ("/tasks/..%2F..%2Fetc/sessions", "task_id"),
        ("/events?task_id=a/b", "task_id"),
        ("/events?colour=red", "colour"),
    ],
)
async def test_a_bad_question_names_the_parameter(submit: Submit, path: str, field: str) -> None:
    error = await error_of(await submit.client.get(path), 422, "invalid")
    assert [one["field"] for one in error["problems"]] == [field]


async def test_what_is_not_there(submit: Submit) -> None:
    await error_of(await submit.client.get("/rollout/task/nothing"), 404, "not_found")
    await error_of(await submit.client.get("/tasks/nothing/sessions"), 404, "not_found")
    await error_of(await submit.client.post("/rollout/task/nothing/cancel"), 404, "not_found")
    await error_of(await submit.client.get("/nowhere"), 404, "not_found")
    response = await submit.client.put("/rollout/task/submit", json={})
    await error_of(response, 405, "method_not_allowed")
    assert "POST" in response.headers["Allow"]


# --- cancelling ---


@pytest.mark.parametrize("how", ["post", "delete"])
async def test_cancelling_a_task(submit: Submit, how: str) -> None:
    await submit.submit(task_id="t1")
    if how == "post":
        response = await submit.client.post("/rollout/task/t1/cancel", json={"reason": "changed my mind"})
    else:
        response = await submit.client.delete("/rollout/task/t1")
    assert response.status == 202, await response.text()
    await submit.scheduler.seen(2)
    (cancel,) = submit.scheduler.cancels
    assert (cancel.task_id, cancel.session_id) == ("t1", None)
    assert cancel.reason == ("changed my mind" if how == "post" else "cancelled by request")


async def test_cancelling_one_session(submit: Submit) -> None:
    answer = await submit.submit(task_id="t1", num_samples=2)
    session = answer["session_ids"][1]
    response = await submit.client.post("/rollout/task/t1/cancel", json={"session_id": session})
    assert response.status == 202
    await submit.scheduler.seen(2)
    assert submit.scheduler.cancels[0].session_id == session
    response = await submit.client.post("/rollout/task/t1/cancel", json={"session_id": "other"})
    error = await error_of(response, 422, "invalid")
    assert error["problems"][0]["field"] == "session_id"


async def test_cancelling_what_has_ended_does_nothing(submit: Submit) -> None:
    await submit.submit(task_id="t1")
    await submit.scheduler.finish("t1", CANCELLED, reward=None)
    await submit.task("t1", wait="20")
    response = await submit.client.post("/rollout/task/t1/cancel")
    assert response.status == 200
    assert await response.json() == {"task_id": "t1", "status": "completed", "session_id": None, "cancelling": False}
    assert submit.scheduler.cancels == []


@pytest.mark.parametrize(
    ("body", "field"),
    [([], ""), ({"session": "s"}, "session"), ({"session_id": 3}, "session_id"), ({"reason": {}}, "reason")],
)
async def test_a_bad_cancel_names_the_field(submit: Submit, body: Any, field: str) -> None:
    await submit.submit(task_id="t1")
    response = await submit.client.post("/rollout/task/t1/cancel", json=body)
    error = await error_of(response, 422, "invalid")
    assert [one["field"] for one in error["problems"]] == [field]


# --- the process ---


async def test_health_readiness_and_metrics(submit: Submit) -> None:
    assert (await submit.client.get("/health")).status == 200
    assert (await submit.client.get("/ready")).status == 200
    await submit.submit(task_id="t1")
    await submit.client.get("/nowhere")
    response = await submit.client.get("/metrics")
    assert response.headers["Content-Type"].startswith("text/plain")
    text = await response.text()
    assert 'polar_submit_requests_total{route="/rollout/task/submit",status="200"} 1.0' in text
    assert 'polar_submit_requests_total{route="unmatched",status="404"} 1.0' in text
    assert "polar_submit_view_tasks 1.0" in text
    assert 'polar_submit_sessions_in_flight{stage="REGISTERED"} 1.0' in text


async def test_a_view_that_still_reads_says_so(start: Start) -> None:
    submit = await start()
    submit.feed.ready.clear()
    submit.view.ready = False
    assert (await submit.client.get("/health")).status == 200
    assert (await submit.client.get("/ready")).status == 503
    await error_of(await submit.client.get("/rollout/task/unknown"), 503, "unavailable")
