"""What every runtime promises, held against each backend with real processes. See `conftest.CASES`."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from polar.runtime import (
    Box,
    BoxGone,
    BoxSpec,
    BoxStartFailed,
    PathRefused,
    Runtime,
    SpecRefused,
    TooLarge,
    TransferFailed,
)

Find = Callable[[str], list[int]]

NODE = """
import asyncio, sys
from polar.runtime import create_runtime
async def main(name, root, box_id, command):
    box = await create_runtime(name, {"root": root, "allow_unsafe_local": True}).attach(box_id)
    await box.exec(command)
asyncio.run(main(*sys.argv[1:]))
"""


HOME = os.path.expanduser("~")


def unique_seconds() -> str:
    """An argument for `sleep` that no other process of the machine has."""
    return f"{random.randint(10**6, 10**7)}.{random.randint(10**6, 10**7)}"


async def until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - other processes give no event
            await asyncio.sleep(0.005)


def daemon(seconds: str) -> str:
    """A shell command that leaves a child in another session and process group, without a parent."""
    return f"(setsid sh -c 'sleep {seconds} & sleep {seconds}' >/dev/null 2>&1 &)"


# The shape of the interface


async def test_parts_satisfy_the_protocols(place, box):
    assert isinstance(place.runtime, Runtime)
    assert isinstance(box, Box)


async def test_probe_runs_and_says_what_is_enforced(place):
    probe = await place.runtime.probe()
    assert probe.ok
    assert probe.capabilities == place.runtime.capabilities
    assert await place.runtime.boxes() == []


async def test_a_box_id_that_is_no_uuid_is_refused(place):
    for bad in ("", "..", "a/b", "../../etc", str(uuid.uuid4()).upper() + "x"):
        with pytest.raises(SpecRefused):
            await place.runtime.create(BoxSpec(box_id=bad))
        with pytest.raises(SpecRefused):
            await place.runtime.attach(bad)


async def test_what_a_backend_cannot_give_is_refused(place):
    if not place.runtime.capabilities.images:
        with pytest.raises(SpecRefused):
            await place.box(image="debian:12")
    if not place.runtime.capabilities.gpus:
        with pytest.raises(SpecRefused):
            await place.box(gpus=1)
    for wrong in (
        {"kwargs": {"no-such-option": 1}},
        {"network": "bridge"},
        {"memory_mb": 0},
        {"pids": -1},
        {"workdir": "relative"},
        {"workdir": "/polar/session/../../x"},
    ):
        with pytest.raises(SpecRefused):
            await place.box(**wrong)
    assert await place.runtime.boxes() == []


async def test_a_taken_box_id_is_refused_and_the_first_box_stays(place, box):
    await box.write_file(f"{box.session_dir}/workspace/x", b"first")
    with pytest.raises(BoxStartFailed):
        await place.runtime.create(BoxSpec(box_id=box.box_id))
    assert await box.read_file(f"{box.session_dir}/workspace/x") == b"first"


# Commands


async def test_output_error_output_and_exit_code(box):
    outcome = await box.exec("echo out; echo err >&2; exit 3")
    assert (outcome.return_code, outcome.stdout, outcome.stderr) == (3, b"out\n", b"err\n")
    assert not outcome.ok
    assert (outcome.timed_out, outcome.truncated, outcome.oom_killed) == (False, False, False)
    assert outcome.duration_s > 0


async def test_a_sequence_is_no_shell_text(box):
    outcome = await box.exec(["printf", "%s|", "a b", "$HOME", "", "*"])
    assert outcome.stdout == b"a b|$HOME||*|"


async def test_a_missing_program_is_127_and_a_signal_128_plus(box):
    assert (await box.exec(["no-such-program"])).return_code == 127
    assert (await box.exec("no-such-program")).return_code == 127
    assert (await box.exec("kill -9 $$")).return_code == 137
    assert (await box.exec("kill -15 $$")).return_code == 143


async def test_impossible_commands_are_refused_before_they_start(box):
    for command, env in (([], {}), (["a\0b"], {}), (["true"], {"A=B": "x"}), (["true"], {"A": "x\0"})):
        with pytest.raises(SpecRefused):
            await box.exec(command, env=env)
    with pytest.raises(SpecRefused):
        await box.exec("true", cwd="workspace")


async def test_input_arrives_whole_and_ends(box):
    data = random.Random(1).randbytes(1 << 20)
    outcome = await box.exec("sha256sum; cat /dev/stdin | wc -c", stdin=data)
    assert outcome.stdout.split() == [hashlib.sha256(data).hexdigest().encode(), b"-", b"0"]
    assert (await box.exec("cat")).stdout == b""


async def test_input_that_nobody_reads_does_not_hold_the_command(box):
    assert (await box.exec("exit 4", stdin=b"x" * (1 << 20))).return_code == 4


async def test_a_closed_pipe_ends_a_program_as_usual(box):
    outcome = await box.exec("set -o pipefail; yes | head -1")
    assert (outcome.return_code, outcome.stderr) == (141, b"")


async def test_the_environment_is_clean_and_layered(place, monkeypatch):
    monkeypatch.setenv("NODE_SECRET", "hunter2")
    box = await place.box(env={"A": "box", "B": "box"})
    outcome = await box.exec("env", env={"B": "call", "C": "ü\nzwei"})
    assert "NODE_SECRET" not in outcome.stdout_text
    assert {"A=box", "B=call", "C=ü", "zwei"} <= set(outcome.stdout_text.splitlines())
    names = {line.partition("=")[0] for line in outcome.stdout_text.splitlines()}
    assert {"PATH", "HOME", "LANG"} <= names


async def test_values_of_the_environment_are_on_no_command_line(box, running):
    secret = uuid.uuid4().hex
    task = asyncio.create_task(box.exec("echo here; cat >/dev/null; read x </dev/zero", env={"KEY": secret}))
    seconds = unique_seconds()
    await box.exec(["true"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    task = asyncio.create_task(box.exec(f"sleep {seconds}; true", env={"KEY": secret}))
    await until(lambda: bool(running(seconds)))
    assert running(secret) == []
    task.cancel()


async def test_the_home_is_the_boxs_own_and_writable(box):
    outcome = await box.exec('cd && echo x > here && pwd && echo "$HOME"')
    first, second = outcome.stdout_text.split()
    assert first == second != HOME
    assert (await box.exec('cat "$HOME/here"; mktemp >/dev/null')).stdout == b"x\n"


async def test_working_folders(place, box):
    assert (await box.exec("pwd")).stdout_text.strip() == f"{box.session_dir}/workspace"
    assert (await box.exec("pwd", cwd=box.session_dir)).stdout_text.strip() == box.session_dir
    assert (await box.exec("ls", cwd=box.session_dir)).stdout == b"artifacts\nlogs\nworkspace\n"
    other = await place.box(workdir="/polar/session/workspace/deep/er")
    assert (await other.exec("pwd")).stdout_text.strip() == f"{other.session_dir}/workspace/deep/er"


async def test_a_missing_working_folder_is_a_start_failure_that_names_it(box):
    with pytest.raises(BoxStartFailed, match="nowhere"):
        await box.exec("true", cwd=f"{box.session_dir}/nowhere")


async def test_python_with_its_packages_is_there(box):
    outcome = await box.exec(["python", "-c", "import msgspec, sys; print(sys.prefix)"])
    assert (outcome.stderr, outcome.stdout_text.strip()) == (b"", sys.prefix)


async def test_the_tail_of_each_stream_is_kept_and_the_log_has_it_all(box, tmp_path):
    log = tmp_path / "agent.log"
    outcome = await box.exec(
        "seq 1 20000; seq 30001 50000 >&2; echo last", output_limit=1000, log_file=log, log_limit=1 << 20
    )
    assert outcome.truncated
    assert not outcome.log_truncated
    assert len(outcome.stdout) == len(outcome.stderr) == 1000
    assert outcome.stdout.endswith(b"20000\nlast\n")
    assert outcome.stderr.endswith(b"\n50000\n")
    assert sorted(log.read_text().split()) == sorted([*map(str, (*range(1, 20001), *range(30001, 50001))), "last"])


async def test_the_log_is_bounded_and_appended(box, tmp_path):
    log = tmp_path / "agent.log"
    first = await box.exec("printf 12345", log_file=log, log_limit=100)
    second = await box.exec("seq 1 100000", log_file=log, log_limit=10)
    assert (first.log_truncated, second.log_truncated) == (False, True)
    assert second.stdout.endswith(b"100000\n")
    assert log.read_bytes() == b"123451\n2\n3\n4\n5\n"


async def test_many_commands_at_once_in_one_box(box):
    outcomes = await asyncio.gather(*(box.exec(f"echo {n}; cat", stdin=b"%d" % n) for n in range(12)))
    assert [outcome.stdout for outcome in outcomes] == [b"%d\n%d" % (n, n) for n in range(12)]


async def test_commands_leave_no_handles_and_no_tasks(box):
    await box.exec("true")
    handles, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    for timeout in (None, 0.01, 0.05):
        await asyncio.gather(*(box.exec("sleep 0.1", stdin=b"x" * 100_000, timeout=timeout) for _ in range(5)))
    with pytest.raises(BoxStartFailed):
        await box.exec("true", cwd=f"{box.session_dir}/nowhere")
    assert len(os.listdir("/proc/self/fd")) <= handles
    assert len(asyncio.all_tasks()) == tasks


# Endings


async def test_a_timeout_kills_everything_before_it_returns(box, running):
    seconds = unique_seconds()
    began = time.monotonic()
    outcome = await box.exec(f"{daemon(seconds)}; echo said; sleep {seconds}", timeout=1.0)
    assert running(seconds) == []
    assert (outcome.return_code, outcome.timed_out, outcome.stdout) == (None, True, b"said\n")
    assert 1.0 <= outcome.duration_s <= time.monotonic() - began < 15


async def test_a_command_that_ignores_signals_is_killed_too(box, running):
    seconds = unique_seconds()
    outcome = await box.exec(f"trap '' TERM INT HUP; sleep {seconds} & wait; sleep {seconds}", timeout=0.5)
    assert outcome.timed_out
    assert running(seconds) == []


async def test_cancelling_kills_everything_before_it_returns(box, running):
    seconds = unique_seconds()
    task = asyncio.create_task(box.exec(f"{daemon(seconds)}; sleep {seconds}"))
    await until(lambda: len(running(seconds)) >= 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running(seconds) == []


async def test_cancelling_again_and_again_still_waits_for_death(box, running):
    seconds = unique_seconds()
    task = asyncio.create_task(box.exec(f"{daemon(seconds)}; sleep {seconds}"))
    await until(lambda: len(running(seconds)) >= 4)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert running(seconds) == []


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
async def test_cancelling_during_the_start_leaves_nothing(box, running, turns):
    seconds = unique_seconds()
    task = asyncio.create_task(box.exec(f"sleep {seconds}"))
    for _ in range(turns):
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert running(seconds) == []
    assert running(box.box_id) == []


async def test_what_a_command_leaves_running_ends_with_it(box, running):
    seconds = unique_seconds()
    outcome = await box.exec(f"{daemon(seconds)}; sleep {seconds} & sleep 0.2; exit 5")
    assert outcome.return_code == 5
    assert running(seconds) == []


async def test_a_daemon_that_hides_its_environment_dies_as_well(place, box, running):
    place.needs("kills_detached")
    seconds = unique_seconds()
    hidden = f"(setsid env -i setsid /bin/sleep {seconds} >/dev/null 2>&1 &)"
    outcome = await box.exec(f"{hidden}; sleep 0.3; pgrep -f 'sleep {seconds}' >/dev/null && echo seen", timeout=20)
    assert outcome.stdout == b"seen\n"
    assert running(seconds) == []


async def test_kill_all_ends_every_command_and_says_so(box, running):
    seconds = unique_seconds()
    tasks = [asyncio.create_task(box.exec(f"{daemon(seconds)}; sleep {seconds}")) for _ in range(3)]
    await until(lambda: len(running(seconds)) >= 12)
    await box.kill_all()
    assert running(seconds) == []
    for outcome in await asyncio.gather(*tasks):
        assert (outcome.return_code, outcome.timed_out) == (None, False)
    await box.kill_all()
    assert (await box.exec("echo alive")).stdout == b"alive\n"


async def test_kill_all_of_another_handle_kills_too(place, box, running):
    seconds = unique_seconds()
    task = asyncio.create_task(box.exec(f"{daemon(seconds)}; sleep {seconds}"))
    await until(lambda: len(running(seconds)) >= 4)
    other = await (await place.again()).attach(box.box_id)
    await other.kill_all()
    assert running(seconds) == []
    outcome = await task
    assert (outcome.return_code, outcome.timed_out) in ((None, False), (137, False))


async def test_destroy_is_final_and_idempotent(place, box, running):
    seconds = unique_seconds()
    task = asyncio.create_task(box.exec(f"sleep {seconds}"))
    await until(lambda: bool(running(seconds)))
    await asyncio.gather(box.destroy(), box.destroy())
    assert running(seconds) == []
    assert (await task).return_code is None
    await box.destroy()
    assert await place.runtime.boxes() == []
    assert await place.runtime.attach(box.box_id) is None
    for call in (
        lambda: box.exec("true"),
        lambda: box.read_file(f"{box.session_dir}/x"),
        lambda: box.write_file(f"{box.session_dir}/x", b""),
    ):
        with pytest.raises(BoxGone):
            await call()


async def test_destroy_of_a_box_with_locked_folders(place, box):
    await box.exec("mkdir -p a/b && echo x > a/b/c && chmod 000 a/b a && ln -s / root")
    await box.destroy()
    assert await place.runtime.boxes() == []
    assert os.listdir(place.settings["root"]) == []


# Restarts


async def test_boxes_are_found_by_their_labels(place):
    one = await place.box(labels={"node": "n1", "session": "a"})
    two = await place.box(labels={"node": "n1", "session": "b"})
    await place.box(labels={"node": "n2", "session": "c"})
    found = await (await place.again()).boxes(node="n1")
    assert {info.box_id for info in found} == {one.box_id, two.box_id}
    assert [info.box_id for info in await place.runtime.boxes(node="n1", session="b")] == [two.box_id]
    assert all(abs(time.time() - info.created) < 60 for info in found)


async def test_a_box_survives_its_runtime_object(place):
    place.needs("survives_restart")
    box = await place.box(env={"A": "1"}, labels={"node": "n"}, memory_mb=256, workdir="/polar/session/workspace/w")
    await box.exec("echo kept > file; echo kept > ~/file")
    again = await (await place.again()).attach(box.box_id)
    assert again.spec == box.spec
    assert (await again.exec("cat file ~/file; echo $A")).stdout == b"kept\nkept\n1\n"


async def test_sigkill_of_the_node_kills_the_commands(place, box, running):
    seconds = unique_seconds()
    arguments = (sys.executable, "-c", NODE, place.name, place.settings["root"], box.box_id)
    node = await asyncio.create_subprocess_exec(*arguments, f"{daemon(seconds)}; sleep {seconds}; true")
    try:
        # four sleepers and shells; the node's own command line bears the text too
        await until(lambda: len([pid for pid in running(f"sleep\0{seconds}") if pid != node.pid]) >= 3)
    finally:
        node.send_signal(signal.SIGKILL)
        await node.wait()
    await until(lambda: running(seconds) == [])
    again = await (await place.again()).attach(box.box_id)
    await again.kill_all()
    assert running(box.box_id) == []
    assert (await again.exec("echo works")).stdout == b"works\n"


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.02, 0.03, 0.04, 0.06])
async def test_sigkill_of_the_node_during_a_start_runs_no_command_alone(place, box, running, pause):
    seconds = unique_seconds()
    arguments = (sys.executable, "-c", NODE, place.name, place.settings["root"], box.box_id, f"sleep {seconds}; true")
    node = await asyncio.create_subprocess_exec(*arguments)
    try:
        await until(lambda: bool(_children(node.pid)))  # the launcher of the probe or of the command: both are starts
        await asyncio.sleep(pause)  # spreads the kill over the start; no outcome depends on where it hits
    finally:
        node.send_signal(signal.SIGKILL)
        await node.wait()
    await until(lambda: running(f"sleep\0{seconds}") == [])
    # a launcher that had not begun may be left, asleep; the reaper of a restarted node takes that too
    for info in await place.runtime.boxes():
        left = await (await place.again()).attach(info.box_id)
        await left.kill_all()
    await until(lambda: running(seconds) == [])


DIES_AT_THE_GATE = (
    """
import os, signal
from polar.runtime.local.sandbox import SandboxProcess
from polar.runtime.local.unsafe import SupervisedProcess
def dying(release):
    async def once(self):
        await release(self)
        os.kill(os.getpid(), signal.SIGKILL)
    return once
for one in (SandboxProcess, SupervisedProcess):
    one.release = dying(one.release)
"""
    + NODE
)


async def test_a_node_that_dies_the_moment_a_command_may_begin_leaves_none_behind(place, box, running):
    seconds = unique_seconds()
    arguments = (sys.executable, "-c", DIES_AT_THE_GATE, place.name, place.settings["root"], box.box_id)
    node = await asyncio.create_subprocess_exec(*arguments, f"sleep {seconds}; true")
    assert await node.wait() == -signal.SIGKILL
    await until(lambda: running(seconds) == [])


def _children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []


# Files


async def test_files_go_in_and_out(box, tmp_path):
    work = f"{box.session_dir}/workspace"
    data = random.Random(2).randbytes(300_000)
    await box.write_file(f"{work}/new/folder/data", data)
    assert (await box.exec("sha256sum < new/folder/data")).return_code == 0
    assert await box.read_file(f"{work}/new/folder/data") == data
    source = tmp_path / "script"
    source.write_text("#!/bin/sh\necho ran\n")
    source.chmod(0o755)
    await box.upload(source, f"{work}/bin/script")
    assert (await box.exec("./bin/script")).stdout == b"ran\n"
    await box.exec("echo more >> bin/script")
    got = await box.download(f"{work}/bin/script", tmp_path / "out" / "script")
    assert (got.files, got.skipped) == (1, ())
    assert (tmp_path / "out" / "script").read_text().endswith("ran\nmore\n")


async def test_folders_go_in_and_out_without_links(box, tmp_path):
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "file").write_bytes(b"content")
    (source / "empty").mkdir()
    (source / "link").symlink_to("a/b/file")
    work = f"{box.session_dir}/workspace/tree"
    await box.upload(source, work)
    await box.upload(source, work)
    assert (await box.exec("cat tree/link; ls -d tree/empty")).stdout == b"contenttree/empty\n"
    await box.exec("ln -s /etc/passwd tree/a/evil; mkfifo tree/a/pipe")
    got = await box.download(work, tmp_path / "target")
    assert (got.files, got.size) == (1, 7)
    assert sorted(name.rpartition("/")[2] for name in got.skipped) == ["evil", "link", "pipe"]
    assert sorted(str(path.relative_to(tmp_path / "target")) for path in (tmp_path / "target").rglob("*")) == [
        "a",
        "a/b",
        "a/b/file",
        "empty",
    ]


async def test_limits_of_bytes_are_kept(box, tmp_path):
    work = f"{box.session_dir}/workspace"
    await box.exec(
        "head -c 5000 /dev/zero > five; mkdir many; cd many; seq 1 100 | xargs touch; truncate -s 1T ../huge"
    )
    assert len(await box.read_file(f"{work}/five", max_bytes=5000)) == 5000
    for call in (
        lambda: box.read_file(f"{work}/five", max_bytes=4999),
        lambda: box.read_file(f"{work}/huge", max_bytes=4999),
        lambda: box.download(f"{work}/five", tmp_path / "five", max_bytes=4999),
        lambda: box.download(f"{work}/huge", tmp_path / "huge", max_bytes=100_000),
        lambda: box.download(f"{work}/many", tmp_path / "many", max_bytes=20_000),
    ):
        with pytest.raises(TooLarge):
            await call()
    assert (await box.download(f"{work}/many", tmp_path / "many", max_bytes=30_000)).files == 100


async def test_a_missing_file_is_a_typed_failure(box, tmp_path):
    with pytest.raises(TransferFailed):
        await box.read_file(f"{box.session_dir}/workspace/none")
    with pytest.raises(TransferFailed):
        await box.download(f"{box.session_dir}/none/none", tmp_path / "x")
    with pytest.raises(TransferFailed):
        await box.upload(tmp_path / "none", f"{box.session_dir}/x")


async def every_file_call(box: Box, path: str, tmp_path: Path) -> list[Awaitable[object]]:
    source = tmp_path / "plain"
    await asyncio.to_thread(source.write_bytes, b"evil")
    return [
        box.read_file(path),
        box.write_file(path, b"evil"),
        box.upload(source, path),
        box.download(path, tmp_path / "stolen"),
    ]


@pytest.mark.parametrize(
    "path",
    [
        "relative/file",
        "../x",
        "{dir}/../../x",
        "{dir}/workspace/../../../x",
        "/etc/passwd",
        "/",
        "",
        "/proc/self/environ",
    ],
)
async def test_paths_out_of_the_box_are_refused(box, tmp_path, path):
    for call in await every_file_call(box, path.format(dir=box.session_dir), tmp_path):
        with pytest.raises(PathRefused):
            await call
    assert not (tmp_path / "stolen").exists()


@pytest.mark.parametrize("path", ["link", "dir/secret", "dir/new/file", "up/up/secret", "pipe"])
async def test_planted_links_and_pipes_are_refused(box, tmp_path, path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"host")
    await box.exec(f"ln -s {outside}/secret link; ln -s {outside} dir; ln -s .. up; mkfifo pipe")
    async with asyncio.timeout(20):
        for call in await every_file_call(box, f"{box.session_dir}/workspace/{path}", tmp_path):
            with pytest.raises(PathRefused):
                await call
    assert sorted(os.listdir(outside)) == ["secret"]
    assert (outside / "secret").read_bytes() == b"host"


async def test_a_log_file_below_the_session_follows_no_planted_link(place, box, tmp_path):
    logs = Path(place.settings["root"]) / box.box_id / "session" / "logs"
    outcome = await box.exec("echo hello", log_file=logs / "run" / "one.log")
    assert outcome.ok
    assert await box.read_file(f"{box.session_dir}/logs/run/one.log") == b"hello\n"
    victim = tmp_path / "victim"
    await box.exec(f"ln -s {victim} {box.session_dir}/logs/two.log; ln -s {tmp_path} {box.session_dir}/logs/dir")
    for name in ("two.log", "dir/three.log"):
        with pytest.raises(PathRefused):
            await box.exec("echo hello", log_file=logs / name)
    assert not victim.exists()
    assert not (tmp_path / "three.log").exists()
