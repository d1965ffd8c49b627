"""OpenAI Chat Completions (https://platform.openai.com/docs/api-reference/chat).

Promises: a request is checked field by field and refused in OpenAI's shape; the conversation is normalized, so that the
same history gives the same messages whatever form a client sent it in; a stream and a whole reply say the same. Fields
nobody here knows are passed over and counted; `fields` says what becomes of the others. Pure translation: no I/O, no
clock, no session.
"""

from __future__ import annotations

from ...calls import Call, Json, Reply
from ...errors import ProxyError
from ..base import Dialect, Limits, StreamEncoder, Told
from .errors import STATUS_TYPES, body_of
from .fields import FIELDS
from .reply import Encoder, whole
from .request import PASSED_ON, read

__all__ = ["FIELDS", "PASSED_ON", "STATUS_TYPES", "OpenAIChat"]


class OpenAIChat(Dialect):
    """The dialect `openai.chat`."""

    name = "openai.chat"

    def parse(self, body: bytes, limits: Limits) -> Call:
        return read(body, limits, dialect=self.name)

    def reply(self, call: Call, told: Told, reply: Reply) -> bytes:
        return whole(call, told, reply)

    def stream(self, call: Call, told: Told) -> StreamEncoder:
        return Encoder(call, told)

    def error(self, error: ProxyError, request_id: str | None = None) -> Json:
        return body_of(error)
