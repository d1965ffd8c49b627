"""Tools of every kind that a client runs itself, as functions; and how the model may choose among them. Pure.

A function of a namespace is shown as `NAMESPACE__NAME`. A custom (freeform) tool and the tools whose form the provider
fixes (`local_shell`, `shell`, `apply_patch`) are functions with one object of arguments; `native` tells their calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...calls import Json
from .checks import mapping, objects, one_of, text, unsupported, wrong
from .reading import Reading

INPUT = "input"
"""The one argument of a custom tool."""
NATIVE: dict[str, Json] = {
    "local_shell": {
        "name": "local_shell",
        "description": "Runs a command on the user's machine and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "array", "items": {"type": "string"}, "description": "Program and arguments"},
                "working_directory": {"type": "string"},
                "timeout_ms": {"type": "integer"},
                "env": {"type": "object", "additionalProperties": {"type": "string"}},
            },
            "required": ["command"],
        },
    },
    "shell": {
        "name": "shell",
        "description": "Runs shell commands on the user's machine and returns what they print.",
        "parameters": {
            "type": "object",
            "properties": {
                "commands": {"type": "array", "items": {"type": "string"}},
                "timeout_ms": {"type": "integer"},
                "max_output_length": {"type": "integer"},
            },
            "required": ["commands"],
        },
    },
    "apply_patch": {
        "name": "apply_patch",
        "description": "Creates, updates or deletes one file; `diff` is in the V4A format.",
        "parameters": {
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                "path": {"type": "string"},
                "diff": {"type": "string"},
            },
            "required": ["type", "path"],
        },
    },
}
"""The functions that stand for tools whose form the provider fixes."""


class Tool(NamedTuple):
    """What a function stands for: `kind` is function, custom or one of `NATIVE`."""

    kind: str
    name: str
    namespace: str | None = None


class Offered(NamedTuple):
    """What the model is given, and what each function of it stands for."""

    functions: list[Json]
    known: Mapping[str, Tool]


def shown_name(name: str, namespace: object) -> str:
    """The function's name that stands for a tool of a namespace."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def offered(tools: Sequence[Json] | None, reading: Reading) -> Offered:
    """The functions for a request's tools and for those that its items declare.

    Raises:
        BadRequest: a wrong field; a provider-side tool where those are refused, or nothing but such tools.
    """
    functions: dict[str, Json] = {}
    known: dict[str, Tool] = {}
    before = len(reading.dropped)

    def declare(tool: Json, where: str, *, again: bool = False, namespace: str | None = None) -> None:
        kind = text(tool.get("type"), f"{where}.type")
        if kind == "namespace" and namespace is None:
            space = text(tool.get("name"), f"{where}.name")
            for i, one in enumerate(objects(tool.get("tools"), f"{where}.tools")):
                declare(one, f"{where}.tools[{i}]", again=again, namespace=space)
            return
        function = _function(tool, kind, where)
        if function is None:
            reading.provider(kind, f"{where}.type")
            return
        name = shown_name(function["name"], namespace)
        if name in functions and not again:
            raise wrong(where, f"another tool is called {name[:80]!r} too.")
        functions[name] = {"type": "function", "function": {**function, "name": name}}
        known[name] = Tool(kind, function["name"], namespace)

    for i, tool in enumerate(tools or ()):
        declare(tool, f"tools[{i}]")
    for where, more in reading.tools:
        for i, tool in enumerate(more):
            declare(tool, f"{where}[{i}]", again=True)  # a history repeats what it declares
    if tools and not functions and len(reading.dropped) > before:
        kinds = ", ".join(sorted({kind[:80] for kind in reading.dropped[before:]}))
        raise unsupported("tools", f"{kinds}: tools that the provider runs itself, and the request has no others")
    return Offered(list(functions.values()), known)


def _function(tool: Json, kind: str, where: str) -> Json | None:
    """The function for a tool that the client runs; None: the provider does."""
    match kind:
        case "function":
            parameters = tool.get("parameters")
            found: Json = {"name": _name(tool, where)}
            if tool.get("description") is not None:
                found["description"] = text(tool["description"], f"{where}.description")
            if parameters is not None:
                found["parameters"] = mapping(parameters, f"{where}.parameters")
            return found
        case "custom":
            lines = [text(tool["description"], f"{where}.description")] if tool.get("description") is not None else []
            form = tool.get("format")
            if form is not None:
                lines += _format(mapping(form, f"{where}.format"), f"{where}.format")
            described = {"description": "\n".join(lines)} if lines else {}
            schema = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
            return {"name": _name(tool, where), **described, "parameters": schema}
        case "local_shell" | "apply_patch":
            return NATIVE[kind]
        case "shell":
            place = tool.get("environment")
            kind_of_place = mapping(place, f"{where}.environment").get("type") if place is not None else None
            return NATIVE["shell"] if kind_of_place == "local" else None
        case _:
            return None


def _name(tool: Json, where: str) -> str:
    name = text(tool.get("name"), f"{where}.name")
    if not name:
        raise wrong(f"{where}.name", "it is empty.")
    return name


def _format(form: Json, where: str) -> list[str]:
    if one_of(form.get("type"), ("text", "grammar"), f"{where}.type") == "text":
        return []
    syntax = one_of(form.get("syntax"), ("lark", "regex"), f"{where}.syntax")
    return [f"`{INPUT}` is text of this {syntax} grammar:", text(form.get("definition"), f"{where}.definition")]


# choosing -----------------------------------------------------------------------------------------------------------


def chosen(choice: Any, tools: Offered, parallel: bool | None) -> tuple[list[Json], Json, list[str]]:
    """The functions that are shown, the engine's fields, and what they force.

    Raises:
        BadRequest: an unknown choice, or one that cannot be met.
    """
    shown = tools.functions
    fields: Json = {}
    marks: list[str] = []
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = {_named(one, f"tool_choice.tools[{i}]", tools) for i, one in enumerate(_allowed(choice))}
        shown = [function for function in shown if function["function"]["name"] in allowed]
        choice = one_of(choice.get("mode"), ("auto", "required"), "tool_choice.mode")
    if isinstance(choice, dict):
        name = _named(choice, "tool_choice", tools)
        if name is None:
            raise wrong("tool_choice", "it names none of the `tools`.")
        fields["tool_choice"] = {"type": "function", "function": {"name": name}}
        marks = ["forced_tool"]
    elif choice is not None:
        fields["tool_choice"] = one_of(choice, ("none", "auto", "required"), "tool_choice")
        marks = ["forced_tool"] if choice == "required" else []
    if not shown:
        if marks:
            raise wrong("tool_choice", "it may only be given with `tools`.")
        return [], {}, []  # an engine refuses a request that says how to call no tools
    if parallel is not None:
        fields["parallel_tool_calls"] = parallel
    return shown, fields, marks


def _allowed(choice: Json) -> list[Json]:
    return objects(choice.get("tools"), "tool_choice.tools")


def _named(choice: Json, where: str, tools: Offered) -> str | None:
    """The function that a choice names; None: there is none."""
    kind = text(choice.get("type"), f"{where}.type")
    if kind in NATIVE:
        return next((name for name, tool in tools.known.items() if tool.kind == kind), None)
    if kind not in ("function", "custom"):
        return None
    name = shown_name(text(choice.get("name"), f"{where}.name"), choice.get("namespace"))
    found = tools.known.get(name)
    return name if found is not None and found.kind == kind else None


# calls --------------------------------------------------------------------------------------------------------------


def native(kind: str, arguments: str) -> Json | None:
    """The fields of a call's item, beside its ids, from arguments as the model wrote them; None: they do not fit."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or not encodable(given):
        return None
    match kind:
        case "custom":
            fits = given.keys() == {INPUT} and isinstance(given[INPUT], str)
            return {"input": given[INPUT]} if fits else None
        case "local_shell":
            fits = _words(given.get("command")) and given.keys() <= {
                "command",
                "working_directory",
                "timeout_ms",
                "env",
            }
            env = given.get("env", {})
            fits = fits and isinstance(env, dict) and all(isinstance(one, str) for one in env.values())
            fits = fits and isinstance(given.get("working_directory", ""), str) and _whole(given.get("timeout_ms"))
            return {"action": {"type": "exec", "env": {}, **given}} if fits else None
        case "shell":
            fits = _words(given.get("commands")) and given.keys() <= {"commands", "timeout_ms", "max_output_length"}
            fits = fits and _whole(given.get("timeout_ms")) and _whole(given.get("max_output_length"))
            return {"action": {"timeout_ms": None, "max_output_length": None, **given}} if fits else None
        case _:
            wanted = {"delete_file": {"type", "path"}}.get(str(given.get("type")), {"type", "path", "diff"})
            fits = given.get("type") in ("create_file", "update_file", "delete_file") and given.keys() == wanted
            fits = fits and all(isinstance(one, str) for one in given.values())
            return {"operation": given} if fits else None


def written(kind: str, item: Json, where: str) -> str:
    """Arguments for a call's item, with the spaces that models write."""
    match kind:
        case "custom":
            given: Json = {INPUT: text(item.get("input"), f"{where}.input")}
        case "apply_patch":
            given = mapping(item.get("operation"), f"{where}.operation")
        case _:
            action = mapping(item.get("action"), f"{where}.action")
            given = {name: value for name, value in action.items() if name != "type" and value not in (None, {})}
    return json.dumps(given, ensure_ascii=False)


def encodable(value: Any) -> bool:
    """Whether JSON text can tell it: a lone surrogate can be written as an escape, and not as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _whole(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53)
