"""Any order of faults: each accepted session ends exactly once, and a new leader decides nothing twice."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from polar.schemas import (
    AttemptFenced,
    CancelRequest,
    Event,
    Failure,
    FailureKind,
    GroupClosed,
    SessionAssigned,
    SessionClosed,
    SessionFinal,
    SessionGraded,
    SessionOpened,
    TaskAccepted,
    TaskResult,
)
from tests.submit.scheduler.cluster import COMMAND, Cluster, shell_task

KINDS = st.sampled_from([FailureKind.INFRA, FailureKind.HARNESS, FailureKind.TIMEOUT, FailureKind.TASK])
NODES = st.sampled_from(["g0", "g1"])


class Faults(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(retry_backoff=0)
        self.cluster.gateways["g1"].halves = {"init", "run"}
        self.tasks = 0

    @rule(samples=st.integers(1, 4), own_box=st.booleans())
    def submit(self, samples: int, own_box: bool) -> None:
        self.tasks += 1
        fields = {"evaluator": COMMAND} if own_box else {}
        self.cluster.submit(shell_task(f"t{self.tasks}", samples, **fields))

    @rule()
    def commit(self) -> None:
        self.cluster.commit()

    @rule()
    def work(self) -> None:
        self.cluster.work()

    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        self.cluster.deliver(count)

    @rule(ticks=st.integers(1, 5))
    def time_passes(self, ticks: int) -> None:
        self.cluster.tick(ticks)

    @rule(kind=KINDS, node=NODES)
    def an_attempt_fails(self, kind: FailureKind, node: str) -> None:
        gateway = self.cluster.gateways[node]
        for row in gateway.rows.values():
            failure = Failure(kind=kind, message="it broke", retryable=kind is FailureKind.INFRA)
            self.cluster.exits[row.session] = failure
            break

    @rule(node=NODES)
    def a_gateway_goes_away(self, node: str) -> None:
        self.cluster.gateways[node].up = False

    @rule(node=NODES)
    def a_gateway_restarts(self, node: str) -> None:
        gateway = self.cluster.gateways[node]
        gateway.up = True
        for one, row in list(gateway.rows.items()):
            if row.stage not in ("READY", "ENDED"):
                self.cluster.end(gateway, one, Failure(kind=FailureKind.INFRA, message="lost", retryable=True))
        self.cluster.beat(gateway)

    @rule(node=NODES)
    def a_gateway_loses_its_state(self, node: str) -> None:
        gateway = self.cluster.gateways[node]
        gateway.rows.clear()
        gateway.boot = f"boot-{gateway.beats}"
        gateway.up = True
        self.cluster.beat(gateway)

    @rule()
    def the_grader_restarts(self) -> None:
        grader = self.cluster.graders["e0"]
        grader.rows.clear()
        grader.boot = f"boot-{grader.beats}"
        self.cluster.beat(grader)

    @rule()
    def a_new_leader(self) -> None:
        self.cluster.restart_leader()

    @rule(number=st.integers(1, 5))
    def a_new_leader_finds_a_tasks_record_gone(self, number: int) -> None:
        self.cluster.restart_leader(frozenset({f"t{number}"}))

    @rule()
    def a_commit_fails(self) -> None:
        self.cluster.lose_commit()

    @rule(half=st.sampled_from(["init", "run"]), ticks=st.integers(1, 8))
    def half_of_a_gateway_goes_away(self, half: str, ticks: int) -> None:
        halves = self.cluster.gateways["g1"].halves
        assert halves is not None
        halves.discard(half)
        for _ in range(ticks):
            self.cluster.tick()
            self.cluster.commit()

    @rule(half=st.sampled_from(["init", "run"]))
    def half_of_a_gateway_restarts(self, half: str) -> None:
        gateway = self.cluster.gateways["g1"]
        assert gateway.halves is not None
        if half not in gateway.halves:
            gateway.halves.add(half)
            stage = "INITIALIZING" if half == "init" else "RUNNING"
            for one, row in list(gateway.rows.items()):
                if row.stage == stage:
                    self.cluster.end(gateway, one, Failure(kind=FailureKind.INFRA, message="lost", retryable=True))

    @rule(lag=st.booleans())
    def beats_lag_behind_reports(self, lag: bool) -> None:
        self.cluster.beats_lag = lag
        if not lag:
            self.cluster.deliver_beats()

    @rule()
    def an_hour_passes_without_the_log(self) -> None:
        self.cluster.now += 3_600_000

    @rule(number=st.integers(1, 5))
    def cancel(self, number: int) -> None:
        if number <= self.tasks:
            self.cluster.cancel(CancelRequest(task_id=f"t{number}"))

    @invariant()
    def nothing_is_decided_twice(self) -> None:
        log = self.cluster.log
        for kind in (SessionOpened, SessionClosed, SessionGraded, SessionFinal):
            assert_once(Counter(one.value.session_id for one in log if isinstance(one.value, kind)), kind)
        for kind in (SessionAssigned, AttemptFenced):
            pairs = Counter((one.value.session_id, one.value.attempt) for one in log if isinstance(one.value, kind))
            assert_once(pairs, kind)
        assert_once(Counter(one.value.group_id for one in log if isinstance(one.value, GroupClosed)), GroupClosed)

    @invariant()
    def an_attempt_starts_only_after_the_one_before_it_is_fenced(self) -> None:
        fenced: set[tuple[str, int]] = set()
        closed: set[str] = set()
        for one in self.cluster.log:
            event = one.value
            if isinstance(event, AttemptFenced):
                fenced.add((event.session_id, event.attempt))
            elif isinstance(event, SessionClosed):
                closed.add(event.session_id)
            elif isinstance(event, SessionAssigned):
                assert event.session_id not in closed
                assert event.attempt == 1 or (event.session_id, event.attempt - 1) in fenced

    def teardown(self) -> None:
        self.cluster.settle(rounds=200)
        log = self.cluster.log
        accepted = [session for one in self.cluster.of(TaskAccepted) for session in one.sessions]
        for kind in (SessionOpened, SessionClosed, SessionGraded, SessionFinal):
            ended = {one.value.session_id for one in log if isinstance(one.value, kind)}
            assert ended == set(accepted), f"{kind.__name__}: {len(ended)} of {len(accepted)}"
        assert len(self.cluster.of(TaskResult)) == self.tasks
        assert len(self.cluster.of(GroupClosed)) == self.tasks
        assert self.cluster.machine.world.leases == {}
        assert all(not gateway.rows for gateway in self.cluster.gateways.values()), "boxes left behind"


def assert_once(counts: Counter[object], kind: type[Event]) -> None:
    twice = [one for one, count in counts.items() if count > 1]
    assert not twice, f"{kind.__name__} twice for {twice}"


Faults.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestFaults = Faults.TestCase
