"""`session_completed`: 1 if the session completed, else 0. Needs no box and no tokens."""

from __future__ import annotations

from typing import ClassVar

from polar.schemas import EvaluatorSpec, Grade, Status

from ..errors import ConfigWrong
from ..registry import Case


class SessionCompleted:
    version: ClassVar[str] = "1"

    def __init__(self, spec: EvaluatorSpec) -> None:
        if spec.config:
            raise ConfigWrong(f"session_completed takes no config, got {', '.join(sorted(spec.config))}")

    async def grade(self, case: Case) -> Grade:
        return Grade(reward=1.0 if case.assignment.outcome.status is Status.COMPLETED else 0.0)
