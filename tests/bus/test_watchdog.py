"""What stands still and what only has nothing to do."""

from __future__ import annotations

from polar.bus.partition import Progress
from polar.bus.watchdog import FLAPS, Watchdog


def at(number: int, **more: int) -> Progress:
    return Progress(next=number, furthest=number, processed=number, opened=1, live=True, **more)


def test_a_partition_at_the_end_of_its_log_never_stands_still() -> None:
    dog = Watchdog(10, 3)
    assert not any(dog.stands_still(0, at(5), end=5, now=float(now)) for now in range(0, 1000, 5))


def test_a_partition_that_moves_does_not_stand_still_however_far_behind() -> None:
    dog = Watchdog(10, 3)
    assert not any(dog.stands_still(0, at(now), end=1_000_000, now=float(now)) for now in range(0, 1000, 9))


def test_records_that_wait_for_the_whole_limit_are_noticed() -> None:
    dog = Watchdog(10, 3)
    assert [dog.stands_still(0, at(5), end=6, now=now) for now in (0.0, 9.9, 10.0)] == [False, False, True]


def test_rebuilding_a_long_state_is_movement() -> None:
    dog = Watchdog(10, 3)
    progress = Progress(opened=1)
    for now in range(0, 100, 9):
        progress.replayed += 1
        assert not dog.stands_still(0, progress, end=100, now=float(now))


def test_opening_again_and_again_without_getting_on_is_noticed_though_the_state_is_rebuilt_each_time() -> None:
    dog = Watchdog(10, 3)
    progress = Progress(next=5, furthest=5)
    found = []
    for now in range(0, 12, 2):
        progress.opened += 1
        progress.replayed += 50
        found.append(dog.stands_still(0, progress, end=100, now=float(now)))
    assert progress.opened > FLAPS
    assert found == [False] * 5 + [True]


def test_time_in_which_the_log_cannot_be_asked_does_not_count() -> None:
    dog = Watchdog(10, 3)
    assert not dog.stands_still(0, at(5), end=6, now=0.0)
    dog.unknown(100.0)
    assert not dog.stands_still(0, at(5), end=6, now=109.0)
    assert dog.stands_still(0, at(5), end=6, now=110.0)


def test_it_is_given_up_after_so_many_new_starts_in_a_row_and_anything_done_begins_the_count_anew() -> None:
    dog = Watchdog(10, 2)
    progress, now = at(5), 0.0
    assert not dog.stands_still(0, progress, end=9, now=now)
    for times in (1, 2):
        now += 10
        assert dog.stands_still(0, progress, end=9, now=now)
        assert not dog.given_up(0)
        assert dog.restarted(0, now) == times
        progress.opened += 1
        assert not dog.stands_still(0, progress, end=9, now=now)
    assert dog.given_up(0)
    progress.processed += 1
    assert not dog.stands_still(0, progress, end=9, now=now + 1)
    assert not dog.given_up(0)
