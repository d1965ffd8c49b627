"""Calls at several engines that come, go and pause: nobody is lost, nobody sits twice, nobody is overtaken."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from polar.proxy import ProxySettings
from polar.proxy.errors import EngineAway, EngineUnfit, Overloaded
from polar.proxy.upstreams.engines import Engines
from polar.proxy.upstreams.metrics import EngineMetrics
from polar.proxy.upstreams.place import Place
from polar.proxy.upstreams.upstream import Upstream
from polar.service.clock import SystemClock

SEATS, ROOM = 2, 3
SESSIONS = [f"s{number}" for number in range(9)]
UNFIT = EngineUnfit("it tells no ids")


class Places(RuleBasedStateMachine):
    """Three engines of one model."""

    def __init__(self) -> None:
        super().__init__()
        settings = ProxySettings(
            engine_urls=["http://a/v1", "http://b/v1", "http://c/v1"],
            max_calls_per_endpoint=SEATS,
            max_waiting_per_endpoint=ROOM,
        )
        # nothing here goes over the network
        self.engines = Engines(settings, cast(Any, None), SystemClock(), EngineMetrics(CollectorRegistry()))
        self.places: list[Place] = []
        """In the order in which they came."""

    def alive(self) -> list[Place]:
        return [place for place in self.places if not place.left and place._failure is None]

    def lines(self, place: Place) -> list[Upstream]:
        return [one for one in self.engines.all if place in one.line.seated or place in one.line.waiting]

    @rule(session=st.sampled_from(SESSIONS))
    def come(self, session: str) -> None:
        try:
            place = self.engines.place(session, "m")
        except Overloaded:
            upstream = self.engines.of(session, "m")
            assert len(upstream.line.waiting) == ROOM
            assert len(upstream.line.seated) == SEATS or upstream.line.is_shut
        except EngineUnfit:
            assert all(one.endpoint.unfit is not None for one in self.engines.all)
        else:
            self.places.append(place)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.alive()))
        place.leave()
        place.leave()
        assert self.lines(place) == []

    @precondition(lambda self: any(place._turn.is_set() for place in self.alive()))
    @rule(data=st.data())
    def find_it_gone(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from([one for one in self.alive() if one._turn.is_set()]))
        upstream = place._upstream
        upstream.refused()
        moved = place.move()
        assert moved or not any(one.usable for one in self.engines.all if one is not upstream)

    @rule(at=st.integers(0, 2), event=st.sampled_from(["refused", "answered"]))
    def witness(self, at: int, event: str) -> None:
        getattr(self.engines.all[at], event)()

    @rule(at=st.integers(0, 2), well=st.booleans())
    def look(self, at: int, well: bool) -> None:
        self.engines.all[at].said(well)

    @rule(at=st.integers(0, 2), unfit=st.booleans())
    def test(self, at: int, unfit: bool) -> None:
        self.engines.all[at].endpoint.unfit = UNFIT if unfit else None
        self.engines.all[at].note_fitness()

    @rule(at=st.integers(0, 2), mode=st.sampled_from(["drain", None]))
    def pause(self, at: int, mode: str | None) -> None:
        self.engines.all[at].paused_by_trainer(mode)

    @rule(at=st.integers(0, 2), paused=st.booleans())
    def see_paused(self, at: int, paused: bool) -> None:
        self.engines.all[at].seen_paused(paused, 0.0)

    @rule(at=st.integers(0, 2))
    def cut(self, at: int) -> None:
        cut: list[Place] = []
        for place in self.engines.all[at].line.seated:
            place.cut = lambda error, place=place: cut.append(place)  # type: ignore[misc]
        self.engines.all[at].cut(EngineAway("for new weights"))
        assert cut == list(self.engines.all[at].line.seated)

    @invariant()
    def everybody_is_somewhere_once(self) -> None:
        for place in self.alive():
            (upstream,) = self.lines(place)
            assert place._upstream is upstream
            assert place._turn.is_set() == (place in upstream.line.seated)

    @invariant()
    def nobody_is_anywhere_who_left_or_failed(self) -> None:
        for place in self.places:
            if place.left or place._failure is not None:
                assert self.lines(place) == []

    @invariant()
    def limits_hold_and_no_seat_is_empty_for_nothing(self) -> None:
        for one in self.engines.all:
            seated, waiting = one.line.sizes
            assert seated <= SEATS
            assert waiting <= ROOM
            assert not (waiting and seated < SEATS and not one.is_paused)
            assert one.line.is_shut == one.is_paused


TestPlaces = Places.TestCase
