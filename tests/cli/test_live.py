"""What people see of a task under way."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from polar.cli.live import NAMES, ORDER, SAME_FAILURE, Followed, Progress
from polar.cli.report import report, session_advantages
from polar.schemas import Failure, FailureKind, Grade, Outcome, Stage, Status
from tests.cli.records import COMPLETED, failed, group, moved, trace, trajectory

TASK = Followed("t", ["s0", "s1", "s2"], 0)
LOST = Failure(kind=FailureKind.INFRA, message="the node is gone", retryable=True)


def rendered(progress: Progress, now_s: float = 0.0, height: int = 40, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(progress.view(now_s, height))
    return out.getvalue()


def test_sessions_are_counted_by_step() -> None:
    progress = Progress(TASK, 0.0)
    assert progress.counts() == {"queued": 3}
    progress.apply(moved("s0", Stage.RUNNING), 1.0)
    progress.apply(moved("s1", Stage.FINISHED, outcome=COMPLETED, grade=Grade(reward=0.5)), 65.0)
    progress.apply(moved("other", Stage.RUNNING), 1.0)
    assert progress.summary(65.0) == " 1m05s  1 queued, 1 running, 1 finished, mean reward 0.50"


def test_a_late_report_changes_nothing() -> None:
    progress = Progress(TASK, 0.0)
    progress.apply(moved("s0", Stage.CLOSED, attempt=2), 1.0)
    progress.apply(moved("s0", Stage.ENDED, attempt=2), 2.0)
    progress.apply(moved("s0", Stage.GRADED, attempt=1), 2.0)
    assert progress.sessions["s0"].stage is Stage.CLOSED


def test_a_retry_is_told_once_and_forgotten_when_the_session_ends_well() -> None:
    progress = Progress(TASK, 0.0)
    progress.apply(moved("s0", Stage.RUNNING), 1.0)
    assert progress.apply(moved("s0", Stage.ENDED, failure=LOST), 2.0) is None, "the scheduler decides what follows"
    told = progress.apply(moved("s0", Stage.REGISTERED, attempt=2, failure=LOST), 3.0)
    assert told == "sample 0, attempt 2 follows: infra: the node is gone"
    assert "1 retried" in progress.summary(4.0)
    assert "infra: the node is gone" in rendered(progress)
    assert progress.apply(moved("s0", Stage.FINISHED, attempt=2, outcome=COMPLETED), 9.0) is None
    assert progress.failed() == 0
    assert "infra" not in rendered(progress)


def test_a_failure_is_told_when_it_is_final() -> None:
    progress = Progress(TASK, 0.0)
    outcome = failed(message="exit code 3")
    assert progress.apply(moved("s1", Stage.CLOSED, outcome=outcome, failure=outcome.failure), 1.0) is None
    told = progress.apply(moved("s1", Stage.FINISHED, outcome=outcome), 2.0)
    assert told == "sample 1: harness: exit code 3"
    assert "1 failed" in progress.summary(2.0)


def test_the_same_failure_is_told_a_few_times_and_then_counted() -> None:
    many = Progress(Followed("t", [f"s{n}" for n in range(50)], 0), 0.0)
    told = [many.apply(moved(f"s{n}", Stage.FINISHED, outcome=failed()), 1.0) for n in range(50)]
    assert len([line for line in told if line]) == SAME_FAILURE
    assert "only counted" in (told[SAME_FAILURE - 1] or "")
    assert "50 failed" in many.summary(1.0)
    assert many.apply(moved("s0", Stage.FINISHED, attempt=2, outcome=failed(message="another")), 1.0)


def test_text_of_a_failure_cannot_command_the_terminal() -> None:
    progress = Progress(TASK, 0.0)
    told = progress.apply(moved("s1", Stage.FINISHED, outcome=failed(message="\x1b[2J")), 2.0)
    assert told == "sample 1: harness: ␛[2J"
    assert "\x1b" not in rendered(progress)


def test_a_small_group_has_a_row_per_session_and_a_large_one_a_line() -> None:
    progress = Progress(TASK, 0.0)
    progress.apply(moved("s0", Stage.FINISHED, outcome=failed(message="a long message " * 20)), 1.0)
    text = rendered(progress, now_s=7.0)
    assert len(text.splitlines()) == 1 + 1 + 3
    assert max(map(len, text.splitlines())) <= 80
    assert len(rendered(progress, height=14).splitlines()) == 1
    wide = Progress(Followed("t", [f"s{n}" for n in range(4_096)], 0), 0.0)
    assert len(rendered(wide).splitlines()) == 1


@given(st.lists(st.tuples(st.sampled_from(TASK.sessions), st.integers(1, 3), st.sampled_from(list(Stage)))))
def test_sessions_only_move_forwards(reports: list[tuple[str, int, Stage]]) -> None:
    progress = Progress(TASK, 0.0)
    for session, attempt, stage in reports:
        before = progress.sessions[session]
        progress.apply(moved(session, stage, attempt), 1.0)
        after = progress.sessions[session]
        assert (after.attempt, ORDER[after.stage]) >= (before.attempt, ORDER[before.stage])
        assert sum(progress.counts().values()) == 3
        assert set(progress.counts()) <= set(NAMES)


def test_advantages_are_those_of_the_closed_group() -> None:
    ones = [trajectory(session_id=name, reward=reward) for name, reward in (("a", 1.0), ("b", 0.0), ("late", 1.0))]
    closed = group({"a": 1.0, "b": 0.0, "elsewhere": 1.0, "late": 1.0}, ["a", "b", "elsewhere"])
    found = session_advantages(ones, [closed])
    assert found["late"] is None
    assert found["a"] is not None
    assert found["b"] is not None
    assert abs(found["a"] * 2 + found["b"]) < 1e-3, "the baseline is the whole group's"
    alone = session_advantages(ones, [])
    assert alone["late"] == alone["a"]


def test_the_report_fits_80_columns_and_tells_each_kind_of_failure_once() -> None:
    sessions = [f"{n:08}-0000-0000-0000-000000000000" for n in range(4)]
    ones = [
        trajectory([1, 2], [trace(1, [(1, 2)], 2)], session_id=sessions[0], reward=1.0),
        trajectory(session_id=sessions[1], sample=1, outcome=failed(output_tail="traceback\nlast line")),
        trajectory(session_id=sessions[2], sample=2, outcome=failed()),
        trajectory(
            session_id=sessions[3],
            sample=3,
            outcome=Outcome(
                status=Status.ERROR, failure=Failure(kind=FailureKind.NO_COMPLETIONS, message="no call was captured")
            ),
        ),
    ]
    out = io.StringIO()
    report(Console(file=out, width=80, highlight=False), ones, [])
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for session in sessions:
        assert session in text
    assert text.count("harness in 2 sessions, first in sample 1") == 1
    assert "| last line" in text
    assert "no_completions in 1 session" in text
    assert f"polar show {sessions[0]}" in text
