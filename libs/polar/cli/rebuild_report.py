"""What `polar rebuild` says of its work, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from polar.schemas import Trajectory

from .counting import counted
from .output import complain
from .times import Window

if TYPE_CHECKING:
    from polar.builder.rebuilding import Left

SHOWN = 5
"""Sessions named in a line for people; `--json` names more."""
MOST_NAMES = 10_000
"""Of sessions that differ: a new version of a builder may change all of a million."""


@dataclass(slots=True)
class Tally:
    """What came of it."""

    sessions: int = 0
    traces: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Trajectories that are an error without traces, by message."""
    strategies: Counter[str] = field(default_factory=Counter)
    """Strategy and version."""
    rewarded: int = 0
    revised: int = 0
    without_outcome: int = 0
    groups: int = 0
    groups_in_part: int = 0
    same: int = 0
    expired: int = 0
    differing: int = 0
    different: dict[str, str] = field(default_factory=dict)
    """By session: how; the first `MOST_NAMES`."""

    def add(self, trajectory: Trajectory) -> None:
        """One session built again."""
        self.sessions += 1
        self.traces += len(trajectory.traces)
        self.strategies[f"{trajectory.builder.strategy} {trajectory.builder_version}"] += 1
        if trajectory.error is not None:
            self.failed[trajectory.error.message] += 1


def incomplete(tally: Tally, left: Left, *, named: bool, check: bool) -> bool:
    """Whether something that was asked for is missing or wrong."""
    if left.lost.total or left.failed or left.unknown or tally.differing:
        return True
    if check:
        return tally.sessions > 0 and not tally.same  # nothing was there to compare with
    return bool(tally.failed) or (named and left.unfinished.total > 0)


def summary(tally: Tally, left: Left, told: str) -> dict[str, Any]:
    """For programs."""
    return {
        "target": told,
        "sessions": tally.sessions,
        "traces": tally.traces,
        "builders": dict(tally.strategies),
        "errors": dict(tally.failed),
        "rewarded": tally.rewarded,
        "revised": tally.revised,
        "without_outcome": tally.without_outcome,
        "groups": tally.groups,
        "groups_in_part": tally.groups_in_part,
        "same": tally.same,
        "expired": tally.expired,
        "differing": tally.differing,
        "different": tally.different,
        "lost": {"total": left.lost.total, "sessions": left.lost.names},
        "unfinished": {"total": left.unfinished.total, "sessions": left.unfinished.names},
        "failed": left.failed,
        "unknown": list(left.unknown),
        "strangers": left.strangers,
        "unreadable": left.unreadable,
    }


def report(out: Console, tally: Tally, left: Left, told: str, times: Window, *, check: bool) -> None:
    """For people: what was done on standard output, what is missing on standard error."""

    def say(text: str) -> None:
        out.print(text, markup=False, soft_wrap=True)

    builders = ", ".join(f"{count} by {name}" for name, count in tally.strategies.most_common())
    if not tally.sessions:
        say(f"no session to build ({times})")
    elif check:
        built = counted(tally.sessions, "session")
        say(f"{built} built again ({builders}): {tally.same} byte for byte as in polar.built")
        if tally.expired:
            say(f"  {tally.expired} could not be compared: polar.built no longer has records of that age")
    else:
        what = f"{counted(tally.sessions, 'session')}, {counted(tally.traces, 'trace')}"
        say(f"{what} ({builders}) to {told}")
        if tally.rewarded or tally.without_outcome or tally.groups or tally.groups_in_part:
            groups = counted(tally.groups, "group")
            say(f"  {tally.rewarded} with a reward, {tally.revised} of them revised; {groups} closed")
        if tally.without_outcome:
            say(f"  {tally.without_outcome} have no outcome on the log yet, and so no reward")
        if tally.groups_in_part:
            groups = counted(tally.groups_in_part, "group")
            say(f"  {groups} not closed there: not all of their sessions were built again")
    if not check:  # what is an error in `polar.built` is to be one here
        for message, count in tally.failed.most_common(SHOWN):
            _tell(f"{counted(count, 'session')} became an error without traces: {message}")
    _complaints(tally, left)


def _complaints(tally: Tally, left: Left) -> None:
    for name, difference in list(tally.different.items())[:SHOWN]:
        _tell(f"session {name} differs: {difference}")
    if tally.differing > SHOWN:
        _tell(f"… and {tally.differing - SHOWN} more sessions differ (--json names them)")
    for name, reason in list(left.failed.items())[:SHOWN]:
        _tell(f"session {name} could not be built: {reason}")
    if left.lost.total:
        _tell(f"{counted(left.lost.total, 'session')} lost, the log no longer has the start: {_some(left.lost)}")
    if left.unfinished.total:
        _tell(f"{counted(left.unfinished.total, 'session')} not finished yet: {_some(left.unfinished)}")
    for what in left.unknown:
        _tell(f"{what}: nothing is on the log (never opened, or older than it)")
    if left.strangers:
        sessions = counted(left.strangers, "session")
        _tell(f"{sessions} of that time: the log no longer has the start, which would name the task")
    if left.unreadable:
        _tell(f"{counted(left.unreadable, 'record')} left out: not readable by this version, nor by its builder")


def _some(named: Any) -> str:
    names: Iterable[str] = named.names[:SHOWN]
    more = named.total - min(len(named.names), SHOWN)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _tell(text: str) -> None:
    complain().print(text, markup=False, soft_wrap=True)
