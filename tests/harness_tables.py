"""The tables and lines of docs/harnesses.md, made of what the harness suite runs.

    python -m tests.harness_tables docs/harnesses.md

The page holds each between two comments: `<!-- made NAME -->` and `<!-- /made -->`.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

from polar.gateway.harness import Launch, Session
from polar.proxy.dialects.marks import MARKS, TELLS
from polar.schemas import AgentSpec, CustomShell
from tests.harness.adapters import ADAPTERS, HOME, Adapter
from tests.harness.endings import OVERFLOW, UNKNOWN, Ending

MADE = re.compile(r"(<!-- made (?P<name>[\w. -]+) -->\n).*?(<!-- /made -->)", re.DOTALL)
END = "END"


def script(cli: Adapter) -> str:
    """What a task's `custom_shell.command` has to be: the suite's launch, with a gateway's variables in it."""
    told = Session(
        session_id="",
        attempt=1,
        task_id="",
        agent=AgentSpec(harness="shell", custom_shell=CustomShell(command="true")),
        instruction="$POLAR_INSTRUCTION",
        instruction_file="$POLAR_INSTRUCTION_FILE",
        workdir="",
        session_dir="",
        model="$POLAR_MODEL",
        base_url="$POLAR_BASE_URL",
        key="",
        environment={},
    )
    return as_script(cli.launch(told), cli.command)


def as_script(launch: Launch, command: str) -> str:
    """A launch as shell commands; its texts are in double quotes where they name a variable."""
    lines = []
    for path, data in launch.files.items():
        shown = path.replace(HOME, "~")
        lines.append(f"mkdir -p {Path(shown).parent} && cat > {shown} <<{END}\n{data.decode().rstrip()}\n{END}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in launch.env.items()]
    words = [command, *list(launch.command)[1:]]
    line = " ".join(f'"{word}"' if "$" in word else shlex.quote(word) for word in words)
    if launch.stdin is not None:
        line += ' < "$POLAR_INSTRUCTION_FILE"' if launch.stdin else " < /dev/null"
    return "\n".join([*lines, line])


def installed() -> str:
    packages = " ".join(f"{cli.package}@{cli.version}" for cli in ADAPTERS)
    return f"```bash\nnpm install --prefix DIR node@22 {packages}\n```"


def overview() -> str:
    lines = [
        "| harness | version | API | marks its calls with | comes back changed |",
        "|---|---|---|---|---|",
    ]
    for cli in ADAPTERS:
        lost = ", ".join(LOST[one] for one in sorted(cli.loses)) or "nothing"
        lines.append(f"| {cli.name} | {cli.version} | `{cli.dialect}` | {_marks(cli)} | {lost} |")
    return "\n".join(lines)


def _marks(cli: Adapter) -> str:
    rows = [(row.hint, row.harness) for row in MARKS] + [(row.hint, row.harness) for row in TELLS]
    hints = [hint for hint, harness in rows if re.search(rf"\b{cli.name}\b", harness)]
    return ", ".join(f"`{hint}`" for hint in dict.fromkeys(hints)) or "nothing"


LOST = {
    "emptiness": "no text and an empty one are one to it",
    "spaces": "thinking is stripped",
    "spelling": "arguments are spelled anew",
}


def limits() -> str:
    lines = [
        "| harness | without headers, s | silence after them, s | changed by |",
        "|---|---|---|---|",
    ]
    for cli in ADAPTERS:
        first, idle = cli.patience
        lines.append(f"| {cli.name} | {'waits for ever' if first is None else first} | {idle} | {cli.knobs} |")
    return "\n".join(lines)


def endings() -> str:
    lines = ["| harness | context overflow (400) | unknown model (404) |", "|---|---|---|"]
    lines += [f"| {cli.name} | {_ending(OVERFLOW[cli.name])} | {_ending(UNKNOWN[cli.name])} |" for cli in ADAPTERS]
    return "\n".join(lines)


def _ending(ending: Ending) -> str:
    least, most = ending.tries
    tries = f"{least} to {most} tries" if most > least else "1 try" if least == 1 else f"{least} tries"
    return f"exit code {ending.code}, {tries}"


def lines(cli: Adapter) -> str:
    return f"```bash\n{script(cli)}\n```"


def made(name: str) -> str:
    """What stands under a name."""
    whole: dict[str, Any] = {"install": installed, "overview": overview, "limits": limits, "endings": endings}
    return str(whole[name]()) if name in whole else lines(next(cli for cli in ADAPTERS if cli.name == name))


def rewritten(page: str) -> str:
    """`page` with all of it made again."""
    return MADE.sub(lambda found: f"{found[1]}\n{made(found['name'])}\n\n{found[3]}", page)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(rewritten(path.read_text()))
