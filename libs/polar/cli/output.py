"""How the command line speaks: tables for people, JSON lines for programs, one way to end with an error.

Promises: what can be expected to go wrong ends in one clear line on standard error and an exit code, never in a
traceback; standard output holds what was asked for and nothing else; text that an agent or a model wrote cannot
command the terminal.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Literal, NoReturn, TypeVar

import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polar.bus import BusError, BusSettings
from polar.bus.errors import TopicsWrong
from polar.client import NoAnswer, PolarClient, TaskRefused
from polar.schemas import DecodeError, Problem, to_json_bytes
from polar.schemas.validation import Refused
from polar.service.logs import configure_logs
from polar.service.settings import CommonSettings, ConfigWrong, PolarSettings, prefix_of

S = TypeVar("S", bound=PolarSettings)

BAD_INPUT = 2
"""Exit code for what the caller can mend; 1 is for what went wrong on the way."""
PLAIN = 120
"""Columns where the output is no terminal and COLUMNS is not set: there is no edge to keep to."""

_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def console() -> Console:
    """For people, on standard output."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else PLAIN
    return Console(highlight=False, width=width)


def complain() -> Console:
    """For people, on standard error."""
    return Console(stderr=True, highlight=False)


def visible(text: str) -> str:
    """`text` with control characters other than line feed and tab as pictures, so that a terminal obeys none of it."""
    return text.translate(_VISIBLE)


def plain_table(*columns: tuple[str, Literal["left", "right", "id"]], gap: int = 2) -> Table:
    """A table without rules. `columns`: name and `left`, `right` or `id`, which is never broken, as people copy it."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for name, side in columns:
        justify: Literal["left", "right"] = "right" if side == "right" else "left"
        table.add_column(name, justify=justify, header_style="dim", overflow="fold", no_wrap=side == "id")
    return table


def duration(seconds: float) -> str:
    """A time span for people: `42s`, `3m07s`, `2h05m`, `3d04h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3_600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3_600}h{whole % 3_600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3_600:02}h"


def warn(message: str) -> None:
    """Something that need not be as it is; the work goes on."""
    complain().print(f"[yellow]warning:[/] {escape(visible(message))}", soft_wrap=True)


def fail(message: str, *, code: int = 1, hint: str | None = None) -> NoReturn:
    """End with one line that says what is wrong, and perhaps one that says what to do."""
    speaker = complain()
    speaker.print(f"[bold red]error:[/] {escape(visible(message))}", soft_wrap=True)
    if hint:
        speaker.print(f"  {escape(visible(hint))}", soft_wrap=True)
    raise typer.Exit(code)


def fail_with(message: str, lines: Iterable[tuple[str, str]], *, code: int = BAD_INPUT) -> NoReturn:
    """End with a message and, below it, each field and its reason."""
    speaker = complain()
    speaker.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    for field, reason in lines:
        speaker.print(f"  [bold]{escape(visible(field))}[/]: {escape(visible(reason))}", soft_wrap=True)
    raise typer.Exit(code)


def json_line(value: Any) -> None:
    """One JSON value on a line of standard output."""
    sys.stdout.buffer.write(to_json_bytes(value) + b"\n")
    sys.stdout.buffer.flush()


def settings_or_fail(kind: type[S]) -> S:
    """Settings of a kind; ends with exit code 2 and every wrong setting where they are wrong.

    Values are shown only of settings that cannot hold a secret.
    """
    try:
        return kind()
    except (ConfigWrong, SettingsError) as error:
        fail(str(error), code=BAD_INPUT)
    except ValidationError as error:
        lines = []
        for one in error.errors():
            name = "__".join(str(part) for part in one["loc"]).upper()
            reason = one["msg"]
            if isinstance(one["input"], str | int | float) and not _secret(name):
                reason += f" (it is {one['input']!r})"
            lines.append((prefix_of(kind) + name if name else kind.section or "settings", reason))
        fail_with("settings are wrong, in the environment or in the file of POLAR_CONFIG", lines)


def _secret(name: str) -> bool:
    return any(part in name for part in ("SECRET", "PASSWORD", "TOKEN", "KEY"))


def new_client() -> PolarClient:
    """A client of the log that the settings name; ends with exit code 2 where they are wrong."""
    settings_or_fail(CommonSettings)
    return PolarClient(settings_or_fail(BusSettings))


def run_async(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a command's coroutine; expected failures end in one clear line each.

    Ctrl-C cancels the coroutine, which may say what goes on without it, and ends with exit code 130.
    """
    configure_logs("warning")  # to standard error
    # the log's client tells its tries to reach a broker; the one line below says what they came to
    logging.getLogger("aiokafka").addHandler(logging.NullHandler())
    logging.getLogger("aiokafka").propagate = False
    try:
        asyncio.run(main())
    except (TaskRefused, Refused) as error:
        fail_problems(error.problems)
    except TopicsWrong as error:
        missing = all(one.found == "missing" for one in error.problems)
        hint = "`polar serve` makes them at its start, and `polar topics --create` does" if missing else None
        if missing and len(error.problems) > 3:
            names = ", ".join(one.topic for one in error.problems[:3])
            fail(f"{len(error.problems)} topics are missing: {names}, …", hint=hint)
        lines = [(one.topic, f"{one.setting} is {one.found}, wanted {one.wanted}") for one in error.problems]
        fail_with("topics are not as this version and its POLAR_KAFKA_ settings need them", lines, code=1)
    except DecodeError as error:
        fail(f"a record cannot be read: {error}", hint="it may come from another version of Polar")
    except (NoAnswer, BusError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def fail_problems(problems: list[Problem]) -> NoReturn:
    """End with each problem of a task on a line of its own."""
    fail_with("the task was not accepted", [(one.field or "task", one.message) for one in problems])
