"""The pure cores of the engines' side: who sits, who waits, who is healthy, who is chosen."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polar.proxy.upstreams.choice import choose
from polar.proxy.upstreams.health import BROKEN, ILL, REFUSED, Health
from polar.proxy.upstreams.line import Full, Line


class Guest:
    def __init__(self) -> None:
        self.turns = 0

    def turn(self) -> None:
        self.turns += 1


class Lines(RuleBasedStateMachine):
    """A line against a model of two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.line: Line[Guest] = Line(seats=2, room=3)
        self.seated: list[Guest] = []
        self.waiting: list[Guest] = []
        self.open = True

    def fill(self) -> None:
        while self.open and self.waiting and len(self.seated) < 2:
            guest = self.waiting.pop(0)
            assert guest.turns == 1
            self.seated.append(guest)

    @rule()
    def join(self) -> None:
        guest = Guest()
        if self.open and len(self.seated) < 2 and not self.waiting:
            assert self.line.join(guest)
            assert guest.turns == 0
            self.seated.append(guest)
        elif len(self.waiting) < 3:
            assert not self.line.join(guest)
            self.waiting.append(guest)
        else:
            with pytest.raises(Full):
                self.line.join(guest)

    @precondition(lambda self: self.seated or self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        guest = data.draw(st.sampled_from([*self.seated, *self.waiting]))
        self.line.leave(guest)
        self.line.leave(guest)
        (self.seated if guest in self.seated else self.waiting).remove(guest)
        self.fill()

    @rule()
    def shut(self) -> None:
        self.line.shut()
        self.open = False

    @rule()
    def reopen(self) -> None:
        self.line.reopen()
        self.open = True
        self.fill()

    @invariant()
    def as_the_model(self) -> None:
        assert set(self.line.seated) == set(self.seated)
        assert list(self.line.waiting) == self.waiting
        assert self.line.sizes == (len(self.seated), len(self.waiting))


TestLines = Lines.TestCase


async def test_a_line_tells_when_nobody_sits_any_more() -> None:
    line: Line[Guest] = Line(seats=1, room=1)
    first, second = Guest(), Guest()
    line.join(first)
    line.join(second)
    line.shut()
    idle = asyncio.ensure_future(line.idle())
    await asyncio.sleep(0)
    assert not idle.done()
    line.leave(first)
    await idle
    assert (second.turns, line.sizes) == (0, (0, 1))


NAMES = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


@given(NAMES, st.text(max_size=8), st.data())
def test_a_session_moves_only_while_its_engine_is_out(names: list[str], session: str, data: st.DataObject) -> None:
    out = data.draw(st.sets(st.sampled_from(names)))
    home = choose(names, session, name=str, usable=lambda one: True)
    there = choose(names, session, name=str, usable=lambda one: one not in out)
    assert there == home if home not in out or out == set(names) else there not in out
    # others of its engines going makes no difference
    assert choose(names, session, name=str, usable=lambda one: one == home or one not in out) == home


def test_sessions_spread_over_the_engines() -> None:
    names = ["a", "b", "c", "d"]
    counts = Counter(choose(names, f"s{i}", name=str, usable=lambda one: True) for i in range(4000))
    assert all(800 < counts[name] < 1200 for name in names)


def test_a_refused_connection_ejects_at_once_and_an_answer_returns() -> None:
    health = Health(3)
    assert health.refused()
    assert health.out == REFUSED
    assert not health.refused()
    assert health.answered()
    assert health.out is None


def test_broken_connections_eject_when_they_are_in_a_row() -> None:
    health = Health(3)
    assert not health.broke()
    assert not health.broke()
    assert not health.answered()
    assert not health.broke()
    assert not health.broke()
    assert health.broke()
    assert health.out == BROKEN
    assert health.well()
    assert not health.broke(), "a return begins to count anew"


def test_an_engine_that_calls_itself_ill_returns_by_its_own_word_only() -> None:
    health = Health(2)
    assert not health.ill()
    assert health.ill()
    assert health.out == ILL
    assert not health.answered()
    assert health.out == ILL
    assert health.well()
    assert health.out is None


@given(st.lists(st.sampled_from(["refused", "broke", "ill", "answered", "well"])))
def test_health_says_changed_exactly_when_it_changes(events: list[str]) -> None:
    health = Health(2)
    for event in events:
        before = health.out is None
        assert getattr(health, event)() == (before != (health.out is None))
    health.well()
    assert health.out is None
