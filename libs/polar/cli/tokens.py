"""Ids as text, for people, and where re-tokenizing a sampled text gives other ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class NoTokenizer(ValueError):
    """No tokenizer can be loaded; the message says from where it was tried and what to install."""


def load_tokenizer(place: str) -> Tokenizer:
    """A `tokenizer.json`, or the folder that holds one.

    Raises:
        NoTokenizer: the package is missing, or there is no such file.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise NoTokenizer("the package `tokenizers` is missing: install polar-rollout[trainer]") from None
    path = Path(place)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise NoTokenizer(f"{path} is no file; name a tokenizer.json or the model's folder")
    return Tokenizer.from_file(str(path))


def pieces(tokenizer: Tokenizer, ids: npt.NDArray[np.int32]) -> list[str]:
    """The text of each id, special tokens included; concatenated they are the text of all.

    A character whose bytes are spread over several ids stands with the last of them.
    """
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, int(one)) or "" for one in ids]


def retokenized(tokenizer: Tokenizer, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """For each sampled id, whether encoding the text of all of them anew puts another id in its place.

    Returns:
        Shape `(len(ids),)`. An id is unchanged where the new encoding has the same id over the same characters.
    """
    texts = pieces(tokenizer, ids)
    again = tokenizer.encode("".join(texts), add_special_tokens=False)
    kept = set(zip(_ends(pieces(tokenizer, np.asarray(again.ids, np.int32))), again.ids, strict=True))
    ends = _ends(texts)
    starts = [0, *ends[:-1]]
    begins = {0, *(end for end, _ in kept)}
    return np.array(
        [(end, int(one)) not in kept or start not in begins for start, end, one in zip(starts, ends, ids, strict=True)],
        np.bool_,
    )


def _ends(texts: list[str]) -> list[int]:
    return [int(end) for end in np.cumsum([len(text) for text in texts])]
