"""`polar dead`: what could not be processed, and what to do about it."""

from __future__ import annotations

import getpass
from datetime import datetime
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from polar.bus.errors import Fenced
from polar.client.dead import RETRY, Content, Dead, DeadRefused, content, drop, find, listed, retry
from polar.schemas import to_builtins
from polar.schemas.topics import BY_NAME

from .output import BAD_INPUT, console, fail, json_line, new_client, plain_table, run_async, visible
from .read import since_ms

EXAMPLES = """\b
Examples:
  polar dead list --since 1d
  polar dead show 12
  polar dead retry 12 13
  polar dead drop 14 --reason "a test of ours"
"""
HEAD = 512
"""Bytes of an unreadable record that are shown."""

app = typer.Typer(
    name="dead",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="List, show, retry or drop records that could not be processed.",
    epilog=EXAMPLES,
)

Numbers = Annotated[list[int], typer.Argument(metavar="ID...", min=0, help="Letters, as `polar dead list` shows them.")]


@app.command("list")
def list_(
    topic: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only of records of this topic, without its prefix.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Only since then: 30s, 10m, 2h, 7d ago, or a time like 2026-05-01T12:00."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Most letters listed, the newest.")] = 50,
    open_only: Annotated[bool, typer.Option("--open", help="Only those that nobody has dealt with.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines, without the records' bytes.")] = False,
) -> None:
    """List dead letters. Ends with exit code 1 where there are none."""
    if topic is not None and topic not in BY_NAME:
        fail(f"no topic {topic!r}; known: {', '.join(BY_NAME)}", code=BAD_INPUT)

    async def main() -> None:
        async with new_client() as client:
            start = None if since is None else since_ms(since, client.clock.now_ms())
            found = await listed(client.bus, topic_name=topic, since_ms=start, limit=limit, open_only=open_only)
        if as_json:
            for one in found.letters:
                json_line(_document(one))
        elif found.letters:
            _print(console(), found.letters)
            if found.more:
                console().print(f"{found.more} older ones are left out (--limit)", style="dim")
        else:
            console().print("no dead letters" + (" of these" if topic or since or open_only else ""))
        if not found.letters:
            raise typer.Exit(1)

    run_async(main)


@app.command(no_args_is_help=True)
def show(
    number: Annotated[int, typer.Argument(metavar="ID", min=0, help="A letter, as `polar dead list` shows it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
) -> None:
    """Show a dead letter: where it comes from, why it died, and what it holds."""

    async def main() -> None:
        async with new_client() as client:
            try:
                dead = await find(client.bus, number)
            except DeadRefused as error:
                fail(str(error))
            held = await content(client.bus, dead.letter)
        if as_json:
            json_line({**_document(dead), **_content(held)})
        else:
            _show(console(), dead, held)

    run_async(main)


@app.command("retry", no_args_is_help=True)
def retry_(
    numbers: Numbers,
    force: Annotated[
        bool, typer.Option("--force", help="Also what does not decode now, or was dealt with already.")
    ] = False,
) -> None:
    """Publish dead records again.

    A record goes to the end of its own partition, byte for byte, with headers that name the original
    (polar-retry-of, polar-retry-letter); that and the letter's new state are one transaction.

    \b
    tasks     The scheduler considers the request again. What was accepted
              meanwhile under its id is answered, not run again.
    stages    A report that comes late: it counts if its attempt and its
              assignment are still the current ones.
    graded    The finisher publishes the trajectory that the session still
              lacks. Refused where it has one, and never done twice.

    Everything else is refused, also with --force, because a copy further on in the log would mean
    something else or be a second outcome; `polar dead show` says why for each letter. For records of
    completions there is `polar rebuild --session`, which reads the original where it stands.

    Ends with exit code 1 where one is refused; those before it are done.
    """

    async def main() -> None:
        async with new_client() as client:
            for number in numbers:
                try:
                    place = await retry(client.bus, number, force=force, by=_who())
                except (DeadRefused, Fenced) as error:
                    _refuse(error)
                console().print(f"{number}: again as {place.topic}/{place.partition}/{place.offset}", soft_wrap=True)
                console().print(f"  {RETRY[place.topic].effect}", style="dim", soft_wrap=True, markup=False)

    run_async(main)


@app.command("drop", no_args_is_help=True)
def drop_(
    numbers: Numbers,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for whoever looks next.")] = "",
) -> None:
    """Note that dead letters need nothing further. They stay on the log until their time is up."""

    async def main() -> None:
        async with new_client() as client:
            for number in numbers:
                try:
                    await drop(client.bus, number, reason=reason, by=_who())
                except (DeadRefused, Fenced) as error:
                    _refuse(error)
                console().print(f"{number}: dropped")

    run_async(main)


def _refuse(error: Exception) -> NoReturn:
    fail(str(error))


def _who() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return ""


def _when(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000).astimezone().isoformat(sep=" ", timespec="seconds")


def _origin(dead: Dead) -> str:
    origin = dead.letter.origin
    return f"{origin.topic}/{origin.partition}/{origin.offset}"


def _key(dead: Dead) -> str | None:
    return None if dead.letter.key is None else dead.letter.key.decode(errors="backslashreplace")


def _document(dead: Dead) -> dict[str, Any]:
    letter = dead.letter
    return {
        "id": dead.number,
        "at_ms": letter.at_ms,
        "origin": to_builtins(letter.origin),
        "key": _key(dead),
        "service": letter.service,
        "error": letter.error,
        "state": dead.state,
        "resolved": None if dead.resolved is None else to_builtins(dead.resolved),
        "headers": {name: value.decode(errors="backslashreplace") for name, value in letter.headers.items()},
        "claim": None if letter.whole is None else to_builtins(letter.whole),
    }


def _content(held: Content) -> dict[str, Any]:
    return {
        "size": len(held.raw),
        "whole": held.whole,
        "value": None if held.event is None else to_builtins(held.event),
        "decode_error": held.error,
        "hex": held.raw[:HEAD].hex() if held.event is None else None,
    }


def _print(out: Console, letters: list[Dead]) -> None:
    table = plain_table(
        ("id", "right"), ("when", "id"), ("origin", "id"), ("key", "left"), ("state", "left"), ("error", "left")
    )
    for one in letters:
        first = visible(one.letter.error).partition("\n")[0]
        table.add_row(
            str(one.number),
            _when(one.letter.at_ms),
            Text(_origin(one)),
            Text(visible(_key(one) or "–")),
            _state(one),
            Text(first if len(first) <= 120 else first[:119] + "…"),
        )
    out.print(table)


def _state(dead: Dead) -> Text:
    return Text(dead.state, {"open": "red", "retried": "green"}.get(dead.state, "dim"))


def _show(out: Console, dead: Dead, held: Content) -> None:
    letter = dead.letter
    rows = [
        ("letter", str(dead.number)),
        ("state", dead.state),
        ("when", _when(letter.at_ms)),
        ("origin", _origin(dead)),
        ("key", _key(dead) or "–"),
        ("service", letter.service),
        ("error", letter.error),
    ]
    if (done := dead.resolved) is not None:
        told = f"{done.action} at {_when(done.at_ms)}" + (f" by {done.by}" if done.by else "")
        if done.published is not None:
            told += f", as {done.published.topic}/{done.published.partition}/{done.published.offset}"
        rows[1] = ("state", told + (", forced" if done.forced else "") + (f": {done.reason}" if done.reason else ""))
    rows += [(f"header {name}", value.decode(errors="backslashreplace")) for name, value in letter.headers.items()]
    rule = RETRY.get(letter.origin.topic)
    if rule is not None:
        rows.append(("retry" if rule.allowed else "no retry", rule.effect))
    rows.append(("bytes", f"{len(held.raw)}" + ("" if held.whole else f" ({held.problem})")))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        out.print(Text(f"{name:<{width}}  ", "dim").append(visible(value), "default"), soft_wrap=True)
    out.print()
    if held.event is not None:
        out.print(Text(f"{type(held.event).__name__}, which decodes now:"), soft_wrap=True)
        out.print_json(data=to_builtins(held.event))
        return
    out.print(Text(visible(f"does not decode: {held.error}"), "red"), soft_wrap=True)
    for line in head(held.raw):
        out.print(Text(line), soft_wrap=True)


def head(raw: bytes) -> list[str]:
    """The first bytes of a record: as text where they are text, else in hexadecimal with what is readable beside it."""
    first = raw[:HEAD]
    more = [f"… {len(raw) - HEAD} bytes more"] if len(raw) > HEAD else []
    try:
        text = first.decode()
    except UnicodeDecodeError as error:
        # cut in the middle of a character, perhaps
        text = first[: error.start].decode() if len(raw) > HEAD and error.start >= HEAD - 3 else "\0"
    if all(one.isprintable() or one in "\n\t" for one in text):
        return [*text.splitlines(), *more]
    lines = []
    for start in range(0, len(first), 16):
        part = first[start : start + 16]
        beside = "".join(chr(one) if 0x20 <= one < 0x7F else "." for one in part)
        lines.append(f"{start:04x}  {part.hex(' '):<47}  {beside}")
    return [*lines, *more]
