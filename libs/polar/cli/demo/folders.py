"""Where demos live: one new folder per run, so that every run starts on an empty log and samples the same.

    polar-demo/run-1/     the state of the first run, as `polar up` has it, and `demo.json`
    polar-demo/demo.html  of the last run

A run that was interrupted is gone on with, where nobody asks for a fresh one.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from ..up.errors import CannotUp
from ..up.folder import is_locked

DEFAULT_BASE = Path("polar-demo")
NOTE = "demo.json"
_RUN = re.compile(r"run-(\d+)\Z")


@dataclass
class Note:
    """What is to be known of a run when it is gone on with. `prefix`: of its topics, where Kafka is not its own."""

    finished: bool = False
    prefix: str | None = None


def choose(base: Path, *, fresh: bool, external: bool, new_prefix: str) -> tuple[Path, Note, bool]:
    """The folder of a run, its note, and whether it is one to go on with.

    Raises:
        CannotUp: the newest run is still going, or the folder cannot be made.
    """
    try:
        base.mkdir(parents=True, exist_ok=True)
        (base / ".gitignore").write_text("*\n")
        numbers = sorted(int(match[1]) for one in base.iterdir() if (match := _RUN.match(one.name)))
    except OSError as error:
        raise CannotUp(
            f"cannot write to {base}: {error.strerror}", hint="name another folder with --dir", bad_input=True
        ) from error
    last = base / f"run-{numbers[-1]}" if numbers else None
    if last is not None:
        if is_locked(last):
            raise CannotUp(f"a demo is running in {last}", hint="wait for it, or name another folder with --dir")
        note = read(last)
        if note is not None and not note.finished and not fresh and (note.prefix is not None) == external:
            return last, note, True
    made = base / f"run-{numbers[-1] + 1 if numbers else 1}"
    return made, Note(prefix=new_prefix if external else None), False


def read(folder: Path) -> Note | None:
    try:
        found = json.loads((folder / NOTE).read_text())
        return Note(finished=bool(found["finished"]), prefix=found.get("prefix"))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write(folder: Path, note: Note) -> None:
    (folder / NOTE).write_text(json.dumps(asdict(note)) + "\n")
