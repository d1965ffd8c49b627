"""The ids of a reply's items, and what they say when they come back. Pure.

An id names the completion, so that the items of one reply become one message again, in whatever order or company a
client sends them; and, where a call's own form does not keep the model's arguments byte for byte, it holds them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..anthropic.thinking import OMITTED, kept, sign

PREFIXES = {"reasoning": "rs", "message": "msg", "function": "fc", "custom": "ctc", "local_shell": "lsh", "shell": "sh"}
OTHER = "apc"
OURS = re.compile(
    r"(?:rs|msg|fc|ctc|lsh|sh|apc)_(?P<completion>[0-9a-zA-Z-]{2,64}?)(?:_[0-9]{1,9})?(?P<kept>\.[\w+/=.]+)?"
)


class Meaning(NamedTuple):
    """What an id of ours says."""

    completion: str
    arguments: str | None = None
    """As the model wrote them."""


def item_id(kind: str, completion: str, index: int | None = None, keep: str | None = None) -> str:
    """The id of an item: `index` of a call, `keep` what its form loses."""
    number = "" if index is None else f"_{index}"
    rest = "" if keep is None else "." + sign(keep, omitted=True).removeprefix(OMITTED)
    return f"{PREFIXES.get(kind, OTHER)}_{completion}{number}{rest}"


def meaning(identity: object) -> Meaning | None:
    """What an id says; None: it is not one of ours."""
    found = OURS.fullmatch(identity) if isinstance(identity, str) else None
    if found is None:
        return None
    arguments = None
    if found["kept"]:
        try:
            arguments = kept(OMITTED + found["kept"][1:])
        except ValueError:
            return None
    return Meaning(found["completion"], arguments)
