"""The one way out of a proxy-only box: a listener inside its network namespace, relayed to the model proxy.

The listener is made from outside (`listen_helper.py`), so the box needs no network device but its loopback, and
nothing in the box chooses where the relay leads. Streams may be quiet for as long as they like, each direction ends
by itself (half-close), an error on one side resets the other, and at `limit` connections further ones wait. A proxy
that is away is tried again for `patience` seconds, so that its restart is a pause to the agent and not an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from polar.runtime.errors import BoxStartFailed

CHUNK = 65536
HELPER = Path(__file__).with_name("listen_helper.py")
ACCEPT_PAUSE = 0.05  # seconds between tries when the node is out of file handles
CONNECT_PAUSES = (0.05, 1.0)  # seconds between tries to reach the proxy: the first, the longest
_RESET = struct.pack("ii", 1, 0)  # linger 0: the peer sees a reset and not a clean end of a cut stream


async def listener_inside(pid: int, port: int, patience: float) -> socket.socket:
    """A socket that listens on 127.0.0.1:port in the network namespace of `pid`. Raises BoxStartFailed."""
    ours, theirs = socket.socketpair()
    try:
        arguments = (sys.executable, "-I", "-S", str(HELPER), str(pid), str(port), str(theirs.fileno()), str(patience))
        helper = await asyncio.create_subprocess_exec(
            *arguments,
            pass_fds=(theirs.fileno(),),
            env={},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(patience + 5):
                _, stderr = await helper.communicate()
        except TimeoutError:
            helper.kill()
            await helper.wait()
            raise BoxStartFailed("no listener in the box's network in time") from None
        if helper.returncode != 0:
            last = stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise BoxStartFailed(f"no listener in the box's network: {''.join(last)}")
        ours.setblocking(False)
        _, handles, _, _ = socket.recv_fds(ours, 1, 1)
    finally:
        ours.close()
        theirs.close()
    for handle in handles:
        os.set_inheritable(handle, False)
    listener = socket.socket(fileno=handles[0])
    listener.setblocking(False)
    return listener


class Relay:
    """Forwards every connection to `listener` to `target` and nowhere else. Owns its tasks and the listener.

    `lost` counts the connections that found no proxy within `patience` seconds, and those whose proxy went away while
    the box waited for its first word.
    """

    def __init__(self, listener: socket.socket, target: tuple[str, int], limit: int, patience: float) -> None:
        self.lost = 0
        self._listener = listener
        self._target = target
        self._patience = patience
        self._slots = asyncio.Semaphore(limit)
        self._connections: set[asyncio.Task[None]] = set()
        self._acceptor = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                inside, _ = await loop.sock_accept(self._listener)
            except OSError:
                self._slots.release()
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            task = asyncio.create_task(self._serve(inside))
            self._connections.add(task)
            task.add_done_callback(functools.partial(self._ended, inside))

    def _ended(self, inside: socket.socket, task: asyncio.Task[None]) -> None:
        inside.close()  # here, since a task that is cancelled before its first step closes nothing
        self._connections.discard(task)
        self._slots.release()

    async def _serve(self, inside: socket.socket) -> None:
        inside.setblocking(False)
        inside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            outside = await self._reach()
        except OSError:
            self.lost += 1
            _reset(inside)
            return
        talk = _Talk()
        with contextlib.closing(outside):
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(_pump(inside, outside, talk.asked))
                    both.create_task(_pump(outside, inside, talk.answered))
            except* OSError:
                _reset(inside, outside)
        if talk.waiting:
            self.lost += 1

    async def _reach(self) -> socket.socket:
        """A connection to the proxy, tried until `patience` is over. Raises OSError: the last try's."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        pause, longest = CONNECT_PAUSES
        while True:
            try:
                return await self._connect()
            except OSError:
                left = deadline - loop.time()
                if left <= 0:
                    raise
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, longest)

    async def _connect(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        host, port = self._target
        failure = OSError(f"{host} has no address")
        for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            outside = socket.socket(family, kind, protocol)
            try:
                outside.setblocking(False)
                outside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_connect(outside, address)
            except OSError as error:
                outside.close()
                failure = error
            except BaseException:
                outside.close()
                raise
            else:
                return outside
        raise failure

    async def close(self) -> None:
        """End all connections and the listener."""
        tasks = [self._acceptor, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()


class _Talk:
    """Whether the box waits for the proxy: it spoke last. Knows nothing of what is said."""

    def __init__(self) -> None:
        self.waiting = False

    def asked(self) -> None:
        self.waiting = True

    def answered(self) -> None:
        self.waiting = False


async def _pump(source: socket.socket, sink: socket.socket, moved: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, CHUNK):
        moved()
        await loop.sock_sendall(sink, data)
    sink.shutdown(socket.SHUT_WR)


def _reset(*sockets: socket.socket) -> None:
    for item in sockets:
        with contextlib.suppress(OSError):
            item.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
