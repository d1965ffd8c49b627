"""What is installed in this environment, and how long that took, as far as the environment tells."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

LONGEST_S = 3_600.0
"""A span longer than this was not one installation."""


@dataclass(frozen=True)
class Installed:
    """`seconds`: from the making of the environment to its last package; None where that was not one go."""

    packages: int
    megabytes: int
    seconds: float | None

    def __str__(self) -> str:
        took = f" in {self.seconds:.0f} s" if self.seconds is not None else ""
        return f"{self.packages} packages, {self.megabytes} MB, installed{took}"


def installed() -> Installed:
    """Sizes are those that the packages' own lists of files name. Blocks for some 100 ms."""
    total, count, last = 0, 0, 0.0
    for one in metadata.distributions():
        count += 1
        total += sum(file.size or 0 for file in one.files or [])
        for file in one.files or []:
            if file.name == "RECORD":
                last = max(last, _changed(Path(str(file.locate()))))
    began = _changed(Path(sys.prefix) / "pyvenv.cfg")
    seconds = last - began if began and 0 < last - began <= LONGEST_S else None
    return Installed(count, round(total / 1e6), seconds)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
