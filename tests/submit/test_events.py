"""The stream of events: bounded, resumable by place on the log, slow watchers cut off."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.schemas import RecordRef, Stage
from polar.submit.entries import Moved
from polar.submit.events import Cut, EventHub, Filter, Gap, Told, TooManyWatchers, Watcher, parse_position
from polar.submit.sse import frame
from tests.submit.records import accepted, moved

ALL = Filter()


def event(partition: int, offset: int, session: str = "t-0") -> Moved:
    return Moved(moved(session, Stage.RUNNING), RecordRef(topic="stages", partition=partition, offset=offset))


def hub(*, kept: int = 100, queue: int = 10, watchers: int = 5) -> EventHub:
    return EventHub(2, kept=kept, queue=queue, watchers=watchers)


async def drain(watcher: Watcher, count: int) -> list[Told | Gap | Cut]:
    async with asyncio.timeout(5):
        return [await watcher.get() for _ in range(count)]


async def test_a_watcher_gets_what_comes_after_it_came() -> None:
    stream = hub()
    stream.publish(event(0, 0))
    watcher = stream.watch(ALL, None)
    assert watcher.start == "1.0"
    stream.publish(event(1, 4))
    (told,) = await drain(watcher, 1)
    assert isinstance(told, Told)
    assert (told.id, told.moved.ref.partition) == ("1.5", 1)


async def test_a_waiting_watcher_is_woken() -> None:
    stream = hub()
    watcher = stream.watch(ALL, None)
    waiting = asyncio.create_task(watcher.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.publish(event(0, 0))
    async with asyncio.timeout(5):
        assert isinstance(await waiting, Told)


async def test_a_watcher_that_comes_back_misses_nothing() -> None:
    stream = hub()
    watcher = stream.watch(ALL, None)
    for offset in range(3):
        stream.publish(event(0, offset))
    first, *_ = await drain(watcher, 1)
    assert isinstance(first, Told)
    stream.unwatch(watcher)
    stream.publish(event(1, 0))
    again = stream.watch(ALL, first.id)
    assert again.start == first.id
    found = await drain(again, 3)
    assert [one.moved.ref.offset for one in found if isinstance(one, Told)] == [1, 2, 0]


async def test_another_process_that_read_in_another_order_goes_on_where_the_first_was() -> None:
    one, other = hub(), hub()
    records = [event(0, 0), event(0, 1), event(1, 0), event(1, 1)]
    for index in (0, 1, 2, 3):
        one.publish(records[index])
    for index in (2, 0, 3, 1):
        other.publish(records[index])
    watcher = one.watch(ALL, "0.0")
    seen = [told for told in await drain(watcher, 3) if isinstance(told, Told)]
    rest = await drain(other.watch(ALL, seen[-1].id), 1)
    assert [told.moved for told in rest if isinstance(told, Told)] == [records[3]]


async def test_what_is_no_longer_kept_is_said_to_be_missing() -> None:
    stream = hub(kept=2)
    for offset in range(5):
        stream.publish(event(0, offset))
    gap, *rest = await drain(stream.watch(ALL, "1.0"), 3)
    assert isinstance(gap, Gap)
    assert [one.moved.ref.offset for one in rest if isinstance(one, Told)] == [3, 4]
    whole = await drain(stream.watch(ALL, "3.0"), 2)
    assert all(isinstance(one, Told) for one in whole), "nothing is missing after offset 3"


async def test_what_left_the_log_before_is_missing_too() -> None:
    stream = hub()
    stream.publish(event(0, 100))
    gap, told = await drain(stream.watch(ALL, "7.0"), 2)
    assert isinstance(gap, Gap)
    assert isinstance(told, Told)


@pytest.mark.parametrize("last", ["abc", "1", "1.2.3", "-1.0", "1.x", "9" * 30 + ".0"])
async def test_a_position_that_is_none_is_said_to_be(last: str) -> None:
    stream = hub()
    stream.publish(event(0, 0))
    watcher = stream.watch(ALL, last)
    (gap,) = await drain(watcher, 1)
    assert isinstance(gap, Gap)
    assert watcher.start == "1.0"


async def test_a_slow_watcher_is_cut_off_with_a_reason_and_the_others_are_not() -> None:
    stream = hub(queue=3)
    slow, quick = stream.watch(ALL, None), stream.watch(ALL, None)
    for offset in range(10):
        stream.publish(event(0, offset))
        await drain(quick, 1)
    *told, cut = await drain(slow, 5)
    assert all(isinstance(one, Told) for one in told)
    assert isinstance(cut, Cut)
    assert cut.code == "slow_client"
    assert isinstance(await slow.get(), Cut), "and nothing follows"


async def test_what_a_returning_watcher_is_handed_does_not_count_as_slowness() -> None:
    stream = hub(queue=1)
    for offset in range(50):
        stream.publish(event(0, offset))
    found = await drain(stream.watch(ALL, "0.0"), 50)
    assert all(isinstance(one, Told) for one in found)


async def test_filters() -> None:
    stream = hub()
    task = stream.watch(Filter(task_id="t"), None)
    session = stream.watch(Filter(session_id="t-1"), None)
    stream.publish(event(0, 0, "u-0"))
    stream.publish(event(0, 1, "t-0"))
    stream.publish(Moved(accepted("t"), RecordRef(topic="stages", partition=0, offset=2)))
    stream.publish(event(0, 3, "t-1"))
    assert [one.moved.ref.offset for one in await drain(task, 3) if isinstance(one, Told)] == [1, 2, 3]
    assert [one.moved.ref.offset for one in await drain(session, 1) if isinstance(one, Told)] == [3]


async def test_watchers_are_bounded() -> None:
    stream = hub(watchers=2)
    first = stream.watch(ALL, None)
    stream.watch(ALL, None)
    with pytest.raises(TooManyWatchers, match="2 watchers"):
        stream.watch(ALL, None)
    stream.unwatch(first)
    stream.watch(ALL, None)


async def test_closing_tells_every_watcher_after_what_is_queued() -> None:
    stream = hub()
    watcher = stream.watch(ALL, None)
    stream.publish(event(0, 0))
    stream.close()
    told, cut = await drain(watcher, 2)
    assert isinstance(told, Told)
    assert isinstance(cut, Cut)
    assert cut.code == "shutdown"
    assert isinstance((await drain(stream.watch(ALL, None), 1))[0], Cut), "a late one too"


def test_frames_are_server_sent_events() -> None:
    told = Told(event(0, 3), "4.0")
    text = frame(told).decode()
    assert text.startswith('event: stage\nid: 4.0\ndata: {"type":"stage","session_id":"t-0"')
    assert text.endswith("\n\n")
    assert text.count("\n") == 4, "data is one line"
    assert frame(None) == b": ping\n\n"
    assert frame(Gap("x")) == b'event: gap\ndata: {"message":"x"}\n\n'
    assert frame(Cut("slow_client", "y")) == b'event: cut\ndata: {"code":"slow_client","message":"y"}\n\n'


@given(st.lists(st.integers(0, 2**60), min_size=1, max_size=10))
def test_positions_round_trip(offsets: list[int]) -> None:
    assert parse_position(".".join(map(str, offsets)), len(offsets)) == offsets


@given(st.text(max_size=20))
def test_any_text_is_a_position_or_none(text: str) -> None:
    found = parse_position(text, 2)
    assert found is None or all(one >= 0 for one in found)
