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

from polar.schemas import Choice, CompletionCaptured, Logprobs, MediaPart, Prompt, PromptBase, SetAside, TokenIds

from .messages import MessagePool
from .pool import Ids, Span, TokenPool

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


@dataclass(slots=True)
class _Whole:
    """A completion's prompt, made whole, with its first reply: what delta prompts refer to."""

    prompt: list[Span]
    messages: npt.NDArray[np.int32]
    normals: npt.NDArray[np.int32]
    media: tuple[MediaPart, ...]
    first: tuple[Span, tuple[int, int]] | None
    """The first reply: where its ids are, and the numbers of its message; None: there is none that counts."""


class _Reader:
    def __init__(self) -> None:
        self.material = Material()
        self._whole: dict[str, _Whole] = {}
        self._tools: dict[str, int] = {}
        self._seen: set[str] = set()

    def take(self, completion: CompletionCaptured) -> None:
        if completion.completion_id in self._seen:
            return
        self._seen.add(completion.completion_id)
        self.material.completions.append(completion.completion_id)
        base = completion.prompt.base
        if base is not None and not self._has(base):
            detail = f"its prompt begins with {base.ids} ids of {base.completion_id}, which are not known"
            self._aside(completion, "base_expired", detail)
            return
        choices = sorted(completion.choices, key=lambda one: one.index)
        if not choices:
            self._aside(completion, "empty", "no choice")
            return
        ids, messages, normals, media = self._prompt(completion.prompt)
        if not len(ids):
            self._aside(completion, "incomplete", "no prompt ids")
            return
        tools = self._tool_list(completion.prompt)
        walk, spans, place = self.material.tokens.add_prompt(ids)
        extends, starts_like = tuple(walk.replies()), tuple(walk.prompts())
        first: tuple[Span, tuple[int, int]] | None = None
        for choice in choices:
            problem = _problem(choice)
            if problem is not None:
                self._aside(completion, *problem, choice=choice.index if len(choices) > 1 else None)
                continue
            index = len(self.material.samples)
            reply = self.material.tokens.add_reply(place, choice.ids.array, choice.logprobs.array, index)
            message = self.material.messages.add(choice.message)
            first = first or (reply, message)
            self.material.samples.append(
                Sample(
                    index=index,
                    completion=msgspec.structs.replace(completion, prompt=_NO_PROMPT, choices=[]),
                    choice=msgspec.structs.replace(choice, ids=_NO_IDS, logprobs=Logprobs()),
                    prompt=spans,
                    prompt_length=len(ids),
                    reply=reply,
                    messages=messages,
                    normals=normals,
                    reply_message=message[0],
                    reply_normal=message[1],
                    tools=tools,
                    tools_key=completion.prompt.tools_sha256 or (None if tools is None else f"#{tools}"),
                    media=media,
                    extends=extends,
                    starts_like=starts_like,
                )
            )
        self._whole[completion.completion_id] = _Whole(spans, messages, normals, media, first)

    def _has(self, base: PromptBase) -> bool:
        """Whether the share of an earlier completion that `base` names is known."""
        whole = self._whole.get(base.completion_id)
        if whole is None:
            return False
        spans = [*whole.prompt, whole.first[0]] if whole.first else whole.prompt
        return base.ids <= sum(end - start for start, end in spans)

    def _prompt(
        self, prompt: Prompt
    ) -> tuple[Ids, npt.NDArray[np.int32], npt.NDArray[np.int32], tuple[MediaPart, ...]]:
        """Ids, numbers of messages and of their normal forms, and media, made whole."""
        pairs = np.array([self.material.messages.add(one) for one in prompt.messages], np.int32).reshape(-1, 2)
        messages, normals = pairs[:, 0], pairs[:, 1]
        base = prompt.base
        if base is None:
            return prompt.ids.array, messages, normals, tuple(prompt.media)
        whole = self._whole[base.completion_id]
        # "the first N of X" counts X's prompt first and its reply after it
        spans, said, meant = whole.prompt, whole.messages, whole.normals
        if whole.first is not None:
            reply, numbers = whole.first
            spans = [*spans, reply]
            said, meant = np.append(said, np.int32(numbers[0])), np.append(meant, np.int32(numbers[1]))
        before, said, meant = (
            self.material.tokens.gather(spans)[: base.ids],
            said[: base.messages],
            meant[: base.messages],
        )
        media = tuple(one for one in whole.media if one.offset + one.length <= base.ids)
        return (
            np.concatenate([before, prompt.ids.array]),
            np.concatenate([said, messages]),
            np.concatenate([meant, normals]),
            (*media, *prompt.media),
        )

    def _tool_list(self, prompt: Prompt) -> int | None:
        """The prompt's tools, named by their hash where they are those of an earlier call."""
        if prompt.tools:
            number = self.material.messages.add_tools(prompt.tools)
            if prompt.tools_sha256 is not None:
                self._tools[prompt.tools_sha256] = number
            return number
        return self._tools.get(prompt.tools_sha256) if prompt.tools_sha256 is not None else None

    def _aside(self, completion: CompletionCaptured, reason: str, detail: str, *, choice: int | None = None) -> None:
        self.material.set_aside.append(
            SetAside(
                completion_id=completion.completion_id,
                reason=reason,
                attempt=completion.attempt,
                detail=detail if choice is None else f"choice {choice}: {detail}",
            )
        )


def _problem(choice: Choice) -> tuple[str, str] | None:
    if not len(choice.ids):
        return "empty", "nothing was sampled"
    if len(choice.ids) != len(choice.logprobs):
        return "incomplete", f"{len(choice.ids)} sampled ids with {len(choice.logprobs)} log-probabilities"
    return None
