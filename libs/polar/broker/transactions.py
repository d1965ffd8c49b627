"""The transaction coordinator: transactional ids, their epochs, and what each open transaction touches.

    EMPTY ─► ONGOING ─► PREPARE_COMMIT ─► COMPLETE_COMMIT ─► ONGOING …
                    └─► PREPARE_ABORT  ─► COMPLETE_ABORT  ─► ONGOING …

Promises: once an end is decided (PREPARE_*) it is carried out, also by the next start of the broker; a new producer
of the same id fences the former and aborts what it left open; a transaction older than its time-out is aborted and
its producer fenced. The decision is durable before the first marker, the markers before the completion.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

import msgspec

from polar.broker.batch import ABORT, COMMIT
from polar.broker.database import Database
from polar.broker.errors import ErrorCode, KafkaError
from polar.broker.flusher import Flusher
from polar.broker.group_store import CommittedOffset, GroupStore
from polar.broker.settings import BrokerSettings
from polar.broker.topics import Topics

__all__ = ["ProducerIdentity", "Transaction", "TransactionState", "Transactions"]

LAST_EPOCH = 32_766
"""One below the largest epoch, which is left for fencing; after it a new producer id begins."""
_PRODUCER_ID_BLOCK = 1000


class TransactionState(Enum):
    """Names as DescribeTransactions gives them."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"


_PREPARED = (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)


class Transaction(msgspec.Struct):
    """The state of one transactional id, as the database keeps it. Times are Unix milliseconds."""

    id: str
    producer_id: int
    epoch: int
    timeout_ms: int
    state: TransactionState = TransactionState.EMPTY
    started_ms: int = 0
    partitions: set[tuple[str, int]] = msgspec.field(default_factory=set)
    groups: set[str] = msgspec.field(default_factory=set)
    former_epoch: int = -1
    """The epoch before the last one that a producer asked for: a repeated InitProducerId names it."""


class ProducerIdentity(msgspec.Struct, frozen=True):
    producer_id: int
    epoch: int


class Transactions:
    """All transactional ids. `clock` gives Unix milliseconds. Raises `KafkaError`."""

    def __init__(
        self,
        settings: BrokerSettings,
        database: Database,
        topics: Topics,
        offsets: GroupStore,
        flusher: Flusher,
        clock: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._database = database
        self._topics = topics
        self._offsets = offsets
        self._flusher = flusher
        self._clock = clock
        self._transactions: dict[str, Transaction] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._unfinished: set[str] = set()
        self._next_id = self._id_block_end = int(database.get_meta("producer_ids") or 0)

    async def load(self) -> None:
        """Read all ids back and carry out the ends that were decided and not completed."""
        for (state,) in self._database.query("SELECT state FROM transactions"):
            transaction = msgspec.msgpack.decode(state, type=Transaction)
            self._transactions[transaction.id] = transaction
        for transaction in self._transactions.values():
            if transaction.state in _PREPARED:
                await self._finish(transaction, redo=True)

    async def close(self) -> None:
        """Wait for the ends under way; open transactions stay open."""
        if self._ending:
            await asyncio.wait(self._ending.values())

    def all(self) -> list[Transaction]:
        return list(self._transactions.values())

    def get(self, transactional_id: str) -> Transaction | None:
        return self._transactions.get(transactional_id)

    def new_producer(self) -> ProducerIdentity:
        """An id for an idempotent producer without transactions."""
        return ProducerIdentity(self._new_id(), 0)

    async def init_producer(
        self, transactional_id: str, timeout_ms: int, known: ProducerIdentity | None
    ) -> ProducerIdentity:
        """The next epoch of a transactional id. `known` is the identity a producer already has, if it says so."""
        if not transactional_id:
            raise KafkaError(ErrorCode.invalid_request, "the transactional id is empty")
        if not 0 < timeout_ms <= self._settings.max_transaction_timeout_ms:
            raise KafkaError(ErrorCode.invalid_transaction_timeout)
        transaction = self._transactions.get(transactional_id)
        if transaction is None:
            transaction = Transaction(transactional_id, self._new_id(), -1, timeout_ms)
            self._transactions[transactional_id] = transaction
        elif known is not None:
            if known.producer_id != transaction.producer_id or known.epoch > transaction.epoch:
                raise KafkaError(ErrorCode.producer_fenced)
            if known.epoch < transaction.epoch:
                if known.epoch == transaction.former_epoch:
                    return ProducerIdentity(transaction.producer_id, transaction.epoch)
                raise KafkaError(ErrorCode.producer_fenced)
        if transaction.state in _PREPARED:
            raise KafkaError(ErrorCode.concurrent_transactions)
        asked_epoch = transaction.epoch
        if transaction.state is TransactionState.ONGOING:
            # The abort's markers carry a newer epoch, so that nothing of the former producer lands after them.
            transaction.epoch += 1
            await self._end(transaction, commit=False)
        if transaction.epoch >= LAST_EPOCH:
            transaction.producer_id, transaction.epoch = self._new_id(), -1
        transaction.epoch += 1
        transaction.former_epoch = asked_epoch if known is not None else -1
        transaction.timeout_ms = timeout_ms
        transaction.state = TransactionState.EMPTY
        self._save(transaction)
        return ProducerIdentity(transaction.producer_id, transaction.epoch)

    def add_partitions(self, transactional_id: str, producer: ProducerIdentity, keys: set[tuple[str, int]]) -> None:
        """Partitions the transaction is going to write to; the first begins it."""
        transaction = self._current(transactional_id, producer)
        if not keys <= transaction.partitions or transaction.state is not TransactionState.ONGOING:
            self._begin(transaction)
            transaction.partitions |= keys
            self._save(transaction)

    def add_group(self, transactional_id: str, producer: ProducerIdentity, group: str) -> None:
        """A group whose offsets the transaction is going to commit."""
        transaction = self._current(transactional_id, producer)
        if group not in transaction.groups or transaction.state is not TransactionState.ONGOING:
            self._begin(transaction)
            transaction.groups.add(group)
            self._save(transaction)

    def add_offsets(
        self, transactional_id: str, producer: ProducerIdentity, group: str, offsets: list[CommittedOffset]
    ) -> None:
        """Offsets that become the group's when the transaction commits."""
        transaction = self._transactions.get(transactional_id)
        if transaction is None or transaction.producer_id != producer.producer_id:
            raise KafkaError(ErrorCode.invalid_producer_id_mapping)
        if transaction.epoch != producer.epoch:
            raise KafkaError(ErrorCode.invalid_producer_epoch)
        if transaction.state is not TransactionState.ONGOING or group not in transaction.groups:
            raise KafkaError(ErrorCode.invalid_txn_state)
        self._offsets.add_pending(transactional_id, group, offsets)

    def check_write(self, transactional_id: str | None, producer: ProducerIdentity, key: tuple[str, int]) -> None:
        """Whether a transactional batch may be appended to a partition."""
        transaction = self._transactions.get(transactional_id or "")
        if transaction is None or transaction.producer_id != producer.producer_id:
            raise KafkaError(ErrorCode.invalid_producer_id_mapping)
        if transaction.epoch != producer.epoch:
            raise KafkaError(ErrorCode.invalid_producer_epoch)
        if transaction.state is not TransactionState.ONGOING or key not in transaction.partitions:
            raise KafkaError(ErrorCode.invalid_txn_state, "the partition was not added to the transaction")

    async def end(self, transactional_id: str, producer: ProducerIdentity, *, commit: bool) -> None:
        """Commit or abort; returns when it is complete, markers and offsets included."""
        transaction = self._current(transactional_id, producer)
        if transaction.state is TransactionState.ONGOING:
            await self._end(transaction, commit=commit)
            return
        repeated = TransactionState.COMPLETE_COMMIT if commit else TransactionState.COMPLETE_ABORT
        if transaction.state is not repeated:
            raise KafkaError(ErrorCode.invalid_txn_state)

    @property
    def next_deadline_ms(self) -> int | None:
        """When the oldest open transaction times out."""
        return min(
            (each.started_ms + each.timeout_ms for each in self._transactions.values() if _is_open(each)), default=None
        )

    async def abort_overdue(self) -> None:
        """Abort what is older than its time-out and fence its producer."""
        now = self._clock()
        for transaction in self.all():
            if _is_open(transaction) and transaction.started_ms + transaction.timeout_ms <= now:
                transaction.epoch += 1
                with suppress(KafkaError):  # it is unfinished then, and tried again
                    await self._end(transaction, commit=False)

    @property
    def has_unfinished(self) -> bool:
        """Whether an end was decided whose markers could not be written (a full disk)."""
        return bool(self._unfinished)

    async def finish_unfinished(self) -> None:
        """Try again to carry out what was decided."""
        for name in self._unfinished - self._ending.keys():
            with suppress(KafkaError):
                await self._finish(self._transactions[name], redo=True)

    def _current(self, transactional_id: str, producer: ProducerIdentity) -> Transaction:
        transaction = self._transactions.get(transactional_id)
        if transaction is None or transaction.producer_id != producer.producer_id:
            raise KafkaError(ErrorCode.invalid_producer_id_mapping)
        if transaction.epoch != producer.epoch:
            raise KafkaError(ErrorCode.producer_fenced)
        if transaction.state in _PREPARED:
            raise KafkaError(ErrorCode.concurrent_transactions)
        return transaction

    def _begin(self, transaction: Transaction) -> None:
        if transaction.state is not TransactionState.ONGOING:
            transaction.state = TransactionState.ONGOING
            transaction.started_ms = self._clock()

    async def _end(self, transaction: Transaction, *, commit: bool) -> None:
        transaction.state = TransactionState.PREPARE_COMMIT if commit else TransactionState.PREPARE_ABORT
        self._save(transaction)
        if not self._flusher.enabled:
            # Nothing to wait for, so it ends within this turn of the loop.
            await self._finish(transaction)
            return
        # A task of its own: the end goes on when the client that asked for it is gone.
        task = self._ending[transaction.id] = asyncio.create_task(self._finish(transaction))
        task.add_done_callback(lambda _: self._ending.pop(transaction.id, None))
        await asyncio.shield(task)

    async def _finish(self, transaction: Transaction, *, redo: bool = False) -> None:
        self._unfinished.add(transaction.id)
        await self._flusher.flush()
        commit = transaction.state is TransactionState.PREPARE_COMMIT
        for name, partition in sorted(transaction.partitions):
            topic = self._topics.get(name)
            if topic is None or partition >= len(topic.logs):
                continue  # deleted meanwhile
            log = topic.logs[partition]
            if redo and not log.producers.is_open(transaction.producer_id):
                continue  # its marker was written before the stop, or it had no records
            log.append_marker(transaction.producer_id, transaction.epoch, COMMIT if commit else ABORT)
            self._flusher.mark(log)
        await self._flusher.flush()
        with self._database.transaction():
            self._offsets.end_pending(transaction.id, commit=commit)
            transaction.state = TransactionState.COMPLETE_COMMIT if commit else TransactionState.COMPLETE_ABORT
            transaction.partitions.clear()
            transaction.groups.clear()
            self._save(transaction)
        self._unfinished.discard(transaction.id)
        await self._flusher.flush()

    def _save(self, transaction: Transaction) -> None:
        self._database.execute(
            "INSERT OR REPLACE INTO transactions VALUES (?, ?, ?)",
            (transaction.id, transaction.producer_id, msgspec.msgpack.encode(transaction)),
        )

    def _new_id(self) -> int:
        if self._next_id >= self._id_block_end:
            self._id_block_end = self._next_id + _PRODUCER_ID_BLOCK
            self._database.set_meta("producer_ids", str(self._id_block_end))
        self._next_id += 1
        return self._next_id - 1


def _is_open(transaction: Transaction) -> bool:
    return transaction.state is TransactionState.ONGOING
