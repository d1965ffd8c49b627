"""Errors in Anthropic's shape: status, type and the wording that clients recognise. Pure.

https://platform.claude.com/docs/en/api/errors; Claude Code 2.1.329 goes by the exact wording of two of them.
"""

from __future__ import annotations

import re

from ...calls import Json
from ...errors import PromptTooLong, ProxyError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
OVERLOADED = 529
MAX_TOKENS = re.compile(r"max_tokens=(\d+) cannot be greater than max_model_len=(\d+)")
"""vLLM 0.32's words."""


def status_of(error: ProxyError) -> int:
    """503 is 529 in this dialect; others are as they are."""
    return OVERLOADED if error.status == 503 else error.status


def body_of(error: ProxyError, request_id: str | None) -> Json:
    """The body of an error, and the data of an error event."""
    status = status_of(error)
    kind = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message_of(error)}, "request_id": request_id}


def message_of(error: ProxyError) -> str:
    """Its message, in the provider's words where clients read them."""
    if isinstance(error, PromptTooLong) and error.tokens is not None and error.limit is not None:
        # a prompt that just fits leaves no room for a reply
        return f"prompt is too long: {error.tokens} tokens > {min(error.limit, error.tokens - 1)} maximum"
    if isinstance(error, PromptTooLong):
        return f"prompt is too long: {error.message}"
    found = MAX_TOKENS.search(error.message) if error.param == "max_tokens" else None
    if found is not None:
        asked, most = found.groups()
        return f"max_tokens: {asked} > {most}, which is the maximum allowed number of output tokens for this model"
    return error.message
