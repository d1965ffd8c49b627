"""Logs: structlog to stderr, coloured lines on a terminal, JSON elsewhere.

Promises: what a log line carries is small and safe. Events, token arrays and bytes become a short description, secrets
and keys are masked, and `session`, `task` and `attempt` bound with `bound` are on every line below. The standard
library's loggers (aiokafka's, aiohttp's) come out the same way.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import structlog
from pydantic import SecretStr

from polar.schemas.arrays import Logprobs, TokenIds

LONG_TEXT = 4096
LONG_LIST = 64
"""Items from which a list is told by its length."""
SECRET_NAMES = ("token", "key", "secret", "password", "authorization", "api_key")
TRIES = ("Unable connect to", "Unable to update metadata", "Unable to request metadata")
IDENTIFYING = ("session_id", "task_id", "attempt", "completion_id", "node", "node_id", "stage")


def configure_logs(level: str = "info", format_: str = "auto") -> None:
    """Sets up the logs of this process; call it once, in `main`.

    Args:
        level: `debug`, `info`, `warning` or `error`.
        format_: `auto`, `json` or `console`.
    """
    pretty = format_ == "console" or (format_ == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        shorten,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    last: list[Any] = (
        [structlog.dev.ConsoleRenderer()]
        if pretty
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    handler.addFilter(_quieter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # at info they tell of every join, coordinator and request
    for name in ("aiokafka", "aiohttp.access", "faststream"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def get_logger(name: str) -> Any:
    """A structlog logger: `log.info("what happened", session=…)`."""
    return structlog.get_logger(name)


@contextmanager
def bound(**values: Any) -> Iterator[None]:
    """Puts values such as `session`, `task`, `attempt` on every line logged inside, also in tasks started there."""
    with structlog.contextvars.bound_contextvars(**values):
        yield


def shorten(_: Any, __: str, line: dict[str, Any]) -> dict[str, Any]:
    """structlog processor: keeps large and secret things out of the line."""
    for name, value in line.items():
        if _is_secret(name) and value is not None:
            line[name] = "***"
        elif type(value) not in (int, float, bool) and name not in ("exc_info", "_record"):
            line[name] = short(value)
    return line


def short(value: Any) -> Any:
    """`value`, or a description of it where it is long, binary or secret."""
    if isinstance(value, str):
        return value if len(value) <= LONG_TEXT else f"{value[:LONG_TEXT]}… ({len(value)} characters)"
    if isinstance(value, TokenIds | Logprobs | SecretStr):
        return repr(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, np.ndarray):
        return f"<array {value.shape} {value.dtype}>"
    if isinstance(value, msgspec.Struct):
        found = {name: getattr(value, name) for name in IDENTIFYING if hasattr(value, name)}
        return {"type": type(value).__name__, **found}
    if isinstance(value, Mapping):
        return {str(k): "***" if _is_secret(str(k)) and v is not None else short(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return f"<{len(value)} items>" if len(value) > LONG_LIST else [short(one) for one in value]
    return value


def _is_secret(name: str) -> bool:
    return any(name == one or name.endswith(f"_{one}") for one in SECRET_NAMES)


def _quieter(record: logging.LogRecord) -> bool:
    """aiokafka tells of every try to connect, several a second; whoever tries says once what it means."""
    return not (record.name.startswith("aiokafka") and str(record.msg).startswith(TRIES))


def _json(line: Any, **_: Any) -> str:
    return msgspec.json.encode(line, enc_hook=repr).decode()
