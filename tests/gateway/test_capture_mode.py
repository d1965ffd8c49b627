"""How a session's calls are captured: said in the task, carried in the session's token."""

from __future__ import annotations

import msgspec
import pytest

from polar.gateway.environment import session_token
from polar.schemas import AgentSpec, SessionAssigned, TaskRequest
from polar.service.tokens import sign_session, verify_session

SECRET = "a secret of the tests, and long enough for HS256"


def assigned(task: TaskRequest) -> SessionAssigned:
    return SessionAssigned(
        assignment_id="a",
        node="n",
        boot="b",
        session_id="s",
        attempt=1,
        task_id="t",
        group_id="g",
        sample=0,
        task=task,
    )


def test_a_task_says_how_its_calls_are_captured() -> None:
    task = TaskRequest(
        task_id="t", instruction="x", agent=AgentSpec(harness="shell"), capture="token_in", keep_reasoning="always"
    )
    token = session_token(assigned(task), "m", 1_000)
    assert verify_session(sign_session(token, SECRET), SECRET, 0) == token
    assert (token.capture, token.keep_reasoning) == ("token_in", "always")


def test_without_a_word_it_is_left_to_the_proxy() -> None:
    task = TaskRequest(task_id="t", instruction="x", agent=AgentSpec(harness="shell"))
    token = session_token(assigned(task), "m", 1_000)
    assert (token.capture, token.keep_reasoning) == (None, None)


def test_another_word_is_refused() -> None:
    body = {"type": "TaskRequest", "instruction": "x", "agent": {"harness": "shell"}, "capture": "tokens"}
    with pytest.raises(msgspec.ValidationError, match=r"\$\.capture"):
        msgspec.convert(body, TaskRequest)
