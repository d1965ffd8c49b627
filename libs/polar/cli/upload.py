"""Files of this machine as prepare actions, so that a session anywhere can have them."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from polar.client import PolarClient
from polar.schemas import PrepareAction

INLINE_BYTES = 16 * 1024
MOST_FILES = 2_000
MOST_BYTES = 256 * 1024 * 1024


class CannotUpload(ValueError):
    """A file that cannot be sent; the message names it and says why."""


def argument_files(command: list[str]) -> tuple[list[str], dict[str, Path]]:
    """The command as it runs in the workspace, and the local files among its arguments by workspace path.

    `python agents/a.py` keeps its relative path; a file named from elsewhere comes to lie in the workspace itself.
    """
    found: dict[str, Path] = {}
    rewritten = [command[0]]
    for i, argument in enumerate(command):
        path = Path(argument)
        if i == 0 and "/" not in argument:
            continue  # a program to be found on PATH
        target = argument
        if path.is_file() and not _is_system(path):
            inside = not path.is_absolute() and ".." not in path.parts
            target = str(path) if inside else path.name
            found[target] = path
        if i == 0:
            rewritten[0] = f"./{target}" if target in found else argument
        else:
            rewritten.append(target)
    return rewritten, found


def _is_system(path: Path) -> bool:
    return str(path.absolute()).startswith(("/usr/", "/bin/", "/lib", "/etc/"))


def folder_files(source: Path) -> dict[str, Path]:
    """All regular files below a folder, or the one file, by workspace path."""
    if source.is_file():
        return {source.name: source}
    if not source.is_dir():
        raise CannotUpload(f"{source} is neither a file nor a folder")
    found: dict[str, Path] = {}
    for folder, names, files in os.walk(source):
        names[:] = sorted(name for name in names if name not in (".git", "__pycache__", ".venv", "node_modules"))
        for name in sorted(files):
            path = Path(folder) / name
            if stat.S_ISREG(path.lstat().st_mode):
                found[str(path.relative_to(source))] = path
    return found


async def prepare_actions(client: PolarClient, workdir: str, files: dict[str, Path]) -> list[PrepareAction]:
    """One upload per file; short text travels in the task, the rest through the blob store.

    Raises:
        CannotUpload: too many, too large, or unreadable.
    """
    if len(files) > MOST_FILES:
        raise CannotUpload(f"{len(files)} files are too many to send (at most {MOST_FILES}); use an image instead")
    actions: list[PrepareAction] = []
    total = 0
    for target, path in files.items():
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CannotUpload(f"{path}: {error.strerror}") from None
        total += len(data)
        if total > MOST_BYTES:
            raise CannotUpload(f"the files are larger than {MOST_BYTES >> 20} MiB together; use an image instead")
        where = f"{workdir}/{target}"
        text = _text(data) if len(data) <= INLINE_BYTES else None
        if text is not None:
            actions.append(PrepareAction(type="upload_file", target=where, content=text))
        else:
            actions.append(PrepareAction(type="upload_file", target=where, blob=await client.keep(data)))
        if os.access(path, os.X_OK):
            actions.append(PrepareAction(type="exec", command=f"chmod +x {shlex.quote(where)}"))
    return actions


def _text(data: bytes) -> str | None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text
