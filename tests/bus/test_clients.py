"""What stopping a client owes to whoever stops it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from polar.bus.clients import stop_consumer


class Swallows:
    """A client that takes every cancellation for its own tasks', as aiokafka's do while they stop."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()

    async def stop(self) -> None:
        self.stopping.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return


async def test_a_cancellation_that_a_client_swallows_is_not_lost() -> None:
    client = Swallows()
    stopping = asyncio.create_task(stop_consumer(cast(Any, client)))
    await client.stopping.wait()
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
