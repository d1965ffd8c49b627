"""Consumer groups and committed offsets.

Promises: every answer carries the error of its own group, topic or partition; a commit is durable before its answer.
"""

from collections.abc import Mapping
from typing import Any

from polar.broker.errors import ErrorCode, KafkaError
from polar.broker.group import Group
from polar.broker.group_store import CommittedOffset
from polar.broker.handlers.context import UNAUTHORISED_OPERATIONS, Parts, RequestContext
from polar.broker.membership import JoinRequest, Member, MemberIdRequired, State
from polar.broker.transactions import ProducerIdentity

__all__ = ["GroupHandlers"]

GROUP_KEY, TRANSACTION_KEY = 0, 1


class GroupHandlers:
    """Handlers of the group coordinator's APIs."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._groups = parts.groups
        self._offsets = parts.groups.store

    async def find_coordinator(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        node = self._parts.node
        known = getattr(request, "key_type", GROUP_KEY) in (GROUP_KEY, TRANSACTION_KEY)
        place: dict[str, Any] = {"node_id": node.id, "host": node.host, "port": node.port, "error_message": None}
        if not known:
            place = {
                "node_id": -1,
                "host": "",
                "port": -1,
                "error_code": ErrorCode.invalid_request,
                "error_message": "This broker coordinates groups and transactions only.",
            }
        if context.version >= 4:
            return {"coordinators": [{"key": key, **place} for key in request.coordinator_keys]}
        return place

    async def join_group(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        session = request.session_timeout.total_seconds()
        rebalance = getattr(request, "rebalance_timeout", None)
        asked = JoinRequest(
            member_id=request.member_id,
            instance_id=getattr(request, "group_instance_id", None),
            client_id=context.client_id,
            client_host=context.client_host,
            session_timeout=session,
            # Version 0 has no time-out of its own for rebalances.
            rebalance_timeout=rebalance.total_seconds() if context.version >= 1 and rebalance is not None else session,
            protocol_type=request.protocol_type,
            protocols=[(each.name, each.metadata) for each in request.protocols],
            needs_known_id=context.version >= 4,
            may_skip_assignment=context.version >= 9,
        )
        answer: dict[str, Any] = {
            "member_id": request.member_id,
            "leader": "",
            "members": [],
            "generation_id": -1,
            "protocol_name": None if context.version >= 7 else "",
        }
        try:
            joined = await self._groups.join(request.group_id, asked)
        except MemberIdRequired as error:
            return answer | {"error_code": error.code, "member_id": error.member_id}
        except KafkaError as error:
            return answer | {"error_code": error.code}
        await self._parts.flusher.flush()
        return {
            "generation_id": joined.generation,
            "protocol_type": joined.protocol_type,
            "protocol_name": joined.protocol,
            "leader": joined.leader,
            "skip_assignment": joined.skip_assignment,
            "member_id": joined.member_id,
            "members": [
                {"member_id": member_id, "group_instance_id": instance_id, "metadata": metadata}
                for member_id, instance_id, metadata in joined.members
            ],
        }

    async def sync_group(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        try:
            synced = await self._groups.sync(
                request.group_id,
                request.member_id,
                getattr(request, "group_instance_id", None),
                request.generation_id,
                (getattr(request, "protocol_type", None), getattr(request, "protocol_name", None)),
                {each.member_id: each.assignment for each in request.assignments},
            )
        except KafkaError as error:
            return {"error_code": error.code, "assignment": b""}
        await self._parts.flusher.flush()
        return {
            "protocol_type": synced.protocol_type,
            "protocol_name": synced.protocol,
            "assignment": synced.assignment,
        }

    async def heartbeat(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        try:
            self._groups.heartbeat(
                request.group_id,
                request.member_id,
                getattr(request, "group_instance_id", None),
                request.generation_id,
            )
        except KafkaError as error:
            return {"error_code": error.code}
        return {}

    async def leave_group(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        if context.version < 3:
            try:
                self._groups.leave(request.group_id, request.member_id, None)
            except KafkaError as error:
                return {"error_code": error.code}
            return {}
        members = []
        for each in request.members:
            answer: dict[str, Any] = {"member_id": each.member_id, "group_instance_id": each.group_instance_id}
            try:
                self._groups.leave(request.group_id, each.member_id, each.group_instance_id)
            except KafkaError as error:
                answer["error_code"] = error.code
            members.append(answer)
        return {"members": members}

    async def offset_commit(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        refused: ErrorCode | None = None
        try:
            self._groups.check_commit(
                request.group_id,
                request.member_id,
                getattr(request, "group_instance_id", None),
                request.generation_id_or_member_epoch,
            )
        except KafkaError as error:
            refused = error.code
        accepted, topics = self._sorted_out(request.topics, refused)
        self._offsets.commit(request.group_id, accepted)
        await self._parts.flusher.flush()
        return {"topics": topics}

    async def txn_offset_commit(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        # Beside the producer, version 3 names the group's member, so that an old generation is refused.
        refused: ErrorCode | None = None
        try:
            self._groups.check_commit(
                request.group_id,
                getattr(request, "member_id", ""),
                getattr(request, "group_instance_id", None),
                getattr(request, "generation_id", -1),
                transactional=True,
            )
        except KafkaError as error:
            refused = error.code
        accepted, topics = self._sorted_out(request.topics, refused)
        try:
            self._parts.transactions.add_offsets(
                request.transactional_id,
                ProducerIdentity(request.producer_id, request.producer_epoch),
                request.group_id,
                accepted,
            )
        except KafkaError as error:
            _, topics = self._sorted_out(request.topics, error.code)
        await self._parts.flusher.flush()
        return {"topics": topics}

    def _sorted_out(self, topics: Any, refused: ErrorCode | None) -> tuple[list[CommittedOffset], list[dict[str, Any]]]:
        """The offsets that can be committed, and the answer for all of them."""
        accepted = []
        answers = []
        for topic in topics:
            partitions = []
            for each in topic.partitions:
                answer: dict[str, Any] = {"partition_index": each.partition_index}
                partitions.append(answer)
                metadata = each.committed_metadata or ""
                try:
                    if refused is not None:
                        raise KafkaError(refused)
                    self._parts.topics.log(topic.name, each.partition_index)
                    if len(metadata) > self._parts.settings.offset_metadata_max_bytes:
                        raise KafkaError(ErrorCode.offset_metadata_too_large)
                except KafkaError as error:
                    answer["error_code"] = error.code
                    continue
                epoch = getattr(each, "committed_leader_epoch", -1)
                accepted.append(
                    CommittedOffset(topic.name, each.partition_index, each.committed_offset, epoch, metadata)
                )
            answers.append({"name": topic.name, "partitions": partitions})
        return accepted, answers

    async def offset_fetch(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        stable = getattr(request, "require_stable", False)
        if context.version >= 8:
            return {
                "groups": [
                    {"group_id": each.group_id, "topics": self._committed(each.group_id, each.topics, stable=stable)}
                    for each in request.groups
                ]
            }
        return {"topics": self._committed(request.group_id, request.topics, stable=stable)}

    def _committed(self, group: str, topics: Any, *, stable: bool) -> list[dict[str, Any]]:
        if topics is None:
            asked: dict[str, list[int]] = {}
            for row in self._offsets.offsets(group):
                asked.setdefault(row.topic, []).append(row.partition)
        else:
            asked = {topic.name: list(topic.partition_indexes) for topic in topics}
        return [
            {"name": name, "partitions": [self._committed_offset(group, name, each, stable) for each in partitions]}
            for name, partitions in asked.items()
        ]

    def _committed_offset(self, group: str, topic: str, partition: int, stable: bool) -> dict[str, Any]:
        if stable and self._offsets.is_pending(group, topic, partition):
            return {
                "partition_index": partition,
                "committed_offset": -1,
                "metadata": "",
                "error_code": ErrorCode.unstable_offset_commit,
            }
        row = self._offsets.offset(group, topic, partition)
        return {
            "partition_index": partition,
            "committed_offset": row.offset if row else -1,
            "committed_leader_epoch": row.leader_epoch if row else -1,
            "metadata": row.metadata if row else "",
        }

    async def offset_delete(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        group = self._groups.get(request.group_id)
        if group is None:
            return {"error_code": ErrorCode.group_id_not_found, "topics": []}
        if group.state is not State.EMPTY and group.protocol_type != "consumer":
            return {"error_code": ErrorCode.non_empty_group, "topics": []}
        subscribed = _subscriptions(group)
        topics = []
        for topic in request.topics:
            partitions = []
            for each in topic.partitions:
                answer: dict[str, Any] = {"partition_index": each.partition_index}
                if topic.name in subscribed:
                    answer["error_code"] = ErrorCode.group_subscribed_to_topic
                else:
                    self._offsets.delete_offset(request.group_id, topic.name, each.partition_index)
                partitions.append(answer)
            topics.append({"name": topic.name, "partitions": partitions})
        await self._parts.flusher.flush()
        return {"topics": topics}

    async def list_groups(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        states = {state.lower() for state in getattr(request, "states_filter", ())}
        types = {kind.lower() for kind in getattr(request, "types_filter", ())}
        groups = []
        for name in self._groups.names():
            group = self._groups.get(name)
            if group is None or (states and group.state.value.lower() not in states):
                continue
            if types and "classic" not in types:
                continue
            groups.append(
                {
                    "group_id": name,
                    "protocol_type": group.protocol_type or "",
                    "group_state": group.state.value,
                    "group_type": "classic",
                }
            )
        return {"groups": groups}

    async def describe_groups(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        groups = []
        for name in request.groups:
            group = self._groups.get(name)
            answer: dict[str, Any] = {
                "group_id": name,
                "group_state": "Dead",
                "protocol_type": "",
                "protocol_data": "",
                "members": [],
                "authorized_operations": UNAUTHORISED_OPERATIONS,
            }
            if group is not None:
                answer |= {
                    "group_state": group.state.value,
                    "protocol_type": group.protocol_type or "",
                    "protocol_data": (group.protocol or "") if group.state is State.STABLE else "",
                    "members": [_described(member, group) for member in group.members.values()],
                }
            groups.append(answer)
        return {"groups": groups}

    async def delete_groups(self, request: Any, context: RequestContext) -> Mapping[str, Any]:
        results = []
        for name in request.groups_names:
            answer: dict[str, Any] = {"group_id": name}
            try:
                self._groups.delete(name)
            except KafkaError as error:
                answer["error_code"] = error.code
            results.append(answer)
        await self._parts.flusher.flush()
        return {"results": results}


def _described(member: Member, group: Group) -> dict[str, Any]:
    settled = group.state is State.STABLE
    return {
        "member_id": member.id,
        "group_instance_id": member.instance_id,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "member_metadata": member.metadata(group.protocol) if settled else b"",
        "member_assignment": member.assignment if settled else b"",
    }


def _subscriptions(group: Group) -> set[str]:
    """Topics that members of a consumer group name in their metadata (version, then an array of strings)."""
    topics = set()
    for member in group.members.values():
        for _, metadata in member.protocols:
            count = int.from_bytes(metadata[2:6], "big", signed=True)
            position = 6
            for _ in range(count):
                size = int.from_bytes(metadata[position : position + 2], "big")
                topics.add(metadata[position + 2 : position + 2 + size].decode())
                position += 2 + size
    return topics
