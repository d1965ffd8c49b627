"""The command line on a whole installation with a scripted engine."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from polar.devmodel import Match, Reply, Rule, Script, ScriptedEngine
from tests.e2e.stack import POLAR, Stack, shell_agent

pytestmark = [pytest.mark.e2e, pytest.mark.sandbox, pytest.mark.timeout(240)]


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(Script()) as one:
        yield one


@pytest.fixture
async def stack(tmp_path: Path, bootstrap: str, engine: ScriptedEngine) -> AsyncIterator[Stack]:
    one = Stack(tmp_path / "stack", bootstrap, engine.base_url, prefix=f"test-{uuid.uuid4().hex[:8]}.")
    one.start("all")
    await asyncio.to_thread(one.wait_ready)
    yield one
    await asyncio.to_thread(one.stop)


def on_terminal(
    *arguments: str, env: Mapping[str, str], cwd: Path, interrupt_at: str | None = None, rows: int = 40
) -> tuple[int, str]:
    """Run `polar` on a terminal of 80 columns; press Ctrl-C when `interrupt_at` is seen. Exit code and output."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 80, 0, 0))
    plain = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "CI")}

    def control() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [*POLAR, *arguments],
        env={**plain, "TERM": "xterm-256color"},
        cwd=cwd,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=control,
    )
    os.close(slave)
    output, deadline = b"", time.monotonic() + 120
    while time.monotonic() < deadline:
        readable, _, _ = select.select([master], [], [], 0.2)
        if readable:
            try:
                data = os.read(master, 65536)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            output += data
        if interrupt_at is not None and interrupt_at.encode() in output:
            os.write(master, b"\x03")
            interrupt_at = None
    os.close(master)
    return process.wait(10), output.decode()


async def test_run_sends_odd_files_tells_failures_and_ends_with_a_report(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "a dir" / "sub").mkdir(parents=True)
    (tmp_path / "a dir" / "data.bin").write_bytes(bytes(range(256)))
    (tmp_path / "a dir" / "link").symlink_to("data.bin")
    shell_agent(tmp_path / "a dir" / "agent it's.py")
    go = tmp_path / "a dir" / "sub" / "go.sh"
    go.write_text(
        """#!/bin/sh
[ "$POLAR_SAMPLE" = 1 ] && echo "last words" && exit 3
[ "$WORD" = "grüße" ] && [ "$(wc -c < 'a dir/link')" -eq 256 ] && cmp 'a dir/link' 'a dir/data.bin' || exit 4
exec python3 "$1"
"""
    )
    go.chmod(0o755)
    ran = await stack.apolar(
        *("run", "-n", "3", "--env", "WORD", "--upload", "a dir", "--check", "test -s answer.txt", "--task-id", "odd"),
        *("a dir/sub/go.sh", "a dir/agent it's.py"),
        cwd=tmp_path,
    )
    assert ran.returncode == 2, "WORD is not set here"
    stack.env["WORD"] = "grüße"
    arguments = (
        *("run", "-n", "3", "--env", "WORD", "--upload", "a dir", "--check", "test -s answer.txt", "--task-id", "odd"),
        *("a dir/sub/go.sh", "a dir/agent it's.py"),
    )
    ran = await stack.apolar(*arguments, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr + stack.tails()
    assert "task odd: 3 sessions" in ran.stdout
    assert "sample 1: harness: " in ran.stdout
    assert "  | last words" in ran.stdout
    assert "mean reward 1.000 over 2 of 3 sessions" in ran.stdout
    assert "\x1b" not in ran.stdout + ran.stderr
    assert len(ran.stdout.splitlines()) < 25
    again = await stack.apolar(*arguments, "--json", cwd=tmp_path)
    assert again.returncode == 2, "--json behind the command is the command's, so this is another task"
    assert "task_id: " in again.stderr
    again = await stack.apolar("run", "--json", *arguments[1:], cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    kinds = [json.loads(line)["type"] for line in again.stdout.splitlines()]
    assert kinds == ["TaskAccepted", "Trajectory", "Trajectory", "Trajectory", "GroupClosed"]
    one = await stack.apolar("status", "odd")
    assert one.stdout.count("reward 1") == 2
    assert "group odd: 3 of 3 have ended, decided" in one.stdout
    waited = await stack.apolar("status", "odd", "--wait")
    assert waited.returncode == 0
    assert "mean reward 1.000 over 2 of 3 sessions" in waited.stdout


async def test_exit_codes_tell_a_group_that_failed_and_a_task_that_is_refused(stack: Stack, tmp_path: Path) -> None:
    failed = await stack.apolar("run", "-n", "2", "sh", "-c", "echo no; exit 9", cwd=tmp_path)
    assert failed.returncode == 1
    assert "harness in 2 sessions" in failed.stdout
    refused = await stack.apolar("run", "--builder", "nonsense", "--timeout", "-1", "true", cwd=tmp_path)
    assert refused.returncode == 2
    assert "builder.strategy: " in refused.stderr
    assert "timeout_seconds: " in refused.stderr
    assert refused.stdout == ""
    task = tmp_path / "task.yaml"
    task.write_text(
        "task_id: from-file\ninstruction: x\nruntime: {network: host}\n"
        "agent: {harness: shell, custom_shell: {command: 'exit 0'}}\n"
    )
    accepted = await stack.apolar("submit", str(task))
    assert accepted.returncode == 0
    assert "warning: runtime.network: " in accepted.stderr
    assert "polar status from-file --wait" in accepted.stdout
    waited = await stack.apolar("submit", str(task), "--wait")
    assert waited.returncode == 1
    assert "no_completions in 1 session" in waited.stdout
    task.write_text(task.read_text().replace("exit 0", "exit 1"))
    conflict = await stack.apolar("submit", str(task))
    assert conflict.returncode == 2
    assert "task_id: this id was used for another task" in conflict.stderr


async def test_a_terminal_shows_each_session_in_80_columns(stack: Stack, tmp_path: Path) -> None:
    shell_agent(tmp_path / "agent.py")
    code, text = await asyncio.to_thread(
        on_terminal, "run", "-n", "3", "python3", "agent.py", env=stack.env, cwd=tmp_path
    )
    assert code == 0, text
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"\r?\n|\r", text)]
    assert max(map(len, lines)) <= 80
    assert any(re.search(r"^2  finished .*reward 1", line) for line in lines)
    assert any(re.search(r"^0 [0-9a-f-]{36} completed +1 \+0\.00 +2 ", line) for line in lines), lines


async def test_ctrl_c_leaves_the_task_running_and_says_how_to_find_it(
    stack: Stack, engine: ScriptedEngine, tmp_path: Path
) -> None:
    engine.scripted.script = Script([Rule(match=Match(), replies=[Reply(text="late", gate="go")])])
    shell_agent(tmp_path / "agent.py", turns=1)
    code, text = await asyncio.to_thread(
        on_terminal,
        *("run", "-n", "2", "--task-id", "mine", "python3", "agent.py"),
        env=stack.env,
        cwd=tmp_path,
        interrupt_at="2 running",
    )
    assert code == 130, text
    for said in ("the task goes on", "polar status mine --wait", "polar cancel mine"):
        assert said in text
    assert "Traceback" not in text
    assert "2 running" in (await stack.apolar("status")).stdout
    cancelled = await stack.apolar("cancel", "mine", "--reason", "enough")
    assert "cancelling 2 of the 2 sessions" in cancelled.stdout
    waited = await stack.apolar("status", "mine", "--wait")
    assert waited.returncode == 1
    assert "cancelled in 2 sessions, first in sample 0: enough" in waited.stdout
    engine.open("go")
