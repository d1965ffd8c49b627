"""Which traces get the session's reward."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from polar.builder import rebuild
from polar.evaluator.finishing import finished, summary_of
from polar.schemas import Grade, SessionGraded, Trajectory
from tests.builder.toy import Session, say, user


def built() -> Trajectory:
    session = Session()
    session.call([user("a")], say("b", random.Random(0)))
    session.close()
    return rebuild(session.records)


@pytest.mark.parametrize(
    ("trainable", "rewarded", "expected"),
    [(True, None, 0.5), (False, None, None), (False, True, 0.5), (True, False, None)],
)
def test_a_builder_says_which_traces_are_rewarded(
    trainable: bool, rewarded: bool | None, expected: float | None
) -> None:
    trajectory = built()
    trace = replace(trajectory.traces[0], trainable=trainable, rewarded=rewarded)
    graded = SessionGraded(
        session_id=trajectory.session_id,
        attempt=1,
        task_id=trajectory.task_id,
        group_id=trajectory.group_id,
        outcome=trajectory.outcome,
        built=trajectory.closing,
        grade=Grade(reward=0.5),
        evaluator=trajectory.evaluator,
        at_ms=0,
    )
    done = finished(replace(trajectory, traces=[trace]), graded)
    assert done.traces[0].reward == expected
    assert done.reward == 0.5
    assert summary_of(done).statistics == trajectory.statistics()
