"""Tools, and how the model may choose among them: Anthropic's form to functions. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...calls import Json
from ..base import Limits
from .checks import flag, mapping, objects, text, wrong


class ToolChange(NamedTuple):
    """A tool that the conversation shows or hides, by name or (only where it is shown) by definition."""

    shown: bool
    name: str | None = None
    definition: Json | None = None


class Offered(NamedTuple):
    """What the model is given. `dropped`: kinds of provider-side tools that are left out."""

    functions: list[Json] | None
    names: frozenset[str]
    """Of all tools that the request declares, hidden ones too."""
    dropped: tuple[str, ...]


def offered(tools: Sequence[Json] | None, changes: Iterable[ToolChange], limits: Limits) -> Offered:
    """The functions that the model is shown at the end of a conversation with `changes`.

    Raises:
        BadRequest: a wrong field; a provider-side tool where those are refused, or nothing but such tools.
    """
    known: dict[str, Json] = {}
    hidden: set[str] = set()
    dropped: list[str] = []

    def declare(tool: Json, where: str) -> None:
        kind = tool.get("type")
        if kind not in (None, "custom"):
            dropped.append(_provider(tool, where, limits))
            return
        function = _function(tool, where)
        name = function["function"]["name"]
        if name in known and where.startswith("tools."):
            raise wrong("tools", "Tool names must be unique.")
        known[name] = function
        hidden.discard(name)
        if flag(tool.get("defer_loading"), f"{where}.defer_loading"):
            hidden.add(name)

    for i, tool in enumerate(tools or ()):
        declare(tool, f"tools.{i}")
    if dropped and not known:
        raise wrong(
            "tools",
            f"{', '.join(sorted(set(dropped)))}: tools that the provider runs itself are not available here, and the "
            "request has no others.",
        )
    for change in changes:
        if change.definition is not None:
            declare({**change.definition, "defer_loading": False}, "messages: tool_addition.tool.definition")
        elif change.name is not None:
            (hidden.discard if change.shown else hidden.add)(change.name)
    shown = [function for name, function in known.items() if name not in hidden]
    return Offered(shown or None, frozenset(known), tuple(dropped))


def _provider(tool: Json, where: str, limits: Limits) -> str:
    kind = text(tool.get("type"), f"{where}.type")
    if limits.provider_tools == "refuse":
        raise wrong(f"{where}.type", f"{kind[:80]!r} is a tool of the provider's and is not available here.")
    return kind


def _function(tool: Json, where: str) -> Json:
    name = text(tool.get("name"), f"{where}.name")
    if not name:
        raise wrong(f"{where}.name", "String should have at least 1 character")
    schema = mapping(tool.get("input_schema"), f"{where}.input_schema")
    lines = [text(tool["description"], f"{where}.description")] if tool.get("description") is not None else []
    if tool.get("input_examples"):
        examples = objects(tool["input_examples"], f"{where}.input_examples")
        lines += ["Examples of its input:", *(json.dumps(one, ensure_ascii=False) for one in examples)]
    function: Json = {"name": name}
    if lines:
        function["description"] = "\n".join(lines)
    return {"type": "function", "function": {**function, "parameters": schema}}


def chosen(choice: Json | None, tools: Offered) -> tuple[Json, list[str]]:
    """The engine's fields for `tool_choice`, and what they force.

    Raises:
        BadRequest: an unknown choice, or one that cannot be met.
    """
    if choice is None:
        return {}, []
    kind = choice.get("type")
    shown = [tool["function"]["name"] for tool in tools.functions or ()]
    fields: Json = {}
    marks: list[str] = []
    match kind:
        case "auto" | "none":
            fields["tool_choice"] = kind
        case "any":
            fields["tool_choice"], marks = "required", ["forced_tool"]
        case "tool":
            name = text(choice.get("name"), "tool_choice.name")
            if name not in shown:
                raise wrong("tool_choice", f"Tool {name[:80]!r} not found in provided tools")
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
            marks = ["forced_tool"]
        case _:
            raise wrong("tool_choice.type", "Input should be 'auto', 'any', 'tool' or 'none'")
    if flag(choice.get("disable_parallel_tool_use"), "tool_choice.disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    if not shown:
        if marks:
            raise wrong("tool_choice", "may only be specified while providing tools")
        return {}, []  # an engine refuses a request that says how to call no tools
    return fields, marks
