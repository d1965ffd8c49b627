"""Where a prompt's rendering of an earlier reply ends, and whether it can be the same text.

Given: a prompt `q` that begins with the prompt `p` of an earlier call whose reply `s` the harness sent back unchanged,
while the ids of `q` after `p` are not `s`. Text and back gives other ids for the same text, so this is common. What of
`q` after `p` stands for `s` is found from ids alone, without a tokenizer: a turn ends at the id that the engine sampled
as the end of this turn or of others in the session, and such an id counts only where it is followed as it is followed
in `p`, so that the same characters inside a text are not taken for an end. Pure.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final, NamedTuple

import numpy as np

from .assembly import Drifted
from .pool import Ids, common_prefix, common_suffix
from .samples import Sample
from .turns import CUT

STRETCH: Final = 4
SLACK: Final = 8
"""`n` ids may stand for at most `STRETCH * n + SLACK` other ids of the same text; beyond that, text is missing."""


def terminator(sample: Sample, reply: Ids) -> int | None:
    """The id with which the policy ended the turn itself; None: a length limit, an abort or a stop string did."""
    choice = sample.choice
    if choice.finish is None or choice.finish in CUT or isinstance(choice.stop, str):
        return None
    return int(reply[-1])


class Rendered(NamedTuple):
    """What stands for a reply in a later prompt."""

    length: int
    """Ids after the earlier prompt that the reply stands for, its end of turn included where that was sampled."""
    drift: Drifted


def find(sample: Sample, prompt: Ids, reply: Ids, rest: Ids, terminators: Set[int]) -> Rendered | str:
    """How `rest`, the later prompt after `prompt`, renders `reply`; or the reason why that cannot be told.

    Args:
        sample: the earlier call, its prompt and its reply.
        terminators: ids that ended turns in this session so far.
    """
    own = terminator(sample, reply)
    extent = _extent(prompt, reply, rest, own, terminators)
    if extent is None:
        return "no_end_of_turn"
    said = reply[:-1] if own is not None else reply
    if not _same_text(sample, said, rest[: extent.body]):
        return "history_changed"
    return Rendered(extent.length, _difference(reply, rest[: extent.length]))


class _Extent(NamedTuple):
    body: int
    """Ids of the text."""
    length: int
    """With the end of turn, where the policy sampled one: then the rendered one stands for it."""


def _extent(prompt: Ids, reply: Ids, rest: Ids, own: int | None, terminators: Set[int]) -> _Extent | None:
    if own is not None:
        body = len(reply) - 1
        if body and len(rest) > body and np.array_equal(rest[:body], reply[:-1]):
            # the text as sampled, closed by another id than the one sampled, or by none
            return _Extent(body, body + (int(rest[body]) in terminators))
        found = _first_end(prompt, rest, {own})
        if found is not None:
            return _Extent(found, found + 1)
    found = _first_end(prompt, rest, terminators)
    if found is None:
        return None
    return _Extent(found, found + (own is not None))


def _difference(sampled: Ids, rendered: Ids) -> Drifted:
    position = common_prefix(sampled, rendered)
    tail = common_suffix(sampled[position:], rendered[position:])
    return Drifted(position, len(sampled) - position - tail, len(rendered) - position - tail)


def _first_end(prompt: Ids, rest: Ids, ends: Set[int]) -> int | None:
    """Position in `rest` of the first id of `ends` that is followed as ends are followed in `prompt`."""
    if not ends:
        return None
    wanted = np.array(sorted(ends), np.int32)
    places = np.flatnonzero(np.isin(rest, wanted))
    followers = prompt[1:][np.isin(prompt[:-1], wanted)]
    if len(followers):
        places = places[places + 1 < len(rest)]
        places = places[np.isin(rest[places + 1], followers)]
    return int(places[0]) if len(places) else None


def _same_text(sample: Sample, said: Ids, rendered: Ids) -> bool:
    """Whether the ids `rendered` can be the text of `said`, both without their end of turn.

    The messages say the same; the template may still have dropped a part (thinking, tool calls).
    """
    if _thinks(sample) or (len(said) > 0) != (len(rendered) > 0):
        return False  # without a tokenizer nothing shows that the rendering kept the thinking
    _, here, there = _difference(said, rendered)
    loose = isinstance(sample.choice.stop, str) or bool(sample.choice.message.get("tool_calls"))
    if not loose and (here == 0) != (there == 0):
        return False  # ids that stand for no id at all: text is missing on one side
    return here <= STRETCH * there + SLACK and there <= STRETCH * here + SLACK


def _thinks(sample: Sample) -> bool:
    message = sample.choice.message
    return bool(message.get("reasoning") or message.get("reasoning_content"))
