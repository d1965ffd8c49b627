"""One choice of an answer: sampled tokens in, ended turn and message out.

Pure state machine, the same for every backend: decides where the turn ends (end-of-turn token, stop token, stop string,
length), which text a client sees by then, and what a log-probability entry looks like. Every sampled id is told exactly
once, with its log-probability, also when its text is held back, cut off or empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .chat import ChatTokenizer
from .parse import CallStream, ReasoningStream, read_calls, split_reasoning
from .request import ChatRequest, Sampling

Json = dict[str, Any]
FLOOR = -9999.0  # what vLLM tells for a log-probability of minus infinity


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled token; `top` are (id, log-probability) of the likeliest, best first. Natural logarithms."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Burst:
    """Tokens of one chunk, sampled by one version of the weights; `finish` if the backend ends the turn itself."""

    tokens: Sequence[Sampled]
    finish: str | None = None
    stop_reason: int | str | None = None
    version: str | None = None


@dataclass(slots=True)
class Delta:
    """What one burst adds to a choice."""

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: list[Json] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    entries: list[Json] = field(default_factory=list)
    finish: str | None = None
    stop_reason: int | str | None = None

    def message(self) -> Json:
        """The `delta` object, as sparse as vLLM's."""
        fields: Json = {}
        if self.reasoning:
            fields["reasoning"] = self.reasoning
        if self.tool_calls:
            fields["content"] = self.content or None
            fields["tool_calls"] = self.tool_calls
        elif self.content:
            fields["content"] = self.content
        return fields


class Choice:
    """The state of one choice. Feed bursts until `finish` is set; more tokens after that are an error of the caller."""

    def __init__(
        self,
        index: int,
        sampling: Sampling,
        max_tokens: int,
        chat: ChatTokenizer,
        *,
        request: ChatRequest | None = None,
        reasoning: bool = False,
    ) -> None:
        self.index = index
        self.ids: list[int] = []
        self.entries: list[Json] = []
        self.tops: list[list[tuple[int, float]]] = []
        """Of each entry: the listed tokens, the sampled one first."""
        self.spans: list[Json] = []
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._eos = chat.eos_id
        parses_tools = request is not None and request.parses_tools
        skip = request is None or (request.skip_special_tokens and not parses_tools)
        self._as_ids = request is not None and request.tokens_as_ids
        self._decoder = chat.stream(skip_special=skip)
        self._names = chat.stream(skip_special=False)
        self._text = ""
        self._visible = 0
        self._hold = 0 if sampling.include_stop else max((len(stop) - 1 for stop in sampling.stop), default=0)
        self._parses_calls, self._parses_reasoning = parses_tools, reasoning
        streamed = request is not None and request.stream
        self._calls = CallStream() if parses_tools and streamed else None
        self._reasoning = ReasoningStream() if reasoning and streamed else None

    def feed(self, burst: Burst) -> Delta:
        """Take a burst up to where the turn ends; what comes after that point in it is dropped."""
        delta = Delta(self.index)
        for token in burst.tokens:
            self._take(token, delta)
            self._span(burst.version)
            if self.finish:
                break
        if self.finish is None and burst.finish is not None:
            self.finish, self.stop_reason = burst.finish, burst.stop_reason
        return self._tell(delta)

    def end(self, finish: str) -> Delta:
        """End the turn where it is (an abort)."""
        self.finish = finish
        return self._tell(Delta(self.index))

    @property
    def text(self) -> str:
        """What a client may see of an ended turn, unparsed."""
        return self._text[: self._visible]

    def message(self) -> Json:
        """The whole `message` object of an ended turn."""
        text = self._text[: self._visible]
        reasoning, text = split_reasoning(text) if self._parses_reasoning else (None, text)
        content, calls = read_calls(text) if self._parses_calls else (text, [])
        message: Json = {
            "role": "assistant",
            "content": content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": calls,
            "reasoning": reasoning,
        }
        if not calls:
            del message["tool_calls"]
        return message

    def _take(self, token: Sampled, delta: Delta) -> None:
        self.ids.append(token.id)
        delta.ids.append(token.id)
        if self._sampling.top_logprobs is not None:
            entry = self._entry(token)
            self.entries.append(entry)
            delta.entries.append(entry)
        text, sampling = self._decoder.step(token.id), self._sampling
        enough = len(self.ids) >= sampling.min_tokens
        if enough and token.id == self._eos and not sampling.ignore_eos:
            self.finish = "stop"
            self._text += text if sampling.include_stop else ""
        elif enough and token.id in sampling.stop_token_ids:
            self.finish, self.stop_reason = "stop", token.id
            self._text += text if sampling.include_stop else ""
        else:
            before = len(self._text)
            self._text += text
            if len(self.ids) > sampling.min_tokens and self._stopped(before):
                return
            if len(self.ids) >= self._max_tokens:
                self.finish = "length"

    def _stopped(self, before: int) -> bool:
        """Cut the text at the first stop string that the new text completes."""
        for stop in self._sampling.stop:
            at = self._text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                self._text = self._text[: at + (len(stop) if self._sampling.include_stop else 0)]
                self.finish, self.stop_reason = "stop", stop
                return True
        return False

    def _tell(self, delta: Delta) -> Delta:
        """Fill in what a client may see by now."""
        until = len(self._text) if self.finish else max(self._visible, len(self._text) - self._hold)
        text, self._visible = self._text[self._visible : until], until
        if self._reasoning is not None:
            delta.reasoning, text = self._reasoning.feed(text)
        if self._calls is not None:
            text, delta.tool_calls = self._calls.feed(text)
        delta.content = text
        delta.finish, delta.stop_reason = self.finish, self.stop_reason
        if self.finish == "stop" and self._calls is not None and self._calls.any_call:
            delta.finish = "tool_calls"
        return delta

    def _entry(self, token: Sampled) -> Json:
        asked = self._sampling.top_logprobs or 0
        # vLLM lists the sampled token first, then the likeliest others
        others = [pair for pair in token.top if pair[0] != token.id]
        listed = [(token.id, token.logprob), *others]
        top = [self._named(*pair) for pair in listed[:asked]]
        self.tops.append(listed[: max(asked, 1)])
        entry = {**self._named(token.id, token.logprob), "top_logprobs": top}
        self._names.step(token.id)
        return entry

    def _named(self, token: int, logprob: float) -> Json:
        text = self._names.peek(token)
        shown = f"token_id:{token}" if self._as_ids else text
        return {"token": shown, "logprob": max(logprob, FLOOR), "bytes": list(text.encode())}

    def _span(self, version: str | None) -> None:
        if version is None:
            return
        if not self.spans or self.spans[-1]["version"] != version:
            self.spans.append({"version": version, "start": len(self.ids) - 1, "end": len(self.ids)})
        self.spans[-1]["end"] = len(self.ids)
