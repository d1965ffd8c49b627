"""Where a prompt's rendering of an earlier reply ends, and whether it is the same text.

Given: a later call with prompt `q` whose messages go on from an earlier one's prompt `p` and reply `s`, while the ids
of `q` do not begin with `p` and `s`. Three things make that so although nothing was changed: text and back gives other
ids; the generation prompt at the end of `p` (`<think>`, an empty thought) is not in the history, or melts with the
reply's first character; the end of the turn is another id than the sampled one, or one that nobody sampled.

- **Where they part.** `p` and `q` have to agree up to `p`'s last turn boundary (after the last end of a turn in it),
  and what of `p` is not in `q` has to be a generation prompt: `q` ends with the same ids.
- **Where the turn ends.** An end of turn is an id with which the engine says that a turn of this session ended, and
  it counts only where it is followed as the last end in `p` is, so that the same characters in a text are no end.
- **Same text.** With a tokenizer both sides are decoded and compared, JSON normalized; a stop string, which no history
  shows, is the end of its turn. Without one it is judged: the messages are equal in normal form (the caller has seen to
  that), and aligned id by id the two sides differ in short stretches only, none of which is missing on one side and,
  where the client trimmed the reply, none of which is at its edges. That finds thinking and calls that a template
  drops; it cannot see a template that changes a character in its place.

Pure; arrays are compared, never walked id by id.
"""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Final, NamedTuple

import numpy as np

from polar.schemas.messages import Message

from .assembly import Drifted
from .messages import text_of
from .pool import Ids, common_prefix, common_suffix, shared
from .samples import Material, Sample
from .texts import TextOf, respaced
from .turns import CUT

HISTORY: Final = "history_changed"
NO_END: Final = "no_end_of_turn"

STRETCH: Final = (3, 3)
"""`n` ids may stand for at most 3 n + 3 other ids of the same text; beyond that, text is missing."""
TIGHT_STRETCH: Final = (2, 2)
"""The same for replies with thinking, which templates like to drop; and then they begin with another id."""
RESPACED: Final = 2
"""Ids that spacing in the arguments of a tool call may add or take at one place."""
EDGE: Final = 8
"""Ids of a reply's beginning in which white space that a client trimmed would be missing."""
REPLACEMENT: Final = "\ufffd"
AGREE: Final = 3
"""Equal ids in a row after which two renderings are taken to go on together."""
WINDOWS: Final = (16, 128, 1024)
"""How far ahead is looked for them."""
TAIL: Final = 256
"""Ids of a prompt's end in which its last turn boundary is looked for before all of it is."""


class Ends:
    """The ids that ended turns of one session, by the engine's word, for each tokenizer in it."""

    def __init__(self, material: Material) -> None:
        self._by_engine: dict[str, set[int]] = {}
        for sample in material.samples:
            found = self._by_engine.setdefault(sample.engine, set())
            own = terminator(sample, material.reply_ids(sample))
            if own is not None:
                found.add(own)
            elif isinstance(sample.choice.stop, int):
                found.add(sample.choice.stop)  # an engine that leaves it out of the reply's ids still names it

    def of(self, sample: Sample) -> Set[int]:
        return self._by_engine[sample.engine]


def terminator(sample: Sample, reply: Ids) -> int | None:
    """The id with which the policy ended the turn itself; None: a length limit, an abort or a stop string did."""
    choice = sample.choice
    if choice.finish is None or choice.finish in CUT or isinstance(choice.stop, str):
        return None
    last = int(reply[-1])
    return last if choice.stop in (None, last) else None


class Rendered(NamedTuple):
    """What stands for a reply in a later prompt."""

    standing: int
    """Ids of the later prompt that earlier prompt and reply stand for, with the end of turn where it was sampled."""
    drift: tuple[Drifted, ...]


class Trimmed(NamedTuple):
    """Where a client took white space off a reply that it sent back."""

    text: bool = False
    """Off its text, not only its thinking."""
    start: bool = False
    """Where the reply's first ids show it, unless the template puts it back."""
    end: bool = False
    """Where its last id does."""
    inside: bool = False
    """Where no id's place tells."""


def trimmed(material: Material, before: Sample, sample: Sample) -> Trimmed:
    """How the messages of `sample` give back the reply of `before`, which they hold."""
    at = len(before.messages)
    if at >= len(sample.messages) or before.said not in sample.paths:
        return Trimmed()
    own, shown = before.choice.message, material.messages.messages[sample.messages[at]]
    if own == shown:
        return Trimmed()
    thought, text = _edges(_thought(own), _thought(shown)), _edges(text_of(own), text_of(shown))
    calls = bool(own.get("tool_calls"))
    if _thought(own).strip():
        # a template that puts a thought's first line break back is taken to do so with its last
        inside = (thought.end and not thought.start) or text.start or (text.end and calls)
        return Trimmed(any(text), thought.start, text.end and not calls, inside)
    return Trimmed(any(text), text.start, text.end and not calls, text.end and calls)


class _Edges(NamedTuple):
    start: bool
    end: bool


def _edges(own: str, shown: str) -> _Edges:
    """Whether white space is other, of texts that are otherwise the same."""
    words = own.strip()
    start, _, end = own.partition(words) if words else (own, "", "")
    other_start, _, other_end = shown.partition(words) if words else (shown, "", "")
    return _Edges(start != other_start, end != other_end)


def find(material: Material, before: Sample, sample: Sample, ends: Ends, text_of: TextOf | None) -> Rendered | str:
    """How the prompt of `sample` renders the reply of `before`; or the break reason where it does not."""
    reply = material.reply_ids(before)
    known = ends.of(before)
    same = shared(before.prompt, sample.prompt)
    turn = _last_turn(material, before, known)
    lead = material.prompt_ids(before, same)
    if len(lead) and (turn is None or len(lead) > len(turn) or not _ends_with(material, sample, lead)):
        return HISTORY
    rest = material.prompt_ids(sample, same)
    own = terminator(before, reply)
    said = reply if own is None else reply[:-1]
    # text that is compared has to end with its turn; equal messages have said so already
    closed = text_of is not None
    extents = _extents(said, rest, own, known, None if turn is None else int(turn[0]), closed=closed)
    if not extents:
        return NO_END
    for extent in extents:
        drift = _same(before, lead, said, rest[: extent.body], text_of, trimmed(material, before, sample))
        if drift is not None:
            if own is not None and (extent.body == extent.length or int(rest[extent.body]) != own):
                drift = (*drift, Drifted(len(said), 1, extent.length - extent.body))
            return Rendered(same + extent.length, drift)
    return HISTORY


def _last_turn(material: Material, sample: Sample, ends: Set[int]) -> Ids | None:
    """The end of a prompt after its last end of a turn, at least one id; None: there is none in it."""
    for length in (TAIL, sample.prompt_length):
        tail = material.prompt_ids(sample, max(0, sample.prompt_length - length))
        places = np.flatnonzero(np.isin(tail[:-1], _sorted(ends)))
        if len(places):
            return tail[int(places[-1]) + 1 :]
    return None


def _ends_with(material: Material, sample: Sample, ids: Ids) -> bool:
    start = sample.prompt_length - len(ids)
    return start >= 0 and np.array_equal(material.prompt_ids(sample, start), ids)


class _Extent(NamedTuple):
    body: int
    """Ids of the text."""
    length: int
    """With the end of turn, where the policy sampled one: then the rendered one stands for it."""


def _extents(
    said: Ids, rest: Ids, own: int | None, ends: Set[int], follower: int | None, *, closed: bool
) -> list[_Extent]:
    """Where the turn may end in `rest`, likeliest first; `closed`: not without an end."""
    found: list[_Extent] = []
    if len(said) and len(rest) > len(said) and np.array_equal(rest[: len(said)], said):
        # the text as sampled, closed by another id than the one sampled, or by none
        ended = int(rest[len(said)]) in ends
        if ended or not closed:
            found.append(_Extent(len(said), len(said) + (ended and own is not None)))
    for wanted in ({own} if own is not None else set(), ends):
        place = _first_end(rest, wanted, follower)
        if place is not None:
            found.append(_Extent(place, place + (own is not None)))
    return list(dict.fromkeys(found))


def _first_end(rest: Ids, ends: Set[int], follower: int | None) -> int | None:
    if not ends:
        return None
    places = np.flatnonzero(np.isin(rest, _sorted(ends)))
    if follower is not None:
        places = places[places + 1 < len(rest)]
        places = places[rest[places + 1] == follower]
    return int(places[0]) if len(places) else None


def _sorted(ids: Set[int]) -> Ids:
    return np.array(sorted(ids), np.int32)


def _same(
    sample: Sample, lead: Ids, said: Ids, rendered: Ids, text_of: TextOf | None, client: Trimmed
) -> tuple[Drifted, ...] | None:
    """Where the ids `rendered` differ from `said`, if both are the same text; None: they are not.

    Args:
        lead: what of the generation prompt is not in the later prompt: left out there, or melted with the text.
    """
    left_out = (Drifted(-len(lead), len(lead), 0),) if len(lead) else ()
    if np.array_equal(said, rendered):
        return left_out
    if not decodable(sample):
        return None
    whole = np.concatenate([lead, said])
    if text_of is not None:
        shown = _text(sample, rendered, text_of, cut=False)
        if _text(sample, said, text_of, cut=True) == shown:
            return (*left_out, *differences(said, rendered))
        if len(lead) and _text(sample, whole, text_of, cut=True) == shown:
            return _shifted(differences(whole, rendered), len(lead))
        return None
    if len(lead) and _alike(sample, whole, rendered, client):
        return _shifted(differences(whole, rendered), len(lead))
    return (*left_out, *differences(said, rendered)) if _alike(sample, said, rendered, client) else None


def _text(sample: Sample, ids: Ids, text_of: TextOf, *, cut: bool) -> str:
    text = text_of(ids)
    stop = sample.choice.stop
    if cut and isinstance(stop, str) and stop in text:
        text = text[: text.rindex(stop)]
    return respaced(text) if sample.choice.message.get("tool_calls") else text


def _shifted(drift: tuple[Drifted, ...], by: int) -> tuple[Drifted, ...]:
    return tuple(one._replace(position=one.position - by) for one in drift)


def differences(sampled: Ids, rendered: Ids) -> tuple[Drifted, ...]:
    """The stretches in which two renderings differ, in order, each as short as can be told."""
    tail = common_suffix(sampled, rendered)
    here, there = sampled[: len(sampled) - tail], rendered[: len(rendered) - tail]
    found: list[Drifted] = []
    at, on = 0, 0
    while True:
        same = common_prefix(here[at:], there[on:])
        at, on = at + same, on + same
        if at == len(here) and on == len(there):
            return tuple(found)
        gone, come = _until_they_agree(here[at:], there[on:])
        found.append(Drifted(at, gone, come))
        at, on = at + gone, on + come


def _until_they_agree(here: Ids, there: Ids) -> tuple[int, int]:
    """How many ids of each come before the next `AGREE` equal ones; all of both if none are near."""
    for window in WINDOWS:
        one, other = here[: window + AGREE - 1], there[: window + AGREE - 1]
        if len(one) >= AGREE and len(other) >= AGREE:
            equal = one[:, None] == other[None, :]
            rows, columns = len(one) - AGREE + 1, len(other) - AGREE + 1
            agree = equal[:rows, :columns].copy()
            for step in range(1, AGREE):
                agree &= equal[step : step + rows, step : step + columns]
            places = np.argwhere(agree)
            if len(places):
                # the nearest; of those, one in which neither side is missing
                order = np.lexsort((places[:, 0], places.min(axis=1) == 0, places.sum(axis=1)))
                gone, come = places[order[0]]
                return int(gone), int(come)
        if window >= max(len(here), len(there)):
            break
    return len(here), len(there)


def _alike(sample: Sample, said: Ids, rendered: Ids, client: Trimmed) -> bool:
    """Whether the ids `rendered` can be the text of `said`, both without their end of turn, as ids alone show it."""
    if (len(said) > 0) != (len(rendered) > 0):
        return False
    message, stop = sample.choice.message, sample.choice.stop
    thinks = _thinks(message)
    times, more = TIGHT_STRETCH if thinks else STRETCH
    come = RESPACED if message.get("tool_calls") else 0
    gone = 0 if any(client) else come
    for position, here, there in differences(said, rendered):
        last = position + here == len(said)
        # of a stop string each byte may be an id
        dropped = len(stop.encode()) if isinstance(stop, str) and last else 0
        if thinks and not position:
            return False
        if (client.start and position < EDGE) or (client.end and last) or (client.inside and here):
            return False  # the template did not put back what the client trimmed, or none can tell
        if not here or not there:
            if there > come or here > gone + dropped:
                return False
        elif here > times * there + more + dropped or there > times * here + more:
            return False
    return True


def decodable(sample: Sample) -> bool:
    """Whether what was sampled is text: ids that end inside a character are shown, and come back, as U+FFFD."""
    return REPLACEMENT not in json.dumps(sample.choice.message, ensure_ascii=False)


def _thinks(message: Message) -> bool:
    """Whether a reply holds thinking, told apart by the engine or left in the text."""
    return bool(_thought(message)) or "</think>" in text_of(message)


def _thought(message: Message) -> str:
    return str(message.get("reasoning") or message.get("reasoning_content") or "")
