"""The group's state machine, stepped by hand. Embedded only."""

import asyncio

import pytest

from polar.broker.errors import KafkaError
from polar.broker.group import Group
from polar.broker.membership import Joined, JoinRequest, MemberIdRequired, State


def request(member_id: str = "", instance: str | None = None, metadata: bytes = b"m", **changes: object) -> JoinRequest:
    values = {
        "member_id": member_id,
        "instance_id": instance,
        "client_id": "c",
        "client_host": "h",
        "session_timeout": 10.0,
        "rebalance_timeout": 30.0,
        "protocol_type": "consumer",
        "protocols": [("range", metadata)],
        "needs_known_id": True,
        "may_skip_assignment": True,
    }
    return JoinRequest(**{**values, **changes})  # type: ignore[arg-type]


def join(group: Group, now: float, **changes: object) -> "tuple[str, asyncio.Future[Joined]]":
    """A new dynamic member's two joins: its id and its wait."""
    with pytest.raises(MemberIdRequired) as told:
        group.join(request(**changes), now)  # type: ignore[arg-type]
    member_id = told.value.member_id
    return member_id, group.join(request(member_id, **changes), now)  # type: ignore[arg-type]


def stable(group: Group, now: float = 0.0) -> str:
    member_id, joined = join(group, now)
    generation = joined.result().generation
    group.sync(member_id, None, generation, (None, None), {member_id: b"a"}, now)
    assert group.state is State.STABLE
    return member_id


async def test_an_id_that_was_given_out_and_not_used_lapses() -> None:
    group = Group("g")
    with pytest.raises(MemberIdRequired):
        group.join(request(), 0)
    deadlines = [group.next_deadline]
    group.expire(10)
    assert [*deadlines, group.next_deadline] == [10, None]
    assert group.state is State.EMPTY


async def test_who_does_not_join_again_in_time_is_out_of_the_next_generation() -> None:
    group = Group("g")
    first = stable(group)
    second, waiting = join(group, 1)
    assert not waiting.done()
    assert group.state is State.PREPARING
    for now in range(2, 31, 4):
        with pytest.raises(KafkaError, match="rebalance_in_progress"):
            group.heartbeat(first, None, 1, float(now))
    group.expire(31)
    assert waiting.result().leader == second
    assert waiting.result().generation == 2
    assert list(group.members) == [second]


async def test_who_does_not_sync_in_time_is_out() -> None:
    group = Group("g")
    first = stable(group)
    second, waiting = join(group, 1)
    group.join(request(first), 2)
    assert waiting.result().generation == 2
    follower = group.sync(second, None, 2, (None, None), {}, 3)
    for now in range(4, 32, 4):
        group.heartbeat(first, None, 2, float(now))
    group.expire(32)
    assert isinstance(follower.exception(), KafkaError)
    assert list(group.members) == [second]
    assert group.state is State.PREPARING


async def test_a_waiting_member_is_not_put_out_by_its_session() -> None:
    group = Group("g")
    first = stable(group)
    second, waiting = join(group, 1)
    for now in (9.0, 18.0):
        with pytest.raises(KafkaError, match="rebalance_in_progress"):
            group.heartbeat(first, None, 1, now)
        group.expire(now)
    assert second in group.members
    assert not waiting.done()


async def test_a_repeated_join_without_a_change_does_not_rebalance() -> None:
    group = Group("g")
    first = stable(group)
    second, waiting = join(group, 1)
    group.join(request(first), 1)
    leader = waiting.result().leader
    group.sync(leader, None, 2, (None, None), {first: b"1", second: b"2"}, 1)
    follower = second if leader == first else first
    again = group.join(request(follower), 2)
    states = [group.state]
    assert again.result().generation == 2
    changed = group.join(request(follower, metadata=b"other"), 3)
    assert not changed.done()
    assert [*states, group.state] == [State.STABLE, State.PREPARING]


async def test_the_leaders_join_always_rebalances() -> None:
    group = Group("g")
    leader = stable(group)
    assert group.join(request(leader), 1).result().generation == 2
    assert group.state is State.COMPLETING


async def test_the_protocol_is_one_that_all_members_support() -> None:
    group = Group("g")
    first, waiting = join(group, 0, protocols=[("new", b""), ("old", b"")])
    assert waiting.result().protocol == "new"
    _, second = join(group, 1, protocols=[("old", b"")])
    group.join(request(first, protocols=[("new", b""), ("old", b"")]), 1)
    assert second.result().protocol == "old"


async def test_a_group_has_a_largest_size() -> None:
    group = Group("g", max_size=1)
    stable(group)
    with pytest.raises(KafkaError, match="group_max_size_reached"):
        group.join(request(), 1)


async def test_an_empty_group_waits_for_more_members_if_it_is_told_to() -> None:
    group = Group("g", initial_delay=3.0)
    _, first = join(group, 0)
    _, second = join(group, 1)
    assert not first.done()
    group.expire(3)
    assert first.result().generation == second.result().generation == 1
    assert len(group.members) == 2


async def test_a_stable_group_is_the_same_after_it_was_saved() -> None:
    group = Group("g")
    member_id = stable(group)
    again = Group("g")
    again.restore(group.saved(), 100.0)
    again.heartbeat(member_id, None, 1, 105.0)
    assert again.sync(member_id, None, 1, (None, None), {}, 105.0).result().assignment == b"a"
    again.expire(115.0)
    assert again.state is State.EMPTY
    assert again.generation == 2, "so that a commit of the former generation is refused"


async def test_an_unfinished_generation_is_not_taken_up_but_its_number_is() -> None:
    group = Group("g")
    first = stable(group)
    join(group, 1)
    group.join(request(first), 1)
    assert group.state is State.COMPLETING
    again = Group("g")
    again.restore(group.saved(), 0.0)
    assert (again.state, again.generation, again.members) == (State.EMPTY, 2, {})


async def test_a_static_member_that_is_back_with_other_metadata_rebalances() -> None:
    group = Group("g")
    joined = group.join(request(instance="i"), 0).result()
    group.sync(joined.member_id, "i", 1, (None, None), {joined.member_id: b"a"}, 0)
    changed = group.join(request(instance="i", metadata=b"other"), 1)
    assert changed.result().generation == 2


async def test_an_older_client_that_is_back_as_the_static_leader_is_told_it_follows() -> None:
    group = Group("g")
    joined = group.join(request(instance="i"), 0).result()
    group.sync(joined.member_id, "i", 1, (None, None), {joined.member_id: b"a"}, 0)
    back = group.join(request(instance="i", may_skip_assignment=False), 1).result()
    assert (back.generation, back.leader, list(back.members)) == (1, joined.member_id, [])
