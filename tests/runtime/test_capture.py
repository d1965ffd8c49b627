"""The end of a stream in memory, and whole lines in the log."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from polar.runtime.local.capture import Capture, Log, Tail
from polar.runtime.local.waiting import Held


@given(st.lists(st.binary(max_size=30)), st.integers(min_value=1, max_value=50))
def test_a_tail_is_the_end_of_what_came(chunks, limit):
    tail = Tail(limit)
    for chunk in chunks:
        tail.add(chunk)
    whole = b"".join(chunks)
    assert tail.value() == whole[-limit:]
    assert tail.truncated == (len(whole) > limit)


async def test_lines_of_two_streams_stay_whole_in_the_log(tmp_path: Path):
    path = tmp_path / "log"
    log = Log(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1 << 20)
    script = "for i in $(seq 200); do printf o; printf e >&2; printf 'ut\\n'; printf 'rr\\n' >&2; done; printf end"
    process = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=-1, stderr=-1)
    capture = Capture(process, 1 << 20, log)
    await process.wait()
    await capture.finish(10)
    await log.close()
    lines = (await asyncio.to_thread(path.read_text)).split("\n")
    assert sorted(lines) == sorted(["out"] * 200 + ["err"] * 200 + ["end"])


async def test_a_stream_that_stays_open_is_cut_after_the_grace():
    process = await asyncio.create_subprocess_exec("sh", "-c", "echo x; sleep 60 & echo $! >&2", stdout=-1, stderr=-1)
    capture = Capture(process, 100, None)
    shell = Held(process.pid)
    await shell.dead()
    shell.close()
    assert not await capture.finish(0.5)
    assert capture.truncated
    assert capture.stdout.value() == b"x\n"
    os.kill(int(capture.stderr.value()), 9)
    assert process.stdout is not None
    assert process.stderr is not None
    assert await process.stdout.read() + await process.stderr.read() == b""


async def test_a_full_disk_ends_the_log_and_not_the_reading():
    log = Log(os.open("/dev/full", os.O_WRONLY), 1 << 20)
    process = await asyncio.create_subprocess_exec("seq", "1", "50000", stdout=-1, stderr=-1)
    capture = Capture(process, 100, log)
    await process.wait()
    await capture.finish(10)
    await log.close()
    assert log.truncated
    assert capture.stdout.value().endswith(b"50000\n")
