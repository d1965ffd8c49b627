"""Ids as text, for people, and where re-tokenizing a sampled text gives other ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST_CHARACTER = 4
"""Bytes of UTF-8, so at most as many tokens; what is not a character by then never becomes one."""
UNFINISHED = "\ufffd"


class NoTokenizer(ValueError):
    """No tokenizer can be loaded; the message says from where it was tried and what to install."""


def load_tokenizer(place: str) -> Tokenizer:
    """A `tokenizer.json`, or the folder that holds one.

    Raises:
        NoTokenizer: the package is missing, there is no such file, or it holds no tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise NoTokenizer("the package `tokenizers` is missing: install polar-rollout[trainer]") from None
    path = Path(place).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise NoTokenizer(f"{path} is no file; name a tokenizer.json or the folder of a model that has one")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the package raises Exception itself
        raise NoTokenizer(f"{path} holds no tokenizer: {error}") from None


def pieces(tokenizer: Tokenizer, ids: npt.NDArray[np.int32] | Sequence[int], breaks: Collection[int] = ()) -> list[str]:
    """The text of each id, special tokens included; concatenated they are the text of all.

    A character whose bytes are spread over several ids stands with the last of them. Bytes that never become a
    character are U+FFFD. An id that the tokenizer does not have is `[id?]`.

    Args:
        breaks: positions before which a character that has begun is given up, such as the end of what was sampled.
    """
    numbers = [int(one) for one in ids]
    special = tokenizer.get_added_tokens_decoder()
    found = [""] * len(numbers)
    prefix = read = 0
    """`numbers[prefix:read]` is context, whose text is known; from `read` on the text is pending."""
    known = ""

    def decoded(end: int) -> str:
        return tokenizer.decode(numbers[prefix:end], skip_special_tokens=False)

    def settle(end: int) -> None:
        """What is pending up to `end` is the text of the last id before it."""
        nonlocal prefix, read, known
        found[end - 1] = decoded(end)[len(known) :]
        prefix, read = read, end
        known = decoded(end)

    for i, number in enumerate(numbers):
        foreign = tokenizer.id_to_token(number) is None
        if read < i and (foreign or i in breaks or number in special):
            settle(i)
        if foreign:
            found[i] = f"[{number}?]"
            prefix = read = i + 1
            known = ""
            continue
        text = decoded(i + 1)
        finished = len(text) > len(known) and not text.endswith(UNFINISHED)
        if finished or i + 1 - read >= LONGEST_CHARACTER or number in special:
            settle(i + 1)
    if read < len(numbers):
        settle(len(numbers))
    return found


def retokenized(tokenizer: Tokenizer, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """For each sampled id, whether encoding the text of all of them anew puts another id in its place.

    Returns:
        Shape `(len(ids),)`. An id is unchanged where the new encoding has the same id over the same characters.
    """
    texts = pieces(tokenizer, ids)
    again = tokenizer.encode("".join(texts), add_special_tokens=False).ids
    if again == ids.tolist():
        return np.zeros(len(ids), np.bool_)
    kept = set(_places(pieces(tokenizer, again), again))
    return np.array([place not in kept for place in _places(texts, ids.tolist())], np.bool_)


def _places(texts: list[str], ids: list[int]) -> list[tuple[int, int, int]]:
    """Start, end and id of each token; positions are those of characters."""
    ends = [int(end) for end in np.cumsum([len(text) for text in texts])]
    return list(zip([0, *ends[:-1]], ends, ids, strict=True))
