"""The folder that holds everything of one `polar up`: its lock, its mark, and where its parts listen.

Promises: one `polar up` per folder at a time; a folder of another version, or one that is somebody else's, is refused
and left as it is; everything below may be deleted when nothing runs. It starts nothing.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import yaml

from .errors import CannotUp

FORMAT = 1
"""Of the whole folder; raised where an older `polar up` could not go on with what a newer one left."""
MARK = "up.json"
CONFIG = "polar.yaml"
LOCK = "up.lock"
LEAST_FREE = 512 * 1024 * 1024
"""Bytes: two segments of the broker and some room for the rest."""
OURS = frozenset(
    {MARK, CONFIG, LOCK, "README.txt", ".gitignore", "kafka", "logs", "run", "blobs", "builder", "gateway", "submit"}
    | {"token-secret", "evaluator", "proxy", "demo.json", "demo.html"}
)
"""Names that Polar's processes make in a state folder."""

README = """This folder is the whole state of a `polar up` on this machine.

kafka/        the embedded broker's log: tasks, captured calls, trajectories (absent with another Kafka)
blobs/        parts that are too large for the log
gateway/      boxes and the books of what runs in them
builder/      a cache
logs/         what each process said
polar.yaml    the settings that every process and command uses; written anew at each start
up.json       version and ports
token-secret  signs session tokens

To forget everything: stop `polar up` and delete the folder.
To keep it: nothing to do; the next `polar up` goes on where the last one ended, also after a crash.
"""


@dataclass
class Mark:
    """The content of `up.json`."""

    ports: dict[str, int] = field(default_factory=dict)
    """By part: kafka, model, submit, proxy, gateway."""
    kind: str = "up"
    """`up` or `demo`."""


class Folder:
    """A folder that is locked and marked. Blocks: a few small files are read and written."""

    def __init__(self, path: Path, mark: Mark, lock: IO[str]) -> None:
        self.path = path
        self.mark = mark
        self._lock = lock

    @classmethod
    def open(cls, path: Path, *, least_free: int = LEAST_FREE) -> Folder:
        """Make the folder where it is missing, and lock it.

        Raises:
            CannotUp: another `polar up` has it, it is of another version, it is not Polar's, it cannot be written, or
                the disk is full.
        """
        path = path.absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            strangers = sorted(one for one in os.listdir(path) if one not in OURS)
            if strangers and not (path / MARK).exists():
                raise CannotUp(
                    f"{path} holds {strangers[0]}, which is not Polar's",
                    hint="name an empty or new folder with --dir",
                    bad_input=True,
                )
            lock = _locked(path)
            try:
                mark = _read(path)
                _enough_room(path, least_free)
                found = cls(path, mark, lock)
                for name in ("logs", "run"):
                    (path / name).mkdir(exist_ok=True)
                (path / "README.txt").write_text(README)
                (path / ".gitignore").write_text("*\n")
                found.save()
            except BaseException:
                lock.close()
                raise
        except OSError as error:
            raise _unusable(path, error) from error
        return found

    def save(self) -> None:
        """Write `up.json`."""
        text = {"format": FORMAT, "polar": _version(), "kind": self.mark.kind, "ports": self.mark.ports}
        _replace(self.path / MARK, json.dumps(text, indent=2) + "\n")

    def write_config(self, config: dict[str, Any]) -> Path:
        """Write `polar.yaml`, readable by its owner: it may hold keys."""
        path = self.path / CONFIG
        head = "# Written by `polar up`, anew at each start. Commands in this folder use it while it runs.\n"
        _replace(path, head + yaml.safe_dump(config, sort_keys=False, allow_unicode=True), mode=0o600)
        return path

    def port(self, part: str, asked: int | None, usual: int | None) -> int:
        """The port of a part: the one asked for, else the one it had, else the usual one, else any free one.

        Raises:
            CannotUp: the one asked for is in use.
        """
        if asked:
            if not is_free(asked):
                raise CannotUp(f"port {asked} for {part} is in use", hint="stop what uses it, or name another")
            found = asked
        else:
            taken = {port for name, port in self.mark.ports.items() if name != part}
            wishes = [self.mark.ports.get(part), usual]
            found = next((one for one in wishes if one and one not in taken and is_free(one)), 0)
            while not found or found in taken:
                found = free_port()
        self.mark.ports[part] = found
        return found

    def close(self) -> None:
        """Let others have the folder."""
        self._lock.close()


def is_locked(path: Path) -> bool:
    """Whether a `polar up` runs on the folder."""
    try:
        lock = (path / LOCK).open()
    except OSError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what is closing is free
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _locked(path: Path) -> IO[str]:
    lock = (path / LOCK).open("a+")
    for wait_s in (0.05, 0.1, 0.2, None):  # a command that looks whether `polar up` runs holds the lock for a moment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if wait_s is not None:
                time.sleep(wait_s)
                continue
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise CannotUp(
                f"polar up is already running on {path} (process {holder})",
                hint="use it from this folder, stop it, or give this one another --dir",
            ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _read(path: Path) -> Mark:
    try:
        found = json.loads((path / MARK).read_text())
    except FileNotFoundError:
        return Mark()
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        wrote = found.get("polar", "unknown") if isinstance(found, dict) else "unknown"
        number = found.get("format", "unknown") if isinstance(found, dict) else "unreadable"
        raise CannotUp(
            f"{path} is of another version: format {number}, written by polar {wrote}; this one ({_version()}) has "
            f"format {FORMAT}",
            hint="name another --dir, use that version, or delete the folder and what it holds",
            bad_input=True,
        )
    ports = {str(name): int(port) for name, port in dict(found.get("ports", {})).items()}
    return Mark(ports=ports, kind=str(found.get("kind", "up")))


def _enough_room(path: Path, least: int) -> None:
    free = shutil.disk_usage(path).free
    if free < least:
        raise CannotUp(
            f"only {free >> 20} MB are free where {path} is, too few for a log (at least {least >> 20} MB)",
            hint="make room, or name a folder on another disk with --dir",
        )


def _unusable(path: Path, error: OSError) -> CannotUp:
    if error.errno == errno.ENOSPC:
        return CannotUp(f"no room on the disk where {path} is", hint="make room, or name another folder with --dir")
    return CannotUp(
        f"cannot write to {path}: {error.strerror or error}", hint="name another folder with --dir", bad_input=True
    )


def _replace(path: Path, text: str, *, mode: int = 0o644) -> None:
    draft = path.with_name(f"{path.name}.part")
    with open(draft, "w", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _version() -> str:
    try:
        return metadata.version("polar-rollout")
    except metadata.PackageNotFoundError:
        return "unknown"
