"""Tools, and how the model may choose among them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...calls import Json
from ...errors import BadRequest


class Chosen(NamedTuple):
    """`functions` that are shown, the engine's fields, and what they force."""

    functions: list[Json]
    extras: Json
    marks: tuple[str, ...] = ()


def offered(tools: Sequence[Json] | None) -> list[Json]:
    """The functions of a request.

    Raises:
        BadRequest: a wrong field, or a tool that is no function.
    """
    found = []
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type", "function") != "function":
            raise BadRequest("Only tools of type `function` are supported.", param=f"tools[{i}].type")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest("A tool has a `function` with a `name`.", param=f"tools[{i}].function")
        bare = {key: item for key, item in function.items() if item is not None}
        found.append({"type": "function", "function": bare})
    return found


def chosen(choice: str | Json | None, tools: list[Json]) -> Chosen:
    """How the model may choose.

    Raises:
        BadRequest: an unknown choice, or one that cannot be met.
    """
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        given = choice.get("allowed_tools")
        allowed = given.get("tools") if isinstance(given, dict) else None
        if not isinstance(given, dict) or not isinstance(allowed, list) or not isinstance(given.get("mode"), str):
            raise _wrong("`tool_choice.allowed_tools` has a `mode` and `tools`.", "tool_choice.allowed_tools")
        names = {_named(one, tools) for one in allowed}
        tools = [tool for tool in tools if tool["function"]["name"] in names]
        choice = given["mode"]
    if isinstance(choice, dict):
        function = {"type": "function", "function": {"name": _named(choice, tools)}}
        return Chosen(tools, {"tool_choice": function}, ("forced_tool",))
    if choice not in (None, "none", "auto", "required"):
        raise _wrong("`tool_choice` is none, auto, required or a function.")
    if choice == "required" and not tools:
        raise _wrong("`tool_choice` goes with `tools` only.")
    if choice is None or not tools:
        return Chosen(tools, {})
    return Chosen(tools, {"tool_choice": choice}, ("forced_tool",) if choice == "required" else ())


def _named(choice: object, tools: list[Json]) -> str:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(name, str):
        raise _wrong("`tool_choice` names none of the `tools`.")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise _wrong("`tool_choice` names none of the `tools`.")
    return name


def _wrong(message: str, param: str = "tool_choice") -> BadRequest:
    return BadRequest(message, param=param)
