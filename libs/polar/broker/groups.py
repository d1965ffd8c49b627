"""The group coordinator: all groups, their timers and their storage.

Promises: every change of a group that has to survive a stop is in the database before a member hears of it; an
expired member is put out on time without polling. What a group does is decided in `group`.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from polar.broker.errors import ErrorCode, KafkaError
from polar.broker.group import Group
from polar.broker.group_store import GroupStore
from polar.broker.membership import Joined, JoinRequest, State, Synced
from polar.broker.settings import BrokerSettings

__all__ = ["Groups"]


class Groups:
    """Groups by id, made by the first join; one without members waits in the database. For the loop's thread."""

    def __init__(self, settings: BrokerSettings, store: GroupStore) -> None:
        self.store = store
        self._settings = settings
        self._groups: dict[str, Group] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def load(self) -> None:
        """Take up what was stable when the broker stopped."""
        now = self._now()
        for name, saved in self.store.groups().items():
            if saved is not None and saved.members:
                group = self._groups[name] = self._new(name)
                group.restore(saved, now)
                self._arm(group)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for group in self._groups.values():
            group.close()

    def get(self, name: str) -> Group | None:
        """A group that exists; one that has only offsets is Empty."""
        group = self._groups.get(name)
        if group is not None:
            return group
        saved = self.store.group(name)
        if saved is None and not self.store.has_offsets(name):
            return None
        group = self._new(name)
        if saved is not None:
            group.restore(saved, self._now())
        return group

    def names(self) -> list[str]:
        return sorted(set(self._groups) | set(self.store.groups()))

    def join(self, name: str, request: JoinRequest) -> asyncio.Future[Joined]:
        self._check_name(name)
        milliseconds = request.session_timeout * 1000
        if not self._settings.min_session_timeout_ms <= milliseconds <= self._settings.max_session_timeout_ms:
            raise KafkaError(ErrorCode.invalid_session_timeout)
        group = self.get(name)
        if group is None:
            if request.member_id:
                raise KafkaError(ErrorCode.unknown_member_id)
            group = self._new(name)
        self._groups[name] = group
        with self._changing(group):
            return group.join(request, self._now())

    def sync(
        self,
        name: str,
        member_id: str,
        instance_id: str | None,
        generation: int,
        protocol: tuple[str | None, str | None],
        assignments: dict[str, bytes],
    ) -> asyncio.Future[Synced]:
        group = self._known(name)
        with self._changing(group):
            return group.sync(member_id, instance_id, generation, protocol, assignments, self._now())

    def heartbeat(self, name: str, member_id: str, instance_id: str | None, generation: int) -> None:
        group = self._known(name)
        with self._changing(group):
            group.heartbeat(member_id, instance_id, generation, self._now())

    def leave(self, name: str, member_id: str, instance_id: str | None) -> None:
        group = self._known(name)
        with self._changing(group):
            group.leave(member_id, instance_id, self._now())

    def check_commit(
        self, name: str, member_id: str, instance_id: str | None, generation: int, *, transactional: bool = False
    ) -> None:
        """Whether a commit is in order; raises `KafkaError` when it is not."""
        group = self.get(name)
        if group is None:
            if generation >= 0:
                raise KafkaError(ErrorCode.illegal_generation)
            return
        group.check_commit(member_id, instance_id, generation, transactional=transactional)
        group.touch(member_id, self._now())

    def delete(self, name: str) -> None:
        """Raises `KafkaError`: GROUP_ID_NOT_FOUND, NON_EMPTY_GROUP."""
        self._check_name(name)
        group = self.get(name)
        if group is None:
            raise KafkaError(ErrorCode.group_id_not_found)
        if group.state is not State.EMPTY or self.store.has_pending(name):
            raise KafkaError(ErrorCode.non_empty_group)
        self.store.delete(name)
        self._groups.pop(name, None)
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _known(self, name: str) -> Group:
        self._check_name(name)
        group = self.get(name)
        if group is None:
            raise KafkaError(ErrorCode.unknown_member_id)
        return group

    def _check_name(self, name: str) -> None:
        if not name:
            raise KafkaError(ErrorCode.invalid_group_id)

    def _new(self, name: str) -> Group:
        return Group(
            name, initial_delay=self._settings.initial_rebalance_delay_s, max_size=self._settings.max_group_size
        )

    @contextmanager
    def _changing(self, group: Group) -> Iterator[None]:
        # Also when the group refuses: a refusal may come with a change (an id that was promised).
        try:
            yield
        finally:
            self._settle(group)

    def _settle(self, group: Group) -> None:
        if group.unsaved:
            group.unsaved = False
            self.store.save(group.id, group.saved())
        self._arm(group)

    def _arm(self, group: Group) -> None:
        """One timer per group, set for its next deadline; deadlines that moved on since let it fire in vain."""
        deadline = group.next_deadline
        timer = self._timers.get(group.id)
        if deadline is None:
            if timer is not None:
                timer.cancel()
                del self._timers[group.id]
            if group.state is State.EMPTY:
                # Nobody is in: its generation waits in the database, if it ever had one.
                self._groups.pop(group.id, None)
            return
        if timer is not None:
            if timer.when() <= deadline:
                return
            timer.cancel()
        self._timers[group.id] = asyncio.get_running_loop().call_at(deadline, self._due, group)

    def _due(self, group: Group) -> None:
        self._timers.pop(group.id, None)
        group.expire(self._now())
        self._settle(group)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
