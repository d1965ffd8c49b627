"""What becomes of every field of a provider's published request schema, as data.

A path names a field: `a.b`, `list[]`, `list[]<type>` for one of several shapes told apart by their `type` (or `role`);
`*` stands for any part of such a name, `block` for a content block wherever it may stand. A row that is not `mapped`
covers everything below it. `docs/dialects.md` is made of these rows and a test holds them against the official SDK.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import NamedTuple


class Action(StrEnum):
    MAPPED = "mapped"
    IGNORED = "ignored"
    """On purpose; `note` says why."""
    REFUSED = "refused"
    SETTING = "setting"
    """As a setting says, which `note` names."""


class Field(NamedTuple):
    path: str
    action: Action
    note: str
    whole: bool = False
    """A mapped one that is passed on with all that it holds."""

    def covers(self, path: str) -> bool:
        """Whether this row says what becomes of the field `path`."""
        # brackets are part of a name here, not a set of characters
        pattern = self.path.replace("[", "[[]")
        if fnmatchcase(path, pattern):
            return True
        below = self.whole or self.action is not Action.MAPPED
        return below and any(fnmatchcase(path, pattern + mark) for mark in (".*", "[[]]*", "<*"))


def markdown(fields: Iterable[Field]) -> str:
    """The rows as a table for people."""
    lines = ["| field | what becomes of it | |", "|---|---|---|"]
    lines += [f"| `{one.path}` | {one.action} | {one.note} |" for one in fields]
    return "\n".join(lines)


def names(fields: Iterable[Field], *actions: Action) -> frozenset[str]:
    """The fields of the request itself that have one of `actions`."""
    return frozenset(one.path for one in fields if one.action in actions and one.path.isidentifier())
