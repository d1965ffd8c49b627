"""Producer ids and transactions.

Promises: a fenced producer is told so with the code its version of the request knows.
"""

from collections.abc import Mapping
from typing import Any

from polar.broker.errors import ErrorCode, KafkaError
from polar.broker.handlers.context import Parts, RequestContext, as_duration, as_time, milliseconds
from polar.broker.transactions import ProducerIdentity

__all__ = ["TransactionHandlers"]


class TransactionHandlers:
    """Handlers of the transaction coordinator's APIs."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._transactions = parts.transactions

    async def init_producer_id(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        try:
            if request.transactional_id is None:
                producer = self._transactions.new_producer()
            else:
                known = None
                if context.version >= 3 and request.producer_id >= 0:
                    known = ProducerIdentity(request.producer_id, request.producer_epoch)
                producer = await self._transactions.init_producer(
                    request.transactional_id, milliseconds(request.transaction_timeout), known
                )
        except KafkaError as error:
            return {"error_code": _fenced(error.code, context.version < 4), "producer_id": -1, "producer_epoch": -1}
        await self._parts.flusher.flush()
        return {"producer_id": producer.producer_id, "producer_epoch": producer.epoch}

    async def add_partitions_to_txn(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        topics = request.v3_and_below_topics
        keys = {(topic.name, index) for topic in topics for index in topic.partitions}
        unknown = set()
        for name, index in keys:
            try:
                self._parts.topics.log(name, index)
            except KafkaError:
                unknown.add((name, index))
        code = ErrorCode.none
        if not unknown:
            try:
                self._transactions.add_partitions(
                    request.v3_and_below_transactional_id,
                    ProducerIdentity(request.v3_and_below_producer_id, request.v3_and_below_producer_epoch),
                    keys,
                )
                self._parts.transactions_changed()
            except KafkaError as error:
                code = _fenced(error.code, context.version < 2)
        await self._parts.flusher.flush()

        def code_of(key: tuple[str, int]) -> ErrorCode:
            if not unknown:
                return code
            return ErrorCode.unknown_topic_or_partition if key in unknown else ErrorCode.operation_not_attempted

        return {
            "results_by_topic_v3_and_below": [
                {
                    "name": topic.name,
                    "results_by_partition": [
                        {"partition_index": index, "partition_error_code": code_of((topic.name, index))}
                        for index in topic.partitions
                    ],
                }
                for topic in topics
            ]
        }

    async def add_offsets_to_txn(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        try:
            self._transactions.add_group(
                request.transactional_id,
                ProducerIdentity(request.producer_id, request.producer_epoch),
                request.group_id,
            )
        except KafkaError as error:
            return {"error_code": _fenced(error.code, context.version < 2)}
        self._parts.transactions_changed()
        await self._parts.flusher.flush()
        return {}

    async def end_txn(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        try:
            await self._transactions.end(
                request.transactional_id,
                ProducerIdentity(request.producer_id, request.producer_epoch),
                commit=request.committed,
            )
        except KafkaError as error:
            return {"error_code": _fenced(error.code, context.version < 2)}
        return {}

    async def list_transactions(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        states, producers = set(request.state_filters), set(request.producer_id_filters)
        shortest = getattr(request, "duration_filter", -1)
        now = self._parts.clock()
        return {
            "transaction_states": [
                {
                    "transactional_id": each.id,
                    "producer_id": each.producer_id,
                    "transaction_state": each.state.value,
                }
                for each in self._transactions.all()
                if (not states or each.state.value in states)
                and (not producers or each.producer_id in producers)
                and (shortest < 0 or now - each.started_ms > shortest)
            ]
        }

    async def describe_transactions(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        return {"transaction_states": [self._described(name) for name in request.transactional_ids]}

    def _described(self, transactional_id: str) -> dict[str, Any]:
        each = self._transactions.get(transactional_id)
        if each is None:
            return {
                "error_code": ErrorCode.transactional_id_not_found,
                "transactional_id": transactional_id,
                "transaction_state": "",
                "transaction_timeout": as_duration(0),
                "transaction_start_time": as_time(0),
                "producer_id": -1,
                "producer_epoch": -1,
                "topics": [],
            }
        topics: dict[str, list[int]] = {}
        for name, index in sorted(each.partitions):
            topics.setdefault(name, []).append(index)
        return {
            "transactional_id": each.id,
            "transaction_state": each.state.value,
            "transaction_timeout": as_duration(each.timeout_ms),
            "transaction_start_time": as_time(each.started_ms),
            "producer_id": each.producer_id,
            "producer_epoch": each.epoch,
            "topics": [{"topic": name, "partitions": indexes} for name, indexes in topics.items()],
        }


def _fenced(code: ErrorCode, is_old_version: bool) -> ErrorCode:
    if code is ErrorCode.producer_fenced and is_old_version:
        return ErrorCode.invalid_producer_epoch
    return code
