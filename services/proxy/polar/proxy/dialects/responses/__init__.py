"""OpenAI Responses (https://platform.openai.com/docs/api-reference/responses), with input_tokens and retrieval.

Pure translation but for one thing: a dialect here is one session's, with the memory of what this replica told it.
`fields` says what becomes of every field of a request.
"""

from __future__ import annotations

import msgspec

from ...calls import Call, Json, Reply
from ...errors import BadRequest, ProxyError
from ..base import Dialect, Limits, StreamEncoder, Told
from .errors import body_of
from .fields import FIELDS
from .memory import Recall, Responses, Stored
from .reply import Encoder, details_of, ended, response_id
from .request import read

__all__ = ["FIELDS", "OpenAIResponses", "Responses", "error_body"]

error_body = body_of


class OpenAIResponses(Dialect):
    """The dialect `openai.responses`, as one session speaks it."""

    name = "openai.responses"

    def __init__(self, recall: Recall) -> None:
        self._recall = recall

    def parse(self, body: bytes, limits: Limits) -> Call:
        return read(body, limits, self._recall, dialect=self.name)

    def parse_count(self, body: bytes, limits: Limits) -> Call:
        """The call whose prompt is to be counted."""
        return read(body, limits, self._recall, dialect=self.name, counting=True)

    def counted(self, tokens: int) -> bytes:
        """The answer to input_tokens."""
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})

    def reply(self, call: Call, told: Told, reply: Reply) -> bytes:
        body = msgspec.json.encode(ended(call, told, reply))
        self._keep(call, told, body)
        return body

    def stream(self, call: Call, told: Told) -> StreamEncoder:
        return Encoder(call, told, lambda body: self._keep(call, told, body))

    def error(self, error: ProxyError, request_id: str | None = None) -> Json:
        return body_of(error)

    def retrieved(self, identity: str) -> bytes:
        """A response that was told before.

        Raises:
            BadRequest: 404, it is not there (any more).
        """
        stored = self._recall.response(identity)
        if stored is None:
            raise BadRequest(f"Response with id '{identity[:80]}' not found.", status=404)
        return stored.body

    def _keep(self, call: Call, told: Told, body: bytes) -> None:
        asked = details_of(call)
        if asked.asked is not None:
            self._recall.keep(response_id(told), Stored(body, asked.asked, asked.previous))
