"""What a dialect is. No I/O: a new one is a module here, a row in the route table and the conformance suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..calls import Call, Delta, Json, Reply
from ..errors import ProxyError


class Limits(NamedTuple):
    """What a request may ask for."""

    max_choices: int


class Told(NamedTuple):
    """What every body of one reply repeats."""

    completion_id: str
    created: int
    """Seconds since the epoch."""
    model: str
    """As the client asked for it."""


class StreamEncoder(Protocol):
    """The events of one streamed reply, as bytes."""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Deltas in order; closes nothing."""

    def finish(self, reply: Reply) -> bytes:
        """All events that close the reply; called once, after the broker's acknowledgement."""

    def error(self, error: ProxyError) -> bytes:
        """An error after the status was sent."""

    def keepalive(self, beat: int) -> bytes:
        """Something that says nothing; `beat` counts from 0."""


class Dialect(Protocol):
    """One provider's API over chat."""

    name: str
    """As recorded: `openai.chat`, …."""

    def parse(self, body: bytes, limits: Limits) -> Call:
        """Raises `BadRequest` naming the field."""

    def reply(self, call: Call, told: Told, reply: Reply) -> bytes:
        """The body of a reply that is not streamed."""

    def stream(self, call: Call, told: Told) -> StreamEncoder: ...

    def error(self, error: ProxyError) -> Json:
        """The body of an error."""
