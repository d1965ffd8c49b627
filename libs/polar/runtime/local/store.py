"""Boxes on disk: one folder each, with everything that must outlive the node process.

    <root>/<box id>/box.json     spec, labels, door, cgroups; only the node reads it
    <root>/<box id>/session/     workspace, artifacts, logs: the box's /polar/session
    <root>/<box id>/home, tmp    its HOME and /tmp
    <root>/<box id>/etc          passwd, hosts and the like, made by us, read-only in the box
    <root>/<box id>/dirs/<name>  further folders that the box has at /<name>

A folder gets its name when it is complete and loses it before it is deleted, so a crash leaves no half box; what it
does leave (`.new-…`, `.gone-…`) is swept after an hour. Two processes of a node may share a root. All calls block.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec

from polar.runtime.errors import BoxStartFailed, SpecRefused
from polar.runtime.interface import BoxInfo, BoxSpec, Network
from polar.runtime.local.files import remove_tree

DEBRIS_AGE = 3600.0  # seconds; a create or destroy that still runs is far younger
SESSION = ("workspace", "artifacts", "logs")
USER_ID = 1000  # not 0: some harnesses refuse to run as root
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_ETC = {
    "passwd": (
        f"agent:x:{USER_ID}:{USER_ID}:agent:/polar/home:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
    ),
    "group": f"agent:x:{USER_ID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    "hostname": "box\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


@dataclass(frozen=True, kw_only=True)
class BoxRecord:
    """What box.json holds."""

    backend: str
    spec: BoxSpec
    door: tuple[str, int] | None
    created: float
    cgroups: tuple[str, ...] = ()


@dataclass(frozen=True)
class BoxFolder:
    """The paths of one box."""

    path: Path

    @property
    def session(self) -> Path:
        return self.path / "session"

    @property
    def home(self) -> Path:
        return self.path / "home"

    @property
    def tmp(self) -> Path:
        return self.path / "tmp"

    @property
    def etc(self) -> Path:
        return self.path / "etc"

    @property
    def dirs(self) -> Path:
        return self.path / "dirs"

    def exists(self) -> bool:
        return (self.path / "box.json").exists()

    def extra(self) -> list[str]:
        """Names of the further folders, in order."""
        return sorted(entry.name for entry in os.scandir(self.dirs))


def checked_id(box_id: str) -> str:
    """The id, if it is the plain text of a UUID; SpecRefused otherwise, since it becomes a folder's name."""
    with contextlib.suppress(ValueError):
        if str(uuid.UUID(box_id)) == box_id:
            return box_id
    raise SpecRefused(f"box id {box_id!r} is no UUID in lower case")


def check_spec(spec: BoxSpec) -> None:
    """Refuse what no local backend has, and numbers that make no sense. Raises SpecRefused."""
    checked_id(spec.box_id)
    if spec.image is not None:
        raise SpecRefused("local runtimes have no images", hint="leave image empty, or use docker or apptainer")
    if spec.gpus:
        raise SpecRefused("local runtimes give no GPU to a box")
    if spec.network not in get_args(Network):
        raise SpecRefused(f"unknown network {spec.network!r}", hint=f"known: {', '.join(get_args(Network))}")
    for name in ("cpus", "memory_mb", "pids", "storage_mb"):
        value = getattr(spec, name)
        if value is not None and value <= 0:
            raise SpecRefused(f"{name} must be more than 0, not {value}")


class BoxStore:
    """The folder of all boxes of one backend."""

    def __init__(self, root: Path, backend: str) -> None:
        self.root = root
        self.backend = backend

    def folder(self, box_id: str) -> BoxFolder:
        return BoxFolder(self.root / checked_id(box_id))

    def create(self, record: BoxRecord, dirs: tuple[str, ...] = ()) -> BoxFolder:
        """Make the folder of a new box. Raises BoxStartFailed, also where the id is taken."""
        final = self.folder(record.spec.box_id)
        fresh = BoxFolder(self.root / f".new-{record.spec.box_id}-{os.getpid()}")
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            fresh.path.mkdir(mode=0o700)
            for path in (fresh.session, fresh.home, fresh.tmp, fresh.etc, fresh.dirs):
                path.mkdir()
            fresh.tmp.chmod(0o1777)
            for name in SESSION:
                (fresh.session / name).mkdir()
            for name in dirs:
                (fresh.dirs / name).mkdir()
            for name, text in _ETC.items():
                (fresh.etc / name).write_text(text)
            self._write(fresh, record)
            os.rename(fresh.path, final.path)
        except OSError as error:
            remove_tree(fresh.path)
            raise BoxStartFailed(f"box {record.spec.box_id}: {error.strerror or error}") from error
        return final

    def save(self, record: BoxRecord) -> None:
        self._write(self.folder(record.spec.box_id), record)

    def _write(self, folder: BoxFolder, record: BoxRecord) -> None:
        draft = folder.path / "box.json.new"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(record))
        os.replace(draft, folder.path / "box.json")

    def load(self, box_id: str) -> BoxRecord | None:
        """The record of a box of this backend, or None."""
        return self._read(self.folder(box_id))

    def _read(self, folder: BoxFolder) -> BoxRecord | None:
        try:
            record = msgspec.json.decode((folder.path / "box.json").read_bytes(), type=BoxRecord)
        except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
            return None
        return record if record.backend == self.backend else None

    def find(self, labels: dict[str, str]) -> list[BoxInfo]:
        """Boxes that bear all `labels`; sweeps old debris on the way."""
        found = []
        for name in sorted(os.listdir(self.root)) if self.root.is_dir() else []:
            path = self.root / name
            if name.startswith((".new-", ".gone-")):
                with contextlib.suppress(OSError):
                    if time.time() - path.stat().st_mtime > DEBRIS_AGE:
                        remove_tree(path)
                continue
            record = self._read(BoxFolder(path))
            if record and all(record.spec.labels.get(key) == value for key, value in labels.items()):
                found.append(BoxInfo(record.spec.box_id, dict(record.spec.labels), record.created))
        return found

    def remove(self, box_id: str) -> None:
        """Delete the box's folder, if it is there."""
        gone = self.root / f".gone-{box_id}-{uuid.uuid4().hex[:8]}"
        try:
            os.rename(self.folder(box_id).path, gone)
        except FileNotFoundError:
            return
        os.utime(gone)
        remove_tree(gone)
