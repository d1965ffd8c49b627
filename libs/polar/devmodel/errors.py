"""The errors of the development engines, in the shape in which vLLM answers them.

    EngineError                 anything an engine refuses or breaks on
    ├── ApiError                answered with a status and vLLM's body
    └── ModelUnavailable        the CPU model's wheels are missing or its file is not one this package can read

Nothing here knows HTTP servers: a body is a plain dictionary.
"""

from typing import Any


class EngineError(Exception):
    """Base of every error that this package raises on purpose."""


class ModelUnavailable(EngineError):
    """The CPU model cannot be loaded; the message names what to install."""


class ApiError(EngineError):
    """A refusal with its HTTP status, answered as `{"error": {message, type, param, code}}`.

    `headers` go with the answer (a scripted 429 carries `Retry-After`).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "BadRequestError",
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The answer's body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}}


def invalid(*mistakes: tuple[str, str, str, object], note: str = "") -> ApiError:
    """A body of the wrong shape: (kind, place, message, input) each, told as vLLM tells pydantic's complaints."""
    lines = [
        f"  {{'type': {kind!r}, 'loc': {place!r}, 'msg': {message!r}, 'input': {_shown(value)!r}{note}}}"
        for kind, place, message, value in mistakes
    ]
    head = f"{len(mistakes)} validation error{'s' if len(mistakes) > 1 else ''}:"
    return ApiError("\n".join([head, *lines]), type="Bad Request", param=mistakes[0][1])


def _shown(value: object) -> str:
    return f"<{type(value).__name__} of {len(value)} items>" if isinstance(value, dict | list) else str(value)


def bad_value(message: str, param: str, value: object) -> ApiError:
    """A parameter whose value vLLM refuses: the message names it as vLLM's does."""
    return ApiError(f"{message} (parameter={param}, value={value})", param=param)
