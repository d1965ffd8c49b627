"""Errors in OpenAI's shape. Pure. https://platform.openai.com/docs/guides/error-codes"""

from __future__ import annotations

from ...calls import Json
from ...errors import ProxyError

STATUS_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
}


def body_of(error: ProxyError) -> Json:
    """The body of an error, and the data of an error event."""
    kind = STATUS_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
