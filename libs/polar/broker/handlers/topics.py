"""Metadata, topics and their configs.

Promises: a topic is never created by being asked for; one bad topic in a request does not fail the others.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from polar.broker.configs import ConfigType
from polar.broker.errors import ErrorCode, KafkaError
from polar.broker.handlers.context import UNAUTHORISED_OPERATIONS, Parts, RequestContext
from polar.broker.topics import Topic, check_topic_name

__all__ = ["TopicHandlers"]

TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4
SET_BY_TOPIC, SET_BY_BROKER, DEFAULT = 1, 4, 5
OP_SET, OP_DELETE, OP_APPEND, OP_SUBTRACT = range(4)


class TopicHandlers:
    """Handlers of metadata and topic administration. `discard` takes the directories of deleted topics."""

    def __init__(self, parts: Parts, discard: Callable[[Any], None]) -> None:
        self._parts = parts
        self._node = parts.node
        self._topics = parts.topics
        self._discard = discard

    async def metadata(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        if request.topics is None or (context.version == 0 and not request.topics):
            topics = [self._describe(topic) for topic in self._topics]
        else:
            topics = [self._find(each, context.version) for each in request.topics]
        node = self._node
        return {
            "brokers": [{"node_id": node.id, "host": node.host, "port": node.port}],
            "cluster_id": node.cluster_id,
            "controller_id": node.id,
            "topics": topics,
        }

    def _find(self, asked: Any, version: int) -> dict[str, Any]:
        by_id = asked.name is None
        topic = self._topics.by_id(asked.topic_id) if by_id else self._topics.get(asked.name)
        if topic is not None:
            return self._describe(topic)
        code = ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition
        if not by_id:
            try:
                check_topic_name(asked.name)
            except KafkaError as error:
                code = error.code
        name = asked.name if asked.name is not None or version >= 12 else ""
        return {"error_code": code, "name": name, "topic_id": getattr(asked, "topic_id", None), "partitions": []}

    def _describe(self, topic: Topic) -> dict[str, Any]:
        replicas = (self._node.id,)
        return {
            "name": topic.name,
            "topic_id": topic.id,
            "partitions": [
                {
                    "partition_index": log.partition,
                    "leader_id": self._node.id,
                    "leader_epoch": 0,
                    "replica_nodes": replicas,
                    "isr_nodes": replicas,
                }
                for log in topic.logs
            ],
            "topic_authorized_operations": UNAUTHORISED_OPERATIONS,
        }

    async def describe_cluster(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        node = self._node
        return {
            "cluster_id": node.cluster_id,
            "controller_id": node.id,
            "brokers": [{"broker_id": node.id, "host": node.host, "port": node.port}],
            "cluster_authorized_operations": UNAUTHORISED_OPERATIONS,
        }

    async def create_topics(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        names = [each.name for each in request.topics]
        answers = []
        for name in dict.fromkeys(names):
            asked = next(each for each in request.topics if each.name == name)
            answer: dict[str, Any] = {"name": name, "topic_id": None, "configs": None}
            try:
                if names.count(name) > 1:
                    raise KafkaError(ErrorCode.invalid_request, "Duplicate topic name.")
                topic = self._create(asked, validate_only=request.validate_only)
            except KafkaError as error:
                answer |= {"error_code": error.code, "error_message": error.message}
            else:
                count = len(topic.logs) or self._partition_count(asked)
                answer |= {
                    "topic_id": topic.id,
                    "num_partitions": count,
                    "replication_factor": 1,
                    "configs": [self._config(name, topic.configs) for name in self._topics.specs],
                }
            answers.append(answer)
        await self._parts.flusher.flush()
        return {"topics": answers}

    def _partition_count(self, asked: Any) -> int:
        if asked.assignments:
            return len(asked.assignments)
        return self._parts.settings.default_partitions if asked.num_partitions == -1 else int(asked.num_partitions)

    def _create(self, asked: Any, *, validate_only: bool) -> Topic:
        partitions = asked.num_partitions
        if asked.assignments:
            if asked.num_partitions != -1 or asked.replication_factor != -1:
                raise KafkaError(
                    ErrorCode.invalid_request, "Both a manual assignment and a number of partitions or replicas is set."
                )
            indexes = sorted(each.partition_index for each in asked.assignments)
            if indexes != list(range(len(indexes))) or any(
                tuple(each.broker_ids) != (self._node.id,) for each in asked.assignments
            ):
                raise KafkaError(ErrorCode.invalid_replica_assignment, f"The only broker is {self._node.id}.")
            partitions = len(indexes)
        elif asked.replication_factor not in (-1, 1):
            raise KafkaError(
                ErrorCode.invalid_replication_factor,
                f"Unable to replicate the partition {asked.replication_factor} time(s): there is 1 broker.",
            )
        configs = {each.name: each.value for each in asked.configs}
        return self._topics.create(asked.name, partitions, configs, validate_only=validate_only)

    async def create_partitions(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        answers = []
        for asked in request.topics:
            answer: dict[str, Any] = {"name": asked.name}
            try:
                self._topics.add_partitions(asked.name, asked.count, validate_only=request.validate_only)
            except KafkaError as error:
                answer |= {"error_code": error.code, "error_message": error.message}
            answers.append(answer)
        await self._parts.flusher.flush()
        return {"results": answers}

    async def delete_topics(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        if context.version >= 6:
            asked = [(each.name, each.topic_id) for each in request.topics]
        else:
            asked = [(name, None) for name in request.topic_names]
        answers = []
        for name, topic_id in asked:
            topic = self._topics.get(name) if name is not None else self._topics.by_id(topic_id)
            answer: dict[str, Any] = {"name": name, "topic_id": topic_id}
            if topic is None:
                code = ErrorCode.unknown_topic_or_partition if name is not None else ErrorCode.unknown_topic_id
                answer |= {"error_code": code, "error_message": "This server does not host this topic."}
            else:
                answer |= {"name": topic.name, "topic_id": topic.id}
                self._discard(self._topics.delete(topic.name))
            answers.append(answer)
        await self._parts.flusher.flush()
        return {"responses": answers}

    async def describe_configs(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        results = []
        for resource in request.resources:
            answer: dict[str, Any] = {
                "resource_type": resource.resource_type,
                "resource_name": resource.resource_name,
                "error_message": None,
                "configs": [],
            }
            try:
                configs = self._configs_of(resource)
                wanted = resource.configuration_keys
                answer["configs"] = [each for each in configs if wanted is None or each["name"] in wanted]
            except KafkaError as error:
                answer |= {"error_code": error.code, "error_message": error.message}
            results.append(answer)
        return {"results": results}

    def _configs_of(self, resource: Any) -> list[dict[str, Any]]:
        if resource.resource_type == TOPIC_RESOURCE:
            topic = self._topics.get(resource.resource_name)
            if topic is None:
                raise KafkaError(ErrorCode.unknown_topic_or_partition)
            return [self._config(name, topic.configs) for name in self._topics.specs]
        if resource.resource_type == BROKER_RESOURCE:
            if resource.resource_name not in ("", str(self._node.id)):
                raise KafkaError(ErrorCode.invalid_request, f"The only broker is {self._node.id}.")
            return [_broker_config(name, value) for name, value in self._broker_configs().items()]
        raise KafkaError(ErrorCode.invalid_request, f"No configs for resource type {resource.resource_type}.")

    def _broker_configs(self) -> dict[str, str]:
        settings = self._parts.settings
        return {
            "auto.create.topics.enable": "false",
            "broker.id": str(self._node.id),
            "default.replication.factor": "1",
            "group.max.session.timeout.ms": str(settings.max_session_timeout_ms),
            "group.min.session.timeout.ms": str(settings.min_session_timeout_ms),
            "log.retention.ms": str(settings.retention_ms),
            "log.segment.bytes": str(settings.segment_bytes),
            "message.max.bytes": str(settings.message_max_bytes),
            "num.partitions": str(settings.default_partitions),
            "socket.request.max.bytes": str(settings.max_request_bytes),
            "transaction.max.timeout.ms": str(settings.max_transaction_timeout_ms),
        }

    def _config(self, name: str, values: Mapping[str, str]) -> dict[str, Any]:
        spec = self._topics.specs[name]
        own = values.get(name)
        synonyms = [{"name": name, "value": spec.default, "source": DEFAULT}]
        if own is not None:
            synonyms.insert(0, {"name": name, "value": own, "source": SET_BY_TOPIC})
        return {
            "name": name,
            "value": spec.default if own is None else own,
            "read_only": False,
            "is_default": own is None,
            "config_source": DEFAULT if own is None else SET_BY_TOPIC,
            "is_sensitive": False,
            "synonyms": synonyms,
            "config_type": int(spec.type),
            "documentation": None,
        }

    async def alter_configs(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        return await self._alter(
            request, lambda resource, current: {each.name: each.value for each in resource.configs}
        )

    async def incremental_alter_configs(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        return await self._alter(request, self._incremented)

    async def _alter(
        self, request: Any, altered: Callable[[Any, dict[str, str]], Mapping[str, str | None]]
    ) -> Mapping[str, Any]:
        responses = []
        for resource in request.resources:
            answer: dict[str, Any] = {
                "resource_type": resource.resource_type,
                "resource_name": resource.resource_name,
                "error_message": None,
            }
            try:
                if resource.resource_type != TOPIC_RESOURCE:
                    raise KafkaError(ErrorCode.invalid_request, "Only the configs of topics can be changed.")
                topic = self._topics.get(resource.resource_name)
                if topic is None:
                    raise KafkaError(ErrorCode.unknown_topic_or_partition)
                values = altered(resource, topic.configs)
                self._topics.set_configs(topic.name, values, validate_only=request.validate_only)
            except KafkaError as error:
                answer |= {"error_code": error.code, "error_message": error.message}
            responses.append(answer)
        await self._parts.flusher.flush()
        return {"responses": responses}

    def _incremented(self, resource: Any, current: dict[str, str]) -> dict[str, str | None]:
        values: dict[str, str | None] = dict(current)
        for change in resource.configs:
            spec = self._topics.specs.get(change.name)
            if spec is None:
                raise KafkaError(ErrorCode.invalid_config, f"Unknown topic config name: {change.name}")
            if change.config_operation == OP_DELETE:
                values.pop(change.name, None)
            elif change.config_operation == OP_SET:
                values[change.name] = change.value
            elif spec.type is not ConfigType.LIST:
                raise KafkaError(ErrorCode.invalid_config, f"{change.name} is not a list, so nothing can be added.")
            else:
                items = [item for item in (values.get(change.name) or spec.default).split(",") if item]
                for item in (change.value or "").split(","):
                    if change.config_operation == OP_APPEND and item not in items:
                        items.append(item)
                    elif change.config_operation == OP_SUBTRACT:
                        with suppress(ValueError):
                            items.remove(item)
                values[change.name] = ",".join(items)
        return values

    async def describe_log_dirs(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        wanted = None
        if request.topics is not None:
            wanted = {(topic.topic, index) for topic in request.topics for index in topic.partitions}
        topics = []
        for topic in self._topics:
            partitions = [
                {"partition_index": log.partition, "partition_size": log.size, "offset_lag": 0, "is_future_key": False}
                for log in topic.logs
                if wanted is None or (topic.name, log.partition) in wanted
            ]
            if partitions:
                topics.append({"name": topic.name, "partitions": partitions})
        return {"results": [{"log_dir": str(self._parts.settings.directory), "topics": topics}]}


def _broker_config(name: str, value: str) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "read_only": True,
        "is_default": False,
        "config_source": SET_BY_BROKER,
        "is_sensitive": False,
        "synonyms": [],
        "config_type": int(ConfigType.STRING),
        "documentation": None,
    }
