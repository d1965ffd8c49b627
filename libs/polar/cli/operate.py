"""The commands of whoever operates Polar: topics, config."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from polar.bus import Bus, BusSettings
from polar.schemas.topics import DAY, TABLE, Service, TopicSpec
from polar.service.settings import CommonSettings, describe

from .output import console, run_async, settings_or_fail


def topics(
    create: Annotated[bool, typer.Option("--create", help="Create what is missing, then check everything.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown; asks no broker.")] = False,
) -> None:
    """The topic table; without options, checked against the broker."""
    if markdown:
        typer.echo(markdown_table())
        return
    settings = settings_or_fail(lambda: BusSettings())

    async def main() -> None:
        async with Bus(settings, Service.USER) as bus:
            if create:
                await bus.ensure_topics()
            await bus.check_topics()
        table = Table(title=f"{settings.bootstrap}: as it should be", title_justify="left")
        for name in ("topic", "partitions", "kept", "key"):
            table.add_column(name)
        for spec in TABLE:
            table.add_row(settings.full(spec.name), str(settings.count(spec)), kept(spec), spec.key)
        console().print(table)

    run_async(main)


def kept(spec: TopicSpec) -> str:
    """How long a topic's records stay, for people."""
    days = None if spec.retention_ms is None else f"{spec.retention_ms // DAY} days"
    if spec.compacted:
        return "compacted" if days is None else f"compacted, {days}"
    return days or "for ever"


def markdown_table() -> str:
    """The table of `docs/architecture.md`."""
    lines = ["| topic | key | kept | values | writers → readers |", "|---|---|---|---|---|"]
    for spec in TABLE:
        values = ", ".join(f"`{kind.__name__}`" for kind in spec.values)
        who = f"{', '.join(spec.writers)} → {', '.join(spec.readers)}"
        key = spec.key.replace("<", "&lt;").replace(">", "&gt;")
        lines.append(f"| `{spec.name}` | {key} | {kept(spec)} | {values} | {who} |")
    return "\n".join(lines)


def config() -> None:
    """The resolved configuration of every section, secrets masked."""
    from .serve import SERVICES, settings_of

    parts = [settings_or_fail(lambda: CommonSettings()), settings_or_fail(lambda: BusSettings())]
    for name in SERVICES:
        parts += settings_of(name)
    typer.echo(describe(*parts), nl=False)
