"""What a dialect is. No I/O: a new one is a module here, a row in the route table and the conformance suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from ..calls import Call, Delta, Json, Reply
from ..errors import BadRequest, ProxyError

OrRefuse = Literal["drop", "refuse"]


class Limits(NamedTuple):
    """What a request may ask for, and what becomes of what it may not."""

    max_choices: int
    provider_tools: OrRefuse = "drop"
    """Tools that a provider runs itself, and their traces in a history."""
    foreign_thinking: OrRefuse = "drop"
    """Thinking that only its provider can read."""
    image_urls: Literal["refuse", "allow"] = "refuse"
    """Images that the engine would have to fetch."""
    thinking_switch: Literal["client", "template"] = "client"
    """Who says whether the model thinks: the request, or the chat template's default."""


class Told(NamedTuple):
    """What every body of one reply repeats."""

    completion_id: str
    created: int
    """Seconds since the epoch."""
    model: str
    """As the client asked for it."""


class StreamEncoder(Protocol):
    """The events of one streamed reply, as bytes. Nothing that `deltas` and `keepalive` give closes anything."""

    def prompt(self, tokens: int) -> None:
        """The prompt's length, once it is known; of use to a dialect that tells it first."""
        return

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Deltas in order; closes nothing. Empty: all of them wait for the end."""
        ...

    def finish(self, reply: Reply) -> bytes:
        """All events that close the reply; called once, after the broker's acknowledgement."""
        ...

    def error(self, error: ProxyError) -> bytes:
        """An error after the status was sent."""
        ...

    def keepalive(self, beat: int) -> bytes:
        """Something that says nothing; `beat` counts from 0."""
        ...


class Dialect(Protocol):
    """One provider's API over chat. Subclassing it gives what most providers do alike."""

    name: str
    """As recorded: `openai.chat`, …."""

    def parse(self, body: bytes, limits: Limits) -> Call:
        """Raises `BadRequest` naming the field."""
        ...

    def reply(self, call: Call, told: Told, reply: Reply) -> bytes:
        """The body of a reply that is not streamed."""
        ...

    def stream(self, call: Call, told: Told) -> StreamEncoder: ...

    def error(self, error: ProxyError, request_id: str | None = None) -> Json:
        """The body of an error."""
        ...

    def status(self, error: ProxyError) -> int:
        """The HTTP status of an error."""
        return error.status

    def headers(self, request_id: str) -> dict[str, str]:
        """Of every answer."""
        return {"X-Request-Id": request_id}


@runtime_checkable
class Counting(Protocol):
    """A dialect with a request that only counts a prompt's tokens."""

    def parse_count(self, body: bytes, limits: Limits) -> Call:
        """Raises `BadRequest` naming the field."""

    def counted(self, tokens: int) -> bytes:
        """The body of the answer."""


def json_object(body: bytes) -> Json:
    """A request's body.

    Raises:
        BadRequest: it is no JSON object.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadRequest("The body is not valid JSON.") from None
    except RecursionError:
        raise BadRequest("The body is nested too deep.") from None
    if not isinstance(raw, dict):
        raise BadRequest("The body must be a JSON object.")
    return raw
