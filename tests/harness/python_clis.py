"""Agents from PyPI: where they are installed, what a box must show of them, and how each is launched.

A launch is a pure translation of a session, as a gateway's adapter would make it; the model's address and key are in
the session's own variables (`OPENAI_BASE_URL`, `OPENAI_API_KEY`, …), and the programs take them from there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from polar.gateway.harness import Launch, Session
from polar.schemas import CompletionCaptured
from polar.schemas.prompts import Prompts
from tests.harness.place import captures

PREFIXES = "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"
LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Else it asks the internet for prices before its first call."""


AIDER_PRICES = "/polar/home/.aider/caches/model_prices_and_context_window.json"
"""Aider asks the internet for prices too, unless these are of today and not empty."""


@dataclass(frozen=True)
class PythonCli:
    """A program in a virtual environment. `env`: the variable that names its path; else the PATH is looked at."""

    name: str
    env: str

    @property
    def path(self) -> Path | None:
        found = os.environ.get(self.env) or (shutil.which(self.name) if self.name else None)
        return Path(found).absolute() if found else None

    @property
    def needed(self) -> pytest.MarkDecorator:
        return pytest.mark.skipif(self.path is None, reason=f"needs {self.name or 'it'} (in {self.env})")

    async def shown(self) -> dict[str, Any]:
        """What a place is made with, so that the program and its Python are there."""
        assert self.path is not None
        asked = await asyncio.create_subprocess_exec(
            self.path.with_name("python"), "-c", PREFIXES, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asked.communicate()
        folders = [Path(line) for line in dict.fromkeys(out.decode().splitlines())]
        shown = [str(path) for path in folders if not path.is_relative_to("/usr")]
        return {"read_only": shown, "path": [str(self.path.parent)]}


MINI = PythonCli("mini", "MINI_SWE_AGENT_CLI")
AIDER = PythonCli("aider", "AIDER_CLI")
FRAMEWORKS = PythonCli("", "AGENT_FRAMEWORKS_PYTHON")
"""The Python of an environment that has agent frameworks; no PATH would tell it from another."""
MINI_DIALECTS = {
    "openai.chat": ("openai", ()),
    "anthropic.messages": ("anthropic", ()),
    "openai.responses": ("openai", ("--model-class", "litellm_response")),
}
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""What the model runs when it is done, by mini-swe-agent's prompt."""


def mini(
    told: Session,
    dialect: str = "openai.chat",
    *,
    files: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Launch:
    """mini-swe-agent 2.4.6 on the session's instruction, without questions and without a limit of its own."""
    provider, more = MINI_DIALECTS[dialect]
    model = ("-m", f"{provider}/{told.model}", *more)
    trajectory = ("-o", f"{told.session_dir}/logs/trajectory.json")
    return Launch(
        command=("mini", "-y", "--exit-immediately", "-l", "0", *model, *trajectory, "-t", told.instruction),
        env={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", **LITELLM, **(env or {})},
        files=_placed(told, files),
    )


def aider(told: Session, *more: str, files: Mapping[str, str] | None = None) -> Launch:
    """aider 0.86.2 on the session's instruction: one message, edits as SEARCH/REPLACE blocks."""
    model = ("--model", f"openai/{told.model}", "--edit-format", "diff", "--no-show-model-warnings")
    quiet = ("--no-check-update", "--no-show-release-notes", "--analytics-disable", "--no-pretty")
    return Launch(
        command=("aider", *model, *quiet, "--yes-always", "--no-git", *more, "--message", told.instruction),
        env=LITELLM,
        files={AIDER_PRICES: b'{"none": {}}', **_placed(told, files)},
    )


def _placed(told: Session, files: Mapping[str, str] | None) -> dict[str, bytes]:
    return {f"{told.workdir}/{name}": text.encode() for name, text in (files or {}).items()}


def whole(records: Sequence[Any]) -> list[CompletionCaptured]:
    """The captured calls, which are all there is, with their prompts made whole."""
    prompts = Prompts()
    return [replace(one, prompt=prompts.take(one)) for one in captures(list(records))]


async def until(holds: Callable[[], bool], timeout: float = 60.0) -> None:
    """Wait for what a place's relay notes, which tells nobody. Raises TimeoutError."""
    async with asyncio.timeout(timeout):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
