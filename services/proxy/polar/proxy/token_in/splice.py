"""What of a conversation is new to an engine that already has the exact tokens up to a reply. Pure.

Given the engine's own renderings, as ids, never a template: of the history up to the reply (`history`), of the whole
request with its generation prompt (`whole`), or of the whole with another text in the place of the reply (`marked`).
What follows the reply's end of turn is new, and of a reply that something else ended, the end of turn itself: nobody
sampled it. Where the renderings do not show that, the answer is the reason and nothing is guessed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .compare import Ids, common_suffix

REWROTE = "template_rewrote"
NO_END = "no_end_of_turn"


class New(NamedTuple):
    """`ids`: what is new. `upto`: how many ids of the rendering are the reply's and what is before it."""

    ids: Ids
    upto: int


def added(history: Ids, whole: Ids, *, ended: int | None, turn_end: Ids) -> New | str:
    """What is new in `whole`, which must go on from `history`; or why that cannot be told.

    Args:
        history: ends with the reply's turn.
        whole: the request's whole prompt.
        ended: the id that the policy sampled as its end of turn; None: it did not end the turn.
        turn_end: what the template writes after a reply's text, used where nothing was sampled for it.
    """
    if len(whole) <= len(history) or not np.array_equal(whole[: len(history)], history):
        return REWROTE
    rest = whole[len(history) :]
    if ended is not None:
        places = np.flatnonzero(history == ended)
        if not len(places):
            return NO_END
        upto = int(places[-1])
        return New(np.concatenate([history[upto + 1 :], rest]), upto)
    upto = len(history) - len(turn_end)
    if not len(turn_end) or upto < 0 or not np.array_equal(history[upto:], turn_end):
        return NO_END
    return New(np.concatenate([turn_end, rest]), upto)


def beyond(marked: Ids, whole: Ids, *, ended: int | None, turn_end: Ids) -> New | str:
    """What follows the reply in `whole`, whatever the template made of the reply; `upto` counts into `marked`.

    Both are the same request, with different texts of the reply: what both end with follows it.
    """
    common = common_suffix(marked, whole)
    tail = whole[len(whole) - common :]
    end = ended if ended is not None else int(turn_end[0]) if len(turn_end) else None
    places = np.flatnonzero(tail == end) if end is not None else np.zeros(0, np.intp)
    if not len(places):
        return NO_END
    at = int(places[0])
    return New(tail[at + (ended is not None) :], len(marked) - common + at)
