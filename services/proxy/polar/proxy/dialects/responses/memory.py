"""What this replica told its sessions and was asked to store: `previous_response_id`, item references, retrieval.

Promises: a session is told only of its own attempt's responses; only what a client was told is kept; memory is bounded,
and what is forgotten is answered as the provider answers what it does not have; what is over is freed. It knows neither
HTTP nor Kafka.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from polar.service.tokens import SessionToken

from ...calls import Json

Key = tuple[str, int]
"""Session and attempt."""


class Stored(NamedTuple):
    """A response as it was told, and the items that it answered beside its predecessor's; both as JSON."""

    body: bytes
    asked: bytes
    previous: str | None

    @property
    def size(self) -> int:
        return len(self.body) + len(self.asked)

    @property
    def input(self) -> list[Json]:
        found: list[Json] = msgspec.json.decode(self.asked)
        return found

    @property
    def output(self) -> list[Json]:
        found: list[Json] = msgspec.json.decode(self.body)["output"]
        return found


@dataclass(slots=True)
class _Attempt:
    responses: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    size: int = 0


class Responses:
    """The responses of the attempts that called last, as far as memory goes.

    `attempt_bytes`: of one attempt, whose oldest are forgotten first. `total_bytes`: of all together; beyond, the
    attempt that was quiet longest is forgotten.
    """

    def __init__(self, *, attempt_bytes: int, total_bytes: int) -> None:
        self._attempt_bytes = attempt_bytes
        self._total_bytes = total_bytes
        self._attempts: OrderedDict[Key, _Attempt] = OrderedDict()
        self.size = 0
        """Bytes held, about."""

    def of(self, token: SessionToken) -> Recall:
        """What one attempt may see."""
        return Recall(self, (token.session_id, token.attempt))

    def nobody(self) -> Recall:
        """A memory that holds nothing."""
        return Recall(self, ("", -1))

    def get(self, key: Key, response_id: str) -> Stored | None:
        attempt = self._attempts.get(key)
        return None if attempt is None else attempt.responses.get(response_id)

    def all(self, key: Key) -> list[Stored]:
        """An attempt's, the newest first."""
        attempt = self._attempts.get(key)
        return [] if attempt is None else list(reversed(attempt.responses.values()))

    def add(self, key: Key, response_id: str, stored: Stored) -> None:
        if stored.size > min(self._attempt_bytes, self._total_bytes):
            return
        attempt = self._attempts.setdefault(key, _Attempt())
        self._attempts.move_to_end(key)
        attempt.responses[response_id] = stored
        attempt.size += stored.size
        self.size += stored.size
        while attempt.size > self._attempt_bytes:
            _, oldest = attempt.responses.popitem(last=False)
            attempt.size -= oldest.size
            self.size -= oldest.size
        while self.size > self._total_bytes:
            self._forget(next(iter(self._attempts)))

    def close(self, session_id: str, attempt: int) -> None:
        """Forget the attempts of a session up to `attempt`, which are over."""
        for number in range(attempt + 1):
            self._forget((session_id, number))

    def _forget(self, key: Key) -> None:
        attempt = self._attempts.pop(key, None)
        if attempt is not None:
            self.size -= attempt.size


class Recall:
    """The memory of one attempt."""

    def __init__(self, responses: Responses, key: Key) -> None:
        self._responses = responses
        self._key = key

    def response(self, response_id: str) -> Stored | None:
        """A response by its id."""
        return self._responses.get(self._key, response_id)

    def history(self, response_id: str) -> list[Json] | None:
        """Every item up to a response's last; None: a part of it is not there any more."""
        chain: list[Stored] = []
        at: str | None = response_id
        while at is not None:
            stored = self.response(at)
            if stored is None:
                return None
            chain.append(stored)
            at = stored.previous
        return [item for stored in reversed(chain) for item in (*stored.input, *stored.output)]

    def item(self, item_id: str) -> Json | None:
        """An item by its id."""
        for stored in self._responses.all(self._key):
            for item in (*stored.output, *stored.input):
                if item.get("id") == item_id:
                    return item
        return None

    def keep(self, response_id: str, stored: Stored) -> None:
        """Remember a response that is about to be told."""
        self._responses.add(self._key, response_id, stored)
