"""From captured completions to samples in the pool: what every strategy works on.

A sample is one sampled reply with its prompt (a completion with `n` choices gives `n`). Delta prompts are made whole,
tokens and messages go into the pools, and each sample learns which earlier ones its prompt begins with. Completions are
taken one at a time and dropped, so that memory grows with the distinct tokens of a session. What cannot be a sample is
set aside with the reason; nothing raises. It must not know how samples are joined to traces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from polar.schemas import Choice, CompletionCaptured, Logprobs, MediaPart, Prompt, SetAside, TokenIds
from polar.schemas.prompts import BaseExpired, resolve

from .messages import Message, MessagePool
from .pool import Ids, Span, TokenPool

Numbers = npt.NDArray[np.int32]
"""Shape `(messages, 2)`: of each message and of its normal form."""

_NO_IDS = TokenIds()
_NO_PROMPT = Prompt(ids=_NO_IDS)


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
    reply_message: int
    reply_normal: int
    tools: int | None
    """Number in the pool of tools."""
    tools_key: str | None
    """Equal exactly where tools are."""
    media: tuple[MediaPart, ...]
    extends: tuple[int, ...]
    """Earlier samples whose prompt and reply are, id for id, the beginning of this prompt; longest first."""
    starts_like: tuple[int, ...]
    """Earlier samples whose prompt is the beginning of this prompt (or all of it); longest first."""

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

    def prompt_ids(self, sample: Sample, start: int = 0) -> Ids:
        """A sample's prompt from position `start` on."""
        return self.tokens.gather(sample.prompt)[start:]

    def reply_ids(self, sample: Sample) -> Ids:
        return self.tokens.ids(sample.reply)


def read(completions: Iterable[CompletionCaptured]) -> Material:
    """Takes the captured completions of one attempt, in log order; a second one of the same id is dropped."""
    reader = _Reader()
    for completion in completions:
        reader.take(completion)
    return reader.material


class _Known:
    """A completion in the pools: what delta prompts refer to (`polar.schemas.prompts.Earlier`)."""

    def __init__(self, material: Material, prompt: Prompt, spans: list[Span], numbers: Numbers) -> None:
        """`prompt`: whole; `spans`: its ids; `numbers`: its messages and their normal forms."""
        self.tools = prompt.tools
        self.tools_sha256 = prompt.tools_sha256
        self.media = tuple(prompt.media)
        self.length = len(prompt.ids)
        self.numbers = numbers
        self._material = material
        self._spans = spans
        self._lost = _NO_IDS
        """Ids of the first choice, where they are in no pool."""

    def reply(self, choice: Choice, number: tuple[int, int], span: Span | None) -> None:
        """The first choice; `span` is None where it is no sample."""
        self.length += len(choice.ids)
        self.numbers = np.vstack([self.numbers, np.array([number], np.int32)])
        if span is not None:
            self._spans = [*self._spans, span]
        else:
            self._lost = choice.ids

    @property
    def message_count(self) -> int:
        return len(self.numbers)

    def ids(self, start: int, end: int) -> TokenIds:
        pooled = self._material.tokens.gather(self._spans)
        found: TokenIds = TokenIds.concat(
            [TokenIds(pooled[start:end]), self._lost.slice(max(start - len(pooled), 0), max(end - len(pooled), 0))]
        )
        return found

    def messages(self, start: int, end: int) -> list[Message]:
        return [self._material.messages.messages[one] for one in self.numbers[start:end, 0].tolist()]


class _Reader:
    def __init__(self) -> None:
        self.material = Material()
        self._known: dict[str, _Known] = {}
        self._seen: set[str] = set()

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
        numbers = self._numbers(prompt, completion.prompt)
        ids = prompt.ids.array
        tools = material.messages.add_tools(prompt.tools) if prompt.tools else None
        walk, spans, place = material.tokens.add_prompt(ids)
        known = self._known[completion.completion_id] = _Known(material, prompt, spans, numbers)
        choices = sorted(completion.choices, key=lambda one: one.index)
        problem = _unusable(prompt, choices)
        if problem is not None:
            self._aside(completion, *problem)
        extends, starts_like = tuple(walk.replies()), tuple(walk.prompts())
        for place_among, choice in enumerate(choices):
            message = material.messages.add(choice.message)
            reply: Span | None = None
            wrong = problem or _problem(choice)
            if wrong is None:
                index = len(material.samples)
                reply = material.tokens.add_reply(place, choice.ids.array, choice.logprobs.array, index)
                material.samples.append(
                    Sample(
                        index=index,
                        completion=msgspec.structs.replace(completion, prompt=_NO_PROMPT, choices=[]),
                        choice=msgspec.structs.replace(choice, ids=_NO_IDS, logprobs=Logprobs()),
                        prompt=spans,
                        prompt_length=len(ids),
                        reply=reply,
                        messages=numbers[:, 0],
                        normals=numbers[:, 1],
                        reply_message=message[0],
                        reply_normal=message[1],
                        tools=tools,
                        tools_key=prompt.tools_sha256 or (None if tools is None else f"#{tools}"),
                        media=known.media,
                        extends=extends,
                        starts_like=starts_like,
                    )
                )
            elif problem is None:
                self._aside(completion, *wrong, choice=choice.index if len(choices) > 1 else None)
            if place_among == 0:
                known.reply(choice, message, reply)

    def _numbers(self, prompt: Prompt, written: Prompt) -> Numbers:
        """Of the whole prompt's messages; those that stand in earlier calls have theirs."""
        parts: list[Numbers] = []
        at = 0
        for base in () if written.base is None else (written.base, *written.more):
            parts.append(self._known[base.completion_id].numbers[at : base.messages])
            at = base.messages
        own = [self.material.messages.add(one) for one in prompt.messages[at:]]
        parts.append(np.array(own, np.int32).reshape(-1, 2))
        return np.concatenate(parts)

    def _aside(self, completion: CompletionCaptured, reason: str, detail: str, *, choice: int | None = None) -> None:
        self.material.set_aside.append(
            SetAside(
                completion_id=completion.completion_id,
                reason=reason,
                attempt=completion.attempt,
                detail=detail if choice is None else f"choice {choice}: {detail}",
            )
        )


def _unusable(prompt: Prompt, choices: list[Choice]) -> tuple[str, str] | None:
    """Why no choice of a call can be a sample."""
    if not choices:
        return "empty", "no choice"
    if not len(prompt.ids):
        return "incomplete", "no prompt ids"
    return None


def _problem(choice: Choice) -> tuple[str, str] | None:
    if not len(choice.ids):
        return "empty", "nothing was sampled"
    if len(choice.ids) != len(choice.logprobs):
        return "incomplete", f"{len(choice.ids)} sampled ids with {len(choice.logprobs)} log-probabilities"
    return None
