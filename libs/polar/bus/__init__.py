"""The log, as the services use it: a small interface over aiokafka with safe defaults.

`Bus` makes everything else: idempotent sends, `Transactional` writers, `Reader`s without a group, look-ups of single
records, dead letters and the blob store. `PartitionWorker` is consume-transform-produce, exactly once.
"""

from .blobs import BlobStore
from .bus import Bus
from .cursors import CursorLost, open_at_cursors
from .errors import (
    BlobWrong,
    BrokerUnavailable,
    BusError,
    Fenced,
    RecordGone,
    RecordTooLarge,
    Stuck,
    TopicProblem,
    TopicsWrong,
)
from .reader import Reader, Start
from .records import Out, Record
from .settings import BusSettings
from .transactional import Transaction, Transactional
from .worker import PartitionWorker, Processor, Progress, Send

__all__ = [
    "BlobStore",
    "BlobWrong",
    "BrokerUnavailable",
    "Bus",
    "BusError",
    "BusSettings",
    "CursorLost",
    "Fenced",
    "Out",
    "PartitionWorker",
    "Processor",
    "Progress",
    "Reader",
    "Record",
    "RecordGone",
    "RecordTooLarge",
    "Send",
    "Start",
    "Stuck",
    "TopicProblem",
    "TopicsWrong",
    "Transaction",
    "Transactional",
    "open_at_cursors",
]
