"""A reply in the shape of Chat Completions: whole, or as chunks. Whole and streamed say the same. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...calls import Call, Delta, Entry, Json, Reply, ReplyChoice, ToolDelta
from ...errors import ProxyError
from ..base import StreamEncoder, Told
from .errors import body_of

FINISHES = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "content_filter": "content_filter"}
EMPTY_CHUNK_EACH = 8
"""Every so many keep-alives is an empty chunk: a comment does not reset the idle timer of one client (qwen-code)."""


def whole(call: Call, told: Told, reply: Reply) -> bytes:
    """The body of a reply that is not streamed."""
    body = {
        "id": _id(told),
        "object": "chat.completion",
        "created": told.created,
        "model": told.model,
        "choices": [
            {
                "index": choice.index,
                "message": _told_message(choice.message),
                "logprobs": _logprobs(choice.entries) if call.logprobs else None,
                "finish_reason": _finish(choice),
            }
            for choice in reply.choices
        ],
        "usage": _usage(reply),
        "system_fingerprint": reply.fingerprint,
    }
    return msgspec.json.encode(body)


class Encoder(StreamEncoder):
    """Chunks of one streamed reply."""

    def __init__(self, call: Call, told: Told) -> None:
        self._call = call
        self._head: Json = {
            "id": _id(told),
            "object": "chat.completion.chunk",
            "created": told.created,
            "model": told.model,
        }
        self._begun: set[int] = set()
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """What stands around the text of a choice's chunks; the text is all that changes in most."""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(self._delta(delta) for delta in deltas)

    def _delta(self, delta: Delta) -> bytes:
        if delta.index in self._begun and not (delta.reasoning or delta.tools or delta.entries):
            before, after = self._around.get(delta.index) or self._text_chunk(delta.index)
            return before + msgspec.json.encode(delta.content) + after
        body: Json = {}
        if delta.content:
            body["content"] = delta.content
        if delta.reasoning:
            body |= _told_reasoning(delta.reasoning)
        if delta.tools:
            body["tool_calls"] = [_told_piece(piece) for piece in delta.tools]
        return self._begin(delta.index) + self._chunk(delta.index, body, entries=delta.entries)

    def _text_chunk(self, index: int) -> tuple[bytes, bytes]:
        # inside a string, such as the model's name, these quotes would be escaped
        before, name, after = self._chunk(index, {"content": ""}).partition(b'"content":')
        self._around[index] = before + name, after.removeprefix(b'""')
        return self._around[index]

    def _begin(self, index: int) -> bytes:
        if index in self._begun:
            return b""
        self._begun.add(index)
        return self._chunk(index, {"role": "assistant", "content": ""})

    def finish(self, reply: Reply) -> bytes:
        events = []
        for choice in reply.choices:
            events.append(self._begin(choice.index))
            events.append(self._chunk(choice.index, {}, finish=_finish(choice)))
        if self._call.include_usage:
            last = {**self._head, "choices": [], "usage": _usage(reply), "system_fingerprint": reply.fingerprint}
            events.append(_event(last))
        return b"".join([*events, b"data: [DONE]\n\n"])

    def error(self, error: ProxyError) -> bytes:
        return _event(body_of(error))

    def keepalive(self, beat: int) -> bytes:
        if beat % EMPTY_CHUNK_EACH == EMPTY_CHUNK_EACH - 1:
            return self._begin(0) + self._chunk(0, {})
        return b": keep-alive\n\n"

    def _chunk(self, index: int, delta: Json, *, entries: Sequence[Entry] = (), finish: str | None = None) -> bytes:
        logprobs = _logprobs(entries) if self._call.logprobs and entries else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._call.include_usage else {}
        return _event({**self._head, "choices": [choice], **usage})


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _id(told: Told) -> str:
    return f"chatcmpl-{told.completion_id}"


def _told_message(message: Json) -> Json:
    found = {"role": "assistant", "content": message["content"], "refusal": None}
    if message.get("reasoning"):
        found |= _told_reasoning(message["reasoning"])
    if message.get("tool_calls"):
        found["tool_calls"] = message["tool_calls"]
    return found


def _told_reasoning(text: str) -> Json:
    # clients read one name or the other; none was seen to read both
    return {"reasoning": text, "reasoning_content": text}


def _told_piece(piece: ToolDelta) -> Json:
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _logprobs(entries: Sequence[Entry]) -> Json:
    content = [
        {
            "token": entry.token,
            "logprob": entry.logprob,
            "bytes": entry.bytes,
            "top_logprobs": [
                {"token": one.token, "logprob": one.logprob, "bytes": one.bytes} for one in entry.top_logprobs or ()
            ],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _finish(choice: ReplyChoice) -> str:
    # `repetition` and the like are the engine's own; to a client the turn has stopped
    return FINISHES.get(choice.finish or "stop", "stop")


def _usage(reply: Reply) -> Json:
    told: Json = {name: reply.usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    if "cached_tokens" in reply.usage:
        told["prompt_tokens_details"] = {"cached_tokens": reply.usage["cached_tokens"]}
    if "reasoning_tokens" in reply.usage:
        told["completion_tokens_details"] = {"reasoning_tokens": reply.usage["reasoning_tokens"]}
    return told
