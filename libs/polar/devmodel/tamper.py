"""Ways to break an answer that no proxy may accept: what an engine with a bug would send.

Each damage is a function over an outgoing body or chunk. Pure.
"""

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]


def _choices(chunk: Json) -> list[Json]:
    return list(chunk.get("choices") or [])


def _short_logprobs(chunk: Json) -> Json:
    """One log-probability fewer than ids."""
    for choice in _choices(chunk):
        if choice.get("logprobs"):
            choice["logprobs"] = {"content": choice["logprobs"]["content"][:-1]}
    return chunk


def _short_ids(chunk: Json) -> Json:
    """One id fewer than log-probabilities."""
    for choice in _choices(chunk):
        if choice.get("token_ids"):
            choice["token_ids"] = choice["token_ids"][:-1]
    return chunk


def _no_ids(chunk: Json) -> Json:
    """No ids of the answer, as an engine without `return_token_ids`."""
    for choice in _choices(chunk):
        choice.pop("token_ids", None)
    return chunk


def _no_logprobs(chunk: Json) -> Json:
    for choice in _choices(chunk):
        choice["logprobs"] = None
    return chunk


def _no_prompt_ids(chunk: Json) -> Json:
    chunk.pop("prompt_token_ids", None)
    return chunk


def _nan_logprobs(chunk: Json) -> Json:
    for choice in _choices(chunk):
        for entry in (choice.get("logprobs") or {}).get("content") or []:
            entry["logprob"] = float("nan")
    return chunk


def _no_finish(chunk: Json) -> Json:
    """The turn never says that it ended."""
    for choice in _choices(chunk):
        choice["finish_reason"] = None
    return chunk


def _not_json(chunk: Json) -> str:
    return '{"id": "chatcmpl-broken", "choices": [{'


DAMAGES: dict[str, Callable[[Json], Json | str]] = {
    "short_logprobs": _short_logprobs,
    "short_ids": _short_ids,
    "no_ids": _no_ids,
    "no_logprobs": _no_logprobs,
    "no_prompt_ids": _no_prompt_ids,
    "nan_logprobs": _nan_logprobs,
    "no_finish": _no_finish,
    "not_json": _not_json,
}
