"""Delta prompts: "the first N ids and M messages of completion X, then these" (design, section 6). Pure.

The sequence of a completion is its whole prompt's ids followed by the ids of its first choice (the one of lowest
index); its messages are its whole prompt's messages followed by that choice's message. A `PromptBase` counts into both,
independently of each other. Tools that are those of the base are named by their hash alone. Media of the base that lie
wholly within its first N ids are the prompt's first ones.

Promises:

- `resolve` is the only reading of a delta prompt, and gives back what `delta` was given, bit for bit, whatever came
  before: bases are chosen by comparison (ids as they are, messages and tools by a digest of their encoding), never by
  what a harness is thought to do.
- A chain of references is at most `MAX_CHAIN` long. Whole prompts in between would cost a session of fifty calls half
  of its bytes again, so a prompt whose chain would be longer names the links of the chain itself (`Prompt.more`), each
  for what its own record holds: its chain is short again, and nothing is written twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace

from .arrays import TokenIds
from .completions import Choice, CompletionCaptured, MediaPart, Prompt, PromptBase

MAX_CHAIN: Final = 32
"""References from a prompt to one that is whole, at most."""
REFERENCE_BYTES: Final = 96
"""What a reference itself takes in a record, about; one that saves less is not worth a link of the chain."""
DIGEST_BYTES: Final = 16
ID_BYTES: Final = TokenIds.dtype.itemsize

Message = dict[str, Any]
Tools = list[dict[str, Any]]

_encode = msgspec.msgpack.Encoder().encode


class BaseExpired(LookupError):
    """A prompt refers to what is not there: set the completion aside as `base_expired`."""

    def __init__(self, completion_id: str, base: PromptBase, why: str) -> None:
        super().__init__(
            f"its prompt begins with {base.ids} ids and {base.messages} messages of {base.completion_id} "
            f"(offset {base.offset}): {why}"
        )
        self.completion_id = completion_id
        self.base = base
        self.why = why


def first_choice(choices: Iterable[Choice]) -> Choice | None:
    """The choice that counts in a completion's sequence: the one of lowest index."""
    return min(choices, key=lambda one: one.index, default=None)


# reading ------------------------------------------------------------------------------------------------------------


class Earlier(Protocol):
    """A completion that prompts may refer to, however it is kept."""

    @property
    def length(self) -> int:
        """Ids of its sequence."""

    @property
    def message_count(self) -> int: ...

    @property
    def tools(self) -> Tools | None: ...

    @property
    def tools_sha256(self) -> str | None: ...

    @property
    def media(self) -> Sequence[MediaPart]:
        """Of its whole prompt."""

    def ids(self, start: int, end: int) -> TokenIds:
        """Ids `start` to `end` (exclusive) of its sequence."""

    def messages(self, start: int, end: int) -> list[Message]:
        """Messages `start` to `end` (exclusive)."""


def resolve(completion: CompletionCaptured, known: Callable[[str], Earlier | None]) -> Prompt:
    """The whole prompt of `completion`; it has no base.

    Args:
        known: an earlier completion of the same session and attempt, by its id; None: there is none.

    Raises:
        BaseExpired: a completion it refers to is not known, or holds less than it is said to.
    """
    prompt = completion.prompt
    if prompt.base is None:
        return prompt
    ids: list[TokenIds] = []
    messages: list[Message] = []
    last, at, said = prompt.base, 0, 0
    for last in (prompt.base, *prompt.more):
        found = known(last.completion_id)
        if found is None:
            raise BaseExpired(completion.completion_id, last, "that completion is not known")
        if not (at <= last.ids <= found.length and said <= last.messages <= found.message_count):
            have = f"it has {found.length} ids and {found.message_count} messages"
            raise BaseExpired(completion.completion_id, last, have)
        ids.append(found.ids(at, last.ids))
        messages += found.messages(said, last.messages)
        at, said = last.ids, last.messages
    assert found is not None
    tools = prompt.tools
    if tools is None and prompt.tools_sha256 is not None:
        if found.tools_sha256 != prompt.tools_sha256:
            raise BaseExpired(completion.completion_id, last, f"it has not the tools {prompt.tools_sha256}")
        tools = found.tools
    return replace(
        prompt,
        ids=TokenIds.concat([*ids, prompt.ids]),
        messages=[*messages, *prompt.messages],
        tools=tools,
        media=[*_within(found.media, last.ids), *prompt.media],
        base=None,
        more=[],
    )


class Prompts:
    """The prompts of one attempt's completions, made whole one after the other in log order.

    Holds what each record itself holds and no copies: memory grows with the bytes on the log, not with whole prompts.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Linked] = {}

    def take(self, completion: CompletionCaptured) -> Prompt:
        """The whole prompt of the next completion, which later ones may then refer to.

        Raises:
            BaseExpired: it cannot be made whole; nor can what refers to it.
        """
        whole = resolve(completion, self._known.get)
        self._known.setdefault(completion.completion_id, _Linked(completion, whole, self._known))
        return whole


class _Linked:
    """A completion as it was written, with those it refers to."""

    def __init__(self, completion: CompletionCaptured, whole: Prompt, known: dict[str, _Linked]) -> None:
        prompt, choice = completion.prompt, first_choice(completion.choices)
        self.tools = whole.tools
        self.tools_sha256 = whole.tools_sha256
        self.media = tuple(whole.media)
        bases = [] if prompt.base is None else [prompt.base, *prompt.more]
        self._shares = [(known[one.completion_id], one.ids, one.messages) for one in bases]
        self._own = prompt.ids if choice is None else TokenIds.concat([prompt.ids, choice.ids])
        self._said = prompt.messages if choice is None else [*prompt.messages, choice.message]
        self._own_at, self._said_at = (bases[-1].ids, bases[-1].messages) if bases else (0, 0)
        self.length = self._own_at + len(self._own)
        self.message_count = self._said_at + len(self._said)

    def ids(self, start: int, end: int) -> TokenIds:
        parts: list[TokenIds] = []
        # from the end to the beginning, without recursion: a foreign writer may have made chains of any length
        left = [(self, start, end)]
        while left:
            one, start, end = left.pop()
            if end > one._own_at:
                parts.append(one._own.slice(max(start - one._own_at, 0), end - one._own_at))
            before = 0
            for base, upto, _ in one._shares:
                if max(start, before) < min(end, upto):
                    left.append((base, max(start, before), min(end, upto)))
                before = upto
        whole: TokenIds = TokenIds.concat(reversed(parts))
        return whole

    def messages(self, start: int, end: int) -> list[Message]:
        parts: list[list[Message]] = []
        left = [(self, start, end)]
        while left:
            one, start, end = left.pop()
            if end > one._said_at:
                parts.append(one._said[max(start - one._said_at, 0) : end - one._said_at])
            before = 0
            for base, _, upto in one._shares:
                if max(start, before) < min(end, upto):
                    left.append((base, max(start, before), min(end, upto)))
                before = upto
        return [message for part in reversed(parts) for message in part]


# writing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A completion on the log, as much of it as later prompts are compared with: its own ids, and digests."""

    completion_id: str
    offset: int
    """Of its record."""
    chain: int
    """References from its prompt to one that is whole; 0: it is whole."""
    flat: bool
    """Its prompt names the links of its chain itself, or is whole."""
    base: Captured | None
    base_ids: int
    base_messages: int
    ids: TokenIds
    """After the base's share, its first choice's included."""
    digests: tuple[bytes, ...]
    """Of the messages after the base's share, its first choice's included."""
    tools: bytes | None
    tools_sha256: str | None
    media: tuple[MediaPart, ...]
    """Of its whole prompt."""

    @property
    def size(self) -> int:
        """Bytes it takes in memory, about."""
        return 700 + 50 * len(self.digests) + len(self.ids.data) + 200 * len(self.media)

    def sequence(self) -> TokenIds:
        """All its ids: its whole prompt's, then its first choice's."""
        parts, at, wanted = [self.ids], self, self.base_ids
        while at.base is not None and wanted:
            at = at.base
            if wanted > at.base_ids:
                parts.append(at.ids.slice(0, wanted - at.base_ids))
                wanted = at.base_ids
        whole: TokenIds = TokenIds.concat(reversed(parts))
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A prompt as it is to be written."""

    prompt: Prompt
    saved: int
    """Bytes of ids, messages and tools that references stand for, about; 0: the prompt is whole."""
    _known: _Known | None
    _digests: tuple[bytes, ...]
    """Of the prompt's own messages."""
    _tools: bytes | None
    _media: tuple[MediaPart, ...]
    length: int = 0
    """Ids of the whole prompt."""

    def captured(self, completion_id: str, offset: int, choices: Iterable[Choice]) -> Captured:
        """What later prompts are compared with, once the record with this prompt is acknowledged at `offset`."""
        prompt, choice = self.prompt, first_choice(choices)
        base = None if self._known is None else self._known.one
        last = None if prompt.base is None else [prompt.base, *prompt.more][-1]
        return Captured(
            completion_id=completion_id,
            offset=offset,
            chain=0 if self._known is None else self._known.chain,
            flat=base is None or bool(prompt.more),
            base=base,
            base_ids=0 if last is None else last.ids,
            base_messages=0 if last is None else last.messages,
            ids=prompt.ids if choice is None else TokenIds.concat([prompt.ids, choice.ids]),
            digests=self._digests if choice is None else (*self._digests, _digest(_encode(choice.message))),
            tools=self._tools,
            tools_sha256=prompt.tools_sha256,
            media=self._media,
        )


def delta(prompt: Prompt, history: Iterable[Captured], *, max_chain: int = MAX_CHAIN) -> Draft:
    """`prompt` against the one of `history` that saves most, or whole where none saves anything.

    Args:
        prompt: whole.
        history: completions of the same attempt in log order, each after its base.
        max_chain: references from the result to a whole prompt, at most; 1 or more.
    """
    new = _New(prompt)
    best: _Known | None = None
    saved = REFERENCE_BYTES
    alike: dict[Captured, tuple[int, int]] = {}
    for one in history:
        alike[one] = new.alike(one, alike)
        if new.worth(*alike[one], tools=True) <= saved:
            continue
        match = new.fitted(one, *alike[one])
        if match is not None and (worth := new.worth(match.ids, match.messages, tools=match.tools)) > saved:
            best, saved = match, worth
    bases: list[PromptBase] = []
    if best is not None:
        bases, best.chain = _references(best, max_chain)
    if best is None or saved < REFERENCE_BYTES * len(bases):
        return Draft(prompt, 0, None, tuple(new.digests), new.tools, tuple(prompt.media), len(prompt.ids))
    written = replace(
        prompt,
        ids=prompt.ids.slice(best.ids, len(prompt.ids)),
        messages=prompt.messages[best.messages :],
        tools=None if best.tools else prompt.tools,
        media=prompt.media[best.media :],
        base=bases[0],
        more=bases[1:],
    )
    return Draft(
        written, saved, best, tuple(new.digests[best.messages :]), new.tools, tuple(prompt.media), len(prompt.ids)
    )


@dataclass(slots=True)
class _Known:
    """What of a prompt `one` can stand for."""

    one: Captured
    ids: int
    messages: int
    tools: bool
    media: int
    chain: int = 0


def _references(best: _Known, max_chain: int) -> tuple[list[PromptBase], int]:
    """How `best` is referred to, and how long that makes the chain."""

    def reference(one: Captured, ids: int, messages: int) -> PromptBase:
        return PromptBase(completion_id=one.completion_id, offset=one.offset, ids=ids, messages=messages)

    at, ids, messages = best.one, best.ids, best.messages
    found = [reference(at, ids, messages)]
    if at.chain < max_chain:
        return found, at.chain + 1
    # each link for its own part, back to one from which the chain can grow anew
    while at.base is not None and not (at.flat and at.chain <= max_chain // 2):
        ids, messages = min(ids, at.base_ids), min(messages, at.base_messages)
        at = at.base
        found.append(reference(at, ids, messages))
    found.reverse()
    # the last one stays even if it adds nothing: tools and media are its
    adds = [before.ids < after.ids or before.messages < after.messages for before, after in pairwise(found)]
    return [found[0], *(one for one, new in zip(found[1:-1], adds, strict=False) if new), found[-1]], at.chain + 1


class _New:
    """The prompt that is to be written."""

    def __init__(self, prompt: Prompt) -> None:
        texts = [_encode(message) for message in prompt.messages]
        tools = None if prompt.tools is None else _encode(prompt.tools)
        self.prompt = prompt
        self.ids = prompt.ids.array
        self.digests = [_digest(text) for text in texts]
        self.tools = None if tools is None else _digest(tools)
        self._tools_size = 0 if tools is None else len(tools)
        self._before = [0]
        """Bytes of the first so many messages."""
        for text in texts:
            self._before.append(self._before[-1] + len(text))

    def worth(self, ids: int, messages: int, *, tools: bool) -> int:
        """Bytes of the first so many ids and messages, and of the tools."""
        return ids * ID_BYTES + self._before[messages] + (self._tools_size if tools else 0)

    def alike(self, one: Captured, before: dict[Captured, tuple[int, int]]) -> tuple[int, int]:
        """How many ids and messages the prompt and `one` begin alike.

        Only what `one` adds to its base is looked at, so that all of a history together costs its distinct ids.
        """
        ids, messages = (0, 0) if one.base is None else before[one.base]
        if ids >= one.base_ids:
            data, at = one.ids.data, one.base_ids * ID_BYTES
            # most of a history is the beginning of the next prompt as it is: one comparison of bytes
            if data == self.prompt.ids.data[at : at + len(data)]:
                ids = one.base_ids + len(data) // ID_BYTES
            else:
                ids = one.base_ids + _common_ids(one.ids.array, self.ids[one.base_ids :])
        if messages >= one.base_messages:
            said = self.digests[one.base_messages : one.base_messages + len(one.digests)]
            messages = one.base_messages + _common(one.digests, said)
        return ids, messages

    def fitted(self, one: Captured, ids: int, messages: int) -> _Known | None:
        """As much of that as gives tools and media back as they are too; None: nothing does."""
        sha256 = self.prompt.tools_sha256
        tools = sha256 is not None and (one.tools_sha256, one.tools) == (sha256, self.tools)
        if self.prompt.tools is None and sha256 is not None and not tools:
            return None  # it would be given the base's
        while True:
            share = _within(one.media, ids)
            same = _common(share, self.prompt.media)
            if same == len(share):
                return _Known(one, ids, messages, tools, same)
            if ids == 0:
                return None
            # another image in the same place: end before it
            ids = max(0, min(ids - 1, share[same].offset))


def _within(media: Sequence[MediaPart], ids: int) -> list[MediaPart]:
    return [one for one in media if one.offset + one.length <= ids]


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items both begin with."""
    for at, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return at
    return min(len(one), len(other))


def _common_ids(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> int:
    length = min(len(one), len(other))
    if not length:
        return 0
    differs = one[:length] != other[:length]
    at = int(differs.argmax())
    return at if differs[at] else length


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()
