"""Reading and writing below a folder that untrusted processes write to at the same time.

Every path is walked one component at a time on directory handles with `O_NOFOLLOW`, so a symbolic link anywhere in
it, also one planted between check and use, ends in `PathRefused`. Only plain files and folders are opened; a pipe or
a device can not make the caller wait. All functions block and are meant for a thread. They know nothing of boxes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from polar.runtime.errors import PathRefused, TooLarge, TransferFailed
from polar.runtime.interface import Download

CHUNK = 1 << 20
MAX_DEPTH = 100  # folders within folders; each level holds one file handle
ENTRY_COST = 256  # bytes that an empty file or a folder counts, so that a million of them is not free
MAX_SKIPPED = 100  # names listed of what a download leaves out

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_REFUSALS = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR)


def split(path: str) -> tuple[str, ...]:
    """The components of an absolute path; PathRefused for a relative one and for any `..`."""
    if not path.startswith("/") or "\0" in path:
        raise PathRefused(f"{path!r} is no absolute path")
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if ".." in parts:
        raise PathRefused(f"{path!r} has a '..'")
    return parts


@contextlib.contextmanager
def typed(path: str) -> Iterator[None]:
    """Turn the operating system's errors about `path` into this package's."""
    try:
        yield
    except OSError as error:
        if error.errno in _REFUSALS:
            raise PathRefused(f"{path}: not a plain file or folder reached without links") from error
        raise TransferFailed(f"{path}: {error.strerror or error}") from error


@contextlib.contextmanager
def open_dir(root: Path, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """A handle of the folder `root/parts`, links refused below `root`; missing folders are made if asked."""
    handle = os.open(root, _DIR)
    try:
        for part in parts:
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=handle)
            below = os.open(part, _DIR, dir_fd=handle)
            os.close(handle)
            handle = below
        yield handle
    finally:
        os.close(handle)


def open_plain(name: str, flags: int, directory: int, mode: int = 0o644) -> int:
    """Open a plain file in an open folder; PathRefused for a link, a pipe, a device or a folder."""
    handle = os.open(name, flags, mode, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise PathRefused(f"{name}: not a plain file")
    return handle


def open_log(root: Path, parts: Sequence[str]) -> int:
    """A handle that appends to the file `root/parts`, made with its folders if it is missing."""
    with typed("/".join(parts)), open_dir(root, parts[:-1], create=True) as directory:
        return open_plain(parts[-1], _WRITE | os.O_APPEND, directory)


def read_file(root: Path, parts: Sequence[str], max_bytes: int) -> bytes:
    path = "/".join(parts)
    if not parts:
        raise PathRefused(f"{path or '/'} is a folder")
    with (
        typed(path),
        open_dir(root, parts[:-1]) as directory,
        os.fdopen(open_plain(parts[-1], _READ, directory), "rb") as file,
    ):
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise TooLarge(f"{path} holds more than {max_bytes} bytes")
    return data


def write_file(root: Path, parts: Sequence[str], data: bytes) -> None:
    path = "/".join(parts)
    if not parts:
        raise PathRefused(f"{path or '/'} is a folder")
    with (
        typed(path),
        open_dir(root, parts[:-1], create=True) as directory,
        os.fdopen(open_plain(parts[-1], _WRITE | os.O_TRUNC, directory), "wb") as file,
    ):
        file.write(data)


def make_dir(root: Path, parts: Sequence[str]) -> None:
    """Make the folder `root/parts` with its parents."""
    with typed("/".join(parts)), open_dir(root, parts, create=True):
        pass


def copy_in(source: Path, root: Path, parts: Sequence[str]) -> None:
    """Copy a host file to `root/parts`, or a host folder's content into it; links are copied as links."""
    with typed(str(source)):
        is_dir = stat.S_ISDIR(os.stat(source).st_mode)
    path = "/".join(parts)
    if is_dir:
        with typed(path), open_dir(root, parts, create=True) as directory:
            _copy_in_dir(source, directory, 0)
        return
    if not parts:
        raise PathRefused(f"{path or '/'} is a folder")
    with typed(path), open_dir(root, parts[:-1], create=True) as directory:
        _copy_in_file(source, parts[-1], directory)


def _copy_in_file(source: Path, name: str, directory: int) -> None:
    with open(source, "rb") as reader:
        mode = stat.S_IMODE(os.fstat(reader.fileno()).st_mode) & 0o777
        with os.fdopen(open_plain(name, _WRITE | os.O_TRUNC, directory), "wb") as writer:
            shutil.copyfileobj(reader, writer, CHUNK)
            os.fchmod(writer.fileno(), mode | 0o200)


def _copy_in_dir(source: Path, directory: int, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise TooLarge(f"{source} is more than {MAX_DEPTH} folders deep")
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.is_symlink():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.name, dir_fd=directory)
                os.symlink(os.readlink(entry.path), entry.name, dir_fd=directory)
            elif entry.is_dir():
                with open_dir_at(entry.name, directory) as below:
                    _copy_in_dir(Path(entry.path), below, depth + 1)
            elif entry.is_file():
                _copy_in_file(Path(entry.path), entry.name, directory)


@contextlib.contextmanager
def open_dir_at(name: str, directory: int) -> Iterator[int]:
    """A handle of the folder `name` in an open folder, made if it is missing."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=directory)
    handle = os.open(name, _DIR, dir_fd=directory)
    try:
        yield handle
    finally:
        os.close(handle)


def copy_out(root: Path, parts: Sequence[str], target: Path, max_bytes: int) -> Download:
    """Copy `root/parts` to the host path `target`: a file as a file, a folder's content into a folder."""
    path = "/" + "/".join(parts)
    copier = _CopyOut(path, max_bytes)
    with typed(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_dir(root, parts[:-1]) as directory:
            if not parts or stat.S_ISDIR(os.stat(parts[-1], dir_fd=directory, follow_symlinks=False).st_mode):
                target.mkdir(exist_ok=True)
                with open_dir(root, parts) as source, open_dir(target, ()) as sink:
                    copier.folder(source, sink, "", 0)
            else:
                with open_dir(target.parent, ()) as sink:
                    copier.file(parts[-1], directory, sink, target.name)
    return Download(copier.files, copier.size, tuple(copier.skipped))


class _CopyOut:
    """One download: counts bytes, leaves out what is neither file nor folder."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path = path
        self.left = max_bytes
        self.limit = max_bytes
        self.files = 0
        self.size = 0
        self.skipped: list[str] = []

    def _spend(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise TooLarge(f"{self.path} holds more than {self.limit} bytes")

    def file(self, name: str, directory: int, sink: int, target: str) -> None:
        with os.fdopen(open_plain(name, _READ, directory), "rb") as reader:
            mode = stat.S_IMODE(os.fstat(reader.fileno()).st_mode) & 0o777
            with os.fdopen(open_plain(target, _WRITE | os.O_TRUNC, sink), "wb") as writer:
                while chunk := reader.read(CHUNK):
                    self._spend(len(chunk))
                    writer.write(chunk)
                    self.size += len(chunk)
                os.fchmod(writer.fileno(), mode | 0o600)
        self.files += 1

    def folder(self, source: int, sink: int, prefix: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise TooLarge(f"{self.path} is more than {MAX_DEPTH} folders deep")
        with os.scandir(source) as entries:
            for entry in entries:
                self._spend(ENTRY_COST)
                if entry.is_dir(follow_symlinks=False):
                    below = os.open(entry.name, _DIR, dir_fd=source)
                    try:
                        with open_dir_at(entry.name, sink) as target:
                            self.folder(below, target, f"{prefix}{entry.name}/", depth + 1)
                    finally:
                        os.close(below)
                elif entry.is_file(follow_symlinks=False):
                    self.file(entry.name, source, sink, entry.name)
                elif len(self.skipped) < MAX_SKIPPED:
                    self.skipped.append(f"{self.path}/{prefix}{entry.name}")


def remove_tree(path: Path) -> None:
    """Delete a folder whose users are dead, also where they made folders unreadable; links are not followed."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except PermissionError:
        os.chmod(path, 0o700)
        for folder, names, _ in os.walk(path):  # top-down: a folder is opened up before it is listed
            for name in names:
                below = os.path.join(folder, name)
                if not os.path.islink(below):
                    os.chmod(below, 0o700)
        shutil.rmtree(path)
