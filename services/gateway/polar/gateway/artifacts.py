"""Which files of a session are kept, and their way into the blob store.

Kept are the harness's log, what the agent wrote below its artifacts and logs folders, and what the task's patterns
match below the workspace. A pattern is matched path by path: `*` and `?` within a folder, `**` over folders, `[…]`
one character; a pattern that names a folder means all below it.

What is over a limit, unreadable or unfit is left out and listed in `left-out.json`, an artifact like the others: the
session's ending never depends on its files. Files are read through the box, which refuses links out of it.
"""

from __future__ import annotations

import asyncio
import fnmatch
import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from polar.bus import Bus, BusError
from polar.runtime import Box, RuntimeFailure
from polar.schemas import Artifact
from polar.service.logs import get_logger

log = get_logger(__name__)

HARNESS_LOG = "logs/harness.log"
LEFT_OUT = "left-out.json"
NAME_BYTES = 512
"""Longest name kept: a thousand of them fit into a report."""
LISTING_BYTES = 4 << 20
FIND_TIMEOUT = 30.0
CONTENT_TYPES = {".json": "application/json", ".jsonl": "application/jsonl"} | dict.fromkeys(
    (".log", ".txt", ".md", ".patch", ".diff", ".out", ".csv", ".py"), "text/plain"
)


class Limits(NamedTuple):
    file_bytes: int
    total_bytes: int
    files: int


@dataclass
class Kept:
    """What was kept so far."""

    artifacts: list[Artifact] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    size: int = 0

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out.append({"name": name, "reason": reason})


class Folder(NamedTuple):
    """A folder of the box to look through. `prefix`: before the names of what is kept from it."""

    path: str
    prefix: str
    patterns: tuple[str, ...]


def matches(name: str, pattern: str) -> bool:
    """Whether a relative path is what a pattern means."""
    wanted = pattern.strip("/").split("/")

    def closed(places: set[int]) -> set[int]:
        """With the places that are reached where `**` stands for no folder at all."""
        for place in sorted(places):
            while place < len(wanted) and wanted[place] == "**":
                place += 1
                places.add(place)
        return places

    places = closed({0})  # in the pattern: how far the path's parts so far may have come
    for part in name.split("/"):
        if len(wanted) in places:
            return True  # a folder's name stands for all that is below it
        after = {place for place in places if wanted[place] == "**"}
        after |= {place + 1 for place in places if wanted[place] != "**" and fnmatch.fnmatchcase(part, wanted[place])}
        places = closed(after)
    return len(wanted) in places


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that a pattern matches, in order."""
    return sorted({name for name in names if any(matches(name, pattern) for pattern in patterns)})


def find_command(patterns: Sequence[str]) -> list[str]:
    """`find` for all that `patterns` may match, NUL between names; more than they match, since its `*` crosses `/`."""
    tests: list[str] = []
    for pattern in patterns:
        loose = "./" + pattern.strip("/").replace("\\", "\\\\").replace("**/", "*").replace("**", "*")
        for one in (loose, f"{loose}/*", loose.removesuffix("/*")):
            tests += (["-o"] if tests else []) + ["-path", one]
    return ["find", ".", "-type", "f", "(", *tests, ")", "-print0"]


async def collect(box: Box, folders: Sequence[Folder], bus: Bus, limits: Limits, kept: Kept, timeout_s: float) -> None:
    """Keep what `folders` ask for, adding to `kept`; stops at the time limit. Raises nothing of runtime and bus."""
    try:
        async with asyncio.timeout(timeout_s):
            for folder in folders:
                if folder.patterns:
                    await _collect(box, folder, bus, limits, kept)
    except TimeoutError:
        kept.leave_out("*", f"the time of {timeout_s:g} s was over")
    except BusError as error:
        kept.leave_out("*", str(error))
    if kept.left_out:
        log.warning("files were left out", count=len(kept.left_out), first=kept.left_out[0])
        data = msgspec.json.format(msgspec.json.encode(kept.left_out[:1000]), indent=1)
        try:
            kept.artifacts.append(Artifact(name=LEFT_OUT, claim=await bus.blobs.put(data, "application/json")))
        except BusError as error:
            log.warning("the list of left-out files could not be kept", error=str(error))


async def _collect(box: Box, folder: Folder, bus: Bus, limits: Limits, kept: Kept) -> None:
    for name in await _names(box, folder, kept):
        full = f"{folder.prefix}{name}"
        if len(full.encode("utf-8", "surrogateescape")) > NAME_BYTES or not full.isprintable():
            kept.leave_out(full.encode("utf-8", "replace").decode(), "the name is too long or not printable")
        elif any(one.name == full for one in kept.artifacts):
            kept.leave_out(full, "another file of this name is kept")
        elif len(kept.artifacts) >= limits.files:
            kept.leave_out(full, f"more than {limits.files} files")
        else:
            await _keep(box, f"{folder.path}/{name}", full, bus, limits, kept)


async def _keep(box: Box, path: str, name: str, bus: Bus, limits: Limits, kept: Kept) -> None:
    room = min(limits.file_bytes, limits.total_bytes - kept.size)
    try:
        data = await box.read_file(path, max_bytes=max(0, room))
    except RuntimeFailure as error:
        kept.leave_out(name, str(error))
        return
    await keep_bytes(name, data, bus, kept)


async def keep_bytes(name: str, data: bytes, bus: Bus, kept: Kept) -> None:
    """Raises BusError."""
    kind = CONTENT_TYPES.get(posixpath.splitext(name)[1].lower(), "application/octet-stream")
    kept.artifacts.append(Artifact(name=name, claim=await bus.blobs.put(data, kind)))
    kept.size += len(data)


async def keep_log(path: Path, key: str, bus: Bus, kept: Kept) -> None:
    """Keep the harness's log of the host, if it said anything, without the session's key. Raises BusError."""
    try:
        data = await asyncio.to_thread(path.read_bytes)
    except FileNotFoundError:
        return
    if data:
        await keep_bytes(HARNESS_LOG, data.replace(key.encode(), b"***"), bus, kept)
        kept.size -= len(data)  # has a limit of its own


async def _names(box: Box, folder: Folder, kept: Kept) -> list[str]:
    try:
        outcome = await box.exec(
            find_command(folder.patterns),
            cwd=folder.path,
            timeout=FIND_TIMEOUT,
            network="none",
            output_limit=LISTING_BYTES,
        )
    except RuntimeFailure as error:
        kept.leave_out(f"{folder.prefix}*", f"listing failed: {error}")
        return []
    if not outcome.ok and not outcome.stdout:
        kept.leave_out(f"{folder.prefix}*", f"listing failed: {outcome.stderr_text.strip()[:200] or 'no answer'}")
    listed = outcome.stdout.split(b"\0")
    if outcome.truncated:
        kept.leave_out(f"{folder.prefix}*", "too many files to list")
        listed = listed[1:]  # cut at its start
    names = [one.removeprefix(b"./").decode("utf-8", "surrogateescape") for one in listed if one]
    return matching(names, folder.patterns)
