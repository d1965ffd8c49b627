"""Selection in two passes finds what one that knows the whole log would."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.builder import rebuild_select
from polar.builder.rebuild_index import SessionIndex, State
from polar.builder.rebuild_select import MARGIN_MS, Selection, Span, look_back, merged, sighting
from polar.schemas import (
    Budgets,
    BuilderSpec,
    EvaluatorSpec,
    Event,
    Outcome,
    RecordRef,
    SessionClosed,
    SessionFinal,
    SessionOpened,
    Status,
)

HOUR = 3_600_000


def opened(session: str, task: str, ms: int) -> SessionOpened:
    return SessionOpened(
        session_id=session,
        task_id=task,
        group_id=task,
        sample=0,
        num_samples=1,
        source=RecordRef(topic="tasks", partition=0, offset=0),
        harness="shell",
        builder=BuilderSpec(),
        evaluator=EvaluatorSpec(),
        budgets=Budgets(queue_ttl=1, init_timeout=1, timeout_seconds=1, evaluation_timeout=1),
        at_ms=ms,
    )


@st.composite
def logs(draw: st.DrawFn) -> list[tuple[int, Event]]:
    """A partition: time stamp and record. The scheduler's records tell the time at which they were decided, a little
    before; some sessions are not closed, and the log has lost its beginning."""
    count = draw(st.integers(0, 12))
    steps: list[list[tuple[str, int]]] = []
    for number in range(count):
        length = draw(st.integers(1, 3))
        kinds = ("opened", "closed", "final")[:length]
        if draw(st.integers(0, 9)) == 0:
            kinds = ("opened", "final")[:length]
        steps.append([(kind, number) for kind in kinds])
    order: list[tuple[str, int]] = []
    while any(steps):
        some = [one for one in steps if one]
        order.append(some[draw(st.integers(0, len(some) - 1))].pop(0))
    now = 0
    log: list[tuple[int, Event]] = []
    for kind, number in order:
        now += draw(st.sampled_from([0, 1, HOUR // 12, HOUR // 2, HOUR]))
        told = now - draw(st.integers(0, 1000))
        session = f"s{number}"
        event: Event
        if kind == "opened":
            event = opened(session, f"t{number % 3}", told)
        elif kind == "closed":
            event = SessionClosed(session_id=session, attempt=1, outcome=Outcome(status=Status.COMPLETED), at_ms=told)
        else:
            event = SessionFinal(session_id=session, attempt=1, at_ms=told)
        log.append((now, event))
    return log[draw(st.integers(0, len(log))) if draw(st.booleans()) else 0 :]


@st.composite
def selections(draw: st.DrawFn, log: list[tuple[int, Event]]) -> Selection:
    """Times lie near those of records, so that they part them."""
    near = [None, *(ms + away for ms, _ in log for away in (-HOUR // 2, 0, 1))]
    return Selection(
        since_ms=draw(st.sampled_from(near)),
        until_ms=draw(st.sampled_from(near)),
        tasks=frozenset(draw(st.sets(st.sampled_from(["t0", "t1"]), max_size=1))),
        sessions=frozenset(draw(st.just(set()) | st.sets(st.sampled_from(["s0", "s1", "s2", "s5"])))),
    )


def seen(log: list[tuple[int, Event]], start: int, end: int, selection: Selection) -> list[Span]:
    spans = (sighting(log[offset][1], 0, offset, selection) for offset in range(start, end))
    return [one for one in spans if one is not None]


def put(known: dict[str, Span], spans: list[Span]) -> None:
    for span in spans:
        known[span.session] = merged(known[span.session], span) if span.session in known else span


@settings(max_examples=300)
@given(logs(), st.integers(1, 5), st.data())
def test_reading_from_the_time_asked_for_and_back_chooses_what_the_whole_log_would(
    log: list[tuple[int, Event]], width: int, data: st.DataObject
) -> None:
    selection = data.draw(selections(log))
    whole: dict[str, Span] = {}
    put(whole, seen(log, 0, len(log), selection))

    start = 0
    if selection.since_ms is not None:
        after = [at for at, (ms, _) in enumerate(log) if ms >= (selection.since_ms or 0) - MARGIN_MS]
        start = after[0] if after else len(log)
    end = next((at + 1 for at in range(start, len(log)) if selection.over(log[at][1])), len(log))
    known: dict[str, Span] = {}
    put(known, seen(log, start, end, selection))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebuild_select, "FIRST_LOOK_BACK", width)
        for begin, stop in look_back(start, 0):
            if not any(selection.homeless(one) for one in known.values()):
                break
            put(known, seen(log, begin, stop, selection))

    def chosen(spans: dict[str, Span]) -> set[tuple[str, int | None]]:
        return {(one.session, one.opened) for one in spans.values() if selection.wants(one)}

    assert chosen(known) == chosen(whole)


@given(st.lists(st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)), min_size=1))
def test_sightings_come_together_in_any_order(places: list[tuple[int | None, int | None]]) -> None:
    spans = [Span("s", 0, opened, closed, None if closed is None else closed * 10) for opened, closed in places]

    def fold(ones: list[Span]) -> Span:
        found = ones[0]
        for one in ones[1:]:
            found = merged(found, one)
        return found

    assert fold(spans) == fold(spans[::-1])
    assert fold(spans).opened == min((one for one, _ in places if one is not None), default=None)


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_looking_back_covers_everything_once_and_nearest_first(one: int, other: int) -> None:
    log_start, start = sorted((one, other))
    stretches = list(look_back(start, log_start))
    assert sum(end - begin for begin, end in stretches) == start - log_start
    assert all(begin < end for begin, end in stretches)
    edges = [start, *(begin for begin, _ in stretches)]
    assert [end for _, end in stretches] == edges[:-1]
    assert edges[-1] == log_start


@given(logs(), st.data())
def test_the_index_on_disk_chooses_as_the_selection_does(
    tmp_path_factory: pytest.TempPathFactory, log: list[tuple[int, Event]], data: st.DataObject
) -> None:
    selection = data.draw(selections(log))
    spans = seen(log, 0, len(log), selection)
    known: dict[str, Span] = {}
    put(known, spans)
    wanted = {name for name, one in known.items() if selection.wants(one)}

    async def run(folder: Path) -> None:
        async with SessionIndex(folder) as index:
            await index.see(spans[::2])
            await index.see(spans[1::2])
            homeless = any(selection.homeless(one) for one in known.values())
            assert await index.homeless(selection, 0) == homeless
            assert await index.choose(selection) == len(wanted)
            assert await index.chosen(list(known)) == wanted
            openings = sorted(known[name].opened or 0 for name in wanted if known[name].opened is not None)
            assert await index.next_opening(0, 0) == (openings[0] if openings else None)
            some = sorted(wanted)[:1]
            await index.mark(some, State.BUILT)
            assert await index.chosen(list(known), State.CHOSEN) == wanted - set(some)
            lost, unfinished = await index.lost({0: 0}, 2), await index.unfinished({0: 0}, 2)
            assert lost.total + unfinished.total == len(wanted) - len(some)
            assert len(lost.names) <= 2

    asyncio.run(run(tmp_path_factory.getbasetemp() / "index"))
