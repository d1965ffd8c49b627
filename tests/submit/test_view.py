"""The view's rows as a state machine: any interleaving of partitions, any record twice, bounded, killed anywhere."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.schemas import Problem, RecordRef, Stage, TaskRejected
from polar.schemas.ids import session_id
from polar.submit import lookups
from polar.submit.documents import session_document, session_status, task_document
from polar.submit.entries import Answered, Moved, Settled, ViewLimits
from polar.submit.viewfile import ViewFile
from tests.submit.records import (
    CANCELLED,
    NAMES,
    TIMED_OUT,
    accepted,
    message,
    moved,
    ref,
    session_result,
    task_result,
    tick,
)
from tests.submit.viewlog import Log

DAY = 86_400_000


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path / "view.sqlite")
    yield made
    made.file.close()


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Any]:
    made: list[Log] = []

    def make(**limits: int) -> Log:
        made.append(Log(tmp_path / f"view-{len(made)}.sqlite", ViewLimits(**limits)))
        return made[-1]

    yield make
    for one in made:
        one.file.close()


def test_a_task_from_acceptance_to_its_end(log: Log) -> None:
    (answered, told) = log.put(accepted(count=2))
    assert isinstance(answered, Answered)
    assert isinstance(told, Moved)
    task = log.task("t")
    assert (task.status, task.total, list(task.sessions)) == ("running", 2, ["t-0", "t-1"])
    assert log.in_flight() == {Stage.REGISTERED: 2}

    log.put(moved("t-0", Stage.INITIALIZING, node="n1"))
    log.put(moved("t-0", Stage.RUNNING))
    task = log.task("t")
    assert task.sessions["t-0"].stage is Stage.RUNNING
    assert task.sessions["t-0"].node == "n1", "a report without the node does not forget it"
    assert log.in_flight() == {Stage.REGISTERED: 1, Stage.RUNNING: 1}

    assert log.result(session_result("t-0")) == []
    assert log.result(session_result("t-1", TIMED_OUT, reward=None)) == []
    assert log.result(task_result(count=2)) == [Settled("t")]
    task = log.task("t")
    assert (task.status, task.results) == ("completed", 2)
    assert log.in_flight() == {}
    assert [session_status(one) for one in task.sessions.values()] == ["COMPLETED", "TIMEOUT"]


def test_a_task_is_not_over_before_its_sessions_results_are_here(log: Log) -> None:
    """They stand in other partitions than the task's: a reader may see the task's first."""
    log.put(accepted(count=2))
    assert log.result(task_result(count=2), partition=1) == []
    assert log.task("t").status == "running"
    log.result(session_result("t-0"), partition=2)
    assert log.task("t").status == "running"
    assert log.result(session_result("t-1"), partition=3) == [Settled("t")]
    assert log.task("t").status == "completed"


def test_results_that_retention_took_are_not_waited_for_once_caught_up(log: Log) -> None:
    log.result(task_result("old", count=3))
    log.result(session_result("old-2"))
    assert log.task("old").status == "running"
    assert log.file.tidy(settle_all=True) == [Settled("old")]
    assert log.task("old").status == "completed"
    assert log.file.tidy(settle_all=True) == [], "once"


def test_results_that_do_not_come_are_not_waited_for_longer_than_a_minute_of_ticks(log: Log) -> None:
    log.put(accepted(count=2))
    log.result(session_result("t-0"))
    log.result(task_result(count=2, at_ms=4_000))
    log.put(tick(60), "nodes")
    assert log.file.tidy(settle_all=False) == []
    log.put(tick(65), "nodes")
    assert log.file.tidy(settle_all=False) == [Settled("t")]
    assert log.in_flight() == {}, "nobody waits for the other one"


def test_a_record_twice_changes_nothing(log: Log) -> None:
    event = accepted()
    log.at(event, ref(5))
    assert log.at(event, ref(5)) == []
    assert log.at(moved("t-0", Stage.RUNNING), ref(4)) == []
    assert log.task("t").sessions["t-0"].stage is Stage.REGISTERED
    assert log.file.next == {("stages", 0): 6}


def test_a_session_never_goes_back(log: Log) -> None:
    log.put(accepted())
    log.put(moved("t-0", Stage.RUNNING))
    log.put(moved("t-0", Stage.CLOSED, outcome=CANCELLED))
    log.put(moved("t-0", Stage.ENDED))
    session = log.task("t").sessions["t-0"]
    assert session.stage is Stage.CLOSED
    assert session.outcome == CANCELLED


def test_a_retry_starts_over_and_the_old_attempt_is_ignored(log: Log) -> None:
    log.put(accepted())
    log.put(moved("t-0", Stage.RUNNING, node="n1"))
    log.put(moved("t-0", Stage.REGISTERED, attempt=2))
    log.put(moved("t-0", Stage.ENDED, attempt=1))
    session = log.task("t").sessions["t-0"]
    assert (session.stage, session.attempt) == (Stage.REGISTERED, 2)


def test_sessions_seen_before_their_task_find_it(log: Log) -> None:
    log.put(moved("t-1", Stage.RUNNING), partition=3)
    assert not log.task("t").known
    assert log.known() == set()
    assert log.in_flight() == {}
    log.put(accepted(count=3))
    task = log.task("t")
    assert list(task.sessions) == ["t-0", "t-1", "t-2"]
    assert task.sessions["t-1"].stage is Stage.RUNNING
    assert [one.sample for one in task.sessions.values()] == [0, 1, 2]
    assert log.file.sessions == 3
    assert log.in_flight() == {Stage.REGISTERED: 2, Stage.RUNNING: 1}


def test_sessions_that_the_acceptance_does_not_list_are_derived(log: Log) -> None:
    log.put(accepted(count=2, sessions=[], source=7))
    assert list(log.task("t").sessions) == [session_id(0, 7, 0), session_id(0, 7, 1)]


def test_a_repeat_is_answered_and_makes_no_second_task(log: Log) -> None:
    log.put(accepted())
    answered, *_ = log.put(accepted(answers=ref(9, topic="tasks")))
    assert isinstance(answered, Answered)
    assert answered.answer.answers.offset == 9
    assert log.file.tasks == 1


def test_a_rejection_does_not_touch_the_task_of_that_id(log: Log) -> None:
    log.put(accepted())
    conflict = TaskRejected(
        task_id="t",
        answers=ref(3, topic="tasks"),
        problems=[Problem(field="task_id", message="is taken", code="conflict")],
        at_ms=1,
    )
    assert log.put(conflict)[0] == Answered(conflict)
    assert log.task("t").status == "running"
    assert lookups.rejected(log.file._db, "t") == conflict


def test_an_id_that_is_used_again_is_another_task(log: Log) -> None:
    log.whole_task("t", 2)
    log.put(accepted(count=1, source=50, at_ms=8 * DAY, sessions=["t-7"]))
    task = log.task("t")
    assert (task.status, task.total, list(task.sessions), task.results) == ("running", 1, ["t-7"], 0)
    assert log.file.sessions == 1
    log.result(task_result("t", 2))
    assert log.task("t").status == "running", "the former one's result, read late"


def test_the_oldest_ended_task_is_forgotten_first_and_running_ones_are_not(limited: Any) -> None:
    log = limited(max_tasks=2)
    log.put(accepted("running"))
    log.whole_task("later", at_ms=5_000)
    log.whole_task("earlier", at_ms=4_000)
    log.whole_task("latest", at_ms=6_000)
    assert log.known() == {"running", "later", "latest"}
    log.whole_task("earliest", at_ms=3_000)
    assert log.known() == {"running", "later", "latest"}, "whenever it is read"
    assert log.file.dropped == 2
    assert (log.file.tasks, log.file.sessions, log.file.settled_tasks) == (3, 3, 2)


def test_sessions_are_bounded_too_but_never_the_newest_task(limited: Any) -> None:
    log = limited(max_sessions=10)
    log.whole_task("a", 6, at_ms=4_000)
    log.whole_task("b", 6, at_ms=5_000)
    assert log.known() == {"b"}
    log.whole_task("c", 50, at_ms=6_000)
    assert log.known() == {"c"}
    assert log.file.sessions == 50


def test_ended_tasks_go_with_age_by_the_schedulers_ticks(limited: Any) -> None:
    log = limited(keep_ms=10_000)
    log.whole_task("old", at_ms=4_000)
    log.whole_task("young", at_ms=9_000)
    log.put(accepted("running"))
    log.put(tick(14), "nodes")
    log.file.tidy(settle_all=True)
    assert log.known() == {"old", "young", "running"}
    log.put(tick(15), "nodes")
    log.file.tidy(settle_all=False)
    assert log.known() == {"young", "running"}


def test_what_comes_late_for_a_forgotten_task_does_not_bring_it_back(limited: Any) -> None:
    log = limited(max_tasks=1)
    log.whole_task("a", at_ms=4_000)
    log.whole_task("b", at_ms=5_000)
    assert log.known() == {"b"}
    log.put(moved("a-0", Stage.RUNNING))
    log.result(session_result("a-0"))
    answered, *_ = log.put(accepted("a", answers=ref(99, topic="tasks")))
    assert isinstance(answered, Answered), "who asks again is answered all the same"
    assert log.known() == {"b"}
    assert log.file.tasks == 1
    log.put(accepted("a", source=70, at_ms=8 * DAY))
    assert log.known() == {"a", "b"}, "but its id may be used again"


def test_the_file_is_bounded_by_bytes_and_ended_tasks_go_before_running_ones(limited: Any) -> None:
    log = limited(max_bytes=400_000)
    log.put(accepted("running"))
    for number in range(200):
        log.whole_task(f"t{number:03}", 10, at_ms=4_000 + number)
    assert log.file.bytes < 500_000
    known = log.known()
    assert "running" in known
    assert "t199" in known
    assert "t000" not in known
    for number in range(100):
        log.put(accepted(f"r{number:03}", 50, at_ms=5_000 + number))
    assert log.file.bytes < 500_000
    assert "r099" in log.known()


def test_rejections_are_bounded(limited: Any) -> None:
    log = limited(max_answers=2)
    for number in range(4):
        log.put(TaskRejected(task_id=f"r{number}", answers=ref(number, topic="tasks"), problems=[], at_ms=number))
    kept = [name for (name,) in log.file._db.execute("SELECT task_id FROM rejected ORDER BY task_id")]
    assert kept == ["r2", "r3"]


def test_a_record_that_no_row_can_hold_is_passed_over_alone(log: Log) -> None:
    batch = [
        message(accepted(), ref(0)),
        message(moved("t-0", Stage.RUNNING, at_ms=2**63), ref(1)),
        message(b"\xc1", ref(2)),
        message(moved("t-0", Stage.READY), ref(3)),
    ]
    applied = log.file.apply(batch, NAMES)
    assert [place.offset for place, _ in applied.poison] == [1, 2]
    assert "OverflowError" in applied.poison[0][1]
    assert log.task("t").sessions["t-0"].stage is Stage.READY
    assert log.file.next == {("stages", 0): 4}


def test_documents_of_an_ended_task(log: Log) -> None:
    log.put(accepted(count=2))
    log.result(session_result("t-1", CANCELLED, reward=None, trajectory=ref(3, topic="trajectories")))
    log.result(session_result("t-0", reward=0.5))
    log.result(task_result(count=2))
    task = log.task("t")
    document = task_document(task)
    assert document["status"] == "completed"
    assert (document["total_sessions"], document["completed_sessions"]) == (2, 2)
    assert [one["session_id"] for one in document["results"]] == ["t-0", "t-1"], "in sample order"
    assert document["result_paths"] == ["trajectories/0/3"]
    first, second = document["results"]
    assert first["timing"] == {"run_ms": 12.5}
    assert (second["status"], second["outcome"], second["error"]) == ("ERROR", "cancelled", "cancelled: by request")
    row = session_document(task.sessions["t-1"])
    assert (row["status"], row["stage"], row["sample"]) == ("ERROR", "FINISHED", 1)
    assert row["trajectory_ref"] == {"topic": "trajectories", "partition": 0, "offset": 3}


# --- any order ---

LATER = 8 * DAY
STEPS: list[tuple[str, int, Any]] = [
    ("stages", 0, accepted(count=2)),
    ("stages", 0, accepted(count=2, answers=ref(8, topic="tasks"), at_ms=5_000)),
    ("stages", 1, moved("t-0", Stage.INITIALIZING, node="n1")),
    ("stages", 1, moved("t-0", Stage.RUNNING)),
    ("stages", 1, moved("t-0", Stage.REGISTERED, attempt=2)),
    ("stages", 1, moved("t-0", Stage.RUNNING, attempt=2)),
    ("stages", 1, moved("t-0", Stage.CLOSED, attempt=2)),
    ("stages", 1, moved("t-0", Stage.FINISHED, attempt=2)),
    ("stages", 2, moved("t-1", Stage.RUNNING)),
    ("stages", 2, moved("t-1", Stage.FINISHED)),
    ("results", 0, session_result("t-0", attempt=2)),
    ("results", 1, session_result("t-1")),
    ("results", 2, task_result(count=2)),
    # the id is used again, and the second one ends as well
    ("stages", 3, accepted("u", count=1, sessions=["u-0"])),
    ("stages", 3, accepted("u", count=2, source=5, at_ms=LATER, sessions=["u-5", "u-6"])),
    ("results", 3, session_result("u-0")),
    ("results", 3, task_result("u", 1)),
    ("results", 4, session_result("u-5", at_ms=LATER)),
    ("results", 4, session_result("u-6", at_ms=LATER)),
    ("results", 3, task_result("u", 2, at_ms=LATER + 1)),
    ("stages", 4, moved("u-5", Stage.RUNNING, at_ms=LATER)),
    # one still under way, one that is unknown
    ("stages", 5, accepted("v", count=1)),
    ("stages", 6, moved("v-0", Stage.READY)),
    ("stages", 6, moved("w-0", Stage.READY)),
    *[
        (topic, number % 3, event)
        for number in range(8)
        for topic, event in (
            ("stages", accepted(f"x{number}")),
            ("results", session_result(f"x{number}-0")),
            ("results", task_result(f"x{number}", at_ms=10_000 + number)),
        )
    ],
    ("nodes", 0, tick(20)),
]
LIMITS = ViewLimits(max_tasks=5, keep_ms=LATER)


def everything(file: ViewFile) -> Any:
    """All that can be asked of tasks and sessions."""
    db = file._db
    wanted = lookups.TaskFilter(None, None, None, 1_000)
    return (
        {name: lookups.task(db, name) for name in lookups.everything(db)},
        lookups.select(db, wanted),
        {stage: count for stage, count in file.flight.items() if count},
        file.settled_tasks,
        file.settled_sessions,
    )


def lanes_of(steps: list[tuple[str, int, Any]]) -> dict[tuple[str, int], list[Any]]:
    lanes: dict[tuple[str, int], list[Any]] = {}
    for topic, partition, event in steps:
        lane = lanes.setdefault((topic, partition), [])
        lane.append(message(event, RecordRef(topic=topic, partition=partition, offset=len(lane))))
    return lanes


def read_whole(path: Path, random: Any | None, restarts: int) -> Any:
    """A view that has read all, in an order and in batches of chance, killed and started again on the way."""
    lanes = lanes_of(STEPS)
    file = ViewFile(path, LIMITS, "test")
    settled: list[str] = []
    while lanes:
        lane = random.choice(sorted(lanes)) if random else next(iter(lanes))
        take = random.randint(1, 4) if random else 1
        batch, lanes[lane] = lanes[lane][:take], lanes[lane][take:]
        settled += [one.task_id for one in file.apply(batch, NAMES).changes if isinstance(one, Settled)]
        if not lanes[lane]:
            del lanes[lane]
        if random and restarts and random.random() < 0.1:
            restarts -= 1
            file.close()
            file = ViewFile(path, LIMITS, "test")
            lanes = lanes_of(STEPS)  # reads from where it likes: what it has is passed over
    settled += [one.task_id for one in file.tidy(settle_all=True) if isinstance(one, Settled)]
    found = everything(file)
    reopened = ViewFile(path, LIMITS, "test")
    assert everything(reopened) == found, "counts in memory are those of the file"
    reopened.close()
    file.close()
    assert settled.count("t") <= 1
    return found


@given(st.randoms(use_true_random=False), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_views_agree_whatever_the_order_of_partitions_and_the_restarts(random: Any, restarts: int) -> None:
    with TemporaryDirectory() as folder:
        plain = read_whole(Path(folder) / "plain.sqlite", None, 0)
        other = read_whole(Path(folder) / "other.sqlite", random, restarts)
    assert other == plain
    tasks, *_ = plain
    assert set(tasks) == {"u", "v", "x4", "x5", "x6", "x7"}
    assert (tasks["u"].status, list(tasks["u"].sessions), tasks["u"].results) == ("completed", ["u-5", "u-6"], 2)
