"""By how many ids a prompt differs from what was sampled, and whether two texts are one reply. Pure."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from polar.schemas import TokenIds
from polar.schemas.messages import plain

Ids = npt.NDArray[np.int32]
"""Shape `(n,)`."""

RUN: Final = 4
"""So many equal ids in a row, and two stretches are the same text again."""
WINDOWS: Final = (16, 128, 1024, 4096)
"""How far that is looked for, in ids; beyond, the rest counts as different. Text and back differs in a few."""
ID_BYTES: Final = TokenIds.dtype.itemsize
REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


def drift(sampled: TokenIds, prompt: TokenIds) -> int:
    """Ids by which the beginning of `prompt` differs from `sampled`, an earlier prompt with its reply.

    0 exactly where `prompt` begins with `sampled`. Otherwise both are aligned (stretches that differ lie between runs
    of equal ids), and each stretch counts as many ids as the longer side of it has; from where no alignment is found
    within 4,096 ids, all the rest of `sampled` counts. So it is at least 1, and ids that were only inserted count too.
    """
    if prompt.data.startswith(sampled.data):
        return 0
    total = at = there = 0
    one, other = sampled.array, prompt.array
    while True:
        same = common_prefix(one[at:], other[there:])
        at, there = at + same, there + same
        if at == len(one):
            return total
        step = _aligned(sampled.data[at * ID_BYTES :], prompt.data[there * ID_BYTES :])
        if step is None:
            return total + len(one) - at
        total += max(step)
        at, there = at + step[0], there + step[1]


def common_prefix(one: Ids, other: Ids) -> int:
    """How many ids both begin with."""
    length = min(len(one), len(other))
    if not length:
        return 0
    differs = one[:length] != other[:length]
    at = int(differs.argmax())
    return at if differs[at] else length


def common_suffix(one: Ids, other: Ids) -> int:
    """How many ids both end with."""
    return common_prefix(one[::-1], other[::-1])


def _aligned(one: bytes, other: bytes) -> tuple[int, int] | None:
    """The fewest ids of each after which both go on alike for a run, or for all that is left of `one`."""
    length = len(one) // ID_BYTES
    for window in WINDOWS:
        places: dict[bytes, int] = {}
        for size in range(1, RUN + 1):  # shorter runs are the end of `one`
            if size < RUN and length >= window + RUN:
                continue
            for there in range(min(window, len(other) // ID_BYTES - size + 1)):
                places.setdefault(other[there * ID_BYTES : (there + size) * ID_BYTES], there)
        best: tuple[int, int] | None = None
        for at in range(min(window, length)):
            run = one[at * ID_BYTES : (at + RUN) * ID_BYTES]
            found = places.get(run)
            if found is not None and (best is None or at + found < sum(best)):
                best = at, found
        if best is not None:
            return best
        if window >= max(length, len(other) // ID_BYTES):
            return None
    return None


def same_reply(sampled: str, rendered: str, *, stop: str | None, whole: bool, tools: bool) -> bool:
    """Whether the text `rendered` by the template is the sampled reply's.

    Args:
        sampled: text of the sampled ids, without the end of turn.
        stop: the stop string that ended it, which a harness is not shown.
        whole: the policy ended its turn itself; else the last character may be half.
        tools: it holds tool calls, which templates write with their own spacing.
    """
    if not whole:
        sampled = sampled.rstrip(REPLACEMENT)
    if sampled.strip() == rendered.strip() or (tools and skeleton(sampled) == skeleton(rendered)):
        return True
    if stop is None:
        return False
    shown = sampled[: sampled.rfind(stop)]
    return shown.strip() == rendered.strip() or (tools and skeleton(shown) == skeleton(rendered))


WASTED_PER_CHARACTER: Final = 4
"""How often a character may be read for a JSON value that turns out to be none; beyond, the rest counts as words."""
NESTED_TOO_DEEP: Final = 1000
"""Characters, about, after which Python gives up on nesting."""
_decode = json.JSONDecoder().raw_decode
_bracket = re.compile(r"[{\[]")


def skeleton(text: str) -> list[Any]:
    """`text` as JSON values and words, without white space between them: equal for equal tool calls."""
    found: list[Any] = []
    at, left = 0, WASTED_PER_CHARACTER * len(text)
    while True:
        bracket = _bracket.search(text, at) if left > 0 else None
        start = len(text) if bracket is None else bracket.start()
        found += text[at:start].split()
        if start == len(text):
            return found
        try:
            value, end = _decode(text, start)
            value = plain(value)
        except (ValueError, RecursionError) as error:
            # read again from the next bracket, so nested ones that never close would take the square of their length
            left -= error.pos - start if isinstance(error, json.JSONDecodeError) else NESTED_TOO_DEEP
            found.append(text[start])
            at = start + 1
        else:
            found.append(_typed(value))
            at = end


def _typed(value: Any) -> Any:
    # True equals 1 in Python, and not in JSON
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, dict):
        return {key: _typed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_typed(one) for one in value]
    return value
