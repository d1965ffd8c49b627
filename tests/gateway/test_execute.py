"""What an outcome of the harness means, and what the harness sees."""

from __future__ import annotations

import pytest

from polar.gateway.environment import harness_environment, preparation
from polar.gateway.execute import exit_ending, stop_ending
from polar.gateway.harness import HarnessRefused, Launch, Session, load_harness
from polar.gateway.pool import Stopped, Why
from polar.runtime import ExecOutcome
from polar.schemas import AgentSpec, CustomShell, FailureKind, SessionAssigned, Stage, TaskRequest
from polar.schemas.catalog import HARNESSES


def assignment(agent: AgentSpec) -> SessionAssigned:
    return SessionAssigned(
        assignment_id="a",
        node="n",
        boot="b",
        session_id="s",
        attempt=3,
        task_id="t",
        group_id="g",
        sample=5,
        task=TaskRequest(task_id="t", instruction="do it", agent=agent),
    )


def environment(event: SessionAssigned, *, base_url: str | None = "http://127.0.0.1:8700", instruction: str = "do it"):
    return harness_environment(
        event,
        session_dir="/polar/session",
        instruction=instruction,
        inline_bytes=100,
        model="m",
        base_url=base_url,
        key="secret",
    )


def session(agent: AgentSpec) -> Session:
    event = assignment(agent)
    return Session(
        session_id="s",
        attempt=3,
        task_id="t",
        agent=agent,
        instruction="do it",
        instruction_file="/polar/session/instruction.md",
        workdir="/polar/session/workspace",
        session_dir="/polar/session",
        model="m",
        base_url="http://127.0.0.1:8700",
        key="secret",
        environment=environment(event),
    )


def outcome(code: int | None, *, timed_out: bool = False, oom: bool = False) -> ExecOutcome:
    return ExecOutcome(return_code=code, stdout=b"", stderr=b"", timed_out=timed_out, duration_s=1.5, oom_killed=oom)


def test_exit_code_0_is_no_failure():
    ending = exit_ending(outcome(0), "bye", 10)
    assert ending.failure is None
    assert (ending.exit.reason, ending.exit.exit_code, ending.exit.output_tail, ending.exit.duration_s) == (
        "exited",
        0,
        "bye",
        1.5,
    )


def test_a_harness_that_failed_because_the_proxy_was_away_may_be_tried_again():
    ended = ExecOutcome(return_code=1, stdout=b"", stderr=b"", duration_s=1.5, door_lost=2)
    failure = exit_ending(ended, "boom", 10).failure
    assert failure is not None
    assert (failure.kind, failure.retryable) == (FailureKind.INFRA, True)
    assert "the model proxy was away (2 connections lost)" in failure.message


def test_a_harness_that_got_over_a_lost_proxy_has_no_failure():
    ended = ExecOutcome(return_code=0, stdout=b"", stderr=b"", duration_s=1.5, door_lost=1)
    assert exit_ending(ended, "bye", 10).failure is None


def test_another_exit_code_is_the_harness_s_failure_with_its_last_words():
    ending = exit_ending(outcome(7), "boom", 10)
    assert ending.exit.exit_code == 7
    assert ending.failure is not None
    assert (ending.failure.kind, ending.failure.retryable) == (FailureKind.HARNESS, False)
    assert ending.failure.detail == {"exit_code": 7, "output_tail": "boom", "oom_killed": False}


def test_a_memory_limit_and_a_missing_command_are_named():
    ending = exit_ending(outcome(137, oom=True), "", 10)
    assert ending.failure is not None
    assert "memory" in ending.failure.message
    ending = exit_ending(outcome(127), "", 10)
    assert ending.failure is not None
    assert "not found" in ending.failure.message


def test_a_timeout_is_no_error_of_the_harness():
    ending = exit_ending(outcome(None, timed_out=True), "", 10)
    assert ending.exit.reason == "timeout"
    assert ending.failure is not None
    assert (ending.failure.kind, ending.failure.retryable) == (FailureKind.TIMEOUT, False)


def test_what_the_machine_killed_may_be_tried_again():
    ending = exit_ending(outcome(None), "", 10)
    assert ending.failure is not None
    assert (ending.failure.kind, ending.failure.retryable) == (FailureKind.INFRA, True)
    ending = stop_ending(Stopped(Why.DRAIN, "shutting down"), Stage.RUNNING)
    assert ending.exit.reason == "lost"
    assert ending.failure is not None
    assert (ending.failure.kind, ending.failure.retryable) == (FailureKind.INFRA, True)


def test_a_harness_sees_upstream_s_names():
    found = environment(assignment(AgentSpec(harness="shell")))
    assert found["OPENAI_BASE_URL"] == "http://127.0.0.1:8700/v1"
    assert found["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8700"
    assert found["GOOGLE_API_URL"] == "http://127.0.0.1:8700"
    assert {found[f"{name}_API_KEY"] for name in ("OPENAI", "ANTHROPIC", "GOOGLE")} == {"secret"}
    assert (found["SESSION_ID"], found["TASK_ID"], found["SESSION_DIR"]) == ("s", "t", "/polar/session")
    assert found["ARTIFACTS_DIR"] == "/polar/session/artifacts"
    assert found["LOGS_DIR"] == found["AGENT_LOG_DIR"] == "/polar/session/logs"
    assert found["POLAR_MODEL"] == "m"
    assert found["POLAR_INSTRUCTION"] == "do it"


def test_a_long_instruction_is_in_its_file_only():
    found = environment(assignment(AgentSpec(harness="shell")), instruction="x" * 101)
    assert "POLAR_INSTRUCTION" not in found
    assert found["POLAR_INSTRUCTION_FILE"] == "/polar/session/instruction.md"


def test_a_box_without_a_network_gets_no_address_and_no_key():
    found = environment(assignment(AgentSpec(harness="shell")), base_url=None)
    assert not [name for name in found if name.endswith(("_URL", "_KEY"))]


def test_preparing_commands_see_no_key():
    found = preparation(assignment(AgentSpec(harness="shell")), "/polar/session")
    assert not [name for name in found if name.endswith(("_URL", "_KEY"))]


def test_shell_runs_the_task_s_command_and_polar_s_variables_win():
    agent = AgentSpec(
        harness="shell",
        custom_shell=CustomShell(command="make it", cwd="sub", env={"A": "1", "OPENAI_BASE_URL": "http://elsewhere"}),
    )
    launch = load_harness(agent).launch(session(agent))
    assert launch.command == "make it"
    assert launch.cwd == "/polar/session/workspace/sub"
    assert launch.env["A"] == "1"
    assert launch.env["OPENAI_BASE_URL"] == "http://127.0.0.1:8700/v1"


def test_every_harness_of_the_catalog_that_is_built_can_be_loaded():
    for name in HARNESSES.names():
        load_harness(AgentSpec(harness=name))


@pytest.mark.parametrize(
    "agent",
    [
        AgentSpec(harness="codex"),
        AgentSpec(harness="nothing"),
        AgentSpec(import_path="tests.gateway.test_execute:Mine"),
    ],
)
def test_what_is_not_here_or_not_allowed_is_refused(agent: AgentSpec):
    with pytest.raises(HarnessRefused):
        load_harness(agent)


class Mine:
    def launch(self, session: Session) -> Launch:
        return Launch(command=["mine", session.instruction])


def test_an_outside_adapter_is_loaded_where_the_operator_names_it():
    path = f"{__name__}:Mine"
    agent = AgentSpec(import_path=path)
    assert load_harness(agent, [path]).launch(session(agent)).command == ["mine", "do it"]
    with pytest.raises(HarnessRefused, match="cannot be loaded"):
        load_harness(AgentSpec(import_path="no.such:Thing"), ["no.such:Thing"])


def test_shell_without_a_command_is_refused():
    with pytest.raises(HarnessRefused, match="custom_shell"):
        load_harness(AgentSpec(harness="shell")).launch(session(AgentSpec(harness="shell")))
