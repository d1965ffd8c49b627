"""What the builder counts: the sums are those of its trajectories, and no label grows without bound."""

from __future__ import annotations

import random

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from polar.builder import rebuild
from polar.builder.metrics import MOST_NAMES, MOST_REASONS, BuilderMetrics
from polar.schemas import BuildSummary, SetAside, Trajectory
from tests.builder.toy import Session, say, user


def built(seed: int) -> Trajectory:
    chance = random.Random(seed)
    session = Session(seed=seed)
    messages = [user("ab")]
    for number in range(6):
        reply = say("abc", chance)
        session.call(messages, reply)
        messages = [*messages, reply.message, user("d")] if number != 3 else [user("ccc")]
    session.fail(session.start())
    session.close()
    return rebuild(session.records)


def summary(trajectory: Trajectory) -> BuildSummary:
    return BuildSummary(
        captured=trajectory.captured,
        failed=trajectory.failed,
        traces=len(trajectory.traces),
        trained_tokens=0,
        prompt_tokens=0,
        set_aside={one.reason: 1 for one in trajectory.set_aside},
        statistics=trajectory.statistics(),
    )


def total(registry: CollectorRegistry, name: str) -> float:
    return sum(
        sample.value for family in registry.collect() for sample in family.samples if sample.name == f"{name}_total"
    )


def test_traces_and_merges_are_all_replies() -> None:
    registry = CollectorRegistry()
    metrics = BuilderMetrics(registry)
    made = [built(seed) for seed in range(4)]
    for one in made:
        metrics.built(one, summary(one), 0.1)
    traces, merges = total(registry, "polar_builder_traces"), total(registry, "polar_builder_merges")
    assert merges > 0
    assert traces == total(registry, "polar_builder_labels") == sum(len(one.traces) for one in made)
    assert traces + merges == sum(one.statistics().replies for one in made) == sum(one.captured for one in made)
    assert total(registry, "polar_builder_set_aside") == sum(one.failed for one in made)


def test_names_of_others_making_do_not_grow_without_bound() -> None:
    registry = CollectorRegistry()
    metrics = BuilderMetrics(registry)
    one = built(1)
    for number in range(300):
        strange = replace(
            one,
            harness=f"harness-{number}",
            traces=[replace(one.traces[0], break_reason=f"reason-{number}")],
            set_aside=[SetAside(completion_id="c", reason=f"aside-{number}", attempt=1)],
        )
        metrics.built(strange, summary(strange), 0.1)
    labels = [sample.labels for family in registry.collect() for sample in family.samples]
    assert len({one["harness"] for one in labels if "harness" in one}) <= MOST_NAMES + 1
    reasons = {one.get("break_reason") or one.get("reason") for one in labels}
    assert len(reasons - {None}) <= MOST_REASONS + 1
    assert "other" in reasons
