"""A Responses conversation to Chat's: items in, messages out, in the order in which they were sent.

Promises: the items of one reply (reasoning, message, calls) become the one message that was captured, also where a
client sends them between the outputs of its tools; the same history in another form gives the same messages; nothing
that the model cannot be shown is passed over silently (see `fields`). Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...calls import Json
from ..anthropic.thinking import kept
from ..fields import Action
from .checks import mapping, missing, objects, text, unsupported, wrong
from .content import told, unknown
from .fields import FIELDS
from .ids import meaning
from .reading import Reading
from .tools import NATIVE, native, shown_name, written

CALLS = {"function_call": "function", "custom_tool_call": "custom"} | {f"{kind}_call": kind for kind in NATIVE}
OUTPUTS = ("function_call_output", "custom_tool_call_output", *(f"{kind}_call_output" for kind in NATIVE))
REASONING, SAID, CALLED = range(3)
"""In which order the items of one reply come."""


class Conversation:
    """Messages while they grow. `take` items in order, then `messages`."""

    def __init__(self, instructions: str | None, reading: Reading) -> None:
        self.messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
        self._reading = reading
        self._turn: Json | None = None
        """The assistant's message that is being put together; others' items may stand between its calls."""
        self._stage = REASONING
        self._completion: str | None = None
        """Whose reply it is, as far as ids say."""
        self._local: dict[str, str] = {}
        """Ids of calls by those of their items."""

    def take(self, item: Json, where: str) -> None:
        """Raises `BadRequest`: a wrong or unknown item, or one that the model cannot be shown."""
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        if not isinstance(kind, str):
            self._other(kind, where)
        elif kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind in CALLS:
            self._call(CALLS[kind], item, where)
        elif kind in OUTPUTS:
            self._output(kind, item, where)
        elif kind == "additional_tools":
            self._reading.tools.append((f"{where}.tools", objects(item.get("tools"), f"{where}.tools")))
        else:
            self._other(kind, where)

    def _message(self, item: Json, where: str) -> None:
        role, at = item.get("role"), f"{where}.content"
        if item.get("content") is None:
            raise missing(at)
        match role:
            case "assistant":
                content = told(item["content"], at, self._reading, words_only=True)
                if content or not self._split_off(item):
                    self._assistant(item, SAID)["content"] = content
            case "system" | "developer":
                self._add({"role": "system", "content": told(item["content"], at, self._reading, words_only=True)})
            case "user":
                self._add({"role": "user", "content": told(item["content"], at, self._reading)})
            case None:
                raise missing(f"{where}.role")
            case _:
                raise wrong(f"{where}.role", "supported values are 'assistant', 'system', 'developer', and 'user'.")

    def _reasoning(self, item: Json, where: str) -> None:
        said = self._reasoned(item, where)
        if said and not (not item.get("summary") and self._split_off(item, said)):
            self._assistant(item, REASONING)["reasoning"] = said

    def _reasoned(self, item: Json, where: str) -> str:
        """Reasoning as the model wrote it; empty: there is none that can be read."""
        sealed = item.get("encrypted_content")
        if sealed is not None:
            at = f"{where}.encrypted_content"
            try:
                found = kept(text(sealed, at))
            except ValueError as error:
                raise wrong(at, f"it could not be verified: {error}.", "invalid_encrypted_content") from None
            if found is not None:
                return self._reading.unpacked(found, at)
        for name in ("content", "summary"):
            parts = objects(item[name], f"{where}.{name}") if item.get(name) is not None else []
            said = "".join(text(part.get("text"), f"{where}.{name}[{i}].text") for i, part in enumerate(parts))
            if said and (name == "content" or sealed is None):
                return said
        if sealed is not None:
            self._reading.foreign(f"{where}.encrypted_content")
        return ""

    def _call(self, kind: str, item: Json, where: str) -> None:
        call_id = text(item.get("call_id"), f"{where}.call_id")
        name = kind if kind in NATIVE else shown_name(text(item.get("name"), f"{where}.name"), item.get("namespace"))
        said = meaning(item.get("id"))
        if kind == "function":
            arguments = text(item.get("arguments"), f"{where}.arguments")
        else:
            arguments = written(kind, item, where)
            if said is not None and said.arguments is not None:
                spelled = self._reading.unpacked(said.arguments, f"{where}.id")
                fields = native(kind, spelled)
                # an item that was changed says what it says now
                same = fields is not None and written(kind, fields, where) == arguments
                arguments = spelled if same else arguments
        turn = self._assistant(item, CALLED)
        content = turn["content"]
        # as the engine tells it: no text beside a call is null
        if isinstance(content, str) and not content.strip():
            turn["content"] = None
        function = {"name": name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        if isinstance(item.get("id"), str):
            self._local[item["id"]] = call_id

    def _output(self, kind: str, item: Json, where: str) -> None:
        call_id = item.get("call_id")
        if call_id is None and kind == "local_shell_call_output":
            identity = text(item.get("id"), f"{where}.id")
            call_id = self._local.get(identity, identity)
        call_id = text(call_id, f"{where}.call_id")
        output = item.get("output")
        if kind == "shell_call_output":
            content: Any = json.dumps(objects(output, f"{where}.output"), ensure_ascii=False)
        elif kind == "apply_patch_call_output":
            said = "" if output is None else text(output, f"{where}.output")
            content = said or text(item.get("status"), f"{where}.status")
        elif output is None:
            raise missing(f"{where}.output")
        else:
            content = told(output, f"{where}.output", self._reading)
        self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})

    def _other(self, kind: object, where: str) -> None:
        match _becomes(kind) if isinstance(kind, str) else None:
            case Action.SETTING:
                self._reading.provider(str(kind), f"{where}.type")
            case Action.IGNORED:
                return
            case Action.REFUSED:
                raise unsupported(f"{where}.type", f"{kind!r} is not available here")
            case _:
                raise missing(f"{where}.type") if kind is None else unknown(kind, f"{where}.type")

    def _add(self, message: Json) -> None:
        self._turn = None
        self.messages.append(message)

    def _split_off(self, item: Json, reasoning: str | None = None) -> bool:
        """Whether an item says nothing that its reply has not said: a client made one of an item's late end."""
        identity, turn = item.get("id"), self._turn
        if turn is None or turn is not self.messages[-1]:
            return False
        said = meaning(identity)
        ours = identity is None or (said is not None and self._completion in (None, said.completion))
        return ours and (reasoning is None or turn.get("reasoning") == reasoning)

    def _assistant(self, item: Json, stage: int) -> Json:
        """The assistant's message that an item belongs to."""
        said = meaning(item.get("id"))
        completion = None if said is None else said.completion
        turn = self._turn
        if turn is not None and completion is not None and self._completion is not None:
            # an item that is sent twice is said twice
            again = (stage == SAID and bool(turn["content"])) or (stage == REASONING and "reasoning" in turn)
            same = completion == self._completion and not again
        else:
            # a reply tells its items in order, so one that comes too late begins another
            later = stage > self._stage or stage == CALLED
            same = turn is not None and turn is self.messages[-1] and later
        if turn is None or not same:
            turn = self._turn = {"role": "assistant", "content": ""}
            self.messages.append(turn)
            self._completion = completion
        self._completion = self._completion or completion
        self._stage = stage
        return turn


def _becomes(kind: str) -> Action | None:
    path = f"input[]<{kind}>"
    return next((one.action for one in FIELDS if one.path.endswith(">") and one.covers(path)), None)


def conversation(instructions: str | None, items: Sequence[Json], where: Sequence[str], reading: Reading) -> list[Json]:
    """The messages of a request's items; `where` says of each how the client knows it."""
    found = Conversation(instructions, reading)
    for item, at in zip(items, where, strict=True):
        found.take(mapping(item, at), at)
    return found.messages
