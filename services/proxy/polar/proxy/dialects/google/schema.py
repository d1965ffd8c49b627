"""Google's form of a schema (OpenAPI 3.0, types in upper case) as JSON Schema. Pure."""

from __future__ import annotations

from typing import Any

from ...calls import Json
from .checks import fields, text, wrong

TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def json_schema(value: Any, where: str) -> Json:
    """`value` as JSON Schema; what is no field of Google's form stays as it is.

    Raises:
        BadRequest: a wrong field.
    """
    given = fields(value, where)
    nullable = given.pop("nullable", False) is True
    given.pop("propertyOrdering", None)
    found: Json = {}
    for name, one in given.items():
        at = f"{where}.{name}"
        match name:
            case "type":
                if (kind := _type(one, at)) is not None:
                    found["type"] = [*(kind if isinstance(kind, list) else [kind]), "null"] if nullable else kind
            case "properties":
                found[name] = _several(one, at)
            case "defs" | "$defs":
                found["$defs"] = _several(one, at)
            case "items":
                found[name] = json_schema(one, at)
            case "anyOf":
                if not isinstance(one, list):
                    raise wrong(at, "a list is expected")
                found[name] = [json_schema(each, f"{at}[{i}]") for i, each in enumerate(one)]
                if nullable and "type" not in given:
                    found[name].append({"type": "null"})
            case "additionalProperties" if isinstance(one, dict):
                found[name] = json_schema(one, at)
            case "example":
                found["examples"] = [one]
            case _ if name in COUNTS:
                found[name] = _count(one, at)
            case _:
                found["$ref" if name == "ref" else name] = one
    if nullable and isinstance(found.get("enum"), list) and None not in found["enum"]:
        found["enum"] = [*found["enum"], None]
    return found


def _several(value: Any, where: str) -> Json:
    if not isinstance(value, dict):
        raise wrong(where, "an object is expected")
    return {name: json_schema(one, f"{where}.{name}") for name, one in value.items()}


def _type(value: Any, where: str) -> Any:
    if isinstance(value, list):  # JSON Schema's own form
        return [_type(one, where) for one in value]
    kind = text(value, where).lower()
    if kind == "type_unspecified":
        return None
    if kind not in TYPES:
        raise wrong(where, f"one of {', '.join(TYPES).upper()} is expected")
    return kind


def _count(value: Any, where: str) -> int:
    # 64 bits are written as strings in the JSON form
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(where, "an integer is expected")
    return value
