"""A process of Polar: services in one event loop, and an orderly end.

A service is an object with `async def run(self)`, which works until cancelled, and perhaps `async def drain(self)`,
which finishes what it has and takes nothing new. The first SIGTERM or SIGINT drains, within `shutdown_grace_s`; the
second, or the first while services are still being opened, stops at once. A service that ends or fails stops the
process: non-zero, with one clear line.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, Protocol, runtime_checkable

import structlog
import uvloop

_log = structlog.get_logger(__name__)

STOP_S = 10.0
"""How long services may take to stop once cancelled."""
LEAVE_S = 15.0
"""How long threads may go on once all services have stopped."""


@runtime_checkable
class Service(Protocol):
    async def run(self) -> None:
        """Works until cancelled."""
        ...


@runtime_checkable
class Drains(Protocol):
    async def drain(self) -> None:
        """Takes nothing new and returns when what there was is done."""
        ...


Opened = AbstractAsyncContextManager[Sequence[Service]]
"""Services together with what they stand on; made in the loop, closed after they have stopped."""


def run_services(services: Sequence[Service] | Callable[[], Opened], *, grace_s: float = 20.0) -> int:
    """Runs services in a new event loop until a signal or a failure; returns the process's exit code.

    Args:
        services: the services, or a function that opens them inside the loop:

            @asynccontextmanager
            async def opened():
                async with Bus(settings, Service.BUILDER) as bus:
                    await bus.prepare()
                    yield [Builder(bus)]
        grace_s: seconds to drain.
    """
    leaving = threading.Timer(LEAVE_S, _leave)
    leaving.daemon = True
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_main(services, grace_s))
        leaving.args = (code,)
        leaving.start()
    if not any(
        one.is_alive() and not one.daemon for one in threading.enumerate() if one is not threading.main_thread()
    ):
        leaving.cancel()
    return code


def _leave(code: int) -> None:
    """Python waits for its threads for ever; what hangs in one must not keep a process that has ended."""
    _log.error("a thread does not end; leaving without it", code=code)
    os._exit(code or 1)


async def _main(services: Sequence[Service] | Callable[[], Opened], grace_s: float) -> int:
    stopping = _Stopping()
    with stopping.on_signals():
        opening = asyncio.create_task(_serve_opened(services, stopping, grace_s))
        now = asyncio.create_task(stopping.now.wait())
        try:
            await asyncio.wait([opening, now], return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                opening.cancel()
            await opening
        except asyncio.CancelledError:
            return 130
        except Exception as error:  # noqa: BLE001 - the process's boundary: one line for people, and its exit code
            tell(error)
            return 1
        finally:
            now.cancel()
    return 0


async def _serve_opened(
    services: Sequence[Service] | Callable[[], Opened], stopping: _Stopping, grace_s: float
) -> None:
    async with _opened(services) as found:
        stopping.serving = True
        await serve(found, stop=stopping.asked, grace_s=grace_s)


def tell(error: BaseException) -> None:
    """Why the process stops: one line, with a traceback only for what is not a named error of Polar's."""
    first: BaseException = error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    named = type(first).__module__.startswith(("polar.", "pydantic")) or isinstance(first, OSError)
    _log.error(str(first) or repr(first), kind=type(first).__name__, exc_info=None if named else first)


async def serve(services: Sequence[Service], *, stop: asyncio.Event | None = None, grace_s: float = 20.0) -> None:
    """Runs services until `stop` is set (then drains and stops them) or until cancelled (then stops them at once).

    Raises:
        Exception: what the first service that failed has raised; the others have been stopped.
        RuntimeError: a service ended by itself.
    """
    tasks = {asyncio.create_task(one.run(), name=type(one).__name__): one for one in services}
    stop = stop or asyncio.Event()
    asked = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([*tasks, asked], return_when=asyncio.FIRST_COMPLETED)
        if asked not in done:
            _raise_first([task for task in tasks if task.done()])
        drains = [asyncio.create_task(one.drain()) for one in services if isinstance(one, Drains)]
        if drains:
            _log.info("draining", grace_s=grace_s)
            await _drained(drains, list(tasks), grace_s)
    finally:
        asked.cancel()
        await _stop(list(tasks))


async def _drained(drains: list[asyncio.Task[None]], running: list[asyncio.Task[None]], grace_s: float) -> None:
    """Waits for the drains, for a service that fails meanwhile, or for the end of the grace."""
    whole: asyncio.Future[list[None]] = asyncio.gather(*drains)
    try:
        async with asyncio.timeout(grace_s):
            waiting: set[asyncio.Future[Any]] = {whole, *running}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if whole.done():
                whole.result()
            else:
                _raise_first([task for task in running if task.done()])
    except TimeoutError:
        _log.warning("stopping what is not done yet", grace_s=grace_s)
    finally:
        whole.cancel()
        await asyncio.wait(drains)


def _raise_first(done: list[asyncio.Task[None]]) -> None:
    for task in done:
        error = task.exception()
        if error is not None:
            raise error
    names = ", ".join(task.get_name() for task in done)
    raise RuntimeError(f"{names} ended by itself")


async def _stop(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=STOP_S)
    for task in late:
        _log.warning("service does not stop", service=task.get_name())
    for task in tasks:
        if task.done() and not task.cancelled() and task.exception() is not None:
            _log.debug("service failed while it stopped", service=task.get_name(), error=repr(task.exception()))


@asynccontextmanager
async def _opened(services: Sequence[Service] | Callable[[], Opened]) -> AsyncIterator[Sequence[Service]]:
    if callable(services):
        async with services() as found:
            yield found
    else:
        yield services


class _Stopping:
    """Signals as events."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        self.serving = False

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._got, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _got(self, number: int) -> None:
        if self.asked.is_set() or not self.serving:
            self.now.set()  # nothing runs yet that could be drained
            return
        _log.info("stopping; once more to stop at once", signal=signal.Signals(number).name)
        self.asked.set()
