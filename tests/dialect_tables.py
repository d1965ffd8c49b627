"""The tables of docs/dialects.md, made of the data that the proxy goes by, and what an SDK publishes beside them.

    python -m tests.dialect_tables docs/dialects.md

The page holds each table between two comments: `<!-- table NAME -->` and `<!-- /table -->`.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typing_extensions

from polar.proxy.dialects.anthropic import FIELDS
from polar.proxy.dialects.fields import markdown
from polar.proxy.dialects.google import FIELDS as GOOGLE_FIELDS
from polar.proxy.dialects.marks import MARKS, TELLS
from polar.proxy.dialects.openai_chat import FIELDS as CHAT_FIELDS
from polar.proxy.dialects.quirks import QUIRKS
from polar.proxy.dialects.responses import FIELDS as RESPONSES_FIELDS

TABLE = re.compile(r"(<!-- table (?P<name>[\w. ]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
WRAPPERS = (typing.Required, typing.NotRequired, typing.Annotated)


def quirks() -> str:
    """The harness quirks."""
    lines = ["| quirk | harness | sends | what is done | why |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.name} | {one.harness} {one.version} | {one.sends} | {one.done} | {one.reason} |" for one in QUIRKS
    ]
    return "\n".join(lines)


def marks() -> str:
    """The headers that become hints."""
    lines = ["| hint | header | harness | |", "|---|---|---|---|"]
    for one in MARKS:
        header = f"`{one.header}`" + (f" with `{one.word.pattern}`: {one.says}" if one.word else "")
        lines.append(f"| `{one.hint}` | {header.replace('|', chr(92) + '|')} | {one.harness} | {one.seen} |")
    return "\n".join(lines)


def tells() -> str:
    """The prompts that become hints."""
    lines = ["| hint | known by | harness | | why |", "|---|---|---|---|---|"]
    for one in TELLS:
        known = f"the tool `{one.tool}`"
        if one.system is not None:
            known = f"a system message with `{one.system.pattern}`"
        elif one.last is not None:
            known = f"a last message with `{one.last.pattern}`"
        known = known.replace("|", chr(92) + "|")
        lines.append(f"| `{one.hint}`: {one.says} | {known} | {one.harness} | {one.seen} | {one.reason} |")
    return "\n".join(lines)


TABLES = {
    "anthropic.messages": lambda: markdown(FIELDS),
    "openai.chat": lambda: markdown(CHAT_FIELDS),
    "openai.responses": lambda: markdown(RESPONSES_FIELDS),
    "google.generate_content": lambda: markdown(GOOGLE_FIELDS),
    "quirks": quirks,
    "marks": marks,
    "tells": tells,
}


def rewritten(page: str) -> str:
    """`page` with its tables made again."""
    return TABLE.sub(lambda found: f"{found[1]}\n{TABLES[found['name']]()}\n\n{found[3]}", page)


# what an SDK publishes ----------------------------------------------------------------------------------------------


def published(kind: Any, at: str = "", above: tuple[Any, ...] = ()) -> Iterator[str]:
    """The fields below a request type of an SDK, as paths like `tools[]<custom>.name`."""
    for member in _members(kind):
        if not (isinstance(member, type) and typing_extensions.is_typeddict(member)):
            for item in _items(member):
                yield from published(item, f"{at}[]", above)
        elif member not in above:
            yield from _fields(member, at, (*above, member))


def _fields(member: Any, at: str, above: tuple[Any, ...]) -> Iterator[str]:
    hints = get_type_hints(member, include_extras=True)
    told_apart_by = next((name for name in ("type", "role") if name in hints and _words(hints[name])), None)
    for tag in _words(hints[told_apart_by]) if told_apart_by else [""]:
        base = f"{at}<{tag}>" if tag else at
        if tag:
            yield base
        for name, hint in hints.items():
            if name != told_apart_by:
                path = f"{base}.{name}" if base else name
                yield path
                yield from published(hint, path, above)


def _members(kind: Any) -> Iterator[Any]:
    while get_origin(kind) in WRAPPERS or get_origin(kind) in (typing_extensions.Required, typing_extensions.Annotated):
        kind = get_args(kind)[0]
    if get_origin(kind) in (typing.Union, types.UnionType):
        for one in get_args(kind):
            yield from _members(one)
    else:
        yield kind


def _items(kind: Any) -> Iterator[Any]:
    if getattr(get_origin(kind), "__name__", "") in ("list", "Iterable", "Sequence", "SequenceNotStr"):
        yield get_args(kind)[0]


def _words(kind: Any) -> list[str]:
    return [word for one in _members(kind) if get_origin(one) is Literal for word in get_args(one)]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(rewritten(path.read_text()))
