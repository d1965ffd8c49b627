"""The wait of one fetch: until enough bytes arrived, the time is up, or the client is gone.

Promises: an idle fetch costs no work between its start and its end; a new record wakes it in the same turn of the
loop. Knows logs only as something to watch.
"""

import asyncio
from collections.abc import Iterable

from polar.broker.log import PartitionLog

__all__ = ["FetchWait"]


class FetchWait:
    """Watches a set of logs. `missing` is how many bytes the reader still wants.

    A read-committed reader is woken by each move of a last stable offset, others by bytes alone.
    """

    def __init__(self, logs: Iterable[PartitionLog], missing: int, *, committed: bool) -> None:
        self._logs = list(logs)
        self._missing = missing
        self._committed = committed
        self._woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def grown(self, log: PartitionLog, size: int) -> None:
        if self._committed and log.producers.first_unstable is not None:
            return  # nothing past the open transaction can be read yet
        self._missing -= size
        if self._missing <= 0:
            self._wake()

    def stabilised(self) -> None:
        if self._committed:
            self._wake()

    def closed(self) -> None:
        self._wake()

    async def wait(self, timeout: float, hurry: asyncio.Future[None]) -> bool:
        """Whether something arrived before `timeout` seconds passed or `hurry` was done."""
        for log in self._logs:
            log.watchers.add(self)
        try:
            await asyncio.wait((self._woken, hurry), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for log in self._logs:
                log.watchers.discard(self)
        return self._woken.done()

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)
