"""The session state machine of a node: what each step allows, and what no order of steps can do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.gateway import machine
from polar.gateway.machine import Ending, Half, Row, Step
from polar.schemas import ExitReport, Failure, FailureKind, SessionReady, Stage, StageChanged

OK = Ending(ExitReport(reason="exited", exit_code=0))
TIMEOUT = Ending(ExitReport(reason="timeout"), Failure(kind=FailureKind.TIMEOUT, message="over"))


def fresh() -> Row:
    return Row(
        assignment_id="a",
        session_id="s",
        attempt=2,
        task_id="t",
        node="n",
        boot="b",
        backend="local",
        box_id="box",
        assigned_ms=1_000,
    )


def taken(step: Step | None) -> Step:
    assert step is not None
    return step


def at(stage: Stage) -> Row:
    row = fresh()
    if stage is Stage.REGISTERED:
        return row
    row = taken(machine.begin_init(row, 1_100)).row
    if stage is Stage.INITIALIZING:
        return row
    row = taken(machine.box_ready(row, 1_400)).row
    if stage is Stage.READY:
        return row
    row = taken(machine.begin_run(row, 2_000)).row
    return row if stage is Stage.RUNNING else taken(machine.ended(row, 5_000, OK)).row


def report(step: Step | None) -> StageChanged:
    value = taken(step).messages[0].value
    assert isinstance(value, StageChanged)
    return value


def test_the_way_through_reports_each_stage_with_its_times():
    step = taken(machine.begin_init(fresh(), 1_100))
    assert report(step).stage is Stage.INITIALIZING
    step = taken(machine.box_ready(step.row, 1_400))
    assert [one.topic for one in step.messages] == ["stages", "ready"]
    ready = step.messages[1].value
    assert isinstance(ready, SessionReady)
    assert (ready.assignment_id, ready.node, ready.boot, ready.box_id) == ("a", "n", "b", "box")
    assert step.messages[1].key == "n"
    step = taken(machine.begin_run(step.row, 2_000))
    assert report(step).stage is Stage.RUNNING
    said = report(machine.ended(step.row, 5_000, OK, timing_ms={"collect": 7.0}))
    assert said.stage is Stage.ENDED
    assert (said.session_id, said.attempt, said.assignment, said.node, said.boot) == ("s", 2, "a", "n", "b")
    assert said.exit == OK.exit
    assert said.failure is None
    assert said.timing_ms == {"init_wait": 100, "init": 300, "ready_wait": 600, "run": 3_000, "collect": 7}


@pytest.mark.parametrize("stage", [Stage.REGISTERED, Stage.READY])
def test_a_revoke_ends_what_only_waits_at_once(stage: Stage):
    said = report(machine.revoke(at(stage), "cancelled", 9_000))
    assert said.stage is Stage.ENDED
    assert said.exit is not None
    assert said.exit.reason == "revoked"
    assert said.failure is not None
    assert (said.failure.kind, said.failure.message, said.failure.retryable) == (
        FailureKind.CANCELLED,
        "cancelled",
        False,
    )


@pytest.mark.parametrize("stage", [Stage.INITIALIZING, Stage.RUNNING])
def test_a_revoke_of_what_runs_is_noted_and_reported_only_when_it_is_dead(stage: Stage):
    step = taken(machine.revoke(at(stage), "cancelled", 9_000))
    assert step.messages == ()
    assert step.row.stage is stage
    assert step.row.revoked == "cancelled"


def test_a_box_that_gets_ready_after_its_revoke_ends_as_revoked():
    row = taken(machine.revoke(at(Stage.INITIALIZING), "cancelled", 1)).row
    step = taken(machine.box_ready(row, 2))
    assert report(step).exit == ExitReport(reason="revoked")
    assert step.row.ended


def test_a_release_ends_an_attempt_and_is_kept_on_the_row():
    step = taken(machine.release(at(Stage.READY), 1))
    assert step.row.ended
    assert step.row.released
    assert machine.release(step.row, 2) is None
    running = taken(machine.release(at(Stage.RUNNING), 1)).row
    assert running.released
    assert running.revoked is not None
    assert not running.ended


@pytest.mark.parametrize(
    ("half", "lost"),
    [
        (Half.ALL, {Stage.INITIALIZING, Stage.RUNNING}),
        (Half.INIT, {Stage.INITIALIZING}),
        (Half.RUN, {Stage.RUNNING}),
    ],
)
def test_a_restart_loses_what_ran_in_that_half_and_nothing_else(half: Half, lost: set[Stage]):
    for stage in (Stage.REGISTERED, Stage.INITIALIZING, Stage.READY, Stage.RUNNING, Stage.ENDED):
        step = machine.recovered(at(stage), half, 9_000)
        assert (step is not None) == (stage in lost)
        if step is not None:
            said = report(step)
            assert said.exit == ExitReport(reason="lost")
            assert said.failure is not None
            assert said.failure.kind is FailureKind.INFRA
            assert said.failure.retryable


def test_a_box_is_kept_where_there_is_something_to_grade():
    assert taken(machine.ended(at(Stage.RUNNING), 1, OK)).row.box_kept
    assert taken(machine.ended(at(Stage.RUNNING), 1, TIMEOUT)).row.box_kept
    assert not taken(machine.ended(at(Stage.RUNNING), 1, machine.loss("x", Stage.RUNNING))).row.box_kept
    assert not taken(machine.revoke(at(Stage.READY), "x", 1)).row.box_kept


def test_only_what_has_not_begun_is_given_back():
    assert report(machine.given_back(fresh(), 1)).failure is not None
    for stage in (Stage.INITIALIZING, Stage.READY, Stage.RUNNING, Stage.ENDED):
        assert machine.given_back(at(stage), 1) is None


STEPS = {
    "init": lambda row: machine.begin_init(row, 1),
    "ready": lambda row: machine.box_ready(row, 2),
    "run": lambda row: machine.begin_run(row, 3),
    "end": lambda row: machine.ended(row, 4, OK),
    "timeout": lambda row: machine.ended(row, 4, TIMEOUT),
    "revoke": lambda row: machine.revoke(row, "no", 5),
    "release": lambda row: machine.release(row, 6),
    "restart init": lambda row: machine.recovered(row, Half.INIT, 7),
    "restart run": lambda row: machine.recovered(row, Half.RUN, 7),
    "restart": lambda row: machine.recovered(row, Half.ALL, 7),
    "drain": lambda row: machine.given_back(row, 8),
}
ORDER = [Stage.REGISTERED, Stage.INITIALIZING, Stage.READY, Stage.RUNNING, Stage.ENDED]


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=30))
def test_in_any_order_an_attempt_only_goes_forward_and_ends_once(names: list[str]):
    row, stages, ends = fresh(), [], 0
    for name in names:
        step = STEPS[name](row)
        if step is None:
            continue
        assert ORDER.index(step.row.stage) >= ORDER.index(row.stage)
        if row.stage is Stage.READY:
            assert step.row.stage in (Stage.READY, Stage.RUNNING, Stage.ENDED)
        for message in step.messages:
            if isinstance(message.value, StageChanged):
                assert message.value.stage is step.row.stage
                stages.append(message.value.stage)
                ends += message.value.stage is Stage.ENDED
                assert (message.value.exit is not None) == (message.value.stage is Stage.ENDED)
        assert (row.revoked is None) or (step.row.revoked == row.revoked)
        row = step.row
    assert stages == sorted(stages, key=ORDER.index)
    assert ends == (1 if row.ended else 0)
    assert len(set(stages)) == len(stages)
