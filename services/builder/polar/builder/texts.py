"""Tokenizers by the digest of their file: what turns ids into text where a builder is told to compare text.

A trajectory is a pure function of records and builder specification, so the specification names the tokenizer by
content, never by a path or a name that may come to mean another one. `tokenizers` is imported when one is first wanted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from polar.schemas.messages import plain

from .config import ConfigWrong
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
    escapes; arguments written as JSON inside a string are opened too. White space around an object and around the tag
    that it stands in is one line break, however much there is: templates put their own there (Qwen's a second newline
    between a text and the call that follows it)."""
    found: list[str] = []
    between = ""
    at = 0
    while True:
        start = text.find("{", at)
        if start < 0:
            between += text[at:]
            return "".join([*found, _AFTER.sub(_LINES, between) if found else between])
        between += text[at:start]
        try:
            value, end = _DECODER.raw_decode(text, start)
            written = json.dumps(_opened(plain(value)), sort_keys=True)
        except (ValueError, RecursionError):
            between += "{"
            at = start + 1
        else:
            between = _AFTER.sub(_LINES, between) if found else between
            found += [_BEFORE.sub(_LINES, between), written]
            between = ""
            at = end


_DECODER: Final = json.JSONDecoder(strict=False)
_TAG: Final = r"(<[^<>\s]+>|\[[A-Z_]+\])"
_BEFORE: Final = re.compile(rf"\s*{_TAG}\s*\Z")
_AFTER: Final = re.compile(rf"\A\s*{_TAG}\s*")
_LINES: Final = r"\n\1\n"


def _opened(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(value.get("arguments"), str):
        try:
            return {**value, "arguments": plain(json.loads(value["arguments"]))}
        except (ValueError, RecursionError):
            return value
    return value
