"""What a child says: all of it into a bounded file, warnings and errors also to whoever watches.

Promises: a child is never blocked by a slow terminal; two files of `LIMIT` bytes per child at most; the last lines are
kept for the message about its end. It knows the services' JSON lines and the standard library's format, and takes
every other line as plain text.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Literal

LIMIT = 16 * 1024 * 1024
LONGEST = 1024 * 1024
"""Bytes after which a line without an end is taken as one."""
KEPT = 20
SHOWN = 200
"""Characters of one line on the terminal."""

Level = Literal["debug", "info", "warning", "error"]
_STANDARD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S+) (.*)$")
_META = frozenset({"event", "level", "logger", "timestamp", "exception", "kind"})


@dataclass(frozen=True)
class Line:
    """One line of a child, for people."""

    level: Level
    text: str


def read_line(raw: str) -> Line:
    """What a line of a log says. Pure."""
    if raw.startswith("{"):
        try:
            found = json.loads(raw)
        except ValueError:
            return Line("info", raw)
        if isinstance(found, dict) and "event" in found:
            more = " ".join(f"{name}={value}" for name, value in found.items() if name not in _META)
            return Line(_level(str(found.get("level", "info"))), f"{found['event']} {more}".strip())
    if match := _STANDARD.match(raw):
        return Line(_level(match[1].lower()), match[3])
    return Line("info", raw)


def _level(name: str) -> Level:
    return {"critical": "error", "error": "error", "warning": "warning", "debug": "debug"}.get(name, "info")  # type: ignore[return-value]


class ChildLog:
    """The log of one child over all its lives."""

    def __init__(self, path: Path, watch: Callable[[Line], None], *, limit: int = LIMIT) -> None:
        self.path = path
        self._watch = watch
        self._limit = limit
        self._file: FileIO | None = None
        self._size = 0
        self.last: deque[str] = deque(maxlen=KEPT)

    def begin(self) -> None:
        """A new life of the child: forget the last lines of the one before."""
        self.last.clear()

    async def pump(self, stream: asyncio.StreamReader) -> None:
        """Take everything that comes until the child closes its end."""
        rest = b""
        while chunk := await stream.read(65_536):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._take(line)
        if rest:
            self._take(rest)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def why(self, *, errors_only: bool = False) -> str:
        """The line that most likely says why the child ended: its last error, else, unless `errors_only`, its last."""
        lines = [read_line(raw) for raw in self.last]
        errors = [line for line in lines if line.level == "error"]
        found = (errors or ([] if errors_only else lines))[-1:]
        return found[0].text[:1000] if found else ""

    def _take(self, data: bytes) -> None:
        self._write(data + b"\n")
        text = data.decode(errors="replace").rstrip()
        if not text:
            return
        self.last.append(text)
        line = read_line(text)
        if line.level in ("warning", "error"):
            self._watch(line)

    def _write(self, data: bytes) -> None:
        if self._file is not None and self._size + len(data) > self._limit:
            self._file.close()
            self.path.replace(self.path.with_suffix(".log.1"))
            self._file = None
        try:
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
                self._size = self._file.tell()
            self._file.write(data)
            self._size += len(data)
        except OSError:
            # a full disk must not end the supervisor: the services say themselves what they cannot write
            self.close()


class Slower:
    """Lets at most `burst` lines per `per_s` seconds through, and says how many it held back."""

    def __init__(self, clock: Callable[[], float], *, burst: int = 5, per_s: float = 10.0) -> None:
        self._clock = clock
        self._burst = burst
        self._per_s = per_s
        self._since = clock()
        self._passed = 0
        self._held = 0

    def admit(self) -> tuple[bool, int]:
        """Whether this line may pass, and how many were held back in the span that has just ended."""
        now, held = self._clock(), 0
        if now - self._since >= self._per_s:
            held, self._since, self._passed, self._held = self._held, now, 0, 0
        if self._passed < self._burst:
            self._passed += 1
            return True, held
        self._held += 1
        return False, held
