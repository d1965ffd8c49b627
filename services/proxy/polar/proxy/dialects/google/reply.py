"""A reply in the shape of generateContent: whole, or as pieces.

Promises: whole and streamed say the same once a client has put the pieces together; before `finish` no piece holds a
function call or a finish reason, and never the last of a text. Every piece holds something, since clients throw a reply
away in which one does not. Function calls are told whole: a part is. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...calls import Call, Delta, Entry, Json, Reply, ReplyChoice
from ...errors import ProxyError
from ..arguments import as_input
from ..base import StreamEncoder, Told
from .errors import body_of
from .signatures import Kept, sign, survives

FINISHES = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
"""Others, `repetition` and the like, are the engine's own; to a client the turn has ended: STOP."""
LINE_ENDS = {"\u0085".encode(): b"\\u0085", "\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}
"""What some clients take for the end of a line, inside a string too."""


def encoded(body: Any) -> bytes:
    """JSON on one line, whoever cuts the lines."""
    data = msgspec.json.encode(body)
    for end, escaped in LINE_ENDS.items():
        data = data.replace(end, escaped)
    return data


def whole(call: Call, told: Told, reply: Reply) -> bytes:
    """The body of a reply that is not streamed."""
    candidates = [_candidate(choice.index, parts(call, choice), call, choice) for choice in reply.choices]
    return encoded(_body(told, candidates, reply))


def parts(call: Call, choice: ReplyChoice) -> list[Json]:
    """The content of a reply; arguments are raw JSON."""
    message = choice.message
    reasoning, content = message.get("reasoning") or "", message.get("content") or ""
    found: list[Json] = []
    if reasoning and not call.hide_thinking:
        found.append({"text": reasoning, "thought": True})
    if content:
        found.append(_text(content, reasoning))
    made = _calls(choice, reasoning)
    if reasoning and not content and not made:
        found.append(_text("", reasoning))
    return found + made


def _text(said: str, reasoning: str) -> Json:
    return {"text": said, "thoughtSignature": sign(Kept(reasoning=reasoning))} if reasoning else {"text": said}


def _calls(choice: ReplyChoice, reasoning: str) -> list[Json]:
    """Signed each, the first one for all of the reply: of these, clients are told never to lose a signature."""
    found = []
    for i, made in enumerate(choice.message.get("tool_calls", ())):
        function, arguments = made["function"], made["function"]["arguments"]
        kept = Kept(
            reasoning=reasoning if reasoning and not i else None,
            id=made["id"],
            arguments=None if survives(arguments) else arguments,
        )
        # between values a line's end is a space as any other, and inside strings it is escaped
        raw = as_input(arguments).replace("\n", " ").replace("\r", " ")
        told = {"id": made["id"], "name": function["name"], "args": msgspec.Raw(raw.encode())}
        found.append({"functionCall": told, "thoughtSignature": sign(kept)})
    return found


def _candidate(index: int, told: Sequence[Json], call: Call, choice: ReplyChoice | None = None) -> Json:
    content: Json = {"parts": told, "role": "model"} if told else {"role": "model"}
    found: Json = {"content": content, "index": index}
    if choice is not None:
        found["finishReason"] = FINISHES.get(choice.finish or "stop", "STOP")
        if call.logprobs and choice.entries:
            found["avgLogprobs"] = sum(entry.logprob for entry in choice.entries) / len(choice.entries)
            found["logprobsResult"] = _logprobs(call, choice.entries)
    return found


def _logprobs(call: Call, entries: Sequence[Entry]) -> Json:
    def one(entry: Entry) -> Json:
        return {"token": entry.token, "logProbability": entry.logprob}

    found: Json = {"chosenCandidates": [one(entry) for entry in entries]}
    if call.top_logprobs:
        found["topCandidates"] = [{"candidates": [one(top) for top in entry.top_logprobs or ()]} for entry in entries]
    return found


def _body(told: Told, candidates: Sequence[Json], reply: Reply | None = None) -> Json:
    body: Json = {"candidates": candidates}
    if reply is not None:
        body["usageMetadata"] = usage(reply)
    return {**body, "modelVersion": told.model, "responseId": told.completion_id}


def usage(reply: Reply) -> Json:
    """Token counts; thoughts are counted apart from the candidates' where the engine counts them."""
    prompt, sampled = len(reply.prompt_ids), sum(len(choice.ids) for choice in reply.choices)
    thoughts = min(reply.usage.get("reasoning_tokens", 0), sampled)
    found = {"promptTokenCount": prompt, "candidatesTokenCount": sampled - thoughts}
    if thoughts:
        found["thoughtsTokenCount"] = thoughts
    if cached := min(reply.usage.get("cached_tokens", 0), prompt):
        found["cachedContentTokenCount"] = cached
    return {**found, "totalTokenCount": prompt + sampled}


@dataclass(slots=True)
class _Telling:
    """One candidate as far as it is told."""

    reasoning: str = ""
    shown: int = 0
    """Characters of the thinking that were told."""
    text: str = ""
    sent: int = 0
    """Characters of the text that were told."""
    signed: str | None = None
    """The thinking in the signature of the text; None: there is none yet."""


class Encoder(StreamEncoder):
    """The pieces of one streamed reply, as server-sent events or as the elements of one JSON array."""

    def __init__(self, call: Call, told: Told, *, sse: bool) -> None:
        self._call = call
        self._told = told
        self._sse = sse
        self._begun = False
        self._telling = [_Telling() for _ in range(call.n)]

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(self._delta(delta) for delta in deltas)

    def _delta(self, delta: Delta) -> bytes:
        telling = self._telling[delta.index]
        telling.reasoning += delta.reasoning
        telling.text += delta.content
        # the last character waits for the end, so that the piece which ends the reply holds something
        told = self._thoughts(telling) + self._text(telling, len(telling.text) - 1)
        return self._piece([_candidate(delta.index, told, self._call)]) if told else b""

    def _thoughts(self, telling: _Telling) -> list[Json]:
        piece = telling.reasoning[telling.shown :]
        if self._call.hide_thinking or not piece:
            return []
        telling.shown = len(telling.reasoning)
        return [{"text": piece, "thought": True}]

    def _text(self, telling: _Telling, until: int) -> list[Json]:
        piece = telling.text[telling.sent : until] if until > telling.sent else ""
        if not piece:
            return []
        telling.sent = until
        if telling.signed is not None:
            return [{"text": piece}]
        # clients put pieces of a text together and keep the signature of the first
        telling.signed = telling.reasoning
        return [_text(piece, telling.reasoning)]

    def finish(self, reply: Reply) -> bytes:
        candidates = [_candidate(choice.index, self._rest(choice), self._call, choice) for choice in reply.choices]
        data = self._piece(candidates, reply)
        return data if self._sse else data + b"]"

    def _rest(self, choice: ReplyChoice) -> list[Json]:
        """What is left to tell of a candidate."""
        telling = self._telling[choice.index]
        telling.reasoning = choice.message.get("reasoning") or ""
        telling.text = choice.message.get("content") or ""
        found = self._thoughts(telling) + self._text(telling, len(telling.text))
        made = _calls(choice, telling.reasoning)
        if not made and telling.reasoning != (telling.signed or ""):
            found.append(_text("", telling.reasoning))
        return found + made

    def error(self, error: ProxyError) -> bytes:
        body = encoded(body_of(error))
        if self._sse:
            # no `data:` before it, as the provider; clients look for an object that stands alone
            return body + b"\n\n"
        return self._element(body) + b"]"

    def keepalive(self, beat: int) -> bytes:
        # an event would be taken for a piece of the reply, a comment makes a client drop all of it
        return b"\n"

    def _piece(self, candidates: Sequence[Json], reply: Reply | None = None) -> bytes:
        body = encoded(_body(self._told, candidates, reply))
        return b"data: " + body + b"\n\n" if self._sse else self._element(body)

    def _element(self, body: bytes) -> bytes:
        before = b",\n" if self._begun else b"["
        self._begun = True
        return before + body
