"""Between a call that is made and those who hear of it: one client that waits, or whoever comes back for it.

Plain interfaces. It knows neither HTTP nor engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .calls import Delta, Reply
from .dialects import Told
from .early import Prompted
from .errors import ProxyError


class Audience(Protocol):
    """Who hears of a call while it runs."""

    def answered(self) -> bool:
        """Whether a client has its status, which is then 200 whatever comes."""
        ...

    def status(self, error: ProxyError) -> int | None:
        """What a client that has none yet is answered; None: there is no client."""
        ...

    def prompt(self, tokens: int) -> None:
        """The prompt's length."""
        ...

    async def tell(self, deltas: Sequence[Delta]) -> None:
        """What may be told by now, each delta once, in order. Raises `ClientGone`, which ends the call."""
        ...


class Outcome(NamedTuple):
    """A reply that is on the log, and what of it was not told before."""

    reply: Reply
    rest: Sequence[Delta]


class Work(Protocol):
    """A call that is to be made: `generation.Generation`."""

    @property
    def told(self) -> Told: ...

    @property
    def choices(self) -> int:
        """How many replies were asked for."""
        ...

    async def before_early(self, encoder: Prompted) -> bool:
        """Whether headers may go out that an error then cannot have: `early.count_first`."""
        ...

    async def made(self, audience: Audience, settled: Callable[[], None]) -> Outcome:
        """Generate and capture; `settled` is called when nothing of the call is left to write to the log.

        Raises:
            ProxyError: what the client is to be told instead of a reply.
        """
        ...
