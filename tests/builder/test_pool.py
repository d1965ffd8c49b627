"""The token pool against a plain reading of what it promises."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.builder import rebuild
from polar.builder.pool import FIRST_LOOK, TokenPool, common_prefix, common_suffix, joined, shared, skipped, taken
from polar.schemas import BuilderSpec, Trajectory
from tests.builder.toy import Reply, Session, canonical, say, tool, user

ids = st.lists(st.integers(0, 2), max_size=8)


def array(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(ids, ids), max_size=12))
def test_sequences_come_back_and_know_what_they_begin_with(
    pairs: list[tuple[list[int], list[int]]],
) -> None:
    pool = TokenPool()
    kept: list[tuple[list[int], list[int], list[tuple[int, int]], tuple[int, int], list[tuple[int, int]]]] = []
    for who, (prompt, reply) in enumerate(pairs):
        # on top of an earlier sequence where there is one that it begins with, as delta prompts are
        whole = [(p + r, w) for p, r, _, _, w in kept if prompt[: len(p + r)] == p + r]
        base, before = max(whole, key=lambda one: len(one[0]), default=([], []))
        cut = len(base) if who % 2 else 0
        spans, place = pool.add_given(list(taken(before, cut)), array(prompt[cut:]))
        begins = [(len(p), -i) for i, (p, *_) in enumerate(kept) if prompt[: len(p)] == p]
        extends = [(len(p) + len(r), -i) for i, (p, r, *_) in enumerate(kept) if prompt[: len(p) + len(r)] == p + r]
        assert list(place.prompts(99)) == [-i for _, i in sorted(begins, reverse=True)]
        assert list(place.replies(99)) == [-i for _, i in sorted(extends, reverse=True)]
        at, reached = pool.add_reply(spans, array(reply), np.full(len(reply), -who, np.float32), who)
        kept.append((prompt, reply, spans, at, reached))
        assert pool.gather(reached).tolist() == prompt + reply
    for who, (prompt, reply, spans, at, reached) in enumerate(kept):
        assert pool.gather(spans).tolist() == prompt
        assert pool.ids(at).tolist() == reply
        assert pool.gather(reached).tolist() == prompt + reply
        assert (pool.logprobs(at) == -who).all()
    prefixes = {tuple(prompt[:end]) for prompt, _ in pairs for end in range(1, len(prompt) + 1)}
    assert pool.size <= len(prefixes) + sum(len(reply) for _, reply in pairs)


@given(ids, ids, st.integers(0, 3))
def test_common_prefix_and_suffix(one: list[int], other: list[int], blocks: int) -> None:
    shared = [1] * (blocks * FIRST_LOOK)
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_prefix(array(shared + one), array(shared + other)) == len(shared) + length
    assert common_suffix(array((shared + one)[::-1]), array((shared + other)[::-1])) == len(shared) + length


def test_spans_are_joined_and_cut() -> None:
    assert joined([(0, 2), (2, 2), (2, 5), (7, 8)]) == [(0, 5), (7, 8)]
    assert list(skipped([(0, 2), (4, 8)], 3)) == [(5, 8)]
    assert list(skipped([(0, 2), (4, 8)], 2)) == [(4, 8)]
    assert list(taken([(0, 2), (4, 8)], 3)) == [(0, 2), (4, 5)]
    assert list(taken([(0, 2), (4, 8)], 0)) == []


def test_shared_positions_end_where_spans_part() -> None:
    assert shared([(0, 5), (7, 9)], [(0, 5), (7, 8)]) == 6
    assert shared([(0, 5)], [(0, 3), (5, 9)]) == 3
    assert shared([(0, 5)], [(1, 5)]) == shared([], [(0, 5)]) == 0


def linear(strategy: str, calls: int) -> Trajectory:
    session = Session(builder=BuilderSpec(strategy=strategy))
    chance = random.Random(3)
    messages = [user("abcd" * 20)]
    for number in range(calls):
        reply = say("abc" * 5, chance, exact=number % 4 > 0)
        session.call(messages, reply)
        messages = [*messages, reply.message, tool("cd" * 10)]
    session.close()
    return rebuild(session.records)


def test_per_request_costs_about_what_merging_costs() -> None:
    apart, merged = linear("per_request", 60), linear("prefix_merging", 60)
    assert (len(apart.traces), len(merged.traces)) == (60, 1)
    assert len(apart.pool.tokens) < 1.3 * len(merged.pool.tokens)
    assert len(apart.pool.messages) == len(merged.pool.messages)
    views = [apart.view(trace) for trace in apart.traces]
    assert sum(len(one.prompt_ids) for one in views) > 15 * len(apart.pool.tokens)  # what copies would cost


def test_an_exact_linear_session_costs_the_same_either_way() -> None:
    pools = []
    for strategy in ("per_request", "prefix_merging"):
        session = Session(builder=BuilderSpec(strategy=strategy))
        messages = [user("abcd")]
        for text in ("abc", "d", "ca b"):
            reply = Reply([*canonical(text), 2], {"role": "assistant", "content": text})
            session.call(messages, reply)
            messages = [*messages, reply.message, user("cd")]
        session.close()
        pools.append(rebuild(session.records).pool)
    assert pools[0] == pools[1]
