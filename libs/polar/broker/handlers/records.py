"""Produce, fetch and what looks into the logs.

Promises: a produce answers after its batches are as durable as the settings say, whatever its `acks`; a fetch with
nothing to give waits without working. Requests are kio's structs of whatever version, answers plain mappings.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from polar.broker.batch import HEADER_SIZE, read_header
from polar.broker.errors import ErrorCode, KafkaError
from polar.broker.handlers.context import CloseConnection, Parts, RequestContext, as_time
from polar.broker.log import Appended, PartitionLog
from polar.broker.longpoll import FetchWait
from polar.broker.transactions import ProducerIdentity

__all__ = ["RecordHandlers"]

ZSTD = 4
LATEST, EARLIEST, MAX_TIMESTAMP = -1, -2, -3
LEADER_EPOCH = 0


class Gathered(NamedTuple):
    """One pass over a fetch's partitions."""

    topics: list[dict[str, Any]]
    size: int
    failed: bool


class RecordHandlers:
    """Handlers of the APIs that touch records."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._topics = parts.topics
        self._max_fetch = parts.settings.max_fetch_bytes

    async def produce(self, request: Any, context: RequestContext) -> Mapping[str, Any] | None:
        failed: str | None = None
        responses = []
        for topic in request.topic_data:
            answers = []
            for data in topic.partition_data:
                answer: dict[str, Any] = {"index": data.index, "base_offset": -1, "record_errors": ()}
                try:
                    log, appended = self._append(request, topic.name, data, context.version)
                except KafkaError as error:
                    failed = f"{topic.name}-{data.index}: {error}"
                    answer |= {"error_code": error.code, "error_message": error.message}
                else:
                    answer |= {"base_offset": appended.base_offset, "log_start_offset": log.start_offset}
                    if appended.append_time_ms is not None:
                        answer["log_append_time"] = as_time(appended.append_time_ms)
                answers.append(answer)
            responses.append({"name": topic.name, "partition_responses": answers})
        if request.acks == 0:
            if failed is not None:
                raise CloseConnection(f"a write without acknowledgement failed: {failed}")
            self._parts.flusher.flush_soon()
            return None
        await self._parts.flusher.flush()
        return {"responses": responses}

    def _append(self, request: Any, topic: str, data: Any, version: int) -> tuple[PartitionLog, Appended]:
        if request.acks not in (-1, 0, 1):
            raise KafkaError(ErrorCode.invalid_required_acks)
        log = self._topics.log(topic, data.index)
        if request.acks == -1 and log.config.min_insync_replicas > 1:
            raise KafkaError(ErrorCode.not_enough_replicas, "min.insync.replicas is over the one replica there is")
        records = data.records or b""
        if len(records) >= HEADER_SIZE:
            header = read_header(records)
            if header.codec == ZSTD and version < 7:
                raise KafkaError(ErrorCode.unsupported_compression_type, "zstd needs produce version 7")
            if header.is_transactional and not log.producers.is_open(header.producer_id):
                self._parts.transactions.check_write(
                    request.transactional_id,
                    ProducerIdentity(header.producer_id, header.producer_epoch),
                    (topic, data.index),
                )
        appended = log.append(records)
        self._parts.flusher.mark(log)
        return log, appended

    async def fetch(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        if getattr(request, "session_id", 0):
            # Fetch sessions only save bytes on the wire; without them clients name every partition.
            return {"error_code": ErrorCode.fetch_session_id_not_found, "session_id": 0, "responses": []}
        committed = request.isolation_level == 1
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.max_wait.total_seconds()
        while True:
            gathered = self._gather(request, committed=committed)
            left = deadline - loop.time()
            if gathered.size >= request.min_bytes or gathered.failed or left <= 0 or context.hurry.done():
                return {"responses": gathered.topics, "session_id": 0}
            logs = [
                self._topics.log(topic.topic, each.partition) for topic in request.topics for each in topic.partitions
            ]
            wait = FetchWait(logs, request.min_bytes - gathered.size, committed=committed)
            if not await wait.wait(left, context.hurry):
                if gathered.size:
                    return {"responses": self._gather(request, committed=committed).topics, "session_id": 0}
                return {"responses": gathered.topics, "session_id": 0}

    def _gather(self, request: Any, *, committed: bool) -> Gathered:
        limit = min(request.max_bytes, self._max_fetch)
        size = 0
        failed = False
        topics = []
        for topic in request.topics:
            partitions = []
            for each in topic.partitions:
                answer: dict[str, Any] = {"partition_index": each.partition, "records": b""}
                partitions.append(answer)
                try:
                    log = self._topics.log(topic.topic, each.partition)
                except KafkaError as error:
                    failed = True
                    answer |= {"error_code": error.code, "high_watermark": -1}
                    continue
                stable = log.last_stable_offset
                upper = stable if committed else log.high_watermark
                answer |= {
                    "high_watermark": log.high_watermark,
                    "last_stable_offset": stable,
                    "log_start_offset": log.start_offset,
                }
                try:
                    _check_epoch(getattr(each, "current_leader_epoch", -1))
                    if size >= limit:
                        continue
                    room = min(each.partition_max_bytes, limit - size)
                    records = log.read(each.fetch_offset, room, upper, force=not size)
                except KafkaError as error:
                    failed = True
                    answer["error_code"] = error.code
                    continue
                answer["records"] = records
                size += len(records)
                if committed:
                    answer["aborted_transactions"] = [
                        {"producer_id": gone.producer_id, "first_offset": gone.first_offset}
                        for gone in (log.aborted(each.fetch_offset, upper) if records else ())
                    ]
            topics.append({"topic": topic.topic, "partitions": partitions})
        return Gathered(topics, size, failed)

    async def list_offsets(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        committed = getattr(request, "isolation_level", 0) == 1
        topics = []
        for topic in request.topics:
            partitions = []
            for each in topic.partitions:
                answer: dict[str, Any] = {"partition_index": each.partition_index}
                try:
                    log = self._topics.log(topic.name, each.partition_index)
                    _check_epoch(getattr(each, "current_leader_epoch", -1))
                    answer |= _offset_for(log, each.timestamp, committed=committed)
                except KafkaError as error:
                    answer["error_code"] = error.code
                partitions.append(answer)
            topics.append({"name": topic.name, "partitions": partitions})
        return {"topics": topics}

    async def delete_records(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        topics = []
        for topic in request.topics:
            partitions = []
            for each in topic.partitions:
                answer: dict[str, Any] = {"partition_index": each.partition_index, "low_watermark": -1}
                try:
                    log = self._topics.log(topic.name, each.partition_index)
                    if not log.config.delete:
                        raise KafkaError(ErrorCode.policy_violation)
                    answer["low_watermark"] = log.delete_before(each.offset)
                except KafkaError as error:
                    answer["error_code"] = error.code
                partitions.append(answer)
            topics.append({"name": topic.name, "partitions": partitions})
        await self._parts.flusher.flush()
        return {"topics": topics}

    async def offset_for_leader_epoch(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        """There has only ever been one leader epoch, so it ends at the end of the log."""
        topics = []
        for topic in request.topics:
            partitions = []
            for each in topic.partitions:
                answer: dict[str, Any] = {"partition": each.partition}
                try:
                    log = self._topics.log(topic.topic, each.partition)
                    _check_epoch(each.current_leader_epoch)
                    if each.leader_epoch == LEADER_EPOCH:
                        answer |= {"leader_epoch": LEADER_EPOCH, "end_offset": log.high_watermark}
                except KafkaError as error:
                    answer["error_code"] = error.code
                partitions.append(answer)
            topics.append({"topic": topic.topic, "partitions": partitions})
        return {"topics": topics}

    async def describe_producers(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        topics = []
        for topic in request.topics:
            partitions = []
            for index in topic.partition_indexes:
                answer: dict[str, Any] = {"partition_index": index, "active_producers": []}
                try:
                    log = self._topics.log(topic.name, index)
                    answer["active_producers"] = [
                        {
                            "producer_id": producer_id,
                            "producer_epoch": state.epoch,
                            "last_sequence": state.batches[-1].last_sequence if state.batches else -1,
                            "last_timestamp": state.last_ms,
                            "coordinator_epoch": 0,
                            "current_txn_start_offset": -1 if state.first_offset is None else state.first_offset,
                        }
                        for producer_id, state in log.producers.items()
                    ]
                except KafkaError as error:
                    answer["error_code"] = error.code
                partitions.append(answer)
            topics.append({"name": topic.name, "partitions": partitions})
        return {"topics": topics}


def _offset_for(log: PartitionLog, timestamp: int, *, committed: bool) -> dict[str, Any]:
    upper = log.last_stable_offset if committed else log.high_watermark
    if timestamp == LATEST:
        return {"offset": upper, "leader_epoch": LEADER_EPOCH}
    if timestamp == EARLIEST:
        return {"offset": log.start_offset, "leader_epoch": LEADER_EPOCH}
    if timestamp == MAX_TIMESTAMP:
        found = log.latest_time()
    elif timestamp >= 0:
        found = log.offset_for_time(timestamp)
    else:
        raise KafkaError(ErrorCode.unsupported_version, f"no special timestamp {timestamp}")
    if found is None or found.offset >= upper:
        return {}
    return {"timestamp": found.timestamp, "offset": found.offset, "leader_epoch": LEADER_EPOCH}


def _check_epoch(epoch: int) -> None:
    if epoch > LEADER_EPOCH:
        raise KafkaError(ErrorCode.unknown_leader_epoch)
