"""Waiting for the log's word: bounded in number and time, and nothing is left behind."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.schemas import Event, RecordRef, TaskAccepted, TaskRejected
from polar.submit.entries import Answered, Settled
from polar.submit.view import View
from polar.submit.waiting import TooManyWaiting, Waiters
from tests.submit.records import NAMES, accepted, message, ref, session_result, task_result


@pytest.fixture
async def view(tmp_path: Path) -> AsyncIterator[View]:
    async with await View.open(tmp_path / "view.sqlite") as made:
        yield made


async def fed(view: View, waiters: Waiters, event: Event, offset: int, topic: str = "stages") -> None:
    place = RecordRef(topic=topic, partition=0, offset=offset)
    for change in (await view.apply([message(event, place)], NAMES)).changes:
        waiters.tell(change)


async def test_an_answer_that_comes_later(view: View) -> None:
    waiters = Waiters(view, 10)
    asking = [asyncio.create_task(waiters.answer(ref(0, topic="tasks"), 5)) for _ in range(2)]
    await asyncio.sleep(0)
    await fed(view, waiters, accepted(), 0)
    assert [isinstance(one, TaskAccepted) for one in await asyncio.gather(*asking)] == [True, True]


async def test_an_answer_that_came_before_the_question(view: View) -> None:
    waiters = Waiters(view, 0)
    await fed(view, waiters, TaskRejected(task_id="t", answers=ref(0, topic="tasks"), problems=[], at_ms=1), 0)
    assert isinstance(await waiters.answer(ref(0, topic="tasks"), 0), TaskRejected)


async def test_no_answer_in_time(view: View) -> None:
    waiters = Waiters(view, 1)
    assert await waiters.answer(ref(0, topic="tasks"), 0.01) is None
    assert await waiters.answer(ref(0, topic="tasks"), 0.01) is None, "the place is free again"


async def test_the_end_of_a_task(view: View) -> None:
    waiters = Waiters(view, 10)
    await fed(view, waiters, accepted(), 0)
    waiting = asyncio.create_task(waiters.settled("t", 5))
    await fed(view, waiters, session_result("t-0"), 0, "results")
    assert not waiting.done()
    await fed(view, waiters, task_result(), 1, "results")
    async with asyncio.timeout(5):
        await waiting
    await waiters.settled("t", 0)


async def test_waiting_is_bounded(view: View) -> None:
    waiters = Waiters(view, 1)
    waiting = asyncio.create_task(waiters.answer(ref(0), 5))
    await asyncio.sleep(0)
    with pytest.raises(TooManyWaiting, match="1 requests"):
        waiters.reserve()
    with pytest.raises(TooManyWaiting):
        await waiters.settled("t", 5)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    waiters.reserve()


async def test_a_cancelled_request_does_not_disturb_the_others(view: View) -> None:
    waiters = Waiters(view, 10)
    gone = asyncio.create_task(waiters.answer(ref(0), 5))
    stays = asyncio.create_task(waiters.answer(ref(0), 5))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    waiters.tell(Answered(accepted(answers=ref(0))))
    async with asyncio.timeout(5):
        assert isinstance(await stays, TaskAccepted)


async def test_telling_nobody_is_fine(view: View) -> None:
    waiters = Waiters(view, 1)
    waiters.tell(Answered(accepted()))
    waiters.tell(Settled("t"))
