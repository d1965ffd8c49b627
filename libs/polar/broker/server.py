"""Connections: frames in, answers out, in order, within limits.

Promises: requests of one connection are handled one after the other, as Apache Kafka does; a frame is read only
while the bytes under way are below the limit; a slow reader holds back its own connection only; what a client sent
whole before it went away is still handled. Knows frames, not what they mean.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import cast

from polar.broker.errors import ErrorCode, StorageFailed
from polar.broker.handlers import API_VERSIONS, Api
from polar.broker.handlers.context import CloseConnection, RequestContext
from polar.broker.settings import BrokerSettings
from polar.broker.wire import MalformedRequest, RequestHead, encode_response, parse_request, read_head

__all__ = ["ByteBudget", "Connection", "Server"]

logger = logging.getLogger(__name__)

_READ_AHEAD = 256 * 1024
"""Bytes buffered of a connection beyond the frame being read."""


class ByteBudget:
    """Bytes of requests being read or handled, over all connections; waits are served first come, first served."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def take(self, size: int) -> None:
        if not self._waiting and size <= self._free:
            self._free -= size
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give(size)
            else:
                self._waiting.remove((size, granted))
            raise

    def give(self, size: int) -> None:
        self._free += size
        while self._waiting and self._waiting[0][0] <= self._free:
            wanted, granted = self._waiting.pop(0)
            self._free -= wanted
            granted.set_result(None)


class Connection(asyncio.Protocol):
    """One client. Owns the task that reads its requests and writes the answers."""

    def __init__(self, server: "Server") -> None:
        self._server = server
        self._buffer = bytearray()
        self._wanted = 0
        self._arrived: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._reading_paused = False
        self._transport: asyncio.Transport | None = None
        self._host = "?"
        self.last_active = 0.0
        self.is_busy = False
        self.task: asyncio.Task[None] | None = None
        self._is_lost = False
        self._hurry: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are stream transports without deriving from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        if not self._server.admit(self):
            self._transport.abort()
            return
        peer = transport.get_extra_info("peername")
        self._host = str(peer[0]) if peer else "?"
        self.last_active = asyncio.get_running_loop().time()
        self.task = asyncio.create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= self._wanted and self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        if not self._reading_paused and len(self._buffer) > self._wanted + _READ_AHEAD and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self.hurry()
        for waiting in (self._arrived, self._writable):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        if self.task is None:
            self._server.forget(self)

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # The connection's task

    def hurry(self) -> None:
        """Let a long poll answer at once with what it has."""
        if not self._hurry.done():
            self._hurry.set_result(None)

    def close(self) -> None:
        """End the connection once what was written has been sent."""
        if self._transport is not None:
            self._transport.close()

    async def _serve(self) -> None:
        try:
            while (size_bytes := await self._read(4)) is not None:
                size = int.from_bytes(size_bytes, "big", signed=True)
                if not 8 <= size <= self._server.settings.max_request_bytes:
                    logger.warning(
                        "%s: closed, a request of %d bytes is outside 8 to max_request_bytes", self._host, size
                    )
                    return
                await self._server.budget.take(size)
                try:
                    frame = await self._read(size)
                    if frame is None:
                        return
                    self.is_busy = True
                    await self._answer(frame)
                finally:
                    self.is_busy = False
                    self._server.budget.give(size)
                self.last_active = asyncio.get_running_loop().time()
                if self._server.is_closing:
                    return
        except (CloseConnection, MalformedRequest) as error:
            logger.warning("%s: closed, %s", self._host, error)
        except StorageFailed as error:
            self._server.failed(error)
        except asyncio.CancelledError:
            if not self._server.is_closing:
                raise
        except Exception:
            logger.exception("%s: closed, the broker failed on a request", self._host)
        finally:
            self.close()
            self._server.forget(self)

    async def _read(self, size: int) -> bytes | None:
        """The next `size` bytes; None when the client went away before."""
        while len(self._buffer) < size:
            if self._is_lost or self._transport is None:
                return None
            self._wanted = size
            self._arrived = asyncio.get_running_loop().create_future()
            if self._reading_paused:
                self._reading_paused = False
                self._transport.resume_reading()
            await self._arrived
        self._wanted = 0
        with memoryview(self._buffer) as view:
            data = bytes(view[:size])
        del self._buffer[:size]
        return data

    async def _answer(self, frame: bytes) -> None:
        head = read_head(frame)
        api = self._server.apis.get(head.api_key)
        if api is None:
            raise MalformedRequest(f"this broker does not speak api {head.api_key}")
        if not api.first <= head.version <= api.last:
            if head.api_key != API_VERSIONS:
                raise MalformedRequest(f"this broker does not speak version {head.version} of api {head.api_key}")
            # A client may ask in a version of the future and is told, in the oldest, which ones there are.
            head = RequestHead(head.api_key, 0, head.correlation_id)
            context = RequestContext(0, "", self._host, self._hurry)
            answer = {**(await api.handler(None, context) or {}), "error_code": ErrorCode.unsupported_version}
            await self._write(encode_response(head, answer))
            return
        request, client_id = parse_request(frame, head)
        context = RequestContext(head.version, client_id or "", self._host, self._hurry)
        response = await api.handler(request, context)
        if response is not None:
            await self._write(encode_response(head, response))

    async def _write(self, data: bytes) -> None:
        if self._transport is None or self._is_lost:
            return
        self._transport.write(data)
        if self._writable is not None:
            await self._writable


class Server:
    """Listens, and holds the connections within their limits. `failed` is told when the disk fails."""

    def __init__(self, settings: BrokerSettings, failed: Callable[[BaseException], None]) -> None:
        self.settings = settings
        self.apis: Mapping[int, Api] = {}
        """Set before `accept`: handlers know the port, which `listen` finds."""
        self.failed = failed
        self.budget = ByteBudget(settings.max_inflight_bytes)
        self.is_closing = False
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        return len(self._connections)

    def admit(self, connection: Connection) -> bool:
        if self.is_closing:
            return False
        if len(self._connections) >= self.settings.max_connections:
            logger.warning("refused a connection: there are max_connections=%d already", self.settings.max_connections)
            return False
        self._connections.add(connection)
        return True

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)

    async def listen(self, host: str, port: int) -> int:
        """Bind and return the port; connections wait in the kernel until `accept`."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Connection(self), host, port, start_serving=False, backlog=512
        )
        return int(self._listener.sockets[0].getsockname()[1])

    async def accept(self) -> None:
        assert self._listener is not None
        await self._listener.start_serving()

    def close_idle(self) -> None:
        """Close connections that asked nothing for `connection_idle_s`."""
        oldest = asyncio.get_running_loop().time() - self.settings.connection_idle_s
        for connection in list(self._connections):
            if not connection.is_busy and connection.last_active < oldest:
                connection.close()

    async def close(self) -> None:
        """Take no more connections, let requests under way end for `drain_s`, then cut them off."""
        if self._listener is not None:
            self._listener.close()
        self.is_closing = True
        for connection in list(self._connections):
            connection.hurry()
            if not connection.is_busy:
                connection.close()
        tasks = [each.task for each in self._connections if each.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.settings.drain_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
