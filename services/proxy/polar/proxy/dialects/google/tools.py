"""Tools, and how the model may choose among them: Google's form to functions. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...calls import Json
from ..base import Limits
from .checks import fields, listed, one_of, text, wrong
from .schema import json_schema

MODES = ("MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED")
NO_PARAMETERS: Json = {"type": "object", "properties": {}}


class Offered(NamedTuple):
    """What the model is given. `dropped`: provider-side tools that are left out."""

    functions: list[Json]
    dropped: tuple[str, ...]


def offered(tools: Any, limits: Limits) -> Offered:
    """The functions of a request.

    Raises:
        BadRequest: a wrong field; a provider-side tool where those are refused, or nothing but such tools.
    """
    functions: list[Json] = []
    dropped: list[str] = []
    for i, tool in enumerate(listed(tools, "tools")):
        given = fields(tool, f"tools[{i}]")
        at = f"tools[{i}].functionDeclarations"
        functions += [
            _function(one, f"{at}[{j}]") for j, one in enumerate(listed(given.pop("functionDeclarations", None), at))
        ]
        if given and limits.provider_tools == "refuse":
            kind = min(given)
            raise wrong(f"tools[{i}].{kind[:80]}", "is a tool of the provider's and is not available here.")
        dropped += given
    if dropped and not functions:
        raise wrong(
            "tools",
            f"{', '.join(sorted(set(dropped)))[:200]}: tools that the provider runs itself are not available here, "
            "and the request has no others.",
        )
    names = [function["function"]["name"] for function in functions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise wrong("tools", f"Duplicate function declaration found: {twice[:80]}")
    return Offered(functions, tuple(dropped))


def _function(declaration: Any, where: str) -> Json:
    given = fields(declaration, where)
    name = text(given.get("name"), f"{where}.name")
    if not name:
        raise wrong(f"{where}.name", "Invalid function name.")
    function: Json = {"name": name}
    if given.get("description"):
        function["description"] = text(given["description"], f"{where}.description")
    parameters, schema = given.get("parameters"), given.get("parametersJsonSchema")
    if parameters is not None and schema is not None:
        raise wrong(where, "only one of parameters and parametersJsonSchema can be set.")
    if schema is not None and not isinstance(schema, dict):
        raise wrong(f"{where}.parametersJsonSchema", "an object is expected")
    if schema is None:
        schema = json_schema(parameters or {}, f"{where}.parameters") or NO_PARAMETERS
    return {"type": "function", "function": {**function, "parameters": schema}}


class Chosen(NamedTuple):
    """`functions` that are shown, the engine's fields, and what they force."""

    functions: list[Json] | None
    extras: Json
    marks: list[str]


def chosen(config: Any, tools: Offered) -> Chosen:
    """How the model may choose, by `toolConfig`.

    Raises:
        BadRequest: an unknown mode, or a choice that cannot be met.
    """
    functions, where = tools.functions, "toolConfig.functionCallingConfig"
    shown = functions or None
    if config is None:
        return Chosen(shown, {}, [])
    calling = fields(config, "toolConfig").get("functionCallingConfig")
    if calling is None:
        return Chosen(shown, {}, [])
    given = fields(calling, where)
    mode = one_of(given.get("mode", "AUTO"), MODES, f"{where}.mode")
    known = [function["function"]["name"] for function in functions]
    at = f"{where}.allowedFunctionNames"
    allowed = given.get("allowedFunctionNames", [])
    names = [text(name, at) for name in (allowed if isinstance(allowed, list) else [allowed])]
    if names and mode not in ("ANY", "VALIDATED"):
        raise wrong(at, "should only be set when the function calling mode is ANY or VALIDATED.")
    for name in names:
        if name not in known:
            raise wrong(at, f"{name[:80]!r} is not one of the function declarations.")
    if not functions:
        if mode == "ANY":
            raise wrong(where, "Function calling config is set without function_declarations.")
        return Chosen(None, {}, [])  # an engine refuses a request that says how to call no tools
    if mode == "ANY" and len(set(names)) == 1:
        return Chosen(shown, {"tool_choice": {"type": "function", "function": {"name": names[0]}}}, ["forced_tool"])
    if names:
        shown = [function for function in functions if function["function"]["name"] in names]
    if mode == "ANY":
        return Chosen(shown, {"tool_choice": "required"}, ["forced_tool"])
    return Chosen(shown, {"tool_choice": "none" if mode == "NONE" else "auto"}, [])
