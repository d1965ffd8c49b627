"""What one partition knows of its producers: the last batches of each (de-duplication) and open transactions.

Promises: a replayed batch is recognised among the last five of its producer, a gap or an old epoch is refused, and
the first offset of an open transaction is known (the last stable offset follows from it). A pure state machine: it
is rebuilt by replaying batch headers in log order, and saved as bytes. Knows nothing of transactional ids.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from polar.broker.batch import ABORT, BatchHeader
from polar.broker.errors import ErrorCode, KafkaError

__all__ = ["AbortedTransaction", "AppendedBatch", "ProducerState", "ProducerStates"]

KEPT_BATCHES = 5
"""As many batches as an idempotent producer may have in flight, so any retry of them is recognised."""


class AppendedBatch(NamedTuple):
    first_sequence: int
    last_sequence: int
    base_offset: int
    timestamp: int


class AbortedTransaction(NamedTuple):
    """Offsets of a producer's aborted transaction: its first record and its marker."""

    producer_id: int
    first_offset: int
    last_offset: int


@dataclass(slots=True)
class ProducerState:
    epoch: int
    last_ms: int
    first_offset: int | None = None
    """First offset of the open transaction; None when none is open."""
    batches: deque[AppendedBatch] = field(default_factory=lambda: deque(maxlen=KEPT_BATCHES))


_Saved = list[tuple[int, int, int, int | None, list[AppendedBatch]]]


class ProducerStates:
    """All producers of one partition, by producer id."""

    def __init__(self) -> None:
        self._states: dict[int, ProducerState] = {}
        self._open: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._states)

    @property
    def first_unstable(self) -> int | None:
        """The first offset of the oldest open transaction."""
        return min(self._open.values()) if self._open else None

    def is_open(self, producer_id: int) -> bool:
        return producer_id in self._open

    def items(self) -> list[tuple[int, ProducerState]]:
        """Every known producer by id."""
        return list(self._states.items())

    def check(self, header: BatchHeader) -> AppendedBatch | None:
        """The batch that `header` repeats, or None when it is new and in order.

        Raises `KafkaError`: INVALID_PRODUCER_EPOCH for an old epoch, OUT_OF_ORDER_SEQUENCE_NUMBER for a gap,
        INVALID_TXN_STATE for a plain batch inside the producer's open transaction. A producer that the partition
        does not know (or no longer: expired, deleted) may start at any sequence, as on Apache Kafka.
        """
        state = self._states.get(header.producer_id)
        if state is None:
            return None
        if header.producer_epoch < state.epoch:
            raise KafkaError(
                ErrorCode.invalid_producer_epoch,
                f"producer {header.producer_id} has epoch {state.epoch}; {header.producer_epoch} is fenced",
            )
        if state.first_offset is not None and not header.is_transactional:
            raise KafkaError(ErrorCode.invalid_txn_state, "a plain batch inside the producer's open transaction")
        if header.producer_epoch > state.epoch:
            if header.base_sequence != 0:
                raise KafkaError(
                    ErrorCode.out_of_order_sequence_number,
                    f"sequence {header.base_sequence} is not 0 at the start of epoch {header.producer_epoch}",
                )
            return None
        for known in state.batches:
            if known.first_sequence == header.base_sequence and known.last_sequence == header.last_sequence:
                return known
        if state.batches and header.base_sequence != (state.batches[-1].last_sequence + 1) & 0x7FFFFFFF:
            raise KafkaError(
                ErrorCode.out_of_order_sequence_number,
                f"producer {header.producer_id}: sequence {header.base_sequence} after "
                f"{state.batches[-1].last_sequence}",
            )
        if not state.batches and header.base_sequence != 0:
            # Only a marker is known of this epoch, so its first batch is still to come.
            raise KafkaError(ErrorCode.out_of_order_sequence_number, "the first sequence of an epoch is 0")
        return None

    def record(self, header: BatchHeader, base_offset: int, now_ms: int) -> None:
        """Note a data batch that was appended at `base_offset`."""
        state = self._states.get(header.producer_id)
        if state is None or state.epoch != header.producer_epoch:
            first = state.first_offset if state is not None else None
            state = self._states[header.producer_id] = ProducerState(header.producer_epoch, now_ms, first)
        state.last_ms = now_ms
        state.batches.append(
            AppendedBatch(header.base_sequence, header.last_sequence, base_offset, header.max_timestamp)
        )
        if header.is_transactional and state.first_offset is None:
            state.first_offset = base_offset
            self._open[header.producer_id] = base_offset

    def complete(
        self, producer_id: int, epoch: int, kind: int, marker_offset: int, now_ms: int
    ) -> AbortedTransaction | None:
        """Note a marker; returns the transaction it aborted, if it had records here."""
        first = self._open.pop(producer_id, None)
        state = self._states.get(producer_id)
        if state is None or epoch > state.epoch:
            state = self._states[producer_id] = ProducerState(epoch, now_ms)
        state.first_offset = None
        state.last_ms = now_ms
        if first is None or kind != ABORT:
            return None
        return AbortedTransaction(producer_id, first, marker_offset)

    def expire(self, before_ms: int) -> None:
        """Forget producers that wrote nothing since `before_ms` and have no open transaction."""
        gone = [key for key, state in self._states.items() if state.last_ms < before_ms and key not in self._open]
        for key in gone:
            del self._states[key]

    def to_bytes(self) -> bytes:
        saved: _Saved = [
            (key, state.epoch, state.last_ms, state.first_offset, list(state.batches))
            for key, state in self._states.items()
        ]
        return msgspec.msgpack.encode(saved)

    @classmethod
    def from_bytes(cls, data: bytes) -> "ProducerStates":
        states = cls()
        for key, epoch, last_ms, first, batches in msgspec.msgpack.decode(data, type=_Saved):
            states._states[key] = ProducerState(epoch, last_ms, first, deque(batches, maxlen=KEPT_BATCHES))
            if first is not None:
                states._open[key] = first
        return states
