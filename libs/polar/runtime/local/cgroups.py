"""Limits for all processes of a box together, by Linux control groups, version 1 or 2, where they may be made.

A group is made below the node's own (or a configured parent), so the node's limits hold as well. The paths of a
box's groups are kept in its record: a node that restarted elsewhere finds them again. All calls block, briefly.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PERIOD_US = 100_000  # the kernel's default period for a share of the processors
MIB = 1 << 20
LEFT_OVER = 86_400.0  # seconds without use after which an empty group is taken for forgotten


@dataclass(frozen=True)
class Limits:
    """None is no limit. `memory_mb` in MiB, `cpus` in cores."""

    memory_mb: int | None = None
    pids: int | None = None
    cpus: float | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in (self.memory_mb, self.pids, self.cpus))


@dataclass(frozen=True)
class Controllers:
    """Where each controller's groups are made: `memory`, `pids`, `cpu` to the folder of the parent group."""

    version: int
    parents: Mapping[str, Path]

    def limits(self, name: str) -> bool:
        return name in self.parents

    def plan(self, box_id: str, limits: Limits) -> dict[Path, list[tuple[str, str]]]:
        """For each group that a box needs for `limits`: its folder, and the files and values to write."""
        files = settings_v1(limits) if self.version == 1 else settings_v2(limits)
        groups: dict[Path, list[tuple[str, str]]] = {}
        for name, values in files.items():
            if name in self.parents:
                groups.setdefault(self.parents[name] / f"polar-{box_id}", []).extend(values)
        return groups


def settings_v1(limits: Limits) -> dict[str, list[tuple[str, str]]]:
    """What to write for `limits`, for each controller: file and value, in order."""
    wanted: dict[str, list[tuple[str, str]]] = {}
    if limits.memory_mb is not None:
        size = str(limits.memory_mb * MIB)
        wanted["memory"] = [("memory.limit_in_bytes", size), ("?memory.memsw.limit_in_bytes", size)]
    if limits.pids is not None:
        wanted["pids"] = [("pids.max", str(limits.pids))]
    if limits.cpus is not None:
        quota = str(max(1000, round(limits.cpus * PERIOD_US)))
        wanted["cpu"] = [("cpu.cfs_period_us", str(PERIOD_US)), ("cpu.cfs_quota_us", quota)]
    return wanted


def settings_v2(limits: Limits) -> dict[str, list[tuple[str, str]]]:
    """As `settings_v1`, for version 2. A leading `?` marks a file that a kernel may lack."""
    wanted: dict[str, list[tuple[str, str]]] = {}
    if limits.memory_mb is not None:
        wanted["memory"] = [("memory.max", str(limits.memory_mb * MIB)), ("?memory.swap.max", "0")]
    if limits.pids is not None:
        wanted["pids"] = [("pids.max", str(limits.pids))]
    if limits.cpus is not None:
        wanted["cpu"] = [("cpu.max", f"{max(1000, round(limits.cpus * PERIOD_US))} {PERIOD_US}")]
    return wanted


def own_groups(mountinfo: str, cgroup: str) -> dict[str, Path]:
    """The node's own group folder for each controller, `""` for version 2, from the texts of /proc/self."""
    paths: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path
    found: dict[str, Path] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), (*right.split(), "", "", "")[:3]
        root, mount = fields[3], Path(fields[4])
        names_here = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in names_here:
            if name in paths:
                below = paths[name]
                inside = below[len(root) :] if root != "/" and below.startswith(root) else below if root == "/" else ""
                found[name] = mount / inside.lstrip("/")
    return found


def _try_group(parent: Path, files: Sequence[tuple[str, str]]) -> bool:
    """Whether a group with such limits can really be made here."""
    trial = parent / f"polar-trial-{uuid.uuid4().hex[:12]}"
    try:
        trial.mkdir()
    except OSError:
        return False
    try:
        _write(trial, files)
    except OSError:
        return False
    finally:
        trial.rmdir()
    return True


def _write(group: Path, files: Iterable[tuple[str, str]]) -> None:
    for name, value in files:
        with contextlib.suppress(FileNotFoundError) if name.startswith("?") else contextlib.nullcontext():
            (group / name.lstrip("?")).open("r+").close()  # a missing file must not be made: this may be no cgroup
            (group / name.lstrip("?")).write_text(value)


def detect(parent: Path | None = None) -> Controllers | None:
    """The controllers that may be used here, found by trying; None without any.

    Version 2 needs a parent whose `cgroup.subtree_control` has or takes the controllers: one that holds no process
    itself. Give such a `parent` where the node's own group holds the node.
    """
    trial = Limits(memory_mb=64, pids=64, cpus=1.0)
    try:
        own = own_groups(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    except OSError:
        return None
    if parent is None:
        files = settings_v1(trial)
        found = {name: own[name] for name in files if name in own and _try_group(own[name], files[name])}
        if found:
            return Controllers(1, found)
    base = parent or own.get("")
    if base is None:
        return None
    for name in ("memory", "pids", "cpu"):
        with contextlib.suppress(OSError):
            (base / "cgroup.subtree_control").open("r+").close()
            (base / "cgroup.subtree_control").write_text(f"+{name}")
    files = settings_v2(trial)
    usable = {name: base for name in files if _try_group(base, files[name])}
    return Controllers(2, usable) if usable else None


def sweep(controllers: Controllers) -> None:
    """Delete empty groups whose boxes nobody has used for a day: their folders went without `destroy`.

    An idle box that is hit gets its groups again with its next command; a group with processes is never deleted.
    """
    for parent in set(controllers.parents.values()):
        for group in parent.glob("polar-*"):
            with contextlib.suppress(OSError):
                if time.time() - group.stat().st_mtime > LEFT_OVER:
                    group.rmdir()


@dataclass(frozen=True)
class LimitGroups:
    """The groups of one box, by their folders."""

    paths: tuple[Path, ...]

    @classmethod
    def make(cls, controllers: Controllers, box_id: str, limits: Limits) -> LimitGroups:
        """Make the groups and set their limits; OSError where the kernel refuses."""
        plan = controllers.plan(box_id, limits)
        for group, files in plan.items():
            group.mkdir(exist_ok=True)
            _write(group, files)
        return cls(tuple(plan))

    def exist(self) -> bool:
        return all(path.is_dir() for path in self.paths)

    def enter(self, pid: int) -> None:
        """Put a process, and all that it will start, under the limits."""
        for path in self.paths:
            (path / "cgroup.procs").write_text(str(pid))

    def members(self) -> list[int]:
        """Processes in the groups, without dead ones."""
        found: set[int] = set()
        for path in self.paths:
            with contextlib.suppress(OSError):
                found.update(map(int, (path / "cgroup.procs").read_text().split()))
        return sorted(found)

    def oom_kills(self) -> int:
        """How many processes the kernel has killed for the memory limit since the groups were made."""
        total = 0
        for path in self.paths:
            for name in ("memory.oom_control", "memory.events"):
                with contextlib.suppress(OSError):
                    for line in (path / name).read_text().splitlines():
                        key, _, value = line.partition(" ")
                        total += int(value) if key == "oom_kill" else 0
        return total

    def remove(self, timeout: float = 5.0) -> bool:
        """Delete the groups, whose processes are dead; False if one stays busy."""
        deadline = time.monotonic() + timeout
        left = [path for path in self.paths if os.path.isdir(path)]
        while left:
            for path in left:
                with contextlib.suppress(OSError):
                    path.rmdir()
            left = [path for path in left if path.is_dir()]
            if left and time.monotonic() > deadline:
                return False
            if left:
                time.sleep(0.005)  # the kernel takes a moment to let go of a dead process
        return True
