"""How the command line speaks: one console for people, JSON lines for programs, one way to end with an error."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from polar.bus import BusError
from polar.client import NoAnswer, TaskRefused
from polar.schemas import Problem, to_json_bytes
from polar.schemas.validation import Refused
from polar.service.settings import ConfigWrong

T = TypeVar("T")

BAD_INPUT = 2
"""Exit code for what the caller can mend; 1 is for what went wrong on the way."""


def console() -> Console:
    """For people, on standard output."""
    return Console(highlight=False)


def complain() -> Console:
    return Console(stderr=True, highlight=False)


def fail(message: str, *, code: int = 1, hint: str | None = None) -> NoReturn:
    """End with one line that says what is wrong, and perhaps one that says what to do."""
    speaker = complain()
    speaker.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    if hint:
        speaker.print(f"  {escape(hint)}", soft_wrap=True)
    raise typer.Exit(code)


def fail_with(problems: list[Problem]) -> NoReturn:
    """End with each problem on a line of its own."""
    speaker = complain()
    speaker.print("[bold red]error:[/] the task was not accepted")
    for one in problems:
        speaker.print(f"  [bold]{escape(one.field or 'task')}[/]: {escape(one.message)}", soft_wrap=True)
    raise typer.Exit(BAD_INPUT)


def json_line(value: Any) -> None:
    """One JSON value on a line of standard output."""
    sys.stdout.buffer.write(to_json_bytes(value) + b"\n")
    sys.stdout.buffer.flush()


def run_async(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a command's coroutine; expected failures end in one clear line each."""
    # the log's client tells its tries to reach a broker; the one line below says what they came to
    logging.getLogger("aiokafka").addHandler(logging.NullHandler())
    logging.getLogger("aiokafka").propagate = False
    try:
        asyncio.run(main())
    except TaskRefused as error:
        fail_with(error.problems)
    except Refused as error:
        fail_with(error.problems)
    except (NoAnswer, BusError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def settings_or_fail(make: Callable[[], T]) -> T:
    """Settings, or the field that is wrong.

    Exits with code 2 where the environment or the file holds what no setting takes.
    """
    from pydantic import ValidationError

    try:
        return make()
    except ConfigWrong as error:
        fail(str(error), code=BAD_INPUT)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        fail(f"setting {error.title}.{field}: {first['msg']}", code=BAD_INPUT, hint=f"it was {first.get('input')!r}")
