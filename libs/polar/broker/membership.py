"""What is said between a consumer group and its members, and how a group is kept.

Promises: plain data. Times are seconds on the loop's clock. The rules are in `group`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from polar.broker.errors import ErrorCode, KafkaError

__all__ = ["JoinRequest", "Joined", "Member", "MemberIdRequired", "SavedGroup", "SavedMember", "State", "Synced"]


class State(Enum):
    """Names as DescribeGroups gives them."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


class MemberIdRequired(KafkaError):
    """The answer to a first join: come again with this member id (KIP-394)."""

    def __init__(self, member_id: str) -> None:
        super().__init__(ErrorCode.member_id_required)
        self.member_id = member_id


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """Times are seconds; protocols are (name, metadata) in the member's order of preference."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout: float
    rebalance_timeout: float
    protocol_type: str
    protocols: Sequence[tuple[str, bytes]]
    needs_known_id: bool
    """Version 4 and up: a dynamic member first asks for its id."""
    may_skip_assignment: bool
    """Version 9 and up: a replaced static leader can be told to keep the assignment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    generation: int
    protocol_type: str | None
    protocol: str | None
    leader: str
    member_id: str
    members: Sequence[tuple[str, str | None, bytes]] = ()
    """For the leader: member id, instance id, metadata."""
    skip_assignment: bool = False


@dataclass(frozen=True, slots=True)
class Synced:
    protocol_type: str | None
    protocol: str | None
    assignment: bytes


@dataclass(slots=True, kw_only=True)
class Member:
    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout: float
    rebalance_timeout: float
    protocols: list[tuple[str, bytes]]
    deadline: float
    """When the member is out, unless it waits for an answer of the group or speaks before."""
    assignment: bytes = b""
    joining: asyncio.Future[Joined] | None = None
    syncing: asyncio.Future[Synced] | None = None

    def metadata(self, protocol: str | None) -> bytes:
        return next((metadata for name, metadata in self.protocols if name == protocol), b"")

    @property
    def is_waiting(self) -> bool:
        return self.joining is not None or self.syncing is not None


class SavedMember(msgspec.Struct, array_like=True):
    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout: float
    rebalance_timeout: float
    protocols: list[tuple[str, bytes]]
    assignment: bytes


class SavedGroup(msgspec.Struct, array_like=True):
    """A group as the database keeps it; members only of a stable generation."""

    generation: int
    protocol_type: str | None
    protocol: str | None
    leader: str | None
    members: list[SavedMember]
