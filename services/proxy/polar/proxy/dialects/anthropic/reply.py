"""A reply in the shape of the Messages API: whole, or as events.

Promises: whole and streamed say the same, since both are made of the same blocks; before `finish` no event closes a
block, so that a block which has to wait for another one's end is told at the end only. A tool call's input is told once
it is whole: it must be an object, and what a client has been told of it cannot be taken back. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...calls import Call, Delta, Json, Reply, ReplyChoice
from ...errors import ProxyError
from ..arguments import as_input
from ..base import StreamEncoder, Told
from .errors import body_of
from .thinking import sign

STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def whole(call: Call, told: Told, reply: Reply) -> bytes:
    """The body of a reply that is not streamed."""
    (choice,) = reply.choices
    reason, sequence = stopped(call, choice)
    message = head(told, usage(reply)) | {
        "content": [
            block if block["type"] != "tool_use" else {**block, "input": msgspec.Raw(block["input"].encode())}
            for block in blocks(call, choice)
        ],
        "stop_reason": reason,
        "stop_sequence": sequence,
    }
    return msgspec.json.encode(message)


def head(told: Told, usage: Json) -> Json:
    """A message without content or end."""
    return {
        "id": f"msg_{told.completion_id}",
        "type": "message",
        "role": "assistant",
        "model": told.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def blocks(call: Call, choice: ReplyChoice) -> list[Json]:
    """The content of a reply; a `tool_use` holds its input as JSON text."""
    message = choice.message
    found: list[Json] = []
    if reasoning := message.get("reasoning"):
        shown = "" if call.hide_thinking else reasoning
        signature = sign(reasoning, omitted=call.hide_thinking)
        found.append({"type": "thinking", "thinking": shown, "signature": signature})
    if content := message.get("content"):
        found.append({"type": "text", "text": content})
    for made in message.get("tool_calls", ()):
        function = made["function"]
        given = as_input(function["arguments"])
        found.append({"type": "tool_use", "id": made["id"], "name": function["name"], "input": given})
    return found


def stopped(call: Call, choice: ReplyChoice) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence`."""
    if choice.finish != "length":
        if choice.message.get("tool_calls"):
            return "tool_use", None
        if isinstance(choice.stop, str) and choice.stop in call.asked.stop:
            return "stop_sequence", choice.stop
    # `repetition` and the like are the engine's own; to a client the turn has ended
    return STOPS.get(choice.finish or "stop", "end_turn"), None


def usage(reply: Reply) -> Json:
    """Token counts; the input is the sum of the three kinds of it."""
    cached = min(reply.usage.get("cached_tokens", 0), len(reply.prompt_ids))
    found: Json = {
        "input_tokens": len(reply.prompt_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sum(len(choice.ids) for choice in reply.choices),
    }
    if "reasoning_tokens" in reply.usage:
        found["output_tokens_details"] = {"thinking_tokens": reply.usage["reasoning_tokens"]}
    return found


class Encoder(StreamEncoder):
    """The events of one streamed reply: the first block as it comes, everything after it at the end."""

    def __init__(self, call: Call, told: Told) -> None:
        self._call = call
        self._told = told
        self._tokens: int | None = None
        self._begun = False
        self._open: str | None = None
        """The kind of the one block that is told live."""
        self._sent = 0
        """Characters of it."""
        self._waiting = False

    def prompt(self, tokens: int) -> None:
        self._tokens = tokens

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        events = []
        for delta in deltas:
            if delta.reasoning:
                events.append(self._live("thinking", delta.reasoning))
            if delta.content:
                events.append(self._live("text", delta.content))
            for tool in delta.tools:
                if tool.name is not None and self._open is None:
                    start: Json = {"type": "tool_use", "id": tool.id, "name": tool.name, "input": {}}
                    events.append(self._start("tool_use", start))
                self._waiting = True
        return b"".join(events)

    def _live(self, kind: str, piece: str) -> bytes:
        if self._waiting or self._open not in (None, kind):
            self._waiting = True
            return b""
        start = self._start(kind, _empty(kind)) if self._open is None else b""
        if kind == "thinking" and self._call.hide_thinking:
            return start
        self._sent += len(piece)
        return start + _block_delta(0, kind, piece)

    def _start(self, kind: str, block: Json) -> bytes:
        self._open = kind
        return self._begin() + _event("content_block_start", index=0, content_block=block)

    def _begin(self, tokens: int | None = None) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        counts = {
            "input_tokens": (self._tokens if tokens is None else tokens) or 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        return _event("message_start", message=head(self._told, counts)) + _event("ping")

    def finish(self, reply: Reply) -> bytes:
        (choice,) = reply.choices
        found = blocks(self._call, choice)
        # what was told first stays first, though an engine that reasons after it has spoken is not known
        at = next((i for i, block in enumerate(found) if block["type"] == self._open), 0)
        found = found[at : at + 1] + found[:at] + found[at + 1 :]
        events = [self._begin(len(reply.prompt_ids))]
        for index, block in enumerate(found):
            events += self._rest(index, block)
        reason, sequence = stopped(self._call, choice)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        events += [_event("message_delta", delta=delta, usage=usage(reply)), _event("message_stop")]
        return b"".join(events)

    def _rest(self, index: int, block: Json) -> list[bytes]:
        """What is left to tell of a block, to its close."""
        kind = block["type"]
        told = index == 0 and self._open is not None
        events = []
        if not told:
            start: Json = {**block, "input": {}} if kind == "tool_use" else _empty(kind)
            events.append(_event("content_block_start", index=index, content_block=start))
        said = block["input"] if kind == "tool_use" else block[kind]
        rest = said[self._sent :] if told else said
        if rest:
            events.append(_block_delta(index, kind, rest))
        if kind == "thinking":
            signed = {"type": "signature_delta", "signature": block["signature"]}
            events.append(_event("content_block_delta", index=index, delta=signed))
        return [*events, _event("content_block_stop", index=index)]

    def error(self, error: ProxyError) -> bytes:
        return _sse("error", body_of(error, self._told.completion_id))

    def keepalive(self, beat: int) -> bytes:
        # a message that begins tells its input tokens, so it waits for them
        return (self._begin() if self._tokens is not None else b"") + _event("ping")


def _empty(kind: str) -> Json:
    return {"type": "text", "text": ""} if kind == "text" else {"type": "thinking", "thinking": "", "signature": ""}


def _block_delta(index: int, kind: str, piece: str) -> bytes:
    match kind:
        case "text":
            delta = {"type": "text_delta", "text": piece}
        case "thinking":
            delta = {"type": "thinking_delta", "thinking": piece}
        case _:
            delta = {"type": "input_json_delta", "partial_json": piece}
    return _event("content_block_delta", index=index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return _sse(kind, {"type": kind, **fields})


def _sse(kind: str, body: Json) -> bytes:
    # clients go by the event's name, not by its data alone
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"
