"""Anthropic Messages (https://platform.claude.com/docs/en/api/messages), with count_tokens and models.

Pure translation: no I/O, no clock, no session. `fields` says what becomes of every field of a request.
"""

from __future__ import annotations

import msgspec

from ...calls import Call, Json, Reply
from ...errors import ProxyError
from ..base import Dialect, Limits, StreamEncoder, Told
from .errors import body_of, status_of
from .fields import FIELDS
from .reply import Encoder, whole
from .request import read

__all__ = ["FIELDS", "AnthropicMessages"]

EPOCH = "1970-01-01T00:00:00Z"


class AnthropicMessages(Dialect):
    """The dialect `anthropic.messages`."""

    name = "anthropic.messages"

    def parse(self, body: bytes, limits: Limits) -> Call:
        return read(body, limits, dialect=self.name)

    def parse_count(self, body: bytes, limits: Limits) -> Call:
        """The call whose prompt is to be counted."""
        return read(body, limits, dialect=self.name, counting=True)

    def counted(self, tokens: int) -> bytes:
        """The answer to count_tokens."""
        return msgspec.json.encode({"input_tokens": tokens})

    def reply(self, call: Call, told: Told, reply: Reply) -> bytes:
        return whole(call, told, reply)

    def stream(self, call: Call, told: Told) -> StreamEncoder:
        return Encoder(call, told)

    def error(self, error: ProxyError, request_id: str | None = None) -> Json:
        return body_of(error, request_id)

    def status(self, error: ProxyError) -> int:
        return status_of(error)

    def headers(self, request_id: str) -> dict[str, str]:
        return {"request-id": request_id, "X-Request-Id": request_id}

    def model(self, name: str, max_tokens: int | None) -> Json:
        """A model, as GET /v1/models/{name} tells it; `max_tokens`: of prompt and reply together."""
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": EPOCH,
            "lifecycle": "active",
            "max_input_tokens": max_tokens,
            "max_tokens": max_tokens,
        }

    def models(self, models: list[Json]) -> Json:
        """A page of models; the only one."""
        ids = [model["id"] for model in models] or [None]
        return {"data": models, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}
