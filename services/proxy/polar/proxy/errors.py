"""Everything a call can be answered with instead of a reply.

    ProxyError
    ├── BadRequest        400, 404, 405, 413   the client's doing; nothing was generated
    ├── KeyRefused        401                  no key, a forged, expired or closed one
    ├── AttemptFenced     409                  the attempt is over, another may run
    ├── Overloaded        503 + Retry-After    every slot is taken, not ready yet, draining
    ├── LogAway           503 + Retry-After    the broker did not acknowledge in time
    ├── RecordRefused     413                  the reply does not fit a record
    ├── ClientGone        (none)               the client closed its connection
    └── EngineError                            becomes CompletionFailed(provider)
        ├── EngineRefused     400, 413, 422    the engine refuses this request
        │   └── PromptTooLong 400              with the counts that a client's compaction goes by
        ├── ModelUnknown      404              nobody serves the session's model
        ├── EngineAway        503 + Retry-After
        │   └── EngineUnfit   503 + Retry-After    it failed its self-test: no call of it could be recorded
        ├── EngineTimeout     504
        ├── EngineFailed      502              5xx, a wrong key
        └── EngineBroken      502              an answer that no record may be made of: lengths differ, no ids, not JSON

A dialect turns a status into its own (Anthropic's overload is 529), in its own shape; overload is never 429, because a
client was seen to treat a bare 429 as fatal. Messages name what to do and never hold a prompt, a reply or a key.
"""

from __future__ import annotations

import traceback
from typing import Any

from polar.schemas import Failure, FailureKind
from polar.service.logs import get_logger

log = get_logger(__name__)

RETRY_AFTER_S = 1.0
"""Where nothing better is known."""


class ProxyError(Exception):
    """Base. `status`: HTTP; `code`: for machines; `param`: the request's field; `retry_after`: seconds."""

    status = 500
    code: str | None = "internal_error"
    kind = FailureKind.INFRA
    retryable = False

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if status is not None:
            self.status = status
        if code is not None:
            self.code = code
        self.retry_after = RETRY_AFTER_S if retry_after is None and self.status == 503 else retry_after

    def failure(self) -> Failure:
        """This error as the data of a `CompletionFailed`."""
        detail: dict[str, Any] = {"status": self.status}
        if self.code is not None:
            detail["code"] = self.code
        return Failure(kind=self.kind, message=self.message[:500], retryable=self.retryable, detail=detail)


class BadRequest(ProxyError):
    status = 400
    code = None
    kind = FailureKind.HARNESS


class KeyRefused(ProxyError):
    status = 401
    code = "invalid_api_key"
    kind = FailureKind.CANCELLED


class AttemptFenced(ProxyError):
    status = 409
    code = "attempt_fenced"
    kind = FailureKind.CANCELLED


class Overloaded(ProxyError):
    status = 503
    code = "overloaded"
    retryable = True


class LogAway(ProxyError):
    status = 503
    code = "log_unavailable"
    retryable = True


class RecordRefused(ProxyError):
    status = 413
    code = "record_too_large"


class ClientGone(ProxyError):
    status = 499
    code = "client_gone"
    kind = FailureKind.CANCELLED


class EngineError(ProxyError):
    status = 502
    code: str | None = "engine_error"
    kind = FailureKind.PROVIDER


class EngineRefused(EngineError):
    status = 400
    code: str | None = None


class PromptTooLong(EngineRefused):
    """`tokens` of the prompt, `limit` of the model; None: not known."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, tokens: int | None = None, limit: int | None = None) -> None:
        super().__init__(message, param="messages")
        self.tokens = tokens
        self.limit = limit


class ModelUnknown(EngineError):
    status = 404
    code = "model_not_found"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model")


class EngineAway(EngineError):
    """`untouched`: no connection was made, so another engine may be asked in its place."""

    status = 503
    code = "engine_unavailable"
    retryable = True

    def __init__(self, message: str, *, retry_after: float | None = None, untouched: bool = False) -> None:
        super().__init__(message, retry_after=retry_after)
        self.untouched = untouched


class EngineUnfit(EngineAway):
    code = "engine_unfit"


class EngineTimeout(EngineError):
    status = 504
    code = "engine_timeout"
    retryable = True


class EngineFailed(EngineError):
    retryable = True


class EngineBroken(EngineError):
    code = "engine_protocol"


def retry_headers(error: ProxyError) -> dict[str, str]:
    """What the official clients go by: when to come back, and whether at all.

    Unasked they retry a 409 and every 5xx; of these only what may get better is worth it.
    """
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = f"{error.retry_after:g}"
    if error.status in (401, 409) or (error.status >= 500 and not error.retryable and error.code != "internal_error"):
        headers["X-Should-Retry"] = "false"
    elif error.retryable:
        headers["X-Should-Retry"] = "true"
    return headers


def as_told(error: Exception) -> ProxyError:
    """What a client is told of any error; one of ours as it is, a bug as such, which is logged.

    Without the bug's text: messages of libraries quote what they were given.
    """
    if isinstance(error, ProxyError):
        return error
    # no exc_info either: pretty tracebacks show local variables, and read files from the loop
    frames = [(frame.f_globals.get("__name__"), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    place = " > ".join(f"{module}:{line}" for module, line in frames[-6:])
    log.error("request failed", error=type(error).__name__, place=place)
    return ProxyError("The proxy failed; its log says why.", code="internal_error")
