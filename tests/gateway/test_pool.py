"""Slots: how many work at once, in which order, and how they are stopped."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from polar.gateway.pool import Pool, Stop, Stopped, Why


class Bench:
    """Workers that end when they are told to."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: dict[str, str] = {}
        self.crashed: dict[str, Exception] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.changed = asyncio.Event()

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    def _say(self) -> None:
        self.changed.set()

    async def work(self, name: str, stop: Stop) -> None:
        self.started.append(name)
        self._say()
        try:
            await stop.unless(self.gate(name).wait())
            if name.startswith("bad"):
                raise RuntimeError(name)
            self.ended[name] = "done"
        except Stopped as stopped:
            self.ended[name] = f"{stopped.why}: {stopped.reason}"
        except asyncio.CancelledError:
            self.ended[name] = "cancelled"
            raise
        finally:
            self._say()

    async def failed(self, name: str, error: Exception) -> None:
        self.crashed[name] = error
        self._say()

    async def until(self, condition: object) -> None:
        assert callable(condition)
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def running(pool: Pool) -> AsyncIterator[None]:
    task = asyncio.create_task(pool.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_no_more_than_the_slots_run_and_the_rest_comes_in_order():
    bench = Bench()
    pool = Pool("p", 2, bench.work, bench.failed)
    for name in "abcd":
        pool.add(name)
    pool.add("a")
    async with running(pool):
        await bench.until(lambda: bench.started == ["a", "b"])
        assert (pool.running, pool.waiting) == (2, 2)
        bench.gate("b").set()
        await bench.until(lambda: bench.started == ["a", "b", "c"])
        for name in "acd":
            bench.gate(name).set()
        await bench.until(lambda: len(bench.ended) == 4)
        await pool.idle()
        assert pool.running == 0


async def test_one_is_stopped_and_the_others_go_on():
    bench = Bench()
    pool = Pool("p", 2, bench.work, bench.failed)
    pool.add("a")
    pool.add("b")
    async with running(pool):
        await bench.until(lambda: len(bench.started) == 2)
        pool.stop("a", Why.REVOKED, "cancelled")
        pool.stop("a", Why.DRAIN, "later")
        pool.stop("unknown", Why.REVOKED, "nobody")
        await bench.until(lambda: "a" in bench.ended)
        assert bench.ended == {"a": "revoked: cancelled"}
        assert pool.running == 1


async def test_an_unforeseen_failure_is_told_and_frees_the_slot():
    bench = Bench()
    pool = Pool("p", 1, bench.work, bench.failed)
    pool.add("bad")
    pool.add("good")
    bench.gate("bad").set()
    async with running(pool):
        await bench.until(lambda: bench.started == ["bad", "good"])
        assert isinstance(bench.crashed["bad"], RuntimeError)


async def test_room_is_asked_again_at_each_wake():
    bench = Bench()
    allowed = False

    async def room(now: int) -> bool:
        return allowed

    pool = Pool("p", 2, bench.work, bench.failed, room)
    pool.add("a")
    async with running(pool):
        bench.gate("a").set()
        await asyncio.sleep(0)
        assert bench.started == []
        allowed = True
        pool.wake()
        await bench.until(lambda: bench.ended == {"a": "done"})


async def test_a_pause_lets_what_runs_go_on_and_starts_nothing():
    bench = Bench()
    pool = Pool("p", 1, bench.work, bench.failed)
    pool.add("a")
    pool.add("b")
    async with running(pool):
        await bench.until(lambda: bench.started == ["a"])
        pool.pause()
        bench.gate("a").set()
        await pool.idle()
        assert bench.ended == {"a": "done"}
        assert pool.waiting == 1


async def test_the_end_of_the_pool_cancels_its_workers_and_waits_for_them():
    bench = Bench()
    pool = Pool("p", 2, bench.work, bench.failed)
    pool.add("a")
    async with running(pool):
        await bench.until(lambda: bench.started == ["a"])
    assert bench.ended == {"a": "cancelled"}


async def test_stopped_work_is_over_before_stopped_is_raised():
    over = False

    async def stubborn() -> None:
        nonlocal over
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            over = True

    stop = Stop()
    asyncio.get_running_loop().call_soon(stop.set, Why.REVOKED, "now")
    with pytest.raises(Stopped, match="now"):
        await stop.unless(stubborn())
    assert over


async def test_a_result_that_is_there_wins_over_a_stop():
    async def quick() -> int:
        return 7

    stop = Stop()
    assert await stop.unless(quick()) == 7
