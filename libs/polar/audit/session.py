"""One session's facts, by what they are. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from .facts import (
    Accepted,
    Captured,
    Closed,
    Fact,
    Failed,
    Fenced,
    Final_,
    Graded,
    LeaseRow,
    Opened,
    Placed,
    Reported,
    Result,
    Revised,
    Started,
    Trajected,
)

F = TypeVar("F", bound=Fact)


class Session:
    """A session's facts by what they are, each kind in the order of the log."""

    def __init__(self, name: str, facts: Iterable[Placed]) -> None:
        self.name = name
        self._by: dict[type[Fact], list[Placed]] = {}
        for one in facts:
            self._by.setdefault(type(one.fact), []).append(one)
        trajectories = self._by.get(Trajected, [])
        self.built: list[Any] = [one for one in trajectories if one.place.topic == "built"]
        self.published: list[Any] = [one for one in trajectories if one.place.topic == "trajectories"]
        grades = {one.place for one in self.of(Graded)}
        # what an operator wrote once more is the same grade
        first = [one for one in self.of(Graded) if one.fact.again not in grades]
        self.graded: list[Any] = [one for one in first if one.fact.revision == 0]
        self.regraded: list[Any] = [one for one in first if one.fact.revision > 0]
        self.places = {one.place: one.fact for ones in self._by.values() for one in ones}

    def of(self, kind: type[F]) -> list[Any]:
        """Facts of a kind, each a `Placed`."""
        return self._by.get(kind, [])

    def first(self, kind: type[F]) -> Any | None:
        found = self.of(kind)
        return found[0] if found else None

    @property
    def in_completions(self) -> list[Placed]:
        kinds = (Opened, Fenced, Closed, Final_, Started, Captured, Failed)
        return [one for kind in kinds for one in self._by.get(kind, [])]

    @property
    def opened_ms(self) -> int:
        """When it began, 0 where nothing tells: what was written since is younger."""
        opened, accepted = self.first(Opened), self.first(Accepted)
        if opened is not None:
            return int(opened.fact.at_ms)
        return 0 if accepted is None else int(accepted.fact.at_ms)

    @property
    def task(self) -> str | None:
        kinds = (Opened, Accepted, Graded, Trajected, Result, LeaseRow)
        found = (one.fact.task for kind in kinds for one in self.of(kind))
        return next((str(one) for one in found if one is not None), None)

    @property
    def group(self) -> str | None:
        kinds = (Opened, Graded, Trajected, Result, LeaseRow)
        return next(
            (str(one.fact.group) for kind in kinds for one in self.of(kind) if one.fact.group is not None), None
        )

    @property
    def possible_groups(self) -> list[str]:
        """Its group, or, where no record of its own tells, those that its acceptance leaves."""
        known, accepted = self.group, self.first(Accepted)
        if known is not None:
            return [known]
        # a task that is no group and too large for one has a group for each session
        return [self.name] if accepted is None else [accepted.fact.group or self.name, self.name]


def what(fact: Fact) -> str:
    """A fact as people name its record."""
    names = {
        Opened: "SessionOpened",
        Fenced: "AttemptFenced",
        Closed: "SessionClosed",
        Final_: "SessionFinal",
        Started: "CallStarted",
        Captured: "CompletionCaptured",
        Failed: "CompletionFailed",
        Trajected: "a trajectory",
        Graded: "SessionGraded",
        Result: "SessionResult",
        Reported: "a report",
        Revised: "RewardRevised",
        LeaseRow: "a lease",
        Accepted: "TaskAccepted",
    }
    return names.get(type(fact), type(fact).__name__)
