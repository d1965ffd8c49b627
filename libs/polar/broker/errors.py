"""The broker's error vocabulary.

    BrokerError                 anything the operator of the broker has to act on
    ├── DirectoryInUse          another broker holds the data directory
    ├── RemoteBindRefused       a non-loopback address without `allow_remote`
    ├── BrokerNotReady          a spawned broker did not come up
    └── StorageFailed           the disk refused a write or an fsync; the broker stops
    KafkaError                  one answer of the protocol: an error code for the client, never for the operator

Knows nothing of sockets or files.
"""

from polar.broker.codecs import ErrorCode

__all__ = [
    "BrokerError",
    "BrokerNotReady",
    "DirectoryInUse",
    "ErrorCode",
    "KafkaError",
    "RemoteBindRefused",
    "StorageFailed",
]


class BrokerError(Exception):
    """Something the operator of the broker has to act on; the message says what to do."""


class DirectoryInUse(BrokerError):
    """Another process holds the lock of the data directory."""


class RemoteBindRefused(BrokerError):
    """The address is reachable from other machines and `allow_remote` is off."""


class BrokerNotReady(BrokerError):
    """A spawned broker ended, or said nothing, before it was ready."""


class StorageFailed(BrokerError):
    """The disk refused a write or an fsync, so nothing more can be acknowledged."""


class KafkaError(Exception):
    """An answer of the Kafka protocol other than success.

    `code` goes to the client; whether a retry helps is `code.retriable`. `message` is sent along where the
    response has a field for it.
    """

    def __init__(self, code: ErrorCode, message: str | None = None) -> None:
        super().__init__(message or code.name)
        self.code = code
        self.message = message
