"""The commands of whoever operates Polar: topics, config."""

from __future__ import annotations

import textwrap
from typing import Annotated, Any

import typer
import yaml
from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from polar.bus import Bus, BusSettings
from polar.schemas.topics import DAY, TABLE, Service, TopicSpec
from polar.service.settings import CommonSettings, PolarSettings, describe, prefix_of

from .output import BAD_INPUT, console, fail, plain_table, run_async, settings_or_fail

CONFIG_EXAMPLES = """\b
Examples:
  polar config > polar.yaml
  polar config --section gateway --explain
"""


def topics(
    create: Annotated[bool, typer.Option("--create", help="Create what is missing, then check.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown; asks no broker.")] = False,
) -> None:
    """Check the broker's topics, and list them."""
    if markdown:
        typer.echo(markdown_table())
        return
    settings_or_fail(CommonSettings)
    settings = settings_or_fail(BusSettings)

    async def main() -> None:
        async with Bus(settings, Service.USER) as bus:
            if create:
                await bus.ensure_topics()
            await bus.check_topics()
        table = plain_table(("topic", "left"), ("partitions", "right"), ("kept", "left"), ("key", "left"))
        for spec in TABLE:
            table.add_row(settings.full(spec.name), str(settings.count(spec)), kept(spec), spec.key)
        console().print(table)
        console().print(f"all {len(TABLE)} topics at {settings.bootstrap} are as they should be", soft_wrap=True)

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


def config(
    section: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this section of the file, e.g. gateway; repeatable."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="With what each setting means, its variable and its default.")
    ] = False,
) -> None:
    """Print every setting as it is resolved.

    The YAML is what POLAR_CONFIG may name; secrets are masked. What wins, first to last: POLAR_…
    variables, the file, defaults.
    """
    from .serve import SERVICES, NotInstalled, settings_of

    parts: list[PolarSettings] = [settings_or_fail(CommonSettings), settings_or_fail(BusSettings)]
    missing: dict[str, str] = {}
    for name in SERVICES:
        try:
            parts += settings_of(name)
        except NotInstalled as error:
            missing[name] = str(error)
    known = [one.section for one in parts if one.section]
    for name in section or []:
        if name not in known:
            fail(missing.get(name) or f"no section {name!r}; known: {', '.join(known)}", code=BAD_INPUT)
    chosen = [one for one in parts if not section or one.section in section]
    typer.echo("".join(map(explained, chosen)) if explain else describe(*chosen), nl=False)
    for told in missing.values() if not section else ():
        typer.echo(f"# {told}")


def explained(part: PolarSettings) -> str:
    """A section as YAML with a comment on every setting."""
    indent = "  " if part.section else ""
    lines = [f"{part.section}:"] if part.section else []
    values = part.model_dump(mode="json")  # secrets become asterisks
    for name, field in type(part).model_fields.items():
        told = field.description or ""
        default = field.get_default()
        if default is not PydanticUndefined and default is not None and default != getattr(part, name):
            told += f" Default: {_plain(default)}."
        lines += textwrap.wrap(
            f"{prefix_of(type(part))}{name.upper()}: {told}",
            width=100,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}#   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        text = yaml.safe_dump({name: values[name]}, sort_keys=False, allow_unicode=True, width=1000)
        lines += textwrap.indent(text, indent).splitlines()
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    return "***" if isinstance(value, SecretStr) else str(value)
