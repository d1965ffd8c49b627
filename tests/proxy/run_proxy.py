"""Proxy processes for tests: `python run_proxy.py SECRET`; settings come from the environment. Prints its port.

`--fork`: a proxy of its own for each line of JSON on standard input, `{"id": …, "env": {…}, "broken": …}`. Imports take
most of the time that a proxy needs to be ready, so they are done once. Each prints `{"id": …, "pid": …, "port": …}`.

`broken` makes a proxy that breaks its promise, to see that a test would notice: `early` acknowledges captures before
the broker does, `ungated` tells a reply's closing parts as they come.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from polar.bus import Bus, BusSettings, Out
from polar.proxy import ProxyService, ProxySettings
from polar.proxy.calls import Delta
from polar.proxy.gate import Gate
from polar.schemas import CompletionCaptured, RecordRef
from polar.schemas.topics import Service

BROKEN = ("early", "ungated")
LATE_S = 0.5
"""How much later than it says a proxy that is `early` sends a capture."""


class EarlySender:
    """A bus that takes a capture's acknowledgement for granted."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._late: set[asyncio.Task[object]] = set()

    async def send(self, *outs: Out) -> list[RecordRef]:
        if not isinstance(outs[0].value, CompletionCaptured):
            return await self._bus.send(*outs)
        task = asyncio.create_task(self._send(*outs))
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        return [RecordRef(topic="completions", partition=0, offset=0)]

    async def _send(self, *outs: Out) -> None:
        await asyncio.sleep(LATE_S)
        await self._bus.send(*outs)


class OpenGate(Gate):
    """Holds nothing back."""

    def admit(self, delta: Delta) -> Delta | None:
        return delta


async def serve(secret: str, tell: Callable[[int], None], broken: str | None = None) -> None:
    async with Bus(BusSettings(), Service.PROXY) as bus:
        service = ProxyService(ProxySettings(), bus, secret, sender=EarlySender(bus) if broken == "early" else None)
        running = asyncio.create_task(service.run())
        ready = asyncio.create_task(service.ready.wait())
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            tell(service.port)
        await running


def begin(secret: str, asked: dict[str, Any]) -> None:
    """What a forked process does, to its end."""
    os.environ.update(asked["env"])
    broken = asked.get("broken")
    assert broken in (None, *BROKEN)
    if broken == "ungated":
        import polar.proxy.generation

        setattr(polar.proxy.generation, "Gate", OpenGate)  # noqa: B010 - what the module does not export

    def tell(port: int) -> None:
        print(json.dumps({"id": asked["id"], "pid": os.getpid(), "port": port}), flush=True)

    asyncio.run(serve(secret, tell, broken))


def fork(secret: str) -> None:
    """Until standard input ends. Nothing here may start a thread: a forked process has only the one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who is killed is gone
    for line in sys.stdin:
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                begin(secret, json.loads(line))
            except BaseException as error:
                print(json.dumps({"id": json.loads(line)["id"], "failed": repr(error)}), flush=True)
                raise
            finally:
                os._exit(1)  # whatever happened, it is no second parent


def main() -> None:
    if "--fork" in sys.argv:
        fork(sys.argv[1])
    else:
        asyncio.run(serve(sys.argv[1], lambda port: print(port, flush=True)))


if __name__ == "__main__":
    main()
