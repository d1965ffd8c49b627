"""The view as a state machine: any interleaving of partitions, any record twice, bounded."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.schemas import Event, Problem, RecordRef, Stage, TaskRejected
from polar.schemas.ids import session_id
from polar.submit.documents import (
    nodes_document,
    session_document,
    session_status,
    status_document,
    task_document,
    task_line,
)
from polar.submit.view import Answered, Change, Moved, Settled, View, ViewLimits
from tests.submit.records import (
    CANCELLED,
    TIMED_OUT,
    accepted,
    beat,
    moved,
    ref,
    session_result,
    task_result,
    tick,
)


class Log:
    """Partitions that only grow, and a view that reads them."""

    def __init__(self, limits: ViewLimits | None = None) -> None:
        self.view = View(limits)
        self.ends: dict[tuple[str, int], int] = {}

    def put(
        self, event: Event | None, topic: str = "stages", partition: int = 0, key: str | None = "k"
    ) -> list[Change]:
        place = (topic, partition)
        offset = self.ends.get(place, 0)
        self.ends[place] = offset + 1
        return self.view.apply(event, ref=RecordRef(topic=topic, partition=partition, offset=offset), key=key)

    def result(self, event: Event, partition: int = 0) -> list[Change]:
        return self.put(event, "results", partition)

    def whole_task(self, task_id: str, count: int = 1) -> None:
        self.put(accepted(task_id, count))
        for number in range(count):
            self.result(session_result(f"{task_id}-{number}"))
        self.result(task_result(task_id, count))


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_task_from_acceptance_to_its_end(log: Log) -> None:
    (answered, told) = log.put(accepted(count=2))
    assert isinstance(answered, Answered)
    assert isinstance(told, Moved)
    task = log.view.tasks["t"]
    assert (task.status, task.total, list(task.sessions)) == ("running", 2, ["t-0", "t-1"])
    assert log.view.in_flight() == {Stage.REGISTERED: 2}

    log.put(moved("t-0", Stage.INITIALIZING, node="n1"))
    log.put(moved("t-0", Stage.RUNNING))
    assert task.sessions["t-0"].stage is Stage.RUNNING
    assert task.sessions["t-0"].node == "n1", "a report without the node does not forget it"
    assert log.view.in_flight() == {Stage.REGISTERED: 1, Stage.RUNNING: 1}

    assert log.result(session_result("t-0")) == []
    assert log.result(session_result("t-1", TIMED_OUT, reward=None)) == []
    assert log.result(task_result(count=2)) == [Settled(task)]
    assert (task.status, task.results) == ("completed", 2)
    assert log.view.in_flight() == {}
    assert [session_status(one) for one in task.sessions.values()] == ["COMPLETED", "TIMEOUT"]


def test_a_task_is_not_over_before_its_sessions_results_are_here(log: Log) -> None:
    """They stand in other partitions than the task's: a reader may see the task's first."""
    log.put(accepted(count=2))
    assert log.result(task_result(count=2), partition=1) == []
    assert log.view.tasks["t"].status == "running"
    log.result(session_result("t-0"), partition=2)
    assert log.view.tasks["t"].status == "running"
    (settled,) = log.result(session_result("t-1"), partition=3)
    assert isinstance(settled, Settled)
    assert log.view.tasks["t"].status == "completed"


def test_results_that_retention_took_are_not_waited_for_once_caught_up(log: Log) -> None:
    log.result(task_result("old", count=3))
    log.result(session_result("old-2"))
    assert log.view.tasks["old"].status == "running"
    (settled,) = log.view.caught_up()
    assert isinstance(settled, Settled)
    assert settled.task.task_id == "old"
    assert log.view.tasks["old"].status == "completed"
    assert log.view.caught_up() == [], "once"


def test_a_record_twice_changes_nothing(log: Log) -> None:
    event = accepted()
    log.view.apply(event, ref=ref(5), key="t")
    assert log.view.apply(event, ref=ref(5), key="t") == []
    assert log.view.apply(moved("t-0", Stage.RUNNING), ref=ref(4), key="t-0") == []
    assert log.view.tasks["t"].sessions["t-0"].stage is Stage.REGISTERED
    assert log.view.next_offset("stages", 0) == 6
    assert log.view.next_offset("stages", 1) == 0


def test_a_session_never_goes_back(log: Log) -> None:
    log.put(accepted())
    log.put(moved("t-0", Stage.RUNNING))
    log.put(moved("t-0", Stage.CLOSED, outcome=CANCELLED))
    log.put(moved("t-0", Stage.ENDED))
    session = log.view.tasks["t"].sessions["t-0"]
    assert session.stage is Stage.CLOSED
    assert session.outcome == CANCELLED


def test_a_retry_starts_over_and_the_old_attempt_is_ignored(log: Log) -> None:
    log.put(accepted())
    log.put(moved("t-0", Stage.RUNNING, node="n1"))
    log.put(moved("t-0", Stage.REGISTERED, attempt=2))
    session = log.view.tasks["t"].sessions["t-0"]
    assert (session.stage, session.attempt) == (Stage.REGISTERED, 2)
    log.put(moved("t-0", Stage.ENDED, attempt=1))
    assert (session.stage, session.attempt) == (Stage.REGISTERED, 2)


def test_sessions_seen_before_their_task_find_it(log: Log) -> None:
    log.put(moved("t-1", Stage.RUNNING), partition=3)
    assert not log.view.tasks["t"].known
    assert status_document(log.view)["tasks"] == {}
    log.put(accepted(count=3))
    task = log.view.tasks["t"]
    assert task.known
    assert list(task.sessions) == ["t-0", "t-1", "t-2"]
    assert task.sessions["t-1"].stage is Stage.RUNNING
    assert [one.sample for one in task.sessions.values()] == [0, 1, 2]
    assert log.view.session_count == 3


def test_sessions_that_the_acceptance_does_not_list_are_derived(log: Log) -> None:
    log.put(accepted(count=2, sessions=[], source=7))
    assert list(log.view.tasks["t"].sessions) == [session_id(0, 7, 0), session_id(0, 7, 1)]


def test_an_answer_is_found_by_the_record_it_answers(log: Log) -> None:
    again = ref(9, topic="tasks")
    first = accepted()
    log.put(first)
    repeat = accepted(answers=again)
    log.put(repeat)
    assert log.view.answer(first.answers) == first
    assert log.view.answer(again) == repeat
    assert log.view.answer(ref(10, topic="tasks")) is None
    assert len(log.view.tasks) == 1


def test_a_rejection_does_not_touch_the_task_of_that_id(log: Log) -> None:
    log.put(accepted())
    conflict = TaskRejected(
        task_id="t",
        answers=ref(3, topic="tasks"),
        problems=[Problem(field="task_id", message="is taken", code="conflict")],
        at_ms=1,
    )
    log.put(conflict)
    assert log.view.tasks["t"].status == "running"
    assert log.view.answer(ref(3, topic="tasks")) == conflict
    assert log.view.rejected["t"] == conflict


def test_an_id_that_is_used_again_is_another_task(log: Log) -> None:
    log.whole_task("t", 2)
    log.put(accepted(count=1, source=50, at_ms=9_000, sessions=["t-7"]))
    task = log.view.tasks["t"]
    assert (task.status, task.total, list(task.sessions)) == ("running", 1, ["t-7"])
    assert log.view.session_count == 1


def test_the_oldest_ended_task_is_forgotten_first() -> None:
    log = Log(ViewLimits(max_tasks=3))
    log.put(accepted("running-old"))
    log.whole_task("ended-1")
    log.whole_task("ended-2")
    log.put(accepted("running-new"))
    assert set(log.view.tasks) == {"running-old", "ended-2", "running-new"}
    log.put(accepted("newer"))
    assert set(log.view.tasks) == {"running-old", "running-new", "newer"}
    log.put(accepted("newest"))
    assert set(log.view.tasks) == {"running-new", "newer", "newest"}
    assert log.view.dropped == 3


def test_sessions_are_bounded_too_but_never_the_task_just_touched() -> None:
    log = Log(ViewLimits(max_sessions=10))
    log.put(accepted("a", 6))
    log.put(accepted("b", 6))
    assert set(log.view.tasks) == {"b"}
    log.put(accepted("c", 50))
    assert set(log.view.tasks) == {"c"}
    assert log.view.session_count == 50
    assert log.view.in_flight() == {Stage.REGISTERED: 50}


def test_what_comes_late_for_a_forgotten_task_goes_first() -> None:
    log = Log(ViewLimits(max_tasks=2))
    log.put(accepted("a"))
    log.put(accepted("b"))
    log.put(accepted("c"))
    log.put(moved("a-0", Stage.RUNNING))
    assert not log.view.tasks["a"].known
    log.put(moved("c-0", Stage.RUNNING))
    log.put(accepted("d"))
    assert "a" not in log.view.tasks


def test_a_task_forgotten_under_way_still_ends() -> None:
    log = Log(ViewLimits(max_tasks=1))
    log.put(accepted("a", 2))
    log.result(session_result("a-0"))
    log.view.caught_up()
    log.put(accepted("b"))
    log.result(session_result("a-1"))
    (settled,) = log.result(task_result("a", 2))
    assert isinstance(settled, Settled)
    assert log.view.tasks["a"].status == "completed"


def test_answers_and_rejections_are_bounded() -> None:
    log = Log(ViewLimits(max_answers=2))
    for number in range(4):
        rejected = TaskRejected(task_id=f"r{number}", answers=ref(number, topic="tasks"), problems=[], at_ms=1)
        log.put(rejected)
    assert list(log.view.rejected) == ["r2", "r3"]
    assert log.view.answer(ref(1, topic="tasks")) is None
    assert log.view.answer(ref(3, topic="tasks")) is not None


def test_nodes_live_by_the_schedulers_ticks() -> None:
    log = Log(ViewLimits(dead_after_ticks=3))
    log.put(beat("n1"), "nodes", key="n1")
    log.put(beat("n2", half="run"), "nodes", key="n2/run")
    for number in range(2):
        log.put(tick(number), "nodes", key="tick")
    log.put(beat("n2", 2, half="run"), "nodes", key="n2/run")
    log.put(tick(3), "nodes", key="tick")
    document = nodes_document(log.view)
    assert {one["key"]: one["alive"] for one in document["nodes"]} == {"n1": False, "n2/run": True}
    assert document["nodes"][0]["capacity"] == {"init": 1, "ready": 1, "run": 2, "grade": 0}
    assert document["scheduler"] == {"leader_id": "l", "tick": 3, "last_tick_ms": 3_000}


def test_without_a_scheduler_no_node_dies() -> None:
    log = Log(ViewLimits(dead_after_ticks=1))
    log.put(beat("n1"), "nodes", key="n1")
    assert nodes_document(log.view)["nodes"][0]["alive"]


def test_a_tombstone_takes_a_node_away(log: Log) -> None:
    log.put(beat("n1"), "nodes", key="n1")
    log.put(None, "nodes", key="n1")
    assert log.view.nodes == {}
    log.put(None, "stages", key="n1")
    log.put(None, "results", key="s/x")


def test_nodes_are_bounded_the_longest_silent_goes() -> None:
    log = Log(ViewLimits(max_nodes=2))
    for name in ("a", "b", "a", "c"):
        log.put(beat(name), "nodes", key=name)
    assert set(log.view.nodes) == {"a", "c"}


def test_documents_of_an_ended_task(log: Log) -> None:
    log.put(accepted(count=2))
    log.result(session_result("t-1", CANCELLED, reward=None, trajectory=ref(3, topic="trajectories")))
    log.result(session_result("t-0", reward=0.5))
    log.result(task_result(count=2))
    document = task_document(log.view.tasks["t"])
    assert document["status"] == "completed"
    assert (document["total_sessions"], document["completed_sessions"]) == (2, 2)
    assert [one["session_id"] for one in document["results"]] == ["t-0", "t-1"], "in sample order"
    assert document["result_paths"] == ["trajectories/0/3"]
    first, second = document["results"]
    assert first["timing"] == {"run_ms": 12.5}
    assert (second["status"], second["outcome"], second["error"]) == ("ERROR", "cancelled", "cancelled: by request")
    line = task_line(log.view.tasks["t"])
    assert (line["mean_reward"], line["harness"]) == (0.5, "shell")
    row = session_document(log.view.tasks["t"].sessions["t-1"])
    assert (row["status"], row["stage"], row["sample"]) == ("ERROR", "FINISHED", 1)
    assert row["trajectory_ref"] == {"topic": "trajectories", "partition": 0, "offset": 3}


STEPS: list[tuple[str, int, Any]] = [
    ("stages", 0, accepted(count=2)),
    ("stages", 1, moved("t-0", Stage.INITIALIZING)),
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
]


@given(st.randoms(use_true_random=False), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_any_interleaving_of_partitions_read_any_number_of_times_ends_the_same(random: Any, reads: int) -> None:
    view = View()
    settled = 0
    for _ in range(reads):
        lanes: dict[tuple[str, int], list[tuple[RecordRef, Event]]] = {}
        for topic, partition, event in STEPS:
            lane = lanes.setdefault((topic, partition), [])
            lane.append((RecordRef(topic=topic, partition=partition, offset=len(lane)), event))
        while lanes:
            lane_key = random.choice(sorted(lanes))
            place, event = lanes[lane_key].pop(0)
            settled += sum(isinstance(one, Settled) for one in view.apply(event, ref=place, key="k"))
            if not lanes[lane_key]:
                del lanes[lane_key]
    assert settled == 1
    task = view.tasks["t"]
    assert task.status == "completed"
    assert list(task.sessions) == ["t-0", "t-1"]
    assert [one.attempt for one in task.sessions.values()] == [2, 1]
    assert view.in_flight() == {}
    assert view.session_count == 2
