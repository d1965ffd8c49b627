"""What a harness adapter is: a pure translation of a session into a command to run in its box.

An adapter writes no file and starts nothing itself: it says which files the program needs, and which command, with
which environment. The same session gives the same launch. It must not know Kafka, runtimes or the node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from polar.schemas import AgentSpec


class HarnessRefused(Exception):
    """The adapter cannot start with what the task gives it; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What an adapter is told. Paths are those that commands in the box see.

    `base_url`: the model's door, without `/v1`; None in a box without a network. `key`: the session's token, a secret.
    `environment`: Polar's own variables (`environment.py`); the command sees them without the adapter's doing.
    """

    session_id: str
    attempt: int
    task_id: str
    agent: AgentSpec
    instruction: str
    instruction_file: str
    workdir: str
    session_dir: str
    model: str
    base_url: str | None
    key: str
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command and what it needs. Text is run by the box's shell, which is bash where the box has it.

    `env` comes on top of the task's variables and Polar's, and wins. `cwd` None: the workspace. `files`: path in the
    box to content, written before the command starts.
    """

    command: str | Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    stdin: bytes | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


class Harness(Protocol):
    """One agent program. Made without arguments, once per session."""

    def launch(self, session: Session) -> Launch:
        """Raises HarnessRefused."""
        ...
