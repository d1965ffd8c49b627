"""A pool of open segment files, so that a log of ten thousand segments does not need as many descriptors.

Promises: at most `limit` descriptors, least recently used closed first; writes are complete or undone.
For the event loop's thread only; worker threads open files of their own.
"""

import os
from collections import OrderedDict
from pathlib import Path

from polar.broker.errors import StorageFailed

__all__ = ["FilePool"]


class FilePool:
    """Descriptors by path, opened for reading and writing."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: OrderedDict[Path, int] = OrderedDict()

    def read(self, path: Path, size: int, position: int) -> bytes:
        """Up to `size` bytes at `position`; fewer only at the end of the file."""
        return os.pread(self._descriptor(path), size, position)

    def write(self, path: Path, parts: list[bytes | memoryview], position: int) -> None:
        """Write `parts` one after the other at `position`.

        Raises `OSError` (disk full, …) with the file cut back to `position`, `StorageFailed` when not even that works.
        """
        descriptor = self._descriptor(path)
        written = 0
        total = sum(len(part) for part in parts)
        try:
            while written < total:
                written += os.pwritev(descriptor, _rest(parts, written), position + written)
        except OSError:
            try:
                os.ftruncate(descriptor, position)
            except OSError as error:
                raise StorageFailed(f"cannot undo a partial write to {path.name}: {error}") from error
            raise

    def close(self, path: Path) -> None:
        """Close one file, before it is removed or replaced."""
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def close_all(self) -> None:
        while self._open:
            _, descriptor = self._open.popitem()
            os.close(descriptor)

    def _descriptor(self, path: Path) -> int:
        descriptor = self._open.get(path)
        if descriptor is not None:
            self._open.move_to_end(path)
            return descriptor
        while len(self._open) >= self._limit:
            _, oldest = self._open.popitem(last=False)
            os.close(oldest)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._open[path] = descriptor
        return descriptor


def _rest(parts: list[bytes | memoryview], written: int) -> list[bytes | memoryview]:
    if not written:
        return parts
    rest: list[bytes | memoryview] = []
    for part in parts:
        if written >= len(part):
            written -= len(part)
        else:
            rest.append(memoryview(part)[written:])
            written = 0
    return rest
