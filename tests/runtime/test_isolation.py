"""Network, limits and file system of boxes: what each backend's capability flags claim, tried from inside."""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.runtime import BoxSpec, Door, SpecRefused

PROFILE = os.path.expanduser("~/.profile")
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"


class ModelProxy:
    """A TCP server on the host's loopback with a few behaviours, chosen by the first line."""

    def __init__(self) -> None:
        self.server: asyncio.Server | None = None
        self.open = 0
        self.most = 0
        self.release = asyncio.Event()

    @property
    def door(self) -> Door:
        assert self.server is not None
        return Door(self.server.sockets[0].getsockname()[:2])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            line = await reader.readline()
            if line.startswith(b"GET /stream"):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\ndata: 0\n\n"
                )
                await writer.drain()
                await self.release.wait()
                writer.write(b"data: 1\n\n")
            elif line.startswith(b"GET"):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(REPLY)
            elif line == b"echo\n":  # answers only when the client has closed its half
                writer.write(await reader.read())
            elif line == b"cut\n":
                writer.write(b"half an answer")
                await writer.drain()
                linger = b"\1\0\0\0\0\0\0\0"
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            elif line == b"wait\n":
                await self.release.wait()
            await writer.drain()
        except ConnectionError:
            return
        finally:
            self.open -= 1
            writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[ModelProxy]:
    proxy = ModelProxy()
    proxy.server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    yield proxy
    proxy.release.set()
    proxy.server.close()


def client(body: str) -> list[str]:
    """A Python program in the box, with the door's host and port as `address`."""
    head = "import socket, sys, os\nfrom urllib.parse import urlsplit\nu = urlsplit(os.environ['DOOR'])\n"
    return ["python3", "-c", head + "address = (u.hostname, u.port)\n" + body]


async def test_the_door_leads_to_the_proxy(place, proxy):
    box = await place.box(proxy.door)
    body = "import urllib.request; print(urllib.request.urlopen(os.environ['DOOR'] + '/x').read())"
    outcome = await box.exec(client(body), env={"DOOR": box.door_url})
    assert outcome.stdout == b"b'hello'\n", outcome.stderr_text


async def test_a_stream_may_be_quiet_and_arrives_as_it_comes(place, proxy):
    box = await place.box(proxy.door)
    body = """
import http.client
c = http.client.HTTPConnection(*address); c.request("GET", "/stream"); r = c.getresponse()
print(r.fp.readline(), flush=True)
open("first", "w").close()
print(r.fp.read(), flush=True)
"""
    task = asyncio.create_task(box.exec(client(body), env={"DOOR": box.door_url}, timeout=60))
    async with asyncio.timeout(30):
        while b"first" not in (await box.exec("ls")).stdout:
            assert not task.done(), task.result().stderr_text
    proxy.release.set()
    outcome = await task
    assert outcome.stdout == b"b'data: 0\\n'\nb'\\ndata: 1\\n\\n'\n", outcome.stderr_text


async def test_a_half_closed_connection_still_gets_its_answer(place, proxy):
    box = await place.box(proxy.door)
    body = """
s = socket.create_connection(address); s.sendall(b"echo\\n" + b"x" * 3_000_000); s.shutdown(socket.SHUT_WR)
n = 0
while d := s.recv(65536): n += len(d)
print(n)
"""
    outcome = await box.exec(client(body), env={"DOOR": box.door_url}, timeout=60)
    assert outcome.stdout == b"3000000\n", outcome.stderr_text


async def test_a_cut_answer_is_a_reset_and_no_clean_end(place, proxy):
    box = await place.box(proxy.door)
    body = """
s = socket.create_connection(address); s.sendall(b"cut\\n")
try:
    while d := s.recv(65536): pass
    print("clean")
except ConnectionResetError: print("reset")
"""
    outcome = await box.exec(client(body), env={"DOOR": box.door_url}, timeout=60)
    assert outcome.stdout == b"reset\n", outcome.stderr_text


async def test_a_dead_proxy_is_an_error_for_the_client_and_not_for_the_box(place):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()[:2]
    place.settings["door_patience"] = 0.2
    made = await place.box(Door(address))
    box = await (await place.again()).attach(made.box_id)
    body = """
try:
    s = socket.create_connection(address); s.sendall(b"x"); print(s.recv(1))
except OSError: print("refused")
"""
    outcome = await box.exec(client(body), env={"DOOR": box.door_url}, timeout=60)
    assert outcome.stdout in (b"refused\n", b"b''\n")
    assert outcome.door_lost == (1 if box_has_a_relay(place) else 0)


def box_has_a_relay(place) -> bool:
    return place.runtime.capabilities.proxy_only_network


async def test_a_proxy_that_starts_later_is_waited_for(place):
    place.needs("proxy_only_network")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()[:2]
    box = await place.box(Door(address))
    body = """
s = socket.create_connection(address); s.sendall(b"asked"); open("asked", "w").close(); print(s.recv(5))
"""
    task = asyncio.create_task(box.exec(client(body), env={"DOOR": box.door_url}, timeout=60))
    async with asyncio.timeout(30):
        while b"asked" not in (await box.exec("ls")).stdout:
            assert not task.done(), task.result().stderr_text

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        writer.close()

    async with await asyncio.start_server(answer, *address):
        outcome = await task
    assert (outcome.stdout, outcome.door_lost) == (b"b'asked'\n", 0), outcome.stderr_text


async def test_a_proxy_that_goes_away_before_its_answer_is_counted(place):
    place.needs("proxy_only_network")

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(5) == b"first":
            writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        box = await place.box(Door(server.sockets[0].getsockname()[:2]))
        body = """
for word in sys.argv[1:]:
    s = socket.create_connection(address); s.sendall(word.encode())
    try:
        while s.recv(5): pass
    except OSError: pass
"""
        outcome = await box.exec([*client(body), "first", "other", "third"], env={"DOOR": box.door_url}, timeout=60)
    assert (outcome.return_code, outcome.door_lost) == (0, 2), outcome.stderr_text


async def test_connections_end_when_the_command_ends(place, proxy):
    box = await place.box(proxy.door)
    body = "s = socket.create_connection(address); s.sendall(b'wait\\n'); s.recv(1)"
    outcome = await box.exec(client(body), env={"DOOR": box.door_url}, timeout=1.5)
    assert outcome.timed_out
    assert proxy.most == 1
    proxy.release.set()
    async with asyncio.timeout(20):
        while proxy.open:  # noqa: ASYNC110 - the end of the last connection is what is waited for
            await asyncio.sleep(0.005)


async def test_more_connections_than_the_limit_wait_their_turn(place, proxy):
    place.needs("proxy_only_network")
    place.settings["max_door_connections"] = 4
    runtime = await place.again()
    made = await place.box(proxy.door)
    box = await runtime.attach(made.box_id)
    body = """
import threading
def one():
    s = socket.create_connection(address); s.sendall(b"echo\\n" + b"y" * 1000); s.shutdown(socket.SHUT_WR)
    n = 0
    while d := s.recv(65536): n += len(d)
    print(n)
threads = [threading.Thread(target=one) for _ in range(40)]
[t.start() for t in threads]; [t.join() for t in threads]
"""
    outcome = await box.exec(client(body), env={"DOOR": box.door_url}, timeout=60)
    assert outcome.stdout.split() == [b"1000"] * 40, outcome.stderr_text
    assert 1 <= proxy.most <= 4


async def test_a_proxy_that_moved_is_reached_after_attaching(place, proxy):
    made = await place.box(Door(("127.0.0.1", 1)))
    box = await (await place.again()).attach(made.box_id, proxy.door)
    body = "import urllib.request; print(urllib.request.urlopen(os.environ['DOOR']).read())"
    assert (await box.exec(client(body), env={"DOOR": box.door_url})).stdout == b"b'hello'\n"
    later = await (await place.again()).attach(made.box_id)
    assert (await later.exec(client(body), env={"DOOR": later.door_url})).stdout == b"b'hello'\n"


REACH = """
import socket, sys
for host, port in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        socket.create_connection((host, int(port)), timeout=2).close(); print("reached", host, port)
    except OSError as error: print("no")
"""


async def test_nothing_but_the_door_is_reached(place, proxy):
    place.needs("proxy_only_network")
    host, port = proxy.door.host_address
    own = socket.gethostbyname(socket.gethostname())
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        other = str(everywhere.getsockname()[1])
        targets = [(host, str(port)), (host, other), (own, other), ("10.0.2.2", other), ("1.1.1.1", "53")]
        box = await place.box(proxy.door)
        outcome = await box.exec(["python3", "-c", REACH, *(word for target in targets for word in target)], timeout=60)
    assert outcome.stdout.split() == [b"no"] * len(targets), outcome.stdout_text
    lookup = await box.exec(["python3", "-c", "import socket; socket.gethostbyname('example.com')"], timeout=60)
    assert b"gaierror" in lookup.stderr
    devices = (await box.exec("tail -n +3 /proc/net/dev")).stdout_text
    assert [line.split(":")[0].strip() for line in devices.splitlines()] == ["lo"]


async def test_abstract_sockets_of_the_machine_are_not_reached(place):
    place.needs("proxy_only_network")
    name = f"\0polar-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        box = await place.box()
        program = f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
        outcome = await box.exec(["python3", "-c", program])
    assert b"ConnectionRefusedError" in outcome.stderr


async def test_a_command_without_network_has_no_door(place, proxy):
    place.needs("no_network")
    box = await place.box(proxy.door)
    host, port = box.door_url.removeprefix("http://").split(":")
    outcome = await box.exec(["python3", "-c", REACH, host, port], network="none")
    assert outcome.stdout == b"no\n"
    shut = await place.box(proxy.door, network="none")
    assert shut.door_url is None
    assert (await shut.exec(["python3", "-c", REACH, host, port])).stdout == b"no\n"


async def test_the_machines_network_is_refused_unless_allowed(place, proxy):
    place.needs("isolated_filesystem")
    with pytest.raises(SpecRefused, match="allow_host_network"):
        await place.box(network="host")
    place.settings["allow_host_network"] = True
    place.runtime = await place.again()
    box = await place.box(proxy.door, network="host")
    body = "import urllib.request; print(urllib.request.urlopen(os.environ['DOOR']).read())"
    assert (await box.exec(client(body), env={"DOOR": box.door_url})).stdout == b"b'hello'\n"


# Limits


def groups_of(box_id: str) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/polar-{box_id}"))


async def test_memory_over_the_limit_is_killed_and_said(place):
    place.needs("limits_memory")
    box = await place.box(memory_mb=64)
    outcome = await box.exec("head -c 300M /dev/zero | tail -c 300M | wc -c; exit 9", timeout=60)
    assert outcome.oom_killed
    assert outcome.return_code == 9
    fine = await box.exec("head -c 8M /dev/zero | tail -c 8M | wc -c", timeout=60)
    assert (fine.oom_killed, fine.stdout) == (False, b"8388608\n")
    whole = await box.exec(["python3", "-c", "x = b'y' * (300 << 20)"], timeout=60)
    assert (whole.oom_killed, whole.return_code) == (True, 137)


async def test_memory_is_limited_for_all_processes_together(place):
    place.needs("limits_memory")
    box = await place.box(memory_mb=96)
    each = "python3 -c \"x = b'y' * (40 << 20); import time; time.sleep(2)\""
    outcome = await box.exec(f"{each} & {each} & {each} & wait", timeout=60)
    assert outcome.oom_killed


async def test_a_fork_bomb_is_contained(place):
    place.needs("limits_pids")
    box = await place.box(pids=40)
    bomb = """
import os, signal
n = 0
try:
    while n < 500:
        if not os.fork():
            signal.pause()
        n += 1
except BlockingIOError:
    print(n)
"""
    outcome = await box.exec(["python3", "-c", bomb], timeout=60)
    assert 10 < int(outcome.stdout) < 40
    assert (await box.exec("echo fine")).stdout == b"fine\n"


async def test_processors_are_limited(place):
    place.needs("limits_cpus")
    box = await place.box(cpus=0.25)
    spin = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    outcome = await box.exec(["python3", "-c", spin], timeout=60)
    assert float(outcome.stdout) < 1.2


async def test_limit_groups_vanish_with_the_box(place):
    place.needs("limits_pids")
    box = await place.box(pids=40, memory_mb=64)
    await box.exec("true")
    assert groups_of(box.box_id)
    await box.destroy()
    assert groups_of(box.box_id) == []


async def test_one_process_is_limited_where_groups_are_not(place):
    if place.runtime.capabilities.limits_memory:
        pytest.skip("memory is limited by a group here")
    box = await place.box(memory_mb=128)
    outcome = await box.exec(["python3", "-c", "x = b'y' * (300 << 20)"], timeout=60)
    assert b"MemoryError" in outcome.stderr


# The file system


async def test_the_machine_is_not_seen(place, tmp_path):
    place.needs("isolated_filesystem")
    secret = tmp_path / "secret"
    secret.write_text("host")
    box = await place.box()
    paths = [str(secret), "/etc/shadow", "/etc/ssl/private", PROFILE, place.settings["root"]]
    outcome = await box.exec(["ls", "-d", *paths, "/sys/fs", "/var/lib", "/boot", "/home"])
    assert outcome.stdout == b""
    assert (await box.exec("ls /proc | grep -c '^[0-9]'")).stdout_text.strip() in ("3", "4", "5")


async def test_the_system_cannot_be_written(place):
    place.needs("isolated_filesystem")
    box = await place.box()
    outcome = await box.exec("for d in / /usr /usr/bin /etc /polar /proc /var; do touch $d/x && echo wrote $d; done")
    assert outcome.stdout == b""
    assert (await box.exec("echo x > /tmp/a && echo y > /dev/shm/b && echo z > /dev/null && cat /tmp/a")).ok


async def test_the_box_s_tmp_outlasts_a_command_unless_it_holds_what_boxes_are_shown(place, tmp_path):
    place.needs("isolated_filesystem")
    place.settings |= {"python": False}  # the tests' own environment may lie below /tmp
    box = await (await place.again()).create(BoxSpec(box_id=str(uuid.uuid4())))
    assert (await box.exec("echo x > /tmp/a")).ok
    assert (await box.exec("cat /tmp/a")).stdout == b"x\n"
    await box.destroy()
    shown = tmp_path / "shown"
    if not shown.is_relative_to("/tmp"):
        pytest.skip("the folder for temporary files of this test run is not below /tmp")
    shown.mkdir()
    place.settings |= {"read_only": [str(shown)]}
    box = await (await place.again()).create(BoxSpec(box_id=str(uuid.uuid4())))
    assert (await box.exec("echo x > /tmp/a && cat /tmp/a")).stdout == b"x\n"
    assert not (await box.exec("cat /tmp/a")).ok
    await box.destroy()


async def test_a_command_has_no_privileges(place):
    place.needs("isolated_filesystem")
    box = await place.box()
    status = (await box.exec("cat /proc/self/status")).stdout_text
    caps = {line.split()[0]: line.split()[1] for line in status.splitlines() if line.startswith("Cap")}
    assert set(caps.values()) == {"0" * 16}
    assert "NoNewPrivs:\t1" in status
    assert (await box.exec("id -u")).stdout != b"0\n"
    assert not (await box.exec("unshare -U true")).ok
    assert not (await box.exec("mount -t tmpfs none /tmp")).ok
    assert not (await box.exec(f"kill -0 {os.getpid()}")).ok


WRITABLE = """
import os
for folder, _, names in os.walk("/proc"):
    if folder.endswith("/fd"):
        continue
    for name in names:
        try:
            os.close(os.open(os.path.join(folder, name), os.O_WRONLY))
            print(os.path.join(folder, name))
        except OSError:
            pass
"""


async def test_the_kernels_settings_cannot_be_written(place):
    place.needs("isolated_filesystem")
    box = await place.box()
    outcome = await box.exec(["python3", "-c", WRITABLE], timeout=60)
    assert (outcome.return_code, outcome.stdout) == (0, b"")
    assert (await box.exec("echo x > /dev/stdout; echo y > /dev/fd/1")).stdout == b"x\ny\n"


async def test_shown_folders_are_read_only_wherever_they_lie(place, tmp_path):
    place.needs("isolated_filesystem")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "tool").write_text("#!/bin/sh\necho tool\n")
    (tools / "tool").chmod(0o755)
    place.settings |= {"read_only": [str(tools)], "path": [str(tools)]}
    place.runtime = await place.again()
    box = await place.box()
    assert (await box.exec("tool")).stdout == b"tool\n"
    assert not (await box.exec(f"echo x > {tools}/new")).ok
    assert (await box.exec("echo x > /tmp/y && echo z > /var/tmp/y && cat /tmp/y")).stdout == b"x\n"


async def test_own_folders_at_the_top(place, tmp_path):
    place.needs("isolated_filesystem")
    box = await place.box(workdir="/testbed/repo", kwargs={"dirs": ["/app"]})
    assert (await box.exec("pwd; touch x /app/y; ls -d /app/y")).stdout == b"/testbed/repo\n/app/y\n"
    await box.write_file("/tests/test.sh", b"echo tested")
    assert (await box.exec("sh /tests/test.sh")).stdout == b"tested\n"
    assert await box.read_file("/app/y") == b""
    for bad in ("/usr/x", "/etc/x", "/proc/x", "/polar/x", "/sys/x", "/-x/y", "/var/x"):
        with pytest.raises(SpecRefused):
            await place.box(workdir=bad)


async def test_a_planted_link_at_a_mount_point_leads_nowhere(place, tmp_path):
    place.needs("isolated_filesystem")
    victim = tmp_path / "victim"
    victim.mkdir()
    box = await place.box(kwargs={"dirs": ["/app"]})
    await box.exec(
        f"rm -rf /polar/session/workspace; ln -s /oldroot{victim} /polar/session/workspace;"
        f"ln -s /oldroot{victim} /tmp/x; ln -s {victim} /app/z; mv /polar/session /polar/s2; mv /app /app2"
    )
    await box.exec("touch /app/z/new /tmp/x/new", cwd="/tmp")
    assert list(victim.iterdir()) == []


async def test_the_environment_does_not_touch_the_launcher(place, tmp_path):
    place.needs("isolated_filesystem")
    box = await place.box(env={"LD_PRELOAD": "/no/such.so", "LD_LIBRARY_PATH": "/polar/session", "BASH_ENV": "/x"})
    outcome = await box.exec(["true"])
    assert outcome.ok
    assert outcome.stderr.count(b"/no/such.so") >= 1  # only inside, where the loader complains
