"""Errors in Google's shape: code, status, details and the wording that clients recognise. Pure.

https://ai.google.dev/gemini-api/docs/troubleshooting and google.rpc; Gemini CLI 0.61.0 waits as `RetryInfo` says.
"""

from __future__ import annotations

import re

from ...calls import Json
from ...errors import BadRequest, KeyRefused, PromptTooLong, ProxyError

STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
OTHER_CODES = {405: 404, 422: 400, 502: 500}
"""What this API does not answer with, and what it answers instead."""
TYPE = "type.googleapis.com/google.rpc."
MAX_TOKENS = re.compile(r"max_tokens=(\d+) cannot be greater than max_model_len=(\d+)")
"""vLLM 0.32's words."""


def status_of(error: ProxyError) -> int:
    """The HTTP status, which the body repeats."""
    return OTHER_CODES.get(error.status, error.status)


def body_of(error: ProxyError) -> Json:
    """The body of an error, within a stream too."""
    code = status_of(error)
    status = STATUSES.get(code, "INTERNAL" if code >= 500 else "INVALID_ARGUMENT")
    told: Json = {"code": code, "message": message_of(error), "status": status}
    if details := _details(error):
        told["details"] = details
    return {"error": told}


def message_of(error: ProxyError) -> str:
    """Its message, in the provider's words where clients read them."""
    if isinstance(error, PromptTooLong) and error.tokens is not None and error.limit is not None:
        # a prompt that just fits leaves no room for a reply
        most = min(error.limit, error.tokens - 1)
        return f"The input token count ({error.tokens}) exceeds the maximum number of tokens allowed ({most})."
    if isinstance(error, PromptTooLong):
        return f"The input token count exceeds the maximum number of tokens allowed: {error.message}"
    found = MAX_TOKENS.search(error.message) if error.param == "max_tokens" else None
    if found is not None:
        asked, most = int(found[1]), int(found[2])
        return (
            f"Unable to submit request because it has a maxOutputTokens value of {asked} but the supported range is "
            f"from 1 (inclusive) to {most + 1} (exclusive). Update the value and try again."
        )
    return error.message


def _details(error: ProxyError) -> list[Json]:
    if error.retry_after is not None:
        return [{"@type": f"{TYPE}RetryInfo", "retryDelay": f"{error.retry_after:g}s"}]
    if isinstance(error, KeyRefused):
        return [{"@type": f"{TYPE}ErrorInfo", "reason": "API_KEY_INVALID", "domain": "googleapis.com"}]
    if isinstance(error, BadRequest) and error.param is not None:
        violation = {"field": error.param, "description": error.message}
        return [{"@type": f"{TYPE}BadRequest", "fieldViolations": [violation]}]
    return []
