"""Harness `shell`: any command, as the task gives it.

The instruction is in the file POLAR_INSTRUCTION_FILE and, where it is short, in POLAR_INSTRUCTION. The command sees
the model at OPENAI_BASE_URL and its siblings; its exit code is the harness's.
"""

from __future__ import annotations

import posixpath

from .interface import HarnessRefused, Launch, Session


class ShellHarness:
    def launch(self, session: Session) -> Launch:
        shell = session.agent.custom_shell
        if shell is None or not shell.command.strip():
            raise HarnessRefused("harness `shell` needs agent.custom_shell.command")
        cwd = None if shell.cwd is None else posixpath.join(session.workdir, shell.cwd)
        return Launch(command=shell.command, env={**shell.env, **session.environment}, cwd=cwd)
