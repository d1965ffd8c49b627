"""Upstream's shapes out of our records."""

import json

import pytest

from polar.client.render import render_result, render_trace, render_trajectory, result_path
from polar.schemas import Failure, FailureKind, Logprobs, Outcome, Pool, Status
from tests.submit.records import COMPLETED, ref, session_result, trajectory

UPSTREAM_TRACE = {
    "prompt_ids",
    "response_ids",
    "loss_mask",
    "response_logprobs",
    "prompt_messages",
    "response_messages",
    "tools",
    "finish_reason",
    "reward",
    "metadata",
}


def test_a_trace_has_upstreams_fields_and_aligned_arrays() -> None:
    whole = trajectory()
    trace = render_trace(whole, whole.traces[0])
    assert set(trace) == UPSTREAM_TRACE
    assert trace["prompt_ids"] == [1, 2, 3]
    assert trace["response_ids"] == [4, 5, 6, 7]
    assert trace["loss_mask"] == [1, 1, 0, 0], "given ids, and turns that are not trainable, are masked"
    assert trace["response_logprobs"] == [-0.1, -0.2, 0.0, -0.7]
    assert [one["role"] for one in trace["prompt_messages"]] == ["user"]
    assert [one["role"] for one in trace["response_messages"]] == ["assistant", "user", "assistant"]
    assert trace["tools"][0]["function"]["name"] == "ls"
    assert trace["finish_reason"] == "stop"
    assert trace["reward"] == 1.0
    assert trace["metadata"]["turns"][1]["context"] == "retokenized"


def test_logprobs_as_the_papers_objects() -> None:
    whole = trajectory()
    trace = render_trace(whole, whole.traces[0], logprobs="objects", decode=lambda one: f"<{one}>")
    assert trace["response_logprobs"][0] == {"token": "<4>", "token_id": 4, "logprob": -0.1}
    nameless = render_trace(whole, whole.traces[0], logprobs="objects")
    assert nameless["response_logprobs"][0]["token"] is None


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_json_lacks_is_null(value: float) -> None:
    pool = trajectory().pool
    odd = Pool(tokens=pool.tokens, logprobs=Logprobs([0, 0, 0, value, -0.5, 0, 0]), tools=pool.tools)
    whole = trajectory(pool=odd)
    trace = render_trace(whole, whole.traces[0])
    assert trace["response_logprobs"][:2] == [None, -0.5]
    json.dumps(trace, allow_nan=False)


def test_a_trajectory_has_upstreams_fields() -> None:
    document = render_trajectory(trajectory())
    assert {"status", "metadata", "traces", "error"} <= set(document)
    assert document["status"] == "COMPLETED"
    assert document["metadata"]["policy_version"] == 17, "the task's metadata is hoisted"
    assert document["error"] is None
    json.dumps(document, allow_nan=False)


def test_a_trajectory_that_failed_says_why() -> None:
    failure = Failure(kind=FailureKind.INFRA, message="the node is gone")
    document = render_trajectory(
        trajectory(status=Status.ERROR, outcome=Outcome(status=Status.ERROR, failure=failure), traces=[], reward=None)
    )
    assert (document["status"], document["traces"], document["error"]) == ("ERROR", [], "infra: the node is gone")


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (Status.COMPLETED, "COMPLETED"),
        (Status.ERROR, "ERROR"),
        (Status.TIMEOUT, "TIMEOUT"),
        (Status.CANCELLED, "ERROR"),
    ],
)
def test_a_results_status_is_upstreams(status: Status, told: str) -> None:
    result = session_result("t-0", Outcome(status=status))
    document = render_result(result)
    assert (document["status"], document["outcome"]) == (told, status.value)


def test_a_result_without_and_with_tokens() -> None:
    result = session_result(
        "t-0", COMPLETED, trajectory=ref(4, 2, "trajectories"), timing_ms={"run": 5.0, "init_ms": 2.0}
    )
    lean = render_result(result)
    assert lean["trajectory"] is None
    assert lean["trajectory_ref"] == {"topic": "trajectories", "partition": 2, "offset": 4}
    assert lean["timing"] == {"run_ms": 5.0, "init_ms": 2.0}
    assert result_path(result) == "trajectories/2/4"
    assert result_path(session_result("t-0")) is None
    whole = render_result(result, trajectory())
    assert whole["trajectory"]["traces"][0]["prompt_ids"] == [1, 2, 3]
    assert {name: value for name, value in whole.items() if name != "trajectory"} == {
        name: value for name, value in lean.items() if name != "trajectory"
    }
