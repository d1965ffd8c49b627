"""Time and randomness that tests own."""

from __future__ import annotations

import asyncio
import uuid

from polar.service.clock import ManualClock, SystemClock
from polar.service.randomness import SeededRandomness, SystemRandomness, new_id


async def test_sleepers_wake_in_the_order_of_their_times() -> None:
    clock = ManualClock(now_ms=1000)
    woken: list[tuple[str, int]] = []

    async def sleep(name: str, s: float) -> None:
        await clock.sleep(s)
        woken.append((name, clock.now_ms()))

    tasks = [asyncio.create_task(sleep(name, s)) for name, s in (("late", 3), ("early", 1), ("middle", 2))]
    await clock.advance(0)
    assert clock.sleepers == 3
    await clock.advance(2.5)
    assert woken == [("early", 2000), ("middle", 3000)]
    assert clock.now_ms() == 3500
    await clock.advance(1)
    await asyncio.gather(*tasks)
    assert woken[-1] == ("late", 4000)


async def test_one_that_sleeps_again_is_woken_again_within_the_same_step() -> None:
    clock = ManualClock()
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await clock.sleep(1)
            beats += 1

    task = asyncio.create_task(beat())
    await clock.advance(5)
    assert beats == 5
    task.cancel()


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = ManualClock()
    task = asyncio.create_task(clock.sleep(1))
    await clock.advance(0)
    task.cancel()
    await clock.advance(2)
    assert clock.sleepers == 0


def test_the_system_clock_runs_on() -> None:
    clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.now_ms() > 1_700_000_000_000


def test_ids_are_uuid7_of_the_clock_and_the_same_for_the_same_seed() -> None:
    clock = ManualClock(now_ms=1_763_700_000_000)
    first, second = (new_id(clock, SeededRandomness(seed)) for seed in (1, 1))
    assert first == second != new_id(clock, SeededRandomness(2))
    assert uuid.UUID(first).version == 7
    assert uuid.UUID(first).int >> 80 == 1_763_700_000_000
    assert new_id(clock, SystemRandomness()) != new_id(clock, SystemRandomness())
