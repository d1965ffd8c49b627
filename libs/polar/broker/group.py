"""One consumer group: the classic rebalance protocol as a state machine.

    EMPTY ──join──► PREPARING ──all joined, or time is up──► COMPLETING ──leader's sync──► STABLE
      ▲                 ▲                                         │                          │
      └─ last one left ─┴──────────── join, leave, expiry ────────┴──────────────────────────┘

Promises: a generation has one leader and one protocol that all members support; a member that is silent for its
session time-out is out; a request of an old generation or of an unknown or replaced member is refused. Time is
passed in (seconds, any monotonic clock). Waiting requests are futures; timers and storage belong to `groups`.
"""

import asyncio
from dataclasses import dataclass, field, replace
from typing import TypeVar
from uuid import uuid4

from polar.broker.errors import ErrorCode, KafkaError
from polar.broker.membership import (
    Joined,
    JoinRequest,
    Member,
    MemberIdRequired,
    SavedGroup,
    SavedMember,
    State,
    Synced,
)

__all__ = ["Group"]

T = TypeVar("T")


@dataclass(slots=True)
class Group:
    """Every method that changes something takes `now`. Raises `KafkaError` for what a member did wrong."""

    id: str
    initial_delay: float = 0.0
    max_size: int = 10_000
    state: State = State.EMPTY
    generation: int = 0
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str | None = None
    members: dict[str, Member] = field(default_factory=dict)
    unsaved: bool = False
    """Something changed that has to be found again after a stop."""
    _static: dict[str, str] = field(default_factory=dict)
    _promised: dict[str, float] = field(default_factory=dict)
    """Member ids that were given out and not used yet, with the time they lapse."""
    _rebalance_ends: float | None = None
    _sync_ends: float | None = None
    _is_initial: bool = False

    # Joining

    def join(self, request: JoinRequest, now: float) -> asyncio.Future[Joined]:
        """The member's place in the next generation, once it is settled. Raises also `MemberIdRequired`."""
        names = {name for name, _ in request.protocols}
        if not request.protocol_type or not names or not self._fits(request, names):
            raise KafkaError(ErrorCode.inconsistent_group_protocol)
        if not request.member_id:
            if request.instance_id is not None and request.instance_id in self._static:
                return self._replace(request, now)
            member_id = f"{request.instance_id or request.client_id or 'member'}-{uuid4()}"
            self._check_room()
            if request.instance_id is None and request.needs_known_id:
                self._promised[member_id] = now + request.session_timeout
                raise MemberIdRequired(member_id)
            return self._enter(member_id, request, now)
        if request.member_id in self._promised:
            self._check_room(promised=True)
            del self._promised[request.member_id]
            return self._enter(request.member_id, request, now)
        member = self._member(request.member_id, request.instance_id)
        protocols = list(request.protocols)
        same = member.protocols == protocols
        if self.state is State.PREPARING:
            return self._wait_join(member, request, now)
        if same and (self.state is State.COMPLETING or (self.state is State.STABLE and member.id != self.leader)):
            # A repeated join: the answer got lost, or the member asks again without a change.
            member.deadline = now + member.session_timeout
            return _done(self._joined(member))
        waiting = self._wait_join(member, request, now)
        self._prepare(now)
        return waiting

    def _fits(self, request: JoinRequest, names: set[str]) -> bool:
        others = [member for member in self.members.values() if member.id != request.member_id]
        if not others:
            return True
        common = set.intersection(*({name for name, _ in member.protocols} for member in others))
        return request.protocol_type == self.protocol_type and bool(common & names)

    def _check_room(self, *, promised: bool = False) -> None:
        if len(self.members) + len(self._promised) - promised >= self.max_size:
            raise KafkaError(ErrorCode.group_max_size_reached)

    def _enter(self, member_id: str, request: JoinRequest, now: float) -> asyncio.Future[Joined]:
        member = Member(
            id=member_id,
            instance_id=request.instance_id,
            client_id=request.client_id,
            client_host=request.client_host,
            session_timeout=request.session_timeout,
            rebalance_timeout=request.rebalance_timeout,
            protocols=list(request.protocols),
            deadline=now + request.session_timeout,
        )
        if not self.members:
            self.protocol_type = request.protocol_type
        self.members[member_id] = member
        if request.instance_id is not None:
            self._static[request.instance_id] = member_id
        waiting = self._wait_join(member, request, now)
        if self.state is not State.PREPARING:
            self._prepare(now)
        else:
            self._try_complete(now)
        return waiting

    def _replace(self, request: JoinRequest, now: float) -> asyncio.Future[Joined]:
        """A static member is back under its name: its former self is fenced, the assignment stays if it can."""
        assert request.instance_id is not None
        old = self.members.pop(self._static[request.instance_id])
        _refuse(old, ErrorCode.fenced_instance_id)
        old_leader = self.leader
        member = Member(
            id=f"{request.instance_id}-{uuid4()}",
            instance_id=request.instance_id,
            client_id=request.client_id,
            client_host=request.client_host,
            session_timeout=request.session_timeout,
            rebalance_timeout=request.rebalance_timeout,
            protocols=list(request.protocols),
            deadline=now + request.session_timeout,
            assignment=old.assignment,
        )
        self.members[member.id] = member
        self._static[request.instance_id] = member.id
        if self.leader == old.id:
            self.leader = member.id
        if self.state is State.STABLE and old.metadata(self.protocol) == member.metadata(self.protocol):
            self.unsaved = True
            is_leader = self.leader == member.id
            if is_leader and not request.may_skip_assignment:
                # An older client would assign anew if it were told that it leads.
                return _done(replace(self._joined(member), leader=old_leader or "", members=()))
            return _done(self._joined(member, skip_assignment=is_leader))
        waiting = self._wait_join(member, request, now)
        if self.state is State.PREPARING:
            self._try_complete(now)
        else:
            self._prepare(now)
        return waiting

    def _wait_join(self, member: Member, request: JoinRequest, now: float) -> asyncio.Future[Joined]:
        member.protocols = list(request.protocols)
        member.session_timeout = request.session_timeout
        member.rebalance_timeout = request.rebalance_timeout
        member.client_id, member.client_host = request.client_id, request.client_host
        member.deadline = now + member.session_timeout
        _refuse(member, ErrorCode.rebalance_in_progress)
        member.joining = asyncio.get_running_loop().create_future()
        waiting = member.joining
        if self.state is State.PREPARING:
            self._try_complete(now)
        return waiting

    def _prepare(self, now: float) -> None:
        self._is_initial = self.state is State.EMPTY and self.initial_delay > 0
        self.state = State.PREPARING
        self._sync_ends = None
        for member in self.members.values():
            if member.syncing is not None:
                _refuse(member, ErrorCode.rebalance_in_progress)
                member.deadline = now + member.session_timeout
        longest = max(member.rebalance_timeout for member in self.members.values())
        self._rebalance_ends = now + (self.initial_delay if self._is_initial else longest)
        self._try_complete(now)

    def _try_complete(self, now: float) -> None:
        if self.state is not State.PREPARING or self._is_initial or self._promised:
            return
        if all(member.joining is not None for member in self.members.values()):
            self._complete(now)

    def _complete(self, now: float) -> None:
        """End the joining: who did not come is out, except static members, who have their session time-out."""
        self._is_initial = False
        for member in [each for each in self.members.values() if each.joining is None and each.instance_id is None]:
            self._remove(member)
        self.unsaved = True
        if not self.members:
            self._empty()
            return
        present = [member for member in self.members.values() if member.joining is not None]
        if not present:
            self._rebalance_ends = now + max(member.rebalance_timeout for member in self.members.values())
            return
        self._rebalance_ends = None
        self.generation += 1
        self.protocol = self._vote()
        if self.leader not in [member.id for member in present]:
            self.leader = present[0].id
        self.state = State.COMPLETING
        self._sync_ends = now + max(member.rebalance_timeout for member in self.members.values())
        for member in present:
            member.deadline = now + member.session_timeout
            waiting, member.joining = member.joining, None
            if waiting is not None and not waiting.done():
                waiting.set_result(self._joined(member))

    def _vote(self) -> str:
        """Each member votes for its first protocol that all support; ties go to the earlier member's."""
        supported = set.intersection(*({name for name, _ in member.protocols} for member in self.members.values()))
        votes: dict[str, int] = {}
        for member in self.members.values():
            choice = next(name for name, _ in member.protocols if name in supported)
            votes[choice] = votes.get(choice, 0) + 1
        return max(votes, key=lambda name: votes[name])

    def _joined(self, member: Member, *, skip_assignment: bool = False) -> Joined:
        members: list[tuple[str, str | None, bytes]] = []
        if member.id == self.leader:
            members = [(each.id, each.instance_id, each.metadata(self.protocol)) for each in self.members.values()]
        return Joined(
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol=self.protocol,
            leader=self.leader or "",
            member_id=member.id,
            members=members,
            skip_assignment=skip_assignment,
        )

    # The life of a generation

    def sync(
        self,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol: tuple[str | None, str | None],
        assignments: dict[str, bytes],
        now: float,
    ) -> asyncio.Future[Synced]:
        """The member's assignment, once the leader has sent it. `protocol` is (type, name), None where unsaid."""
        member = self._member(member_id, instance_id)
        self._check_generation(generation)
        for said, actual in zip(protocol, (self.protocol_type, self.protocol), strict=True):
            if said is not None and said != actual:
                raise KafkaError(ErrorCode.inconsistent_group_protocol)
        if self.state is State.PREPARING:
            raise KafkaError(ErrorCode.rebalance_in_progress)
        member.deadline = now + member.session_timeout
        if self.state is State.STABLE:
            return _done(Synced(self.protocol_type, self.protocol, member.assignment))
        if member.syncing is not None:
            _refuse(member, ErrorCode.rebalance_in_progress)
        member.syncing = asyncio.get_running_loop().create_future()
        waiting = member.syncing
        if member.id == self.leader:
            for each in self.members.values():
                each.assignment = assignments.get(each.id, b"")
            self.state = State.STABLE
            self.unsaved = True
            for each in self.members.values():
                if each.syncing is not None:
                    pending, each.syncing = each.syncing, None
                    each.deadline = now + each.session_timeout
                    if not pending.done():
                        pending.set_result(Synced(self.protocol_type, self.protocol, each.assignment))
        return waiting

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int, now: float) -> None:
        member = self._member(member_id, instance_id)
        self._check_generation(generation)
        member.deadline = now + member.session_timeout
        if self.state is State.PREPARING:
            raise KafkaError(ErrorCode.rebalance_in_progress)

    def leave(self, member_id: str, instance_id: str | None, now: float) -> None:
        """A member goes; an administrator may name it by its instance id alone."""
        if member_id in self._promised:
            del self._promised[member_id]
            self._try_complete(now)
            return
        if not member_id and instance_id is not None:
            member_id = self._static.get(instance_id, "")
        member = self._member(member_id, instance_id)
        self._out(member, now)

    def check_commit(self, member_id: str, instance_id: str | None, generation: int, *, transactional: bool) -> None:
        """Whether offsets may be committed: by a member of this generation, or by anyone while nobody is in."""
        if generation < 0 and self.state is State.EMPTY:
            return
        if generation >= 0 or member_id or instance_id is not None:
            self._member(member_id, instance_id)
            self._check_generation(generation)
        elif not transactional and self.state is not State.EMPTY:
            raise KafkaError(ErrorCode.unknown_member_id)
        if not transactional and self.state is State.COMPLETING:
            raise KafkaError(ErrorCode.rebalance_in_progress)

    def touch(self, member_id: str, now: float) -> None:
        """A commit is a sign of life."""
        member = self.members.get(member_id)
        if member is not None:
            member.deadline = now + member.session_timeout

    # Time

    @property
    def next_deadline(self) -> float | None:
        """When `expire` has something to do at the earliest."""
        times = [member.deadline for member in self.members.values() if not member.is_waiting]
        times += self._promised.values()
        times += [time for time in (self._rebalance_ends, self._sync_ends) if time is not None]
        return min(times, default=None)

    def expire(self, now: float) -> None:
        """Put out the silent, and end a rebalance whose time is up."""
        for member_id in [key for key, deadline in self._promised.items() if deadline <= now]:
            del self._promised[member_id]
            self._try_complete(now)
        for member in list(self.members.values()):
            if member.deadline <= now and not member.is_waiting and member.id in self.members:
                self._out(member, now)
        if self._rebalance_ends is not None and self._rebalance_ends <= now:
            self._complete(now)
        if self._sync_ends is not None and self._sync_ends <= now:
            self._sync_ends = None
            if self.state is State.COMPLETING:
                for member in [each for each in self.members.values() if each.syncing is None]:
                    self._remove(member)
                if self.members:
                    self._prepare(now)
                else:
                    self._empty()

    def _out(self, member: Member, now: float) -> None:
        self._remove(member)
        self.unsaved = True
        if not self.members and self.state is not State.PREPARING:
            self._empty()
        elif self.state in (State.STABLE, State.COMPLETING):
            self._prepare(now)
        elif not self.members and not self._promised:
            self._complete(now)
        else:
            self._try_complete(now)

    def _remove(self, member: Member) -> None:
        del self.members[member.id]
        if member.instance_id is not None and self._static.get(member.instance_id) == member.id:
            del self._static[member.instance_id]
        if self.leader == member.id:
            self.leader = next(iter(self.members), None)
        _refuse(member, ErrorCode.unknown_member_id)

    def _empty(self) -> None:
        self.state = State.EMPTY
        self.generation += 1
        self.protocol = None
        self.leader = None
        self._rebalance_ends = self._sync_ends = None
        self.unsaved = True

    def _member(self, member_id: str, instance_id: str | None) -> Member:
        if instance_id is not None:
            current = self._static.get(instance_id)
            if current is None:
                raise KafkaError(ErrorCode.unknown_member_id)
            if current != member_id:
                raise KafkaError(ErrorCode.fenced_instance_id)
        member = self.members.get(member_id)
        if member is None:
            raise KafkaError(ErrorCode.unknown_member_id)
        return member

    def _check_generation(self, generation: int) -> None:
        if generation != self.generation:
            raise KafkaError(ErrorCode.illegal_generation)

    # Storage

    def saved(self) -> SavedGroup:
        members = self.members.values() if self.state is State.STABLE else ()
        return SavedGroup(
            self.generation,
            self.protocol_type,
            self.protocol,
            self.leader,
            [
                SavedMember(
                    each.id,
                    each.instance_id,
                    each.client_id,
                    each.client_host,
                    each.session_timeout,
                    each.rebalance_timeout,
                    each.protocols,
                    each.assignment,
                )
                for each in members
            ],
        )

    def restore(self, saved: SavedGroup, now: float) -> None:
        """Take up a stable generation again; its members have a whole session time-out to be heard."""
        self.generation = saved.generation
        self.protocol_type = saved.protocol_type
        for each in saved.members:
            self.members[each.id] = Member(
                id=each.id,
                instance_id=each.instance_id,
                client_id=each.client_id,
                client_host=each.client_host,
                session_timeout=each.session_timeout,
                rebalance_timeout=each.rebalance_timeout,
                protocols=each.protocols,
                deadline=now + each.session_timeout,
                assignment=each.assignment,
            )
            if each.instance_id is not None:
                self._static[each.instance_id] = each.id
        if self.members:
            self.state = State.STABLE
            self.protocol = saved.protocol
            self.leader = saved.leader

    def close(self) -> None:
        """Answer everybody who waits: the broker stops."""
        for member in self.members.values():
            _refuse(member, ErrorCode.coordinator_not_available)


def _refuse(member: Member, code: ErrorCode) -> None:
    for waiting in (member.joining, member.syncing):
        if waiting is not None and not waiting.done():
            waiting.set_exception(KafkaError(code))
            waiting.exception()  # retrieved: the connection that waited may be gone
    member.joining = member.syncing = None


def _done(value: T) -> asyncio.Future[T]:
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future
