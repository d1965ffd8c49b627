"""Who may call, and for how long that is remembered."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from polar.proxy.errors import AttemptFenced, KeyRefused, Overloaded, ProxyError
from polar.proxy.sessions import Sessions
from polar.schemas import ControlState, SessionControl
from polar.service.clock import ManualClock
from polar.service.tokens import BoxKey, SessionToken, sign_box, sign_session

SECRET = "a secret of the tests, and long enough for HS256"


def token(clock: ManualClock, session: str = "s", attempt: int = 1, life_s: float = 60) -> SessionToken:
    return SessionToken(
        session_id=session,
        attempt=attempt,
        task_id="t",
        group_id="g",
        sample=0,
        model="m",
        not_after_ms=clock.now_ms() + round(life_s * 1000),
    )


def control(clock: ManualClock, state: ControlState, session: str = "s", attempt: int = 1) -> SessionControl:
    return SessionControl(session_id=session, state=state, attempt=attempt, at_ms=clock.now_ms())


def fresh(clock: ManualClock, limit: int = 10) -> Sessions:
    return Sessions(SECRET, clock, limit=limit, memory_ms=100_000)


async def test_a_box_key_opens_no_model() -> None:
    clock = ManualClock()
    key = sign_box(BoxKey(session_id="s", attempt=1, not_after_ms=clock.now_ms() + 1000), SECRET)
    with pytest.raises(KeyRefused):
        fresh(clock).admit(key)


async def test_a_token_is_good_until_its_time() -> None:
    clock = ManualClock()
    sessions, key = fresh(clock), sign_session(token(clock), SECRET)
    assert sessions.admit(key).session_id == "s"
    await clock.advance(61)
    with pytest.raises(KeyRefused, match="expired"):
        sessions.admit(key)


async def test_calls_are_numbered_for_each_attempt() -> None:
    clock = ManualClock()
    sessions = fresh(clock)
    first, second = token(clock), token(clock, attempt=2)
    assert [sessions.next_call(one) for one in (first, first, second, first)] == [0, 1, 0, 2]


async def test_a_replica_that_has_just_started_counts_on_from_what_the_request_shows() -> None:
    clock = ManualClock()
    sessions = fresh(clock)
    assert [sessions.next_call(token(clock), shown) for shown in (14, 15, 15, 0, 3, 40)] == [14, 15, 16, 17, 18, 40]


async def test_at_the_limit_new_sessions_wait_until_old_ones_are_dead() -> None:
    clock = ManualClock()
    sessions = fresh(clock, limit=2)
    old = token(clock, "a")
    sessions.next_call(old)
    sessions.apply("b", control(clock, ControlState.CLOSED, "b"))
    with pytest.raises(Overloaded):
        sessions.next_call(token(clock, "c"))
    assert sessions.next_call(old) == 1
    await clock.advance(61)
    assert sessions.next_call(token(clock, "c")) == 0
    with pytest.raises(Overloaded):
        sessions.next_call(token(clock, "d"))
    assert sessions.control("b") is not None, "a closed session stays closed"


async def test_control_is_forgotten_with_the_longest_token() -> None:
    clock = ManualClock()
    sessions = fresh(clock)
    sessions.apply("s", control(clock, ControlState.CLOSED))
    await clock.advance(101)
    sessions.purge()
    assert len(sessions) == 0
    old = SessionControl(session_id="s", state=ControlState.CLOSED, attempt=1, at_ms=0)
    sessions.apply("s", old)
    assert sessions.control("s") is None


async def test_a_tombstone_reopens_nothing_that_is_alive() -> None:
    clock = ManualClock()
    sessions = fresh(clock)
    sessions.apply("s", control(clock, ControlState.FENCED))
    sessions.apply("s", None)
    assert sessions.control("s") is None


@pytest.mark.parametrize(
    ("state", "kind"), [(ControlState.FENCED, AttemptFenced), (ControlState.CANCELLED, KeyRefused)]
)
async def test_a_running_call_is_stopped_and_its_task_goes_on(state: ControlState, kind: type[ProxyError]) -> None:
    clock = ManualClock()
    sessions = fresh(clock)
    inside = asyncio.Event()

    async def work() -> None:
        with sessions.running(token(clock)):
            inside.set()
            await asyncio.Event().wait()

    async def call() -> str:
        with pytest.raises(kind):
            await work()
        await asyncio.sleep(0)  # not cancelled any more
        return "answered"

    task = asyncio.create_task(call())
    await inside.wait()
    sessions.apply("s", control(clock, state, attempt=0))
    sessions.apply("other", control(clock, state, "other"))
    if state is ControlState.FENCED:
        await asyncio.sleep(0)
        assert not task.done(), "an earlier attempt was fenced, not this one"
    sessions.apply("s", control(clock, state))
    assert await task == "answered"


async def test_a_client_that_leaves_is_still_a_cancellation() -> None:
    clock = ManualClock()
    sessions = fresh(clock)
    inside = asyncio.Event()

    async def call() -> None:
        with sessions.running(token(clock)):
            inside.set()
            await asyncio.Event().wait()

    for also_closed in (False, True):
        sessions.apply("s", None)
        inside.clear()
        task = asyncio.create_task(call())
        await inside.wait()
        if also_closed:
            sessions.apply("s", control(clock, ControlState.CLOSED))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_session_that_ended_since_it_was_admitted_does_not_begin() -> None:
    clock = ManualClock()
    sessions = fresh(clock)
    admitted = sessions.admit(sign_session(token(clock), SECRET))
    sessions.apply("s", control(clock, ControlState.CLOSED))
    with pytest.raises(KeyRefused), sessions.running(admitted):
        raise AssertionError("it began")


async def test_a_record_that_says_how_long_it_counts_is_kept_so_long_and_no_longer() -> None:
    clock = ManualClock()
    sessions = fresh(clock)
    for session, life_s in (("short", 50), ("long", 500)):
        until = clock.now_ms() + life_s * 1000
        sessions.apply(session, msgspec.structs.replace(control(clock, ControlState.CLOSED, session), until_ms=until))
    await clock.advance(60)
    sessions.purge()
    assert sessions.control("short") is None
    await clock.advance(400)
    sessions.purge()
    with pytest.raises(KeyRefused):
        sessions.admit(sign_session(token(clock, "long"), SECRET))
    sessions.apply("old", msgspec.structs.replace(control(clock, ControlState.CLOSED, "old"), until_ms=clock.now_ms()))
    assert sessions.control("old") is None, "read back after its keys are dead"
