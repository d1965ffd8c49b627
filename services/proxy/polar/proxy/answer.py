"""An engine's answer to a chat call, whole or as chunks, gathered into one checked `Reply`. vLLM's, and SGLang's.

Promises: every id has its own log-probability, in the order sampled, or `EngineBroken`; the same tokens give the same
reply whether they came whole or streamed (as far as the engine's own tool parser does). Pure: bytes of JSON in, deltas
and a reply out. It does not know HTTP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from polar.schemas import Logprobs, TokenIds

from .calls import Delta, Entry, Json, Reply, ReplyChoice, ToolDelta, Version
from .errors import EngineBroken, EngineError, EngineFailed

NAMED_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Tool(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    """A message, or a delta of one."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The name of `reasoning` before vLLM 0.12 and elsewhere."""
    tool_calls: list[_Tool] | None = None


class _Logprobs(msgspec.Struct):
    content: list[Entry] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    """SGLang's `meta_info`, which has the ids: of each token log-probability, id and perhaps its text."""

    output_token_logprobs: list[tuple[float, int, str | None]] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Message | None = None
    delta: _Message | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weight_versions: list[_Span] | None = None
    meta_info: _Meta | None = None
    prompt_token_ids: list[int] | None = None
    matched_stop: int | str | None = None
    """SGLang's names of what vLLM tells of the answer, or as `stop_reason`."""

    def sampled(self) -> tuple[list[int], list[Entry]]:
        """Ids and log-probability entries."""
        entries = (self.logprobs.content if self.logprobs is not None else None) or []
        meta = self.meta_info.output_token_logprobs if self.meta_info is not None else None
        if self.token_ids is not None or meta is None:
            return self.token_ids or [], entries
        if len(entries) != len(meta):
            entries = [Entry(text or "", logprob) for logprob, _, text in meta]
        ids = [token for _, token, _ in meta]
        # the values beside the ids are the ones to go by; the others hold their texts and alternatives
        told = [
            Entry(entry.token, logprob, entry.bytes, entry.top_logprobs)
            for entry, (logprob, _, _) in zip(entries, meta, strict=True)
        ]
        return ids, told


class _Body(msgspec.Struct):
    """A whole answer or one chunk."""

    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    usage: dict[str, Any] | None = None
    system_fingerprint: str | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Body)


@dataclass(slots=True)
class _Growing:
    """One choice while it grows."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tools: dict[int, list[str]] = field(default_factory=dict)
    """Per call: id, name, then pieces of its arguments."""
    finish: str | None = None
    stop: int | str | None = None
    versions: list[_Span] = field(default_factory=list)

    def message(self) -> Json:
        content = "".join(self.content)
        found: Json = {"role": "assistant", "content": content}
        if self.reasoning:
            found["reasoning"] = "".join(self.reasoning)
        if self.tools:
            # white space before a call is no text: the engine says null when whole and tells it when streamed
            found["content"] = content if content.strip() else None
            found["tool_calls"] = [
                {"id": call[0], "type": "function", "function": {"name": call[1], "arguments": "".join(call[2:])}}
                for _, call in sorted(self.tools.items())
            ]
        return found


class Answer:
    """An answer as far as it has come. Feed it one whole body, or chunks in order; then ask for the `reply`.

    `keep_entries`: keep the engine's log-probability entries too, for a client that asked for them.
    """

    def __init__(self, n: int, *, keep_entries: bool = False) -> None:
        self._choices = [_Growing() for _ in range(n)]
        self._keep_entries = keep_entries
        self._prompt: list[int] | None = None
        self._usage: dict[str, int] = {}
        self._fingerprint: str | None = None

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, once they have come."""
        return None if self._prompt is None else len(self._prompt)

    @property
    def sampled(self) -> int:
        """Tokens so far, over all choices."""
        return sum(len(choice.ids) for choice in self._choices)

    def feed(self, data: bytes) -> list[Delta]:
        """Take a whole body or a chunk; returns what it adds, without what adds nothing to see.

        Raises:
            EngineBroken: it is not such an answer, or has not one log-probability for each id.
            EngineError: the engine tells an error inside its stream.
        """
        try:
            body = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineBroken(f"the engine's answer is not a chat completion: {_where(error)}") from None
        if body.error is not None:
            raise told_error(body.error)
        if body.prompt_token_ids is not None:
            self._prompted(body.prompt_token_ids)
        if body.usage is not None:
            self._usage = _usage(body.usage)
        if body.system_fingerprint is not None:
            self._fingerprint = body.system_fingerprint
        deltas = []
        for choice in body.choices:
            delta = self._take(choice)
            if not delta.empty:
                deltas.append(delta)
        return deltas

    def _prompted(self, prompt: list[int]) -> None:
        if self._prompt is not None and self._prompt != prompt:
            raise EngineBroken("the engine tells two different prompts in one answer")
        self._prompt = prompt

    def _take(self, told: _Choice) -> Delta:
        if not 0 <= told.index < len(self._choices):
            raise EngineBroken(f"the engine answers choice {told.index}; {len(self._choices)} were asked for")
        choice = self._choices[told.index]
        if told.prompt_token_ids is not None:
            self._prompted(told.prompt_token_ids)
        ids, entries = told.sampled()
        if len(ids) != len(entries):
            raise EngineBroken(
                f"the engine tells {len(ids)} token ids with {len(entries)} log-probabilities; "
                "it must support logprobs with return_token_ids (vLLM 0.11 or newer), or return_meta_info (SGLang "
                "0.5.13 or newer)"
            )
        for entry in entries:
            if not math.isfinite(entry.logprob):
                raise EngineBroken("the engine tells a log-probability that is no number")
            choice.logprobs.append(entry.logprob)
        choice.ids += ids
        if self._keep_entries:
            choice.entries += entries
        if told.finish_reason is not None:
            choice.finish = told.finish_reason
            choice.stop = told.matched_stop if told.stop_reason is None else told.stop_reason
        if told.weight_versions:
            choice.versions = told.weight_versions
        message = told.message or told.delta or _Message()
        content, reasoning = message.content or "", message.reasoning or message.reasoning_content or ""
        if content:
            choice.content.append(content)
        if reasoning:
            choice.reasoning.append(reasoning)
        tools = message.tool_calls
        return Delta(
            index=told.index,
            content=content,
            reasoning=reasoning,
            tools=[self._tool(choice, i, tool) for i, tool in enumerate(tools)] if tools else (),
            entries=entries if self._keep_entries else (),
        )

    def _tool(self, choice: _Growing, position: int, tool: _Tool) -> ToolDelta:
        index = position if tool.index is None else tool.index
        function = tool.function or _Function()
        arguments = function.arguments or ""
        known = choice.tools.get(index)
        if known is not None:
            known.append(arguments)
            return ToolDelta(index, arguments=arguments)
        if tool.id is None or function.name is None:
            raise EngineBroken("the engine tells a tool call without id or name")
        choice.tools[index] = [tool.id, function.name, arguments]
        return ToolDelta(index, tool.id, function.name, arguments)

    def reply(self, *, partial: bool = False) -> Reply:
        """The whole answer; `partial`: as far as it came, for an answer that was cut off.

        Raises:
            EngineBroken: no prompt ids, a choice without an end, or a count that differs from the engine's own.
        """
        if not self._prompt:
            raise EngineBroken(
                "the engine tells no prompt ids; it must support return_token_ids (vLLM 0.11 or newer), or "
                "return_prompt_token_ids (SGLang 0.5.13 or newer)"
            )
        if not partial:
            self._check_ended()
        try:
            return Reply(
                prompt_ids=TokenIds(self._prompt),
                choices=[self._choice(i, choice) for i, choice in enumerate(self._choices)],
                usage=self._usage or self._counted(),
                fingerprint=self._fingerprint,
            )
        except (ValueError, OverflowError) as error:
            raise EngineBroken(f"the engine's numbers cannot be recorded: {error}") from None

    def _check_ended(self) -> None:
        for i, choice in enumerate(self._choices):
            if choice.finish is None:
                raise EngineBroken(f"the engine's answer ends without a finish reason for choice {i}")
            if not choice.ids and choice.finish != "abort":
                raise EngineBroken(f"the engine tells no token ids for choice {i}")
        told = self._usage.get("completion_tokens")
        if told is not None and told != self.sampled:
            raise EngineBroken(f"the engine counts {told} sampled tokens and tells {self.sampled}")
        told = self._usage.get("prompt_tokens")
        if told is not None and self._prompt is not None and told != len(self._prompt):
            raise EngineBroken(f"the engine counts {told} prompt tokens and tells {len(self._prompt)}")

    def _counted(self) -> dict[str, int]:
        prompt = len(self._prompt or ())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.sampled,
            "total_tokens": prompt + self.sampled,
        }

    def _choice(self, index: int, choice: _Growing) -> ReplyChoice:
        return ReplyChoice(
            index=index,
            ids=TokenIds(choice.ids),
            logprobs=Logprobs(choice.logprobs),
            message=choice.message(),
            finish=choice.finish,
            stop=choice.stop,
            versions=[Version(span.version, span.start, span.end) for span in choice.versions],
            entries=choice.entries,
        )


def told_error(error: Any) -> EngineError:
    """An error told inside a stream, after a status of 200. The engine's text stays out: it may quote the prompt."""
    code = error.get("code") if isinstance(error, dict) else None
    return EngineFailed(f"the engine failed while it generated (code {code})")


def _usage(told: dict[str, Any]) -> dict[str, int]:
    found = {name: int(told[name]) for name in NAMED_USAGE if isinstance(told.get(name), int)}
    for group, name in (("prompt_tokens_details", "cached_tokens"), ("completion_tokens_details", "reasoning_tokens")):
        details = told.get(group)
        if isinstance(details, dict) and isinstance(details.get(name), int):
            found[name] = details[name]
    return found


def _where(error: Exception) -> str:
    # msgspec names types and paths, never values
    return str(error) if isinstance(error, msgspec.DecodeError) else "not UTF-8"
