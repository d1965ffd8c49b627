"""The broker's housekeeping: retention, compaction, forgetting, checkpoints, and transactions that time out.

Promises: the loop's thread only decides and swaps; reading, writing and deleting files happens in a worker thread,
one log at a time. A failure on one log is logged and does not stop the others.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from polar.broker import compaction
from polar.broker.database import Database
from polar.broker.errors import KafkaError
from polar.broker.log import PartitionLog
from polar.broker.retention import apply_retention
from polar.broker.server import Server
from polar.broker.settings import BrokerSettings
from polar.broker.topics import Topics
from polar.broker.transactions import Transactions

__all__ = ["Maintenance"]

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two attempts to complete a transaction whose markers could not be written."""


class Maintenance:
    """Owns two tasks: the rounds, and the clock of open transactions."""

    def __init__(
        self,
        settings: BrokerSettings,
        database: Database,
        topics: Topics,
        transactions: Transactions,
        clock: Callable[[], int],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._settings = settings
        self._database = database
        self._topics = topics
        self._transactions = transactions
        self._clock = clock
        self._failed = failed
        self._garbage: list[Path] = []
        self._transaction_began = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, server: Server) -> None:
        self._garbage += self._topics.garbage()
        self._tasks = [asyncio.create_task(self._rounds(server)), asyncio.create_task(self._watch_transactions())]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        # Without housekeeping or time-outs the broker would go wrong slowly; better it stops and says why.
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def discard(self, directory: Path) -> None:
        """Delete a directory with the next round."""
        self._garbage.append(directory)

    def transaction_began(self) -> None:
        self._transaction_began.set()

    async def run_once(self) -> None:
        """One round over all logs."""
        garbage, self._garbage = self._garbage, []
        for directory in garbage:
            await asyncio.to_thread(shutil.rmtree, directory, True)
        forget_before = self._clock() - self._settings.producer_expiry_ms
        for log in list(self._topics.logs()):
            if log.is_closed:
                continue
            try:
                await self._maintain(log)
            except (OSError, KafkaError) as error:
                logger.error("%s-%d: housekeeping failed: %s", log.topic, log.partition, error)
            log.producers.expire(forget_before)
            await asyncio.sleep(0)
        await asyncio.to_thread(self._database.checkpoint)

    async def _maintain(self, log: PartitionLog) -> None:
        obsolete = apply_retention(log, self._clock())
        if obsolete:
            await asyncio.to_thread(_unlink, obsolete)
        work = compaction.plan(log, self._clock(), self._settings.compaction_map_keys, fsync=self._settings.fsync)
        if work is not None:
            done = await asyncio.to_thread(compaction.run, work)
            await asyncio.to_thread(_unlink, compaction.install(log, done, self._clock()))

    async def _rounds(self, server: Server) -> None:
        while True:
            await asyncio.sleep(self._settings.maintenance_interval_s)
            server.close_idle()
            await self.run_once()

    async def _watch_transactions(self) -> None:
        while True:
            self._transaction_began.clear()
            deadline = self._transactions.next_deadline_ms
            left = None if deadline is None else max(0, deadline - self._clock()) / 1000
            if self._transactions.has_unfinished:
                left = RETRY_S if left is None else min(left, RETRY_S)
            try:
                # A transaction that begins may have the next deadline, so it ends the wait.
                await asyncio.wait_for(self._transaction_began.wait(), left)
            except TimeoutError:
                await self._transactions.finish_unfinished()
                await self._transactions.abort_overdue()


def _unlink(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
