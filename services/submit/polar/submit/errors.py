"""Refusals of the HTTP API, each a JSON body that says field and reason.

{"error": {"code": "invalid_task", "message": "…", "problems": [{"field", "message", "code"}], …}}

ApiError                 status, code
├── Invalid              422: a field is wrong; every problem found is listed
├── NotFound             404
├── Conflict             409: the task id is taken by another body, or its group is decided
├── UnsupportedMedia     415
├── TooLarge             413
└── Unavailable          503, with Retry-After: the log, the scheduler or this process's view is not there yet
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from polar.schemas import Problem, to_builtins, to_json_bytes


class ApiError(Exception):
    """Answered as `status` with a JSON body."""

    status = 500
    code = "internal"

    def __init__(
        self,
        message: str,
        problems: list[Problem] | None = None,
        *,
        extra: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """`extra`: more members of `error`, e.g. the task id."""
        super().__init__(message)
        self.problems = problems or []
        self.extra = extra or {}
        self.headers = headers or {}

    def response(self) -> web.Response:
        return error_response(self.status, self.code, str(self), self.problems, self.extra, self.headers)


class Invalid(ApiError):
    status, code = 422, "invalid"

    @classmethod
    def field(cls, field: str, message: str, code: str = "invalid") -> Invalid:
        return cls(f"{field}: {message}", [Problem(field=field, message=message, code=code)])


class NotFound(ApiError):
    status, code = 404, "not_found"


class Conflict(ApiError):
    status, code = 409, "conflict"


class UnsupportedMedia(ApiError):
    status, code = 415, "unsupported_media_type"


class TooLarge(ApiError):
    status, code = 413, "too_large"


class Unavailable(ApiError):
    status, code = 503, "unavailable"

    def __init__(
        self,
        message: str,
        problems: list[Problem] | None = None,
        *,
        retry_after_s: int = 1,
        extra: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, problems, extra=extra, headers={"Retry-After": str(retry_after_s)})


class Busy(Unavailable):
    code = "busy"


def error_response(
    status: int,
    code: str,
    message: str,
    problems: list[Problem] | None = None,
    extra: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    told = [{"code": one.code, **to_builtins(one)} for one in problems or []]
    body = {"error": {"code": code, "message": message, "problems": told, **(extra or {})}}
    return web.Response(status=status, body=to_json_bytes(body), content_type="application/json", headers=headers or {})


def http_error_response(error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals (no such path, no such method, a body over the limit) in the same shape."""
    headers = {name: value for name, value in error.headers.items() if name in ("Allow", "Retry-After")}
    match error:
        case web.HTTPNotFound():
            return error_response(404, "not_found", "no such path; see /rollout/status, /tasks, /nodes, /events")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return error_response(405, "method_not_allowed", f"this path takes {allowed}", headers=headers)
        case web.HTTPRequestEntityTooLarge():
            return error_response(413, "too_large", error.text or "the request body is too large")
        case _:
            code = error.reason.lower().replace(" ", "_")
            return error_response(error.status, code, error.text or error.reason, headers=headers)
