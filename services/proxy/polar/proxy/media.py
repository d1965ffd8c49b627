"""Where a prompt's images stand among its ids. Pure.

Two images of one size have the same placeholder ids, so the hash tells them apart and the position says which is which.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polar.schemas import MediaPart, TokenIds

from .calls import Media

UNKNOWN = -1
"""The offset of an image of which the place is not known."""


def place(media: Sequence[Media], ids: TokenIds, placeholder: int | None) -> list[MediaPart]:
    """`media` with their places: the n-th run of the id `placeholder` is the n-th image's.

    Where there are not as many runs as images, or the id is not known, no place is guessed: offset -1, length 0.
    """
    if not media:
        return []
    marks = np.zeros(0, np.int8) if placeholder is None else (ids.array == placeholder).astype(np.int8)
    edges = np.flatnonzero(np.diff(marks, prepend=0, append=0))
    starts, ends = edges[::2].tolist(), edges[1::2].tolist()
    if len(starts) != len(media):
        starts, ends = [UNKNOWN] * len(media), [UNKNOWN] * len(media)
    return [
        MediaPart(kind=one.kind, sha256=one.sha256, offset=start, length=end - start)
        for one, start, end in zip(media, starts, ends, strict=True)
    ]
