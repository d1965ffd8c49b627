"""A grade from its assignment: whatever an evaluator does, what comes of it can be reported."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import aiohttp
import msgspec
import pytest

from polar.bus import Bus, BusSettings
from polar.evaluator.errors import GradingError
from polar.evaluator.grading import Grader
from polar.evaluator.registry import Case
from polar.schemas import (
    EvaluatorSpec,
    Failure,
    FailureKind,
    Grade,
    GradeAssigned,
    Outcome,
    RecordRef,
    Status,
)
from polar.schemas.topics import Service

PATH = f"{__name__}:Own"


class Own:
    version: ClassVar[str] = "1"
    says: ClassVar[Any] = None

    def __init__(self, spec: EvaluatorSpec) -> None:
        pass

    async def grade(self, case: Case) -> Grade:
        if isinstance(self.says, Exception):
            raise self.says
        return self.says  # type: ignore[no-any-return]


@pytest.fixture
async def grader(bus_settings: BusSettings) -> AsyncIterator[Grader]:
    async with Bus(bus_settings, Service.GRADER) as bus, aiohttp.ClientSession() as http:
        yield Grader(bus, http, allowed={PATH}, max_timeout_s=10, gateway_patience_s=0)


def assignment() -> GradeAssigned:
    ref = RecordRef(topic="built", partition=0, offset=0)
    return GradeAssigned(
        grade_id="g",
        node="n",
        boot="b",
        session_id="s",
        attempt=1,
        task_id="t",
        evaluator=EvaluatorSpec(strategy=PATH),
        instruction_ref=ref,
        outcome=Outcome(status=Status.COMPLETED),
        built=ref,
        timeout_s=5,
    )


@pytest.mark.parametrize(
    "says",
    [
        None,
        1.0,
        Grade(reward="1"),  # type: ignore[arg-type]
        Grade(reward=float("inf")),
        Grade(reward=1.0, rewards={"x": float("nan")}),
        Grade(reward=1.0, rewards={"x" * 300_000: 1.0}),
        Grade(reward=1.0, report={"x": object()}),
        Grade(reward=1.0, report={"x": 2**70}),
        RuntimeError("x" * 1_000_000),
        GradingError("x" * 1_000_000, detail={"x": "x" * 1_000_000}),
        GradingError("bad", detail={"x": object()}),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_what_cannot_be_reported_becomes_a_failure_that_can(
    says: Any, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Own, "says", says)
    found = await grader.grade(assignment())
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.EVALUATOR
    assert len(msgspec.msgpack.encode(found)) < 300_000


async def test_a_proper_grade_is_passed_on(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    grade = Grade(reward=0.5, rewards={"style": 1.0}, report={"said": "x" * 1000})
    monkeypatch.setattr(Own, "says", grade)
    assert await grader.grade(assignment()) == grade
