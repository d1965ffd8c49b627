"""What every handler is given: the broker's parts, and the request's connection."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from polar.broker.flusher import Flusher
from polar.broker.groups import Groups
from polar.broker.settings import BrokerSettings
from polar.broker.topics import Topics
from polar.broker.transactions import Transactions

__all__ = ["CloseConnection", "Node", "Parts", "RequestContext", "as_duration", "as_time", "milliseconds"]

UNAUTHORISED_OPERATIONS = -(1 << 31)
"""`authorized_operations` when they were not asked for, or cannot be told."""


class CloseConnection(Exception):
    """The only way to tell the client: an unacknowledged write failed, or the request has no answer."""


@dataclass(frozen=True, slots=True)
class Node:
    """How clients see this broker, which is all of the cluster."""

    id: int
    host: str
    port: int
    cluster_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`clock` gives Unix milliseconds."""

    settings: BrokerSettings
    node: Node
    topics: Topics
    groups: Groups
    transactions: Transactions
    flusher: Flusher
    clock: Callable[[], int]
    transactions_changed: Callable[[], None]
    """A transaction began: its time-out may be the next."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """`version` is the request's; `hurry` is done when the client is gone or the broker stops: wait no longer."""

    version: int
    client_id: str
    client_host: str
    hurry: asyncio.Future[None]


def milliseconds(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)


def as_duration(ms: int) -> timedelta:
    return timedelta(milliseconds=ms)


def as_time(ms: int) -> datetime:
    """Unix milliseconds as kio wants them, exactly."""
    return datetime.fromtimestamp(ms // 1000, UTC) + timedelta(milliseconds=ms % 1000)
