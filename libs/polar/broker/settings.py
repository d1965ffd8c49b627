"""Settings of one broker: limits, timings and the address, all with defaults that suit one machine.

Promises: immutable, checked on construction, and free of I/O. Settings of a single topic live in `configs`.
"""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from polar.broker.errors import BrokerError, RemoteBindRefused

__all__ = ["BrokerSettings"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """What a broker is started with. Sizes are bytes, times are seconds unless the name says `_ms`.

    Raises `RemoteBindRefused` for a non-loopback host without `allow_remote`, `BrokerError` for other values
    that cannot work.
    """

    directory: Path
    """Holds segment files, the SQLite database and the lock; made when missing."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port."""
    advertised_host: str | None = None
    """The name clients are told to connect to; None is `host`."""
    allow_remote: bool = False
    """The protocol has no authentication here, so other machines are let in only on request."""
    fsync: bool = False
    """Acknowledge only what has reached the disk (power loss); without it, what has reached the kernel (SIGKILL)."""
    node_id: int = 1

    max_request_bytes: int = 100 * MIB
    """A larger frame closes its connection, as `socket.request.max.bytes` does."""
    max_inflight_bytes: int = 256 * MIB
    """Requests being read or handled over all connections; at the limit reading pauses."""
    max_fetch_bytes: int = 55 * MIB
    """Upper bound of one fetch response, unless a single batch is larger."""
    max_connections: int = 2048
    """Further connections are closed at once."""
    connection_idle_s: float = 600.0
    max_partitions: int = 20_000
    """Partitions over all topics; creating more is refused with PolicyViolation."""
    max_open_files: int = 512
    """Segment files held open at once; more are opened and closed as needed."""

    default_partitions: int = 1
    message_max_bytes: int = 1_048_588
    """`max.message.bytes` of topics that do not set it; Apache Kafka's default."""
    segment_bytes: int = 128 * MIB
    retention_ms: int = 7 * 24 * 3600 * 1000

    initial_rebalance_delay_s: float = 0.0
    """How long an empty group waits for more members before its first generation."""
    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
    max_group_size: int = 10_000
    offset_metadata_max_bytes: int = 4_096

    max_transaction_timeout_ms: int = 900_000
    producer_expiry_ms: int = 24 * 3600 * 1000
    """A producer silent for this long is forgotten by its partitions, as `producer.id.expiration.ms`."""

    maintenance_interval_s: float = 5.0
    """Between two rounds of retention, compaction and checkpoints."""
    compaction_map_keys: int = 1_000_000
    """Keys one compaction pass holds in memory (about 150 bytes each); longer logs take several passes."""
    drain_s: float = 5.0
    """How long a stop waits for requests under way."""

    def __post_init__(self) -> None:
        if not self.allow_remote and not _is_loopback(self.host):
            raise RemoteBindRefused(
                f"refusing to listen on {self.host}: the broker has no authentication. Use 127.0.0.1, or pass "
                "--allow-remote (allow_remote=True) on a network you trust."
            )
        if not 0 <= self.port <= 65535:
            raise BrokerError(f"port {self.port} is not between 0 and 65535")
        for name in ("max_request_bytes", "max_inflight_bytes", "max_fetch_bytes", "max_connections", "max_open_files"):
            if getattr(self, name) <= 0:
                raise BrokerError(f"{name} has to be positive")
        if self.max_inflight_bytes < self.max_request_bytes:
            raise BrokerError("max_inflight_bytes has to be at least max_request_bytes, or a large request never fits")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
