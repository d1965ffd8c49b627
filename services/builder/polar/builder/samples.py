"""From captured completions to samples in the pool: what every strategy works on.

A sample is one sampled reply with its prompt (a completion with `n` choices gives `n`). Delta prompts are made whole,
tokens and messages go into the pools, and each sample learns which earlier ones its prompt begins with. Completions are
taken one at a time and dropped, so that memory grows with the distinct tokens of a session. What cannot be a sample is
set aside with the reason; nothing raises. It must not know how samples are joined to traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from polar.schemas import Choice, CompletionCaptured, Logprobs, MediaPart, Prompt, SetAside, TokenIds
from polar.schemas.messages import Message
from polar.schemas.prompts import BaseExpired, resolve

from .messages import MessagePool
from .pool import Ids, Span, TokenPool, begins, skipped, taken
from .texts import Tokenizers

Numbers = npt.NDArray[np.int32]
"""Shape `(3, messages)`: of each message, of its normal form, and of the conversation up to it."""

NEAREST: Final = 32
"""Earlier calls that a sample knows by ids: all would be one for each pair of calls, and only the longest matter."""
CONVERSATIONS: Final = 4
"""Whole prompts that are kept to compare later ones with: of calls of a sub-agent and its caller by turns."""

_NO_IDS = TokenIds()
_NO_LOGPROBS = Logprobs()
_NO_PROMPT = Prompt(ids=_NO_IDS)
_NO_NUMBERS: Final[Numbers] = np.empty((3, 0), np.int32)

_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True, eq=False)
class Sample:
    """One sampled reply. Samples are numbered in log order."""

    index: int
    completion: CompletionCaptured
    """Without its prompt and choices, which are in the pools."""
    choice: Choice
    """Without ids and log-probabilities."""
    prompt: list[Span]
    """Of the token pool."""
    prompt_length: int
    reply: Span
    """Of the token pool."""
    messages: npt.NDArray[np.int32]
    """Numbers of the prompt's messages."""
    normals: npt.NDArray[np.int32]
    """Numbers of their normal forms."""
    paths: npt.NDArray[np.int32]
    """Numbers of the conversation up to each of them (`MessagePool.path`)."""
    said: int
    """Number of the conversation with the reply."""
    reply_message: int
    reply_normal: int
    tools: int | None
    """Number in the pool of tools."""
    tools_key: str | None
    """Equal exactly where tools are."""
    media: tuple[MediaPart, ...]
    extends: tuple[int, ...]
    """The longest earlier samples with whose prompt and reply, id for id, this prompt begins; longest first."""
    starts_like: tuple[int, ...]
    """The longest earlier samples with whose prompt this prompt begins, or which it equals; longest first."""

    @property
    def path(self) -> int:
        """Number of the conversation that the prompt is; -1: it has no messages."""
        return int(self.paths[-1]) if len(self.paths) else -1

    def conversations(self) -> Iterator[int]:
        """`paths`, longest first."""
        paths = self.paths
        return (paths.item(at) for at in range(len(paths) - 1, -1, -1))

    @property
    def place(self) -> int:
        """Where the prompt ends in the pool; equal prompts end in one place."""
        return self.prompt[-1][1]

    @property
    def engine(self) -> str:
        """Which tokenizer its ids are of, as far as the record says."""
        engine = self.completion.engine
        return engine.tokenizer_sha256 or engine.model

    @property
    def reply_length(self) -> int:
        return self.reply[1] - self.reply[0]

    @property
    def end(self) -> int:
        """Length of prompt and reply."""
        return self.prompt_length + self.reply_length


@dataclass(slots=True)
class Material:
    """All a strategy may use."""

    tokens: TokenPool = field(default_factory=TokenPool)
    messages: MessagePool = field(default_factory=MessagePool)
    samples: list[Sample] = field(default_factory=list)
    set_aside: list[SetAside] = field(default_factory=list)
    completions: list[str] = field(default_factory=list)
    """Ids of all completions read, in log order."""
    tokenizers: Tokenizers = field(default_factory=Tokenizers)

    def prompt_ids(self, sample: Sample, start: int = 0) -> Ids:
        """A sample's prompt from position `start` on."""
        spans = sample.prompt if not start else list(skipped(sample.prompt, start))
        return self.tokens.gather(spans)

    def reply_ids(self, sample: Sample) -> Ids:
        return self.tokens.ids(sample.reply)


def read(completions: Iterable[CompletionCaptured], tokenizers: Tokenizers | None = None) -> Material:
    """Takes the captured completions of one attempt, in log order; a second one of the same id is dropped."""
    reader = Reader(tokenizers)
    for completion in completions:
        reader.take(completion)
    return reader.material


class _Line:
    """Numbers of messages that grow at their end: one array for all calls of a conversation that only grows."""

    def __init__(self) -> None:
        self._rows = np.empty((3, 8), np.int32)
        self._used = 0

    def add(self, known: Numbers, new: list[tuple[int, int, int]]) -> tuple[_Line, Numbers]:
        """`known`, with which this line begins, and then `new`: here, or in a new line where another one stands."""
        start, end = known.shape[1], known.shape[1] + len(new)
        line = self
        if start != self._used:
            line = _Line()
            line._reserve(end)
            line._rows[:, :start] = known
        if new:
            line._reserve(end)
            line._rows[:, start:end] = np.array(new, np.int32).T
        line._used = end
        return line, line._rows[:, :end]

    def _reserve(self, count: int) -> None:
        if count > self._rows.shape[1]:
            larger = np.empty((3, max(count, 2 * self._rows.shape[1])), np.int32)
            larger[:, : self._used] = self._rows[:, : self._used]
            self._rows = larger


class _Whole(NamedTuple):
    """The messages of a prompt that was written whole."""

    packed: bytes
    line: _Line
    numbers: Numbers


class _Known:
    """A completion in the pools: what delta prompts refer to (`polar.schemas.prompts.Earlier`).

    Its ids and messages stay where they are: a prompt that refers to it is resolved to what it adds, and goes on from
    `spans` and `numbers`, so that taking a call costs what is new in it.
    """

    def __init__(
        self, prompt: Prompt, tools: int | None, spans: list[Span], length: int, line: _Line, numbers: Numbers
    ) -> None:
        """`prompt`: its tools and media are whole; `spans`, `length`, `numbers`: of all of its ids and messages."""
        self.tools = prompt.tools
        self.tools_number = tools
        self.tools_sha256 = prompt.tools_sha256
        self.media = tuple(prompt.media)
        self.spans = spans
        self.length = length
        self.line = line
        self.numbers = numbers

    @property
    def message_count(self) -> int:
        return len(self.numbers[0])

    def ids(self, start: int, end: int) -> TokenIds:
        return _NO_IDS

    def messages(self, start: int, end: int) -> list[Message]:
        return []


class Reader:
    """Takes completions one by one; `material` is of those taken."""

    def __init__(self, tokenizers: Tokenizers | None = None) -> None:
        self.material = Material(tokenizers=tokenizers or Tokenizers())
        self._known: dict[str, _Known] = {}
        self._seen: set[str] = set()
        self._whole: list[_Whole] = []
        """Of the last ones that do not begin each other."""

    def take(self, completion: CompletionCaptured) -> None:
        if completion.completion_id in self._seen:
            return
        self._seen.add(completion.completion_id)
        material = self.material
        material.completions.append(completion.completion_id)
        try:
            prompt = resolve(completion, self._known.get)
        except BaseExpired as error:
            self._aside(completion, "base_expired", str(error))
            return
        line, numbers = self._numbers(prompt.messages, completion.prompt)
        tools = self._tools(prompt, completion.prompt)
        spans, place = material.tokens.add_given(self._before(completion.prompt), prompt.ids.array)
        extends, starts_like = place.replies(NEAREST), place.prompts(NEAREST)
        length = place.depth
        known = self._known[completion.completion_id] = _Known(prompt, tools, spans, length, line, numbers)
        choices = sorted(completion.choices, key=lambda one: one.index)
        problem = _unusable(length, choices)
        if problem is not None:
            self._aside(completion, *problem)
        bare = msgspec.structs.replace(completion, prompt=_NO_PROMPT, choices=[])
        path = _last_path(numbers)
        for place_among, choice in enumerate(choices):
            message = material.messages.add(choice.message)
            said = material.messages.path(path, message[1])
            wrong = problem or _problem(choice)
            if wrong is None:
                index = len(material.samples)
                reply, whole = material.tokens.add_reply(spans, choice.ids.array, choice.logprobs.array, index)
                material.samples.append(
                    Sample(
                        index=index,
                        completion=bare,
                        choice=msgspec.structs.replace(choice, ids=_NO_IDS, logprobs=_NO_LOGPROBS),
                        prompt=spans,
                        prompt_length=length,
                        reply=reply,
                        messages=numbers[0],
                        normals=numbers[1],
                        paths=numbers[2],
                        said=said,
                        reply_message=message[0],
                        reply_normal=message[1],
                        tools=tools,
                        tools_key=prompt.tools_sha256 or (None if tools is None else f"#{tools}"),
                        media=known.media,
                        extends=extends,
                        starts_like=starts_like,
                    )
                )
            else:
                if problem is None:
                    self._aside(completion, *wrong, choice=choice.index if len(choices) > 1 else None)
                if place_among == 0:
                    # no sample, but later prompts may refer to it
                    whole, _ = material.tokens.add_given(spans, choice.ids.array)
            if place_among == 0:
                known.spans, known.length = whole, length + len(choice.ids)
                known.line, known.numbers = line.add(numbers, [(*message, said)])

    def _tools(self, prompt: Prompt, written: Prompt) -> int | None:
        if not prompt.tools:
            return None
        if written.base is not None:
            last = self._known[(written.base, *written.more)[-1].completion_id]
            if last.tools is prompt.tools:
                return last.tools_number
        return self.material.messages.add_tools(prompt.tools)

    def _before(self, written: Prompt) -> list[Span]:
        """The ids that a prompt refers to."""
        spans: list[Span] = []
        length = 0
        for base in () if written.base is None else (written.base, *written.more):
            known = self._known[base.completion_id]
            share = known.spans if base.ids == known.length else taken(known.spans, base.ids)
            if not begins(share, spans):
                # that call's own beginning was another: only what follows it is meant
                ids = self.material.tokens.gather(list(skipped(share, length)))
                share, _ = self.material.tokens.add_given(spans, ids.copy())
            spans, length = share, base.ids
        return spans

    def _numbers(self, messages: list[Message], written: Prompt) -> tuple[_Line, Numbers]:
        """Of the whole prompt's messages, of which `messages` are its own; those in earlier calls have theirs."""
        if written.base is None:
            return self._numbers_of_whole(messages)
        line, numbers = _Line(), _NO_NUMBERS
        for base in (written.base, *written.more):
            known = self._known[base.completion_id]
            share = known.numbers[:, : base.messages]
            at = numbers.shape[1]
            if not at or known.line is line or np.array_equal(share[0, :at], numbers[0]):
                line, numbers = known.line, share
            else:
                # that call's own beginning was another: only what follows it is meant
                line, numbers = line.add(numbers, self._placed(share[:2, at:].T.tolist(), _last_path(numbers)))
        return line.add(numbers, self._placed(map(self.material.messages.add, messages), _last_path(numbers)))

    def _numbers_of_whole(self, messages: list[Message]) -> tuple[_Line, Numbers]:
        """A conversation that is written whole with each call is looked at in one comparison of bytes."""
        packed = _packed(messages)
        line, numbers = _Line(), _NO_NUMBERS
        for one in self._whole:
            if packed.startswith(one.packed):
                line, numbers = one.line, one.numbers
                self._whole.remove(one)
                break
        new = self._placed(map(self.material.messages.add, messages[numbers.shape[1] :]), _last_path(numbers))
        line, numbers = line.add(numbers, new)
        self._whole = [_Whole(packed, line, numbers), *self._whole[: CONVERSATIONS - 1]]
        return line, numbers

    def _placed(self, messages: Iterable[Sequence[int]], path: int) -> list[tuple[int, int, int]]:
        """Messages and their normal forms, behind the conversation `path`."""
        found = []
        for number, form in messages:
            path = self.material.messages.path(path, form)
            found.append((number, form, path))
        return found

    def _aside(self, completion: CompletionCaptured, reason: str, detail: str, *, choice: int | None = None) -> None:
        self.material.set_aside.append(
            SetAside(
                completion_id=completion.completion_id,
                reason=reason,
                attempt=completion.attempt,
                detail=detail if choice is None else f"choice {choice}: {detail}",
            )
        )


def _last_path(numbers: Numbers) -> int:
    return int(numbers[2, -1]) if numbers.shape[1] else -1


def _packed(messages: list[Message]) -> bytes:
    """As MessagePack, without the head that tells how many: what a list begins with stands at the beginning."""
    return b"".join(map(_encode, messages))


def _unusable(length: int, choices: list[Choice]) -> tuple[str, str] | None:
    """Why no choice of a call can be a sample."""
    if not choices:
        return "empty", "no choice"
    if not length:
        return "incomplete", "no prompt ids"
    return None


def _problem(choice: Choice) -> tuple[str, str] | None:
    if not len(choice.ids):
        return "empty", "nothing was sampled"
    if len(choice.ids) != len(choice.logprobs):
        return "incomplete", f"{len(choice.ids)} sampled ids with {len(choice.logprobs)} log-probabilities"
    return None
