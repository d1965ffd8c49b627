"""`polar audit`: is the accounting of the log right?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from polar.audit import AuditOptions, AuditReport, Offence
from polar.audit import audit as audit_log
from polar.bus import Bus, BusError, BusSettings
from polar.schemas.topics import Service
from polar.service.clock import SystemClock
from polar.service.settings import CommonSettings

from .output import complain, console, fail, json_line, plain_table, run_async, settings_or_fail, visible
from .read import since_ms

OFFENCES: Final = 1
UNREADABLE: Final = 3

EXAMPLES = """\b
Examples:
  polar audit
  polar audit --task 01a1fe23-7527-7581-8bb9-b504684bebd4
  polar audit --since 1d --no-tokens --json | jq .offences

Ends with 0 where all that could be judged holds, 1 with offences, 2 with wrong options, 3 where the log cannot be read.
"""

Tell = Callable[[str, int, int], None]


def audit(
    task: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only sessions of this task; may be repeated.")
    ] = None,
    session: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this session; may be repeated.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Only sessions accepted since then: a span like 10m or 2h, or a time."),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens/--no-tokens", help="Compare sampled ids and log-probabilities with the captures.")
    ] = True,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Most offences and dead letters printed.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="The whole report as one line of JSON.")] = False,
) -> None:
    """Read the log and prove its accounting.

    Every accepted session finished or in flight, everything that must be there once there once, every call accounted
    for, every sampled token the captured one. Writes nothing, and may run beside the services.
    """
    settings_or_fail(CommonSettings)
    settings = settings_or_fail(BusSettings)
    options = AuditOptions(
        tokens=tokens,
        tasks=frozenset(task or ()),
        sessions=frozenset(session or ()),
        since_ms=None if since is None else since_ms(since, SystemClock().now_ms()),
        keep=limit,
    )
    reports: list[AuditReport] = []

    async def main() -> None:
        try:
            async with Bus(settings, Service.USER) as bus:
                with _progress() as tell:
                    reports.append(await audit_log(bus, options, progress=tell))
        except BusError as error:
            fail(f"the log cannot be read: {error}", code=UNREADABLE)

    run_async(main)
    (report,) = reports
    if as_json:
        json_line(report)
    else:
        _print(console(), report)
    if not report.clean:
        raise typer.Exit(OFFENCES)


@contextmanager
def _progress() -> Iterator[Tell]:
    """A bar on standard error, where that is a terminal."""
    speaker = complain()
    if not speaker.is_terminal:
        yield lambda *_: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=speaker, transient=True) as bar:
        tasks = {name: bar.add_task(name, total=None, visible=name == "reading") for name in ("reading", "judging")}

        def tell(doing: str, done: int, total: int) -> None:
            bar.update(tasks[doing], completed=done, total=total or 1, visible=True)

        yield tell


def _print(out: Console, report: AuditReport) -> None:
    counts = report.counts
    out.print(f"{counts['records']:,} records in {report.seconds:.1f} s", soft_wrap=True)
    table = plain_table(
        ("check", "id"), ("judged", "right"), ("offences", "right"), ("not judged", "right"), ("", "left")
    )
    for one in report.checks:
        offences = Text(f"{one.offences:,}", "bold red" if one.offences else "green" if one.checked else "dim")
        table.add_row(str(one.check), f"{one.checked:,}", offences, f"{one.unjudged:,}", Text(one.proves, "dim"))
    out.print(table)
    out.print(_sessions(report), soft_wrap=True)
    if counts.get("calls"):
        out.print(_calls(report), soft_wrap=True)
    notes = [
        ("late_trajectories", "published after their group was decided"),
        ("ends_repeated", "ends of calls sent twice as they were; readers drop the second"),
        ("failures_unstarted", "failures of calls whose start the log did not take"),
        ("source_expired", "sources no longer on the log"),
    ]
    for name, told in notes:
        if counts.get(name):
            out.print(Text(f"{counts[name]:,} {told}", "dim"), soft_wrap=True)
    _reach(out, report)
    _dead(out, report)
    for offence in report.offences:
        _offence(out, offence)
    total = sum(report.found.values())
    if len(report.offences) < total:
        out.print(f"… and {total - len(report.offences):,} more (--limit)", soft_wrap=True)
    if total:
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(report.found.items()))
        out.print(Text(f"{_number(total, 'offence')}: {kinds}", "bold red"), soft_wrap=True)
    else:
        out.print(Text("clean: all that could be judged holds", "bold green"), soft_wrap=True)


def _sessions(report: AuditReport) -> str:
    counts = report.counts
    parts = [f"{counts.get('finished', 0):,} finished", f"{counts.get('in_flight', 0):,} in flight"]
    parts += [
        f"{counts[name]:,} {told}"
        for name, told in (("lost", "lost"), ("unknown", "no longer told"))
        if counts.get(name)
    ]
    return f"sessions: {counts.get('accepted', 0):,} accepted = " + " + ".join(parts)


def _calls(report: AuditReport) -> str:
    counts = report.counts
    fates = {
        "traced": "in traces",
        "aside": "set aside by the builder",
        "fenced": "fenced",
        "unfinished": "unfinished",
        "failed": "failed",
        "late": "late",
        "untold": "of trajectories too large to be published",
        "unaccounted": "unaccounted for",
        "in_flight": "of sessions in flight",
        "unknown": "no longer told",
    }
    parts = [f"{counts[f'calls_{name}']:,} {told}" for name, told in fates.items() if counts.get(f"calls_{name}")]
    told = f"calls: {counts['calls']:,} = " + " + ".join(parts)
    if counts.get("sampled_tokens"):
        told += f"; {counts['sampled_tokens']:,} sampled tokens compared"
    return told


def _reach(out: Console, report: AuditReport) -> None:
    """How far the proof goes, where the log does not begin at its beginning."""
    for one in report.reach:
        if one.removed:
            told = f"{one.topic}: {one.removed:,} offsets before what was read"
            if one.from_ms is not None:
                told += f"; whole from {datetime.fromtimestamp(one.from_ms / 1000).astimezone():%Y-%m-%d %H:%M:%S}"
            out.print(Text(told, "yellow"), soft_wrap=True)


def _dead(out: Console, report: AuditReport) -> None:
    if not report.dead:
        return
    out.print(f"{_number(report.counts['dead'], 'dead letter')}; look closer with polar dead list", soft_wrap=True)
    for one in report.dead:
        told = f"  {one.origin} ({one.service}): {one.error}"
        if one.open:
            told += f"; session {one.session_id} is open"
        out.print(Text(visible(told), "yellow" if one.open else "dim"), soft_wrap=True)


def _offence(out: Console, one: Offence) -> None:
    place = "" if one.topic is None else f" {one.topic}/{one.partition}/{one.offset}"
    ids = [
        f" {name} {value}"
        for name, value in (
            ("task", one.task_id),
            ("group", one.group_id),
            ("session", one.session_id),
            ("completion", one.completion_id),
        )
        if value is not None
    ]
    out.print(f"[bold red]{one.kind}[/]{escape(visible(place + ''.join(ids)))}", soft_wrap=True)
    out.print(f"  {escape(visible(one.message))}", soft_wrap=True)


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
