"""One grade from its assignment: a grade or a failure, in time, whatever the evaluator does.

It must not know reports, slots and leases: those are `node`'s.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Collection
from typing import TypeVar

import aiohttp
import msgspec

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
MAX_BYTES = 256 * 1024
"""Of a grade with its report, or of a failure; the scheduler takes no larger grade."""
MESSAGE = 2_000
"""Characters of what an evaluator says went wrong."""
_UNWRITABLE = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, NotImplementedError, RecursionError)
Found = TypeVar("Found", bound=Event)


class Grader:
    """Grades sessions; holds nothing between them."""

    def __init__(
        self,
        bus: Bus,
        http: aiohttp.ClientSession,
        *,
        allowed: Collection[str],
        max_timeout_s: float,
        gateway_patience_s: float,
    ) -> None:
        self._gateway_patience_s = gateway_patience_s
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
                return fit(await evaluator.grade(self._case(assignment, limit)))
        except GradingError as error:
            return _told(error.failure)
        except TimeoutError:
            return _failure(f"evaluator {name} was not done within {limit:g} s (evaluation_timeout)")
        except BusError as error:
            return _failure(f"evaluator {name}: {error}", retryable=error.retryable)
        except Exception as error:  # noqa: BLE001 - the boundary to evaluators, which may be anyone's
            trace = await asyncio.to_thread(traceback.format_exception, error)  # reads source files
            _log.error("evaluator failed", evaluator=name, session=assignment.session_id, exception="".join(trace))
            return _failure(f"evaluator {name} failed: {type(error).__name__}: {error}")

    def _case(self, assignment: GradeAssigned, limit: float) -> Case:
        access = assignment.box
        box = None
        if access is not None:
            box = BoxClient(
                self._http,
                access,
                assignment.session_id,
                assignment.attempt,
                patience_s=self._gateway_patience_s,
            )

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


def fit(grade: Grade) -> Grade:
    """The grade, if it can be reported.

    Raises:
        GradingError: its fields are not a grade's, a reward is no finite number, or it is too large.
    """
    try:
        data = msgspec.msgpack.encode(grade)
        msgspec.msgpack.decode(data, type=Grade)
    except _UNWRITABLE as error:
        raise GradingError(f"the evaluator's grade cannot be reported: {error}") from error
    numbers = (grade.reward, *grade.rewards.values(), *grade.trace_rewards.values())
    if any(one is not None and not math.isfinite(one) for one in numbers):
        raise GradingError("the evaluator's grade has a reward that is no finite number")
    if len(data) > MAX_BYTES:
        raise GradingError(f"the evaluator's grade takes {len(data)} bytes and may take {MAX_BYTES}")
    return grade


def _told(failure: Failure) -> Failure:
    """As it can be reported: a message of one line's length, and details only where they fit."""
    failure = msgspec.structs.replace(failure, message=failure.message[:MESSAGE])
    try:
        fits = len(msgspec.msgpack.encode(failure)) <= MAX_BYTES
    except _UNWRITABLE:
        fits = False
    return failure if fits else msgspec.structs.replace(failure, detail=None)


def _failure(message: str, *, retryable: bool = False) -> Failure:
    return Failure(
        kind=FailureKind.EVALUATOR, message=message[:MESSAGE], retryable=retryable, stage=str(Stage.EVALUATING)
    )
