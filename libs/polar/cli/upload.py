"""Files of this machine as prepare actions, so that a session anywhere can have them.

A file keeps its path relative to the current folder; one from elsewhere comes to lie in the workspace itself, under
its own name. Links are sent as what they point to. What no session needs or should see (version control, caches,
virtual environments, Polar's own state with its secret) is left out of folders.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from polar.client import PolarClient
from polar.schemas import PrepareAction

INLINE_BYTES = 16 * 1024
INLINE_TOTAL = 64 * 1024
"""Text in the task itself; more goes through the blob store, since every assignment carries the task."""
MOST_FILES = 2_000
MOST_BYTES = 256 * 1024 * 1024
COMMAND_BYTES = 32 * 1024
"""Of one `chmod`; Linux takes 128 KiB."""
CACHES = ("__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".tox")
LEFT_OUT = frozenset((".git", ".hg", ".svn", ".polar", ".venv", "venv", "node_modules", *CACHES))
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt", "/nix", "/snap", "/proc", "/sys", "/dev")


class CannotUpload(ValueError):
    """A file that cannot be sent; the message names it and says why."""


def argument_files(command: list[str]) -> tuple[list[str], dict[str, Path]]:
    """The command as it runs in the workspace, and the local files among its words by their path in the workspace.

    Files are looked for in each word and behind the `=` of options. Programs and files of the system or of a Python
    environment stay what they are: a box has those of its own machine.

    Raises:
        CannotUpload: two files would lie at the same place, or a word is not UTF-8.
    """
    found: dict[str, Path] = {}
    rewritten: list[str] = []
    for i, word in enumerate(command):
        checked(word, "the command")
        option, separator, value = (
            word.partition("=") if i > 0 and word.startswith("-") and "=" in word else ("", "", word)
        )
        path = Path(value)
        if (i == 0 and "/" not in word) or not _is_file(path) or _installed(path):
            rewritten.append(word)
            continue
        target = place(path)
        _put(found, target, path)
        rewritten.append(f"./{target}" if i == 0 else f"{option}{separator}{target}")
    return rewritten, found


def folders_among(command: list[str]) -> list[str]:
    """Words of a command that name folders of here, which are sent only where `--upload` says so."""
    words = [word for word in command[1:] if not word.startswith("-") and word.strip("./")]
    return [word for word in words if _is_folder(Path(word)) and not _installed(Path(word))]


def place(path: Path) -> str:
    """Where a file or folder of this machine lies in the workspace; `.` is the workspace itself."""
    whole, here = os.path.abspath(path), os.getcwd()
    if whole == here or whole.startswith(here.rstrip("/") + "/"):
        return checked(os.path.relpath(whole, here), "a file's name")
    return checked(os.path.basename(whole), "a file's name")


def tree_files(source: Path, *, private: Collection[Path] = ()) -> tuple[dict[str, Path], list[str]]:
    """A file, or the files below a folder, by workspace path; and what was left out although it was asked for.

    Args:
        private: folders never sent, whatever they are called.

    Raises:
        CannotUpload: there is nothing of that name.
    """
    target = place(source)
    if _is_file(source):
        return {target: source}, []
    if not _is_folder(source):
        raise CannotUpload(f"{source} is neither a file nor a folder here")
    hidden = {os.path.realpath(one) for one in private}
    found: dict[str, Path] = {}
    skipped: list[str] = []
    for folder, names, files in os.walk(source):
        inner = [name for name in sorted(names) if name not in LEFT_OUT]
        names[:] = [name for name in inner if os.path.realpath(os.path.join(folder, name)) not in hidden]
        for name in names:
            if os.path.islink(os.path.join(folder, name)):
                skipped.append(f"{os.path.join(folder, name)} is a link to a folder: name it with --upload")
        for name in sorted(files):
            path = Path(folder) / name
            if name in LEFT_OUT:
                continue
            if not _is_file(path):
                skipped.append(f"{path} is no regular file")
                continue
            found[checked(os.path.normpath(os.path.join(target, os.path.relpath(path, source))), "a name")] = path
            if len(found) > MOST_FILES:
                raise CannotUpload(f"{source} holds more than {MOST_FILES} files; bring them in an image instead")
    return found, skipped


def merge(into: dict[str, Path], more: Mapping[str, Path]) -> None:
    """Add files to others; CannotUpload where two different ones would lie at the same place."""
    for target, path in more.items():
        _put(into, target, path)


async def prepare_actions(client: PolarClient, files: Mapping[str, Path]) -> list[PrepareAction]:
    """One upload per file, relative to the workspace, then the executables' modes. Short text travels in the task, the
    rest through the blob store.

    Raises:
        CannotUpload: too many, too large, or unreadable.
    """
    if len(files) > MOST_FILES:
        raise CannotUpload(f"{len(files)} files are too many to send (at most {MOST_FILES}); use an image instead")
    actions: list[PrepareAction] = []
    executable: list[str] = []
    total = inline = 0
    for target, path in files.items():
        try:
            status = path.stat()
            total += status.st_size
            if total > MOST_BYTES:
                raise CannotUpload(
                    f"the files are larger than {MOST_BYTES >> 20} MiB together (at {path}); use an image instead"
                )
            data = path.read_bytes()
        except OSError as error:
            raise CannotUpload(f"cannot read {path}: {error.strerror}") from None
        text = _text(data) if len(data) <= min(INLINE_BYTES, INLINE_TOTAL - inline) else None
        if text is not None:
            inline += len(data)
            actions.append(PrepareAction(type="upload_file", target=target, content=text))
        else:
            actions.append(PrepareAction(type="upload_file", target=target, blob=await client.keep(data)))
        if status.st_mode & stat.S_IXUSR:
            executable.append(shlex.quote(f"./{target}"))
    return [*actions, *(PrepareAction(type="exec", command=f"chmod +x {some}") for some in _chunks(executable))]


def checked(text: str, what: str) -> str:
    """`text`, which came from this machine's file system or arguments, if it can be written to the log.

    Raises:
        CannotUpload: it is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = text.encode("utf-8", "surrogateescape")
        raise CannotUpload(f"{what} is not UTF-8: {shown!r}") from None
    return text


def _put(files: dict[str, Path], target: str, path: Path) -> None:
    other = files.setdefault(target, path)
    if other is not path and os.path.abspath(other) != os.path.abspath(path):
        raise CannotUpload(f"{other} and {path} would both lie at {target} in the workspace; rename one of them")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a word too long for a name, or forbidden
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _installed(path: Path) -> bool:
    """Whether a file belongs to the system or to a Python environment rather than to the user's work."""
    whole, here = Path(os.path.abspath(path)), Path.cwd()
    if whole.is_relative_to(here):
        above = [folder for folder in whole.parents if folder.is_relative_to(here) and folder != here]
    else:
        above = list(whole.parents)
        if any(whole.is_relative_to(folder) for folder in (*SYSTEM, sys.prefix, sys.base_prefix)):
            return True
    return any((folder / "pyvenv.cfg").exists() or (folder / "conda-meta").is_dir() for folder in above)


def _chunks(words: list[str]) -> Iterator[str]:
    line = ""
    for word in words:
        if line and len(line.encode()) + len(word.encode()) >= COMMAND_BYTES:
            yield line
            line = ""
        line = f"{line} {word}" if line else word
    if line:
        yield line


def _text(data: bytes) -> str | None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text
