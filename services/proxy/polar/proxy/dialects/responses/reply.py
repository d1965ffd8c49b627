"""A reply in the shape of the Responses API: a response, or the events that come to it.

Promises: whole and streamed say the same, since both are made of the same items; before `finish` no event closes a
part, an item or the response, so that reasoning, text and the arguments of calls may all be open while they grow; a
call whose form is not the model's own is told once it is whole. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...calls import Call, Delta, Entry, Json, Reply, ReplyChoice, ToolDelta
from ...errors import ProxyError
from ..anthropic.thinking import sign
from ..base import StreamEncoder, Told
from .errors import failure_of
from .ids import item_id
from .request import Details
from .tools import Tool, native, written

INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
REASONING, MESSAGE = -2, -1
"""Slots of the items that there is one of; a call's is its index."""


def details_of(call: Call) -> Details:
    """What the request was beside the call."""
    assert isinstance(call.details, Details)
    return call.details


def response_id(told: Told) -> str:
    return f"resp_{told.completion_id}"


def response(call: Call, told: Told, status: str, **fields: Any) -> Json:
    """A response without output or end, but for `fields`."""
    return {
        "id": response_id(told),
        "object": "response",
        "created_at": told.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": told.model,
        **details_of(call).told,
        "output": [],
        "usage": None,
        **fields,
    }


def ended(call: Call, told: Told, reply: Reply, slots: Sequence[int] = ()) -> Json:
    """The response that a reply comes to; items of `slots` come first, in that order."""
    (choice,) = reply.choices
    found = items(call, told, choice)
    output = [found[slot] for slot in [*slots, *(slot for slot in found if slot not in slots)]]
    reason = INCOMPLETE.get(choice.finish or "")
    return response(
        call,
        told,
        "completed" if reason is None else "incomplete",
        incomplete_details=None if reason is None else {"reason": reason},
        output=output,
        usage=usage(reply),
    )


def items(call: Call, told: Told, choice: ReplyChoice) -> dict[int, Json]:
    """The output by its slots, in the order in which the model wrote it."""
    message, asked = choice.message, details_of(call)
    found: dict[int, Json] = {}
    calls = message.get("tool_calls", ())
    if reasoning := message.get("reasoning"):
        found[REASONING] = _reasoning(asked, told, reasoning)
    if message.get("content") or not (calls or reasoning):
        part = _text_part(message.get("content") or "", _spoken(choice) if call.logprobs else [])
        found[MESSAGE] = {**_message(told), "content": [part]}
    for index, made in enumerate(calls):
        found[index] = _call(asked, told, index, made)
    for item in found.values():
        if "status" in item:
            item["status"] = "completed"
    last = next(reversed(found.values()))
    if choice.finish in INCOMPLETE and "status" in last:
        last["status"] = "incomplete"
    return found


def _reasoning(asked: Details, told: Told, said: str) -> Json:
    found: Json = {"id": item_id("reasoning", told.completion_id), "type": "reasoning", "summary": []}
    if said and asked.summary:
        found["summary"] = [_reasoning_part(asked, said)]
    elif said:
        found["content"] = [_reasoning_part(asked, said)]
    if asked.sealed:
        # where only the summary comes back, nothing but this holds what the model wrote
        found["encrypted_content"] = sign(said, omitted=True) if said else ""
    return found


def _reasoning_part(asked: Details, said: str) -> Json:
    return {"type": "summary_text" if asked.summary else "reasoning_text", "text": said}


def _message(told: Told) -> Json:
    return {
        "id": item_id("message", told.completion_id),
        "type": "message",
        "role": "assistant",
        "status": "in_progress",
        "content": [],
    }


def _text_part(said: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": said, "annotations": [], "logprobs": logprobs}


def _call(asked: Details, told: Told, index: int, made: Json) -> Json:
    function = made["function"]
    tool = asked.known.get(function["name"]) or Tool("function", function["name"])
    arguments = function["arguments"]
    fields = None if tool.kind == "function" else native(tool.kind, arguments)
    if fields is None:
        # arguments that do not fit the tool's own form are passed on as they are, as a function's
        return _function_call(told, index, made["id"], tool, arguments)
    if tool.kind == "custom":
        fields = {"name": tool.name, **_namespace(tool), **fields}
        item: Json = {"type": "custom_tool_call", "call_id": made["id"], **fields}
    else:
        item = {"type": f"{tool.kind}_call", "call_id": made["id"], "status": "in_progress", **fields}
        item |= {"environment": {"type": "local"}} if tool.kind == "shell" else {}
    keep = None if written(tool.kind, item, "") == arguments else arguments
    return {"id": item_id(tool.kind, told.completion_id, index, keep), **item}


def _function_call(told: Told, index: int, call_id: str, tool: Tool, arguments: str) -> Json:
    return {
        "id": item_id("function", told.completion_id, index),
        "type": "function_call",
        "status": "in_progress",
        "call_id": call_id,
        "name": tool.name,
        **_namespace(tool),
        "arguments": arguments,
    }


def _namespace(tool: Tool) -> Json:
    return {} if tool.namespace is None else {"namespace": tool.namespace}


def _spoken(choice: ReplyChoice) -> list[Json]:
    """The log-probabilities of the text alone; none where it cannot be told from the rest."""
    said = (choice.message.get("content") or "").encode()
    pieces = [bytes(entry.bytes) if entry.bytes is not None else entry.token.encode() for entry in choice.entries]
    at = b"".join(pieces).rfind(said)
    if at < 0 or not said:
        return []
    found, end = [], 0
    for piece, entry in zip(pieces, choice.entries, strict=True):
        begin, end = end, end + len(piece)
        if begin < at + len(said) and end > at:
            found.append(_logprob(entry) | {"top_logprobs": [_logprob(one) for one in entry.top_logprobs or ()]})
    return found


def _logprob(entry: Entry) -> Json:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.bytes or []}


def usage(reply: Reply) -> Json:
    """Token counts; the input is the whole prompt's."""
    given, made = len(reply.prompt_ids), sum(len(choice.ids) for choice in reply.choices)
    return {
        "input_tokens": given,
        "input_tokens_details": {
            "cached_tokens": min(reply.usage.get("cached_tokens", 0), given),
            "cache_write_tokens": 0,
        },
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": reply.usage.get("reasoning_tokens", 0)},
        "total_tokens": given + made,
    }


class Encoder(StreamEncoder):
    """The events of one streamed response. `keep` is given the whole response before its end is told."""

    def __init__(self, call: Call, told: Told, keep: Callable[[bytes], None]) -> None:
        self._call = call
        self._told = told
        self._keep = keep
        self._asked = details_of(call)
        self._number = 0
        self._open: dict[int, Json] = {}
        """Items that the client has been told of, by their slots, in the order of their output_index."""
        self._sent: dict[int, int] = {}
        """Characters of them."""
        self._waiting = False
        """Something is told at the end only, so that what begins after it is too."""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        events = []
        for delta in deltas:
            if delta.reasoning:
                events.append(self._more(REASONING, _reasoning(self._asked, self._told, ""), delta.reasoning))
            if delta.content:
                events.append(self._more(MESSAGE, _message(self._told), delta.content))
            events += [self._tool(tool) for tool in delta.tools]
        return b"".join(events)

    def _tool(self, tool: ToolDelta) -> bytes:
        if tool.name is not None and tool.id is not None:
            known = self._asked.known.get(tool.name) or Tool("function", tool.name)
            if known.kind != "function":
                self._waiting = True
                return b""
            item = _function_call(self._told, tool.index, tool.id, known, "")
            return self._more(tool.index, item, tool.arguments)
        if tool.index not in self._open:
            return b""
        return self._more(tool.index, self._open[tool.index], tool.arguments)

    def _more(self, slot: int, item: Json, piece: str) -> bytes:
        """More of an item, which begins where it is not known yet."""
        if slot not in self._open and self._waiting:
            return b""
        begun = b"" if slot in self._open else self._start(slot, item)
        if not piece:
            return begun
        self._sent[slot] += len(piece)
        return begun + self._piece(slot, "delta", delta=piece)

    def _start(self, slot: int, item: Json) -> bytes:
        begun = self._begin()
        self._open[slot] = item
        self._sent[slot] = 0
        begun += self._event("response.output_item.added", output_index=len(self._open) - 1, item=item)
        if slot == MESSAGE:
            begun += self._part(slot, "response.content_part.added", _text_part("", []))
        elif slot == REASONING and self._asked.summary:
            begun += self._part(slot, "response.reasoning_summary_part.added", _reasoning_part(self._asked, ""))
        elif slot == REASONING:
            begun += self._part(slot, "response.content_part.added", _reasoning_part(self._asked, ""))
        return begun

    def _begin(self) -> bytes:
        if self._number:
            return b""
        begun = response(self._call, self._told, "in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def finish(self, reply: Reply) -> bytes:
        events = [self._begin()]
        (choice,) = reply.choices
        for slot, item in items(self._call, self._told, choice).items():
            if slot not in self._open:
                empty = self._empty(slot, item)
                events.append(self._start(slot, empty))
        whole = ended(self._call, self._told, reply, list(self._open))
        self._keep(msgspec.json.encode(whole))
        for slot, item in zip(self._open, whole["output"], strict=True):
            events += self._rest(slot, item)
        events.append(self._event(f"response.{whole['status']}", response=whole))
        return b"".join(events)

    def _empty(self, slot: int, item: Json) -> Json:
        """An item as it begins."""
        if slot == MESSAGE:
            return _message(self._told)
        if slot == REASONING:
            return _reasoning(self._asked, self._told, "")
        field = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"])
        found = item if field is None else {**item, field: ""}
        return found | ({"status": "in_progress"} if "status" in item else {})

    def _rest(self, slot: int, item: Json) -> list[bytes]:
        """What is left to tell of an item, to its close."""
        index = list(self._open).index(slot)
        said = _said(slot, item)
        events = []
        if said is not None:
            if rest := said[self._sent[slot] :]:
                events.append(self._piece(slot, "delta", delta=rest))
            name = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"], "text")
            logprobs = {"logprobs": item["content"][0]["logprobs"]} if slot == MESSAGE else {}
            events.append(self._piece(slot, "done", **{name: said}, **logprobs))
        if slot == MESSAGE or (slot == REASONING and not self._asked.summary):
            events.append(self._part(slot, "response.content_part.done", item["content"][0]))
        elif slot == REASONING:
            events.append(self._part(slot, "response.reasoning_summary_part.done", item["summary"][0]))
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def _piece(self, slot: int, step: str, **fields: Any) -> bytes:
        """A delta of what an item says, or its end."""
        item = self._open[slot]
        if slot == MESSAGE:
            kind, place = "output_text", {"content_index": 0, "logprobs": []}
        elif slot == REASONING and self._asked.summary:
            kind, place = "reasoning_summary_text", {"summary_index": 0}
        elif slot == REASONING:
            kind, place = "reasoning_text", {"content_index": 0}
        else:
            names = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}
            kind, place = names[item["type"]], {}
        return self._of(slot, f"response.{kind}.{step}", **place | fields)

    def _part(self, slot: int, kind: str, part: Json) -> bytes:
        index = "summary_index" if "summary" in kind else "content_index"
        return self._of(slot, kind, **{index: 0, "part": part})

    def _of(self, slot: int, kind: str, **fields: Any) -> bytes:
        at = {"item_id": self._open[slot]["id"], "output_index": list(self._open).index(slot)}
        return self._event(kind, **at, **fields)

    def error(self, error: ProxyError) -> bytes:
        told = failure_of(error)
        failed = response(self._call, self._told, "failed", error=told)
        # clients were seen to know the one event or the other
        return (
            self._begin()
            + self._event("error", code=told["code"], message=told["message"], param=error.param)
            + self._event("response.failed", response=failed)
        )

    def keepalive(self, beat: int) -> bytes:
        # a comment does not reset Codex's idle timer
        begun = self._begin()
        return begun or self._event("response.in_progress", response=response(self._call, self._told, "in_progress"))

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def _said(slot: int, item: Json) -> str | None:
    """What an item says; None: it is told as a whole."""
    if slot == MESSAGE:
        said: str = item["content"][0]["text"]
        return said
    if slot == REASONING:
        (part,) = item["summary"] or item["content"]
        return str(part["text"])
    found: str | None = item.get("arguments", item.get("input"))
    return found
