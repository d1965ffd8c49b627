"""The broker: its parts put together, started and stopped.

Promises: `start` returns when clients can connect and everything acknowledged before is there; `stop` drains, and a
start after it reads nothing again; a start after a kill reads what it must. One process per data directory.
"""

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO
from uuid import uuid4

from polar.broker.database import Database
from polar.broker.errors import BrokerError, DirectoryInUse
from polar.broker.flusher import Flusher
from polar.broker.group_store import GroupStore
from polar.broker.groups import Groups
from polar.broker.handlers import api_table
from polar.broker.handlers.context import Node, Parts
from polar.broker.maintenance import Maintenance
from polar.broker.server import Server
from polar.broker.settings import BrokerSettings
from polar.broker.topics import Topics
from polar.broker.transactions import Transactions

__all__ = ["Broker"]

logger = logging.getLogger(__name__)


def unix_ms() -> int:
    return time.time_ns() // 1_000_000


class Broker:
    """One single-node broker in this event loop.

    `clock` gives Unix milliseconds. Raises `DirectoryInUse`, `RemoteBindRefused` and other `BrokerError`s on start.
    """

    def __init__(self, settings: BrokerSettings, clock: Callable[[], int] = unix_ms) -> None:
        self.settings = settings
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets an exception when the disk fails; the broker then acknowledges nothing and has to be stopped."""
        self.address = ""
        """`host:port` for clients, once started."""
        self._clock = clock
        self._resources = ExitStack()
        self._is_running = False

    async def start(self) -> str:
        """Recover, listen, and return the bootstrap address."""
        settings = self.settings
        try:
            await self._start(settings)
        except BaseException:
            self._resources.close()
            raise
        self._is_running = True
        return self.address

    async def _start(self, settings: BrokerSettings) -> None:
        settings.directory.mkdir(parents=True, exist_ok=True)
        lock = _lock(settings.directory)
        self._resources.callback(lock.close)
        self._database = Database(settings.directory / "broker.db")
        self._resources.callback(self._database.close)
        cluster_id = self._database.get_meta("cluster_id")
        if cluster_id is None:
            cluster_id = uuid4().hex[:22]
            self._database.set_meta("cluster_id", cluster_id)
        self.topics = Topics(settings, self._database, self._clock)
        # Recovery reads files for as long as the unclean part of the logs is large.
        await asyncio.to_thread(self.topics.load)
        self._resources.callback(self.topics.close)
        self._flusher = Flusher(self._database, self._fail, enabled=settings.fsync)
        store = GroupStore(self._database)
        self.groups = Groups(settings, store)
        self.groups.load()
        self._resources.callback(self.groups.close)
        self.transactions = Transactions(settings, self._database, self.topics, store, self._flusher, self._clock)
        await self.transactions.load()
        self.maintenance = Maintenance(
            settings, self._database, self.topics, self.transactions, self._clock, self._fail
        )
        self.server = Server(settings, self._fail)
        try:
            port = await self.server.listen(settings.host, settings.port)
        except OSError as error:
            raise BrokerError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}. "
                "Take another port, or 0 for a free one."
            ) from error
        host = settings.advertised_host or settings.host
        parts = Parts(
            settings=settings,
            node=Node(settings.node_id, host, port, cluster_id),
            topics=self.topics,
            groups=self.groups,
            transactions=self.transactions,
            flusher=self._flusher,
            clock=self._clock,
            transactions_changed=self.maintenance.transaction_began,
        )
        self.server.apis = api_table(parts, self.maintenance.discard)
        self.maintenance.start(self.server)
        await self.server.accept()
        self.address = f"{host}:{port}"

    async def stop(self) -> None:
        """Drain, note everything for the next start, and let go of the directory."""
        if not self._is_running:
            return
        self._is_running = False
        self.groups.close()
        await self.server.close()
        await self.maintenance.close()
        await self.transactions.close()
        await self._flusher.close()
        self.topics.save()
        self._resources.close()

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


def _lock(directory: Path) -> IO[str]:
    lock = (directory / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise DirectoryInUse(
            f"{directory} is in use by another broker (process {holder}). Stop it, or give this one its own --dir."
        ) from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
