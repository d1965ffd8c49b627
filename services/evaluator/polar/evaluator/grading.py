"""One grade from its assignment: a grade or a failure, in time, whatever the evaluator does.

It must not know reports, slots and leases: those are `node`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TypeVar

import aiohttp

from polar.bus import Bus, BusError, RecordGone
from polar.schemas import (
    Failure,
    FailureKind,
    Grade,
    GradeAssigned,
    RecordRef,
    Stage,
    TaskRequest,
    Trajectory,
)
from polar.schemas.base import Event
from polar.service.logs import get_logger

from .box import BoxClient
from .errors import GradingError
from .registry import Case, load

_log = get_logger(__name__)
Found = TypeVar("Found", bound=Event)


class Grader:
    """Grades sessions; holds nothing between them."""

    def __init__(
        self, bus: Bus, http: aiohttp.ClientSession, *, allowed: Collection[str], max_timeout_s: float
    ) -> None:
        self._bus = bus
        self._http = http
        self._allowed = allowed
        self._max_timeout_s = max_timeout_s

    async def grade(self, assignment: GradeAssigned) -> Grade | Failure:
        """The grade, or why there is none; raises nothing but cancellation."""
        limit = min(assignment.timeout_s, self._max_timeout_s)
        name = assignment.evaluator.strategy
        try:
            kind = await asyncio.to_thread(load, name, self._allowed)  # the first time, it reads files
            evaluator = kind(assignment.evaluator)
            async with asyncio.timeout(limit):
                return await evaluator.grade(self._case(assignment, limit))
        except GradingError as error:
            return error.failure
        except TimeoutError:
            return _failure(f"evaluator {name} was not done within {limit:g} s (evaluation_timeout)")
        except BusError as error:
            return _failure(f"evaluator {name}: {error}", retryable=error.retryable)
        except Exception as error:  # noqa: BLE001 - the boundary to evaluators, which may be anyone's
            _log.exception("evaluator failed", evaluator=name, session=assignment.session_id)
            return _failure(f"evaluator {name} failed: {type(error).__name__}: {error}")

    def _case(self, assignment: GradeAssigned, limit: float) -> Case:
        access = assignment.box
        box = None
        if access is not None:
            box = BoxClient(self._http, access, assignment.session_id, assignment.attempt)

        async def trajectory() -> Trajectory:
            return await self._fetch(assignment.built, Trajectory)

        async def task() -> TaskRequest:
            return await self._fetch(assignment.instruction_ref, TaskRequest)

        return Case(assignment, box, limit, trajectory, task)

    async def _fetch(self, ref: RecordRef, kind: type[Found]) -> Found:
        try:
            record = await self._bus.lookup(ref)
        except RecordGone as error:
            raise GradingError(f"what the grade needs is no longer on the log: {error}") from error
        if not isinstance(record.value, kind):
            raise GradingError(f"{ref.topic}/{ref.partition}/{ref.offset} is no {kind.__name__}")
        return record.value


def _failure(message: str, *, retryable: bool = False) -> Failure:
    return Failure(kind=FailureKind.EVALUATOR, message=message, retryable=retryable, stage=str(Stage.EVALUATING))
