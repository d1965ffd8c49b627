"""Tokenizers by the digest of their file: what turns ids into text where a builder is told to compare text.

A trajectory is a pure function of records and builder specification, so the specification names the tokenizer by
content, never by a path or a name that may come to mean another one. `tokenizers` is imported when one is first wanted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from .config import ConfigWrong
from .messages import plain
from .pool import Ids

TextOf = Callable[[Ids], str]
"""The text of ids, control tokens written out."""

FILE: Final = "tokenizer.json"


class Tokenizers:
    """Those that an operator allows: files, or folders that hold a `tokenizer.json`. Loaded once each."""

    def __init__(self, places: Iterable[Path] = ()) -> None:
        self._places = tuple(places)
        self._loaded: dict[str, TextOf] = {}

    def find(self, sha256: str) -> TextOf:
        """The tokenizer whose file has this digest.

        Raises:
            ConfigWrong: none has, or it cannot be read; says what to do.
        """
        known = self._loaded.get(sha256)
        if known is None:
            known = self._loaded[sha256] = self._load(sha256)
        return known

    def _load(self, sha256: str) -> TextOf:
        for place in self._places:
            path = place / FILE if place.is_dir() else place
            try:
                data = path.read_bytes()
            except OSError as error:
                raise ConfigWrong(f"the tokenizer {path.name} of POLAR_BUILDER_TOKENIZERS: {error.strerror}") from None
            if hashlib.sha256(data).hexdigest() == sha256:
                return _text_of(data)
        raise ConfigWrong(
            f"builder.config.tokenizer: no file of POLAR_BUILDER_TOKENIZERS has the SHA-256 {sha256}; add the model's "
            f"{FILE} there, or leave `tokenizer` out"
        )


def _text_of(data: bytes) -> TextOf:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigWrong("builder.config.tokenizer needs the package `tokenizers`: pip install tokenizers") from None
    tokenizer = Tokenizer.from_str(data.decode())

    def text_of(ids: Ids) -> str:
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    return text_of


def respaced(text: str) -> str:
    """`text` with every JSON object in it written in one way: whitespace, order of keys, spelling of numbers and
    escapes; arguments written as JSON inside a string are opened too."""
    found: list[str] = []
    at = 0
    while True:
        start = text.find("{", at)
        if start < 0:
            return "".join([*found, text[at:]])
        found.append(text[at:start])
        try:
            value, at = _DECODER.raw_decode(text, start)
            found.append(json.dumps(_opened(plain(value)), sort_keys=True))
        except (ValueError, RecursionError):
            found.append("{")
            at = start + 1


_DECODER: Final = json.JSONDecoder(strict=False)


def _opened(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("arguments"), str):
        try:
            return {**value, "arguments": plain(json.loads(value["arguments"]))}
        except (ValueError, RecursionError):
            return value
    return value
