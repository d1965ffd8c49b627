"""One view file per process: the first free one of several in a state folder, and what can be wrong with it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

SLOTS = 64


class ViewUnusable(RuntimeError):
    """The file cannot be opened, made or written; a person has to act."""


class ViewBroken(RuntimeError):
    """The file is corrupt, or was made from another log: it is thrown away and built anew."""


def lock_slot(path: Path) -> tuple[Path, int]:
    """The first file of `path`, `path`-2, … that no process has, and the handle that keeps it locked.

    Raises:
        ViewUnusable: no permission, or every one is taken.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for number in range(1, SLOTS + 1):
            mine = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
            handle = os.open(f"{mine}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                continue
            except BaseException:
                os.close(handle)
                raise
            return mine, handle
    except OSError as error:
        raise ViewUnusable(
            f"cannot use {path} for the view ({error.strerror}): set POLAR_SUBMIT_VIEW_FILE or POLAR_STATE_DIR"
        ) from None
    raise ViewUnusable(f"{SLOTS} processes use {path} and its neighbours already: set POLAR_SUBMIT_VIEW_FILE")
