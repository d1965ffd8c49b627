"""Tool arguments as the model wrote them, where an engine that answers whole has written them anew.

vLLM's parsers read a call's JSON and write it again when they answer unstreamed, so `{"a":1}` becomes `{"a": 1}`; when
they stream they pass it on. The tokens hold what was written: the first object in their text, after the call before,
that says the same. Where there is none (a parser of another form) the engine's word stays. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from .calls import Call, Entry, Reply, ReplyChoice

MOST_TRIED = 10_000
"""Braces that are tried per reply: text before a call may hold code."""


def wanted(call: Call) -> bool:
    """Whether an answer to `call` needs its tokens' texts."""
    return call.logprobs or bool(call.tools)


def as_written(reply: Reply, call: Call) -> Reply:
    """`reply` with its calls' arguments as sampled, and without the texts of tokens where nobody asked for them."""
    return replace(reply, choices=[_choice(choice, call) for choice in reply.choices])


def spelled(told: Sequence[str], said: str) -> list[str]:
    """Each of `told` as it stands in `said`, which holds them in this order; one that is not found stays as it is."""
    found, decoder, at, tried = [], json.JSONDecoder(), 0, 0
    for arguments in told:
        same, end = arguments, at
        meaning = _meaning(arguments)
        begin = said.find("{", at) if meaning is not None else -1
        while begin >= 0 and tried < MOST_TRIED:
            tried += 1
            try:
                value, stop = decoder.raw_decode(said, begin)
            except (ValueError, RecursionError):
                pass
            else:
                if json.dumps(value) == meaning:
                    same, end = said[begin:stop], stop
                    break
            begin = said.find("{", begin + 1)
        found.append(same)
        at = end
    return found


def _meaning(arguments: str) -> str | None:
    """An object in one form; None: it is no object."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return json.dumps(value) if isinstance(value, dict) else None


def _choice(choice: ReplyChoice, call: Call) -> ReplyChoice:
    entries = choice.entries if call.logprobs else ()
    made = choice.message.get("tool_calls")
    if not made or not choice.entries:
        return replace(choice, entries=entries)
    written = spelled([one["function"]["arguments"] for one in made], _text(choice.entries))
    calls = [
        {**one, "function": {**one["function"], "arguments": arguments}}
        for one, arguments in zip(made, written, strict=True)
    ]
    return replace(choice, entries=entries, message={**choice.message, "tool_calls": calls})


def _text(entries: Sequence[Entry]) -> str:
    pieces = (bytes(entry.bytes) if entry.bytes is not None else entry.token.encode() for entry in entries)
    return b"".join(pieces).decode(errors="replace")
