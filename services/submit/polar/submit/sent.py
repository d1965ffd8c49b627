"""Which callbacks were delivered: a small file, one line each, so that a restart does not send them all again.

A memory and no truth: when the file is lost, what ended within the memory is delivered once more. Knows only keys and
times. Its functions read and write a file and are called in a thread.
"""

from __future__ import annotations

import os
from pathlib import Path


class SentFile:
    """Lines of `<at_ms> <key>`; the newest `limit` are kept, and up to twice as many until it is tidied."""

    def __init__(self, path: Path, *, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._lines = 0

    def load(self, since_ms: int) -> set[str]:
        """The keys noted at or after `since_ms`; older lines and a torn last one are dropped from the file."""
        try:
            text = self._path.read_text(errors="replace")
        except FileNotFoundError:
            return set()
        kept: dict[str, int] = {}
        for line in text.splitlines():
            at, _, key = line.partition(" ")
            if key and at.isascii() and at.isdigit() and int(at) >= since_ms:
                kept[key] = int(at)
        newest = list(kept.items())[-self._limit :]
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        draft.write_text("".join(f"{at} {key}\n" for key, at in newest))
        draft.replace(self._path)
        self._lines = len(newest)
        return {key for key, _ in newest}

    def note(self, key: str, at_ms: int) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(f"{at_ms} {key}\n")
        self._lines += 1
        if self._lines > 2 * self._limit:
            self.load(0)
