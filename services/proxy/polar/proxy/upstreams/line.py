"""Who may call an engine now, and who waits: so many seats, a queue of so much room, first come first served.

Promises: never more seated than seats; whoever waits is seated in the order of coming; nobody is seated while the line
is shut. It knows neither HTTP nor engines nor time: how long one waits is its members' own affair. Everything here
happens at once, so it never holds the loop.
"""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar


class Member(Protocol):
    def turn(self) -> None:
        """Called when it is seated after it has waited."""


MemberT = TypeVar("MemberT", bound=Member)


class Full(Exception):
    """Every seat is taken and nobody more may wait."""


class Line(Generic[MemberT]):
    """The line of one engine."""

    def __init__(self, *, seats: int, room: int) -> None:
        self.seats = seats
        self.room = room
        """How many may wait."""
        self.is_shut = False
        """Nobody is seated; those who sit may stay."""
        self._seated: dict[MemberT, None] = {}
        self._waiting: dict[MemberT, None] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def seated(self) -> tuple[MemberT, ...]:
        return tuple(self._seated)

    @property
    def waiting(self) -> tuple[MemberT, ...]:
        """In the order in which they are seated."""
        return tuple(self._waiting)

    @property
    def sizes(self) -> tuple[int, int]:
        """How many sit and how many wait."""
        return len(self._seated), len(self._waiting)

    def join(self, member: MemberT) -> bool:
        """Seat `member` or let it wait; whether it is seated, at once and without its `turn`.

        Raises:
            Full: neither is possible.
        """
        if self._has_seat and not self._waiting:
            self._seat(member)
            return True
        if len(self._waiting) >= self.room:
            raise Full
        self._waiting[member] = None
        return False

    def leave(self, member: MemberT) -> None:
        """Give up the seat or the wait; nothing where it has neither."""
        self._waiting.pop(member, None)
        if member in self._seated:
            del self._seated[member]
            self._advance()

    def shut(self) -> None:
        self.is_shut = True

    def reopen(self) -> None:
        self.is_shut = False
        self._advance()

    async def idle(self) -> None:
        """Wait until nobody sits."""
        await self._idle.wait()

    @property
    def _has_seat(self) -> bool:
        return not self.is_shut and len(self._seated) < self.seats

    def _seat(self, member: MemberT) -> None:
        self._seated[member] = None
        self._idle.clear()

    def _advance(self) -> None:
        while self._waiting and self._has_seat:
            member = next(iter(self._waiting))
            del self._waiting[member]
            self._seat(member)
            member.turn()
        if not self._seated:
            self._idle.set()
