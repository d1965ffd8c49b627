"""Who may join whom, against a model that keeps everything and looks through all of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from polar.proxy.joining import Joined, Key, Phase, Unanswered

WINDOW = 10.0
CALLS, ATTEMPT_BYTES, TOTAL_BYTES = 5, 100, 150
KEYS = [
    Key(session, attempt, "openai.chat", "/v1/chat/completions", (None,), body)
    for session, attempt, body in product(("s", "t"), (1, 2), ("b1", "b2"))
]
keys = st.sampled_from(KEYS)


@dataclass
class Known:
    """A call as the model knows it."""

    number: int
    key: Key
    phase: Phase = Phase.RUNNING
    size: int = 0
    left: float | None = None
    order: int = 0
    gone: bool = False

    @property
    def kept(self) -> bool:
        return not self.gone and self.left is not None and self.phase is Phase.CAPTURED


class Joins(RuleBasedStateMachine):
    """Clients come, leave and come back; calls end; sessions are closed; time goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.real: Unanswered[int] = Unanswered(
            window=WINDOW, calls=CALLS, attempt_bytes=ATTEMPT_BYTES, total_bytes=TOTAL_BYTES
        )
        self.known: list[Known] = []
        self.now = 0.0
        self.order = 0

    # the model -------------------------------------------------------------------------------------------------------

    def waiting(self) -> list[Known]:
        """Those whose clients have left, the first left first."""
        found = [one for one in self.known if not one.gone and one.left is not None]
        return sorted(found, key=lambda one: one.order)

    def expire(self) -> None:
        for one in self.waiting():
            assert one.left is not None
            one.gone = self.now - one.left > WINDOW

    def bound(self) -> None:
        for group in ("attempt", "total"):
            for one in self.waiting():
                of_attempt = [other for other in self.known if other.key[:2] == one.key[:2]]
                among, limit = (of_attempt, ATTEMPT_BYTES) if group == "attempt" else (self.known, TOTAL_BYTES)
                if one.kept and sum(other.size for other in among if other.kept) > limit:
                    one.phase = Phase.LOST
        for one in self.waiting()[: max(len(self.waiting()) - CALLS, 0)]:
            one.gone = True

    def some(self, index: int) -> Known | None:
        return self.known[index % len(self.known)] if self.known else None

    # what happens ----------------------------------------------------------------------------------------------------

    @rule(key=keys)
    def a_call_begins(self, key: Key) -> None:
        one = Known(len(self.known), key)
        self.known.append(one)
        self.real.begin(str(one.number), key, one.number)

    @rule(index=st.integers(0, 50), size=st.integers(0, 120))
    def a_call_is_captured(self, index: int, size: int) -> None:
        one = self.some(index)
        if one is not None:
            self.expire()
            if not one.gone and one.phase is Phase.RUNNING:
                one.phase, one.size = Phase.CAPTURED, size
                self.bound()
            self.real.captured(str(one.number), size, self.now)

    @rule(index=st.integers(0, 50))
    def a_call_fails(self, index: int) -> None:
        one = self.some(index)
        if one is not None and one.phase is Phase.RUNNING:
            one.phase = Phase.LOST
            self.real.lost(str(one.number))

    @rule(index=st.integers(0, 50))
    def a_client_is_told(self, index: int) -> None:
        one = self.some(index)
        if one is not None and one.left is None:
            one.gone = True
            self.real.told(str(one.number))

    @rule(index=st.integers(0, 50))
    def a_client_leaves(self, index: int) -> None:
        one = self.some(index)
        if one is not None and one.left is None:
            self.expire()
            self.order += 1
            one.left, one.order = self.now, self.order
            self.bound()
            self.real.left(str(one.number), self.now)

    @rule(key=keys)
    def a_request_comes(self, key: Key) -> None:
        self.expire()
        equal = [one for one in self.waiting() if one.key == key]
        may = next((one for one in equal if one.phase is not Phase.LOST), None)
        expected = None if may is None else Joined(may.phase, may.number)
        assert self.real.join(key, self.now) == expected
        if may is not None:
            may.left = None  # its connection is the call's now: nobody else joins
            return
        lost = next((one for one in equal if one.phase is Phase.LOST), None)
        assert self.real.retried(key, self.now) == (None if lost is None else str(lost.number))
        if lost is not None:
            lost.gone = True

    @rule(session=st.sampled_from(("s", "t")), attempt=st.integers(0, 2))
    def a_session_is_closed(self, session: str, attempt: int) -> None:
        for one in self.known:
            one.gone = one.gone or (one.key.session_id == session and one.key.attempt <= attempt)
        self.real.close(session, attempt)

    @rule(seconds=st.sampled_from((0.0, 1.0, 5.0, 10.0, 10.5)))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def what_is_held_is_bounded_and_counted(self) -> None:
        self.expire()
        self.real.expire(self.now)
        assert self.real.size == sum(one.size for one in self.known if one.kept) <= TOTAL_BYTES
        assert len(self.real) == len(self.waiting()) <= CALLS

    def teardown(self) -> None:
        for session in ("s", "t"):
            self.real.close(session, 2)
        assert (self.real.size, len(self.real)) == (0, 0)
        assert not self.real._entries
        assert not self.real._attempts


Joins.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_requests_join_as_the_model_says = Joins.TestCase


def unanswered(**limits: int) -> Unanswered[str]:
    return Unanswered(**{"window": WINDOW, "calls": 10, "attempt_bytes": 100, "total_bytes": 100, **limits})  # type: ignore[arg-type]


def test_nobody_joins_while_a_connection_is_open() -> None:
    joins = unanswered()
    joins.begin("c", KEYS[0], "call")
    assert joins.join(KEYS[0], 0.0) is None
    joins.left("c", 1.0)
    assert joins.join(KEYS[0], 2.0) == (Phase.RUNNING, "call")
    assert joins.join(KEYS[0], 2.0) is None, "two joined one call"


def test_only_an_equal_request_joins() -> None:
    joins = unanswered()
    joins.begin("c", KEYS[0], "call")
    joins.left("c", 0.0)
    other = [
        KEYS[0]._replace(**{name: value})  # type: ignore[arg-type]
        for name, value in {
            "session_id": "x",
            "attempt": 9,
            "dialect": "anthropic.messages",
            "path": "/v1/chat/completions?beta=true",
            "client": ("agent-7",),
            "body": "another",
        }.items()
    ]
    assert [joins.join(key, 1.0) for key in other] == [None] * 6
    assert joins.join(KEYS[0], 1.0) is not None


def test_the_window_begins_anew_when_whoever_joined_leaves_too() -> None:
    joins = unanswered()
    joins.begin("c", KEYS[0], "call")
    joins.left("c", 0.0)
    assert joins.join(KEYS[0], WINDOW) is not None
    joins.left("c", WINDOW + 5)
    assert joins.join(KEYS[0], 2 * WINDOW + 5) is not None
    joins.left("c", 3 * WINDOW)
    assert joins.join(KEYS[0], 4 * WINDOW + 0.1) is None


def test_a_call_that_failed_is_not_joined_and_the_next_is_its_retry_once() -> None:
    joins = unanswered()
    joins.begin("c", KEYS[0], "call")
    joins.lost("c")
    joins.left("c", 0.0)
    assert joins.join(KEYS[0], 1.0) is None
    assert [joins.retried(KEYS[0], 1.0) for _ in range(2)] == ["c", None]


def test_a_reply_that_is_too_large_to_keep_is_known_as_lost() -> None:
    joins = unanswered()
    joins.begin("c", KEYS[0], "call")
    joins.left("c", 0.0)
    joins.captured("c", 101, 1.0)
    assert joins.size == 0
    assert joins.join(KEYS[0], 1.0) is None
    assert joins.retried(KEYS[0], 1.0) == "c"
