"""Waiting for the log's word: bounded in number and time, and nothing is left behind."""

import asyncio

import pytest

from polar.schemas import RecordRef, TaskAccepted, TaskRejected
from polar.submit.view import Answered, Settled, TaskEntry, View
from polar.submit.waiting import TooManyWaiting, Waiters
from tests.submit.records import accepted, ref, session_result, task_result


def fed(view: View, waiters: Waiters, event: object, offset: int, topic: str = "stages") -> None:
    place = RecordRef(topic=topic, partition=0, offset=offset)
    for change in view.apply(event, ref=place, key="k"):  # type: ignore[arg-type]
        waiters.tell(change)


async def test_an_answer_that_comes_later() -> None:
    view = View()
    waiters = Waiters(view, 10)
    asking = [asyncio.create_task(waiters.answer(ref(0, topic="tasks"), 5)) for _ in range(2)]
    await asyncio.sleep(0)
    fed(view, waiters, accepted(), 0)
    assert [isinstance(one, TaskAccepted) for one in await asyncio.gather(*asking)] == [True, True]


async def test_an_answer_that_came_before_the_question() -> None:
    view = View()
    waiters = Waiters(view, 0)
    fed(view, waiters, TaskRejected(task_id="t", answers=ref(0, topic="tasks"), problems=[], at_ms=1), 0)
    assert isinstance(await waiters.answer(ref(0, topic="tasks"), 0), TaskRejected)


async def test_no_answer_in_time() -> None:
    waiters = Waiters(View(), 1)
    assert await waiters.answer(ref(0, topic="tasks"), 0.01) is None
    assert await waiters.answer(ref(0, topic="tasks"), 0.01) is None, "the place is free again"


async def test_the_end_of_a_task() -> None:
    view = View()
    waiters = Waiters(view, 10)
    fed(view, waiters, accepted(), 0)
    waiting = asyncio.create_task(waiters.settled("t", 5))
    await asyncio.sleep(0)
    fed(view, waiters, session_result("t-0"), 0, "results")
    assert not waiting.done()
    fed(view, waiters, task_result(), 1, "results")
    async with asyncio.timeout(5):
        await waiting
    await waiters.settled("t", 0)


async def test_waiting_is_bounded() -> None:
    waiters = Waiters(View(), 1)
    waiting = asyncio.create_task(waiters.answer(ref(0), 5))
    await asyncio.sleep(0)
    with pytest.raises(TooManyWaiting, match="1 requests"):
        waiters.reserve()
    with pytest.raises(TooManyWaiting):
        await waiters.settled("t", 5)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    waiters.reserve()


async def test_a_cancelled_request_does_not_disturb_the_others() -> None:
    waiters = Waiters(View(), 10)
    gone = asyncio.create_task(waiters.answer(ref(0), 5))
    stays = asyncio.create_task(waiters.answer(ref(0), 5))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    waiters.tell(Answered(accepted(answers=ref(0))))
    async with asyncio.timeout(5):
        assert isinstance(await stays, TaskAccepted)


async def test_telling_nobody_is_fine() -> None:
    waiters = Waiters(View(), 1)
    waiters.tell(Answered(accepted()))
    waiters.tell(Settled(TaskEntry("t")))
