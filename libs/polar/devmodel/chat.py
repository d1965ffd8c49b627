"""A tokenizer with its chat template: text to ids, conversation to prompt, ids to text.

Promises the ids that vLLM makes of the same tokenizer and template: text parts are joined by a newline, tool
arguments in the history are parsed and rendered again, special tokens inside a message are recognised. Holds no state
between calls and knows no HTTP; `ApiError` is raised for what vLLM would refuse.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer

from .errors import ApiError, invalid

Json = dict[str, Any]
BUNDLED_TOKENIZER = "tokenizer.json"
BUNDLED_TEMPLATE = "chatml-tools.jinja"


def bundled(name: str) -> str:
    """The text of a data file of this package."""
    return resources.files(__package__).joinpath("data", name).read_text(encoding="utf-8")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: object, indent: int | None = None) -> str:
    # unlike Jinja's own filter: no HTML escapes, keys in the order they came, as model templates expect
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    return environment.from_string(template)


class ChatTokenizer:
    """A fast tokenizer, its chat template and its end-of-turn token.

    `eos` is the token that ends a turn; sampling it finishes a generation. Raises `ValueError` when the vocabulary
    has no such token.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, *, eos: str = "<|im_end|>") -> None:
        self.tokenizer = tokenizer
        self._template = _compile(template)
        eos_id = tokenizer.token_to_id(eos)
        if eos_id is None:
            raise ValueError(f"the vocabulary has no token {eos!r}; name its end-of-turn token with eos=")
        self.eos_id: int = eos_id
        self.vocabulary: int = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def small(cls) -> "ChatTokenizer":
        """The tokenizer and template that ship with this package: 4,096 entries, no download."""
        return cls(Tokenizer.from_str(bundled(BUNDLED_TOKENIZER)), bundled(BUNDLED_TEMPLATE))

    @classmethod
    def from_files(
        cls, tokenizer: str | Path, template: str | Path | None = None, *, eos: str = "<|im_end|>"
    ) -> "ChatTokenizer":
        """Read `tokenizer.json` (or a folder that holds it) and a Jinja template (the bundled one by default)."""
        path = Path(tokenizer)
        if path.is_dir():
            path = path / "tokenizer.json"
        text = bundled(BUNDLED_TEMPLATE) if template is None else Path(template).read_text(encoding="utf-8")
        return cls(Tokenizer.from_file(str(path)), text, eos=eos)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which a decoded message leaves out."""
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @cached_property
    def _vocab(self) -> dict[str, int]:
        return self.tokenizer.get_vocab(with_added_tokens=False)

    @cached_property
    def _bytes(self) -> list[bytes]:
        """The bytes of every id."""
        alphabet = _byte_alphabet()
        table = [b""] * self.vocabulary
        for piece, number in self._vocab.items():
            table[number] = (
                bytes(alphabet[char] for char in piece) if all(c in alphabet for c in piece) else piece.encode()
            )
        for number, token in self.tokenizer.get_added_tokens_decoder().items():
            table[number] = token.content.encode()
        return table

    def encode(self, text: str) -> list[int]:
        """The canonical ids of `text`; control tokens written out in it become their ids."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; ids outside the vocabulary decode to nothing."""
        known = [number for number in ids if 0 <= number < self.vocabulary]
        return self.tokenizer.decode(known, skip_special_tokens=skip_special)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary entries of `ids`, in the byte-level alphabet."""
        return [self.tokenizer.id_to_token(number) or "" for number in ids]

    def stream(self, *, skip_special: bool) -> "TextStream":
        """A decoder that takes ids one at a time."""
        return TextStream(self._bytes, self.special_ids if skip_special else frozenset())

    def split(self, token: int) -> tuple[int, int] | None:
        """Two tokens that together decode to the same bytes as `token`, or None when it cannot be split so."""
        piece = self.tokenizer.id_to_token(token)
        if piece is None or token in self.special_ids:
            return None
        for cut in range(len(piece) - 1, 0, -1):
            left, right = self._vocab.get(piece[:cut]), self._vocab.get(piece[cut:])
            if left is not None and right is not None:
                return left, right
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Json] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt's ids. Raises `ApiError` for media and for conversations that the template refuses."""
        normal = [_normalize(message) for message in messages]
        try:
            text = self._template.render(
                messages=normal,
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                **(template_kwargs or {}),
            )
        except jinja2.TemplateError as error:
            raise ApiError(str(error)) from error
        if continue_final_message:
            last = normal[-1]["content"].rstrip() if normal else ""
            cut = text.rfind(last)
            text = text[: cut + len(last)] if cut >= 0 else text
        return self.encode(text)


class TextStream:
    """Ids in, text out as soon as it is whole: half a character is held until its last byte came.

    Ids in `silent` and ids outside the vocabulary give no text. Like vLLM's decoder it holds everything since the
    last whole text while the end is not valid UTF-8, so what it never completed is never told.
    """

    def __init__(self, table: Sequence[bytes], silent: frozenset[int]) -> None:
        self._table = table
        self._silent = silent
        self._held = b""

    def step(self, token: int) -> str:
        """The text that `token` completes, perhaps empty."""
        text = self.peek(token)
        self._held = b"" if text else self._held + self._piece(token)
        return text

    def peek(self, token: int) -> str:
        """What `step` would give, without taking the token."""
        text = (self._held + self._piece(token)).decode("utf-8", "replace")
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else text

    def _piece(self, token: int) -> bytes:
        return b"" if token in self._silent or not 0 <= token < len(self._table) else self._table[token]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-in for each byte, reversed (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _text_of(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(("string_type", "body.messages.content", "Input should be a valid string", content))
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise ApiError("this model is not a multimodal model")
    return "\n".join(texts)


def _normalize(message: Mapping[str, Any]) -> Json:
    """A message as vLLM gives it to a template that takes strings."""
    normal: Json = {**message, "content": _text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        normal["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"))}}
            for call in calls
            if isinstance(call, dict) and isinstance(call.get("function"), dict)
        ]
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        normal["reasoning"] = normal["reasoning_content"] = reasoning
    return normal


def _arguments(value: object) -> object:
    """What vLLM makes of a call's arguments in the history: an object, empty when they are not one."""
    if isinstance(value, dict):
        return value
    try:
        parsed = json.loads(str(value or "{}"))
    except json.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
