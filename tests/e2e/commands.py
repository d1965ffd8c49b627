"""Commands of `polar` as a person has them: in a folder, found through it, killed and started again.

A command's processes are known by its folder, which is in the environment or the command line of each of them, also of
those that hold a box: so that what is left over is found whoever its parent is by now.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from polar.bus import BusSettings
from polar.cli.up.folder import Folder
from polar.cli.up.plan import USUAL
from polar.client import PolarClient
from polar.schemas import GroupClosed, SessionClosed, Trajectory
from tests.e2e.stack import POLAR

MARK = "FOLDER_OF_THIS_TEST"
"""In the environment of every command here and of what it starts; a box has an environment of its own, and its folder
in the command line."""


def environment(folder: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """No settings of whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("POLAR_")}
    return {**kept, "COLUMNS": "200", MARK: str(folder), **(more or {})}


def with_own_ports(state: Path) -> None:
    """Make a state folder whose parts have ports that nobody has, as if `polar up` had been there before.

    The usual ones may be taken at any moment on a machine where others start brokers too.
    """
    folder = Folder.open(state)
    for part in USUAL:
        folder.port(part, None, None)
    folder.save()
    folder.close()


def polar(
    folder: Path, *arguments: str, timeout_s: float = 180.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*POLAR, *arguments],
        cwd=folder,
        env=environment(folder, env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class Lasting:
    """A command that lasts, such as `polar up`; what it prints goes to a file."""

    def __init__(self, folder: Path, *arguments: str, name: str, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.said = folder / f"{name}.out"
        with self.said.open("wb") as out:
            self.process = subprocess.Popen(
                [*POLAR, *arguments],
                cwd=folder,
                env=environment(folder, env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.said.read_text(errors="replace")

    def until(self, what: str, timeout_s: float = 180.0) -> None:
        """Wait until it has printed this."""
        deadline = time.monotonic() + timeout_s
        while what not in self.text():
            ended = self.process.poll()
            assert ended is None or what in self.text(), f"ended with {ended}, without {what!r}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {what!r} within {timeout_s:g} s:\n{self.text()}"
            time.sleep(0.05)

    def parts(self) -> dict[str, int]:
        """Process ids of the children that run now, by name of the part."""
        found = {}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                words = _bytes(pid, "cmdline").decode().split("\0")
                if "serve" in words:
                    at = words.index("serve")
                    found["model" if "polar.devmodel" in words else words[at + 1]] = pid
                elif "polar.broker" in words:
                    found["kafka"] = pid
        return found

    def stop(self, number: signal.Signals = signal.SIGINT, timeout_s: float = 90.0) -> int:
        """Signal it, where it still runs; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)


def running(folder: Path) -> dict[int, str]:
    """Every process of the commands in `folder`: id and command line. One that only waits to be reaped is none."""
    mark = str(folder).encode()
    found = {}
    for one in Path("/proc").iterdir():
        if not one.name.isdigit() or int(one.name) == os.getpid():
            continue
        pid = int(one.name)
        command = _bytes(pid, "cmdline")
        if mark in command or mark in _bytes(pid, "environ"):
            found[pid] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def kill_all(folder: Path) -> None:
    """SIGKILL everything of `folder`, the parents first, until nothing is left."""
    deadline = time.monotonic() + 60
    while left := running(folder):
        assert time.monotonic() < deadline, f"cannot be killed: {left}"
        for pid in sorted(left):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # with its parent
        time.sleep(0.02)


def none_left(folder: Path, timeout_s: float = 30.0) -> None:
    """Fails where something of `folder` still runs after a while."""
    deadline = time.monotonic() + timeout_s
    while left := running(folder):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def settings_of(state: Path) -> BusSettings:
    """A client's settings, as `polar up` left them in its folder."""
    return BusSettings(**yaml.safe_load((state / "polar.yaml").read_text())["kafka"])


async def endings(
    settings: BusSettings, task_id: str
) -> tuple[list[Trajectory], list[GroupClosed], list[SessionClosed]]:
    """All that the log holds of a task's endings, read committed."""
    async with PolarClient(settings) as client:
        events = [event async for event in client.trajectories(task_ids={task_id}, follow=False)]
        trajectories = [one for one in events if isinstance(one, Trajectory)]
        mine = {one.session_id for one in trajectories}
        reader = await client.bus.reader(["completions"])
        try:
            closed = [
                one.value
                async for one in reader.to_end()
                if isinstance(one.value, SessionClosed) and one.value.session_id in mine
            ]
        finally:
            await reader.close()
    return trajectories, [one for one in events if isinstance(one, GroupClosed)], closed


async def assert_ended_once(settings: BusSettings, task_id: str, samples: int) -> list[Trajectory]:
    """Each session of a task has exactly one outcome and one trajectory, and the task one group. The trajectories."""
    trajectories, groups, closed = await endings(settings, task_id)
    assert sorted(one.sample for one in trajectories) == list(range(samples))
    assert sorted(one.session_id for one in closed) == sorted(one.session_id for one in trajectories)
    attempts = {one.session_id: one.attempt for one in closed}
    assert attempts == {one.session_id: one.attempt for one in trajectories}
    (group,) = groups
    assert sorted(one.session_id for one in group.members) == sorted(attempts)
    return trajectories


def _bytes(pid: int, name: str) -> bytes:
    """A file of a process; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
