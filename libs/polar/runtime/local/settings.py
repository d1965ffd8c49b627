"""Settings of the local backends."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from polar.runtime.errors import SpecRefused

# Folders that would show the machine's secrets or devices to a box.
FORBIDDEN = frozenset(map(Path, ("/", "/dev", "/etc", "/home", "/proc", "/root", "/run", "/sys", "/tmp", "/var")))


def python_folders() -> tuple[Path, ...]:
    """The folders that the running Python and its site-packages live in, those of the system left out."""
    found: dict[Path, None] = {}
    for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix):
        for path in (Path(prefix), Path(prefix).resolve()):
            if not path.is_relative_to("/usr") and path not in FORBIDDEN:
                found[path] = None
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """How boxes are made on this machine.

    `root`: the folder that holds them, private to the node. `read_only`: folders of the machine that boxes see, at
    the same path. `path`: folders in front of PATH in boxes. `python`: this process's Python environment is visible
    and first in PATH; where it, or a folder of `read_only`, lies below /tmp, a box's /tmp lasts one command only.
    `door_port`: where the model proxy is reached in a box. `door_patience`: seconds for which a
    connection to a proxy that is away is tried again before it is reset. `cgroup_parent`: a cgroup (v2) whose
    children may be limited; by default the node's own. `default_memory_mb`, `default_pids`: for boxes that name none.
    `start_timeout`: seconds that the sandbox of one command may take to stand.
    """

    root: Path
    read_only: tuple[Path, ...] = ()
    path: tuple[str, ...] = ()
    python: bool = True
    door_port: int = 8700
    max_door_connections: int = 64
    door_patience: float = 30.0
    allow_host_network: bool = False
    allow_unsafe_local: bool = False
    nested_user_namespaces: bool = False
    bwrap: Path | None = None
    cgroup_parent: Path | None = None
    default_memory_mb: int | None = None
    default_pids: int | None = 4096
    start_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not self.root.is_absolute():
            raise SpecRefused(f"root of the local runtime must be absolute, not {self.root}")
        for path in self.read_only:
            if not path.is_absolute() or path in FORBIDDEN or path.resolve() in FORBIDDEN:
                raise SpecRefused(f"{path} cannot be shown to boxes", hint="name single folders below it in read_only")
        for path in self.visible:
            if self.root.is_relative_to(path):
                raise SpecRefused(
                    f"root {self.root} lies in {path}, which every box can read", hint="choose another root"
                )

    @cached_property  # looked at once, when the settings are made: it reads the disk
    def visible(self) -> tuple[Path, ...]:
        """All folders of the machine outside /usr that boxes see, parents before what is below them."""
        found = dict.fromkeys((*self.read_only, *(python_folders() if self.python else ())))
        outer = [path for path in found if not any(path != other and path.is_relative_to(other) for other in found)]
        return tuple(sorted(outer))

    @property
    def search_path(self) -> str:
        """PATH in boxes."""
        own = (f"{sys.prefix}/bin",) if self.python else ()
        system = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
        return ":".join(dict.fromkeys((*self.path, *own, *system)))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> LocalSettings:
        """From plain values (text paths, lists), as configuration files have them; SpecRefused names a wrong one."""
        known = {item.name for item in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise SpecRefused(f"unknown setting {unknown[0]!r} of the local runtime", hint=f"known: {sorted(known)}")

        def decode(kind: type, value: Any) -> Any:
            if kind is Path and isinstance(value, str):
                return Path(value)
            raise NotImplementedError(kind)

        try:
            plain = msgspec.to_builtins(dict(values), enc_hook=str)
            return msgspec.convert(plain, cls, dec_hook=decode)
        except msgspec.ValidationError as error:
            raise SpecRefused(f"settings of the local runtime: {error}") from error
