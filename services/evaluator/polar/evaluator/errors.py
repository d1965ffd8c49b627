"""What can go wrong in a grade.

GradingError             carries the failure to report; `retryable`: another grader, or a later try, may do better
├── ConfigWrong          `evaluator.config` does not fit; the message names the field
├── UnknownEvaluator     no such evaluator here, or not allowed
└── BoxError             the runtime API refused or was not reached
"""

from __future__ import annotations

from typing import Any

from polar.schemas import Failure, FailureKind, Stage


class GradingError(Exception):
    retryable: bool = False

    def __init__(self, message: str, *, retryable: bool | None = None, detail: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        if retryable is not None:
            self.retryable = retryable
        self.detail = detail

    @property
    def failure(self) -> Failure:
        return Failure(
            kind=FailureKind.EVALUATOR,
            message=str(self),
            retryable=self.retryable,
            stage=str(Stage.EVALUATING),
            detail=self.detail,
        )


class ConfigWrong(GradingError):
    """`evaluator.config` does not fit the evaluator."""


class UnknownEvaluator(GradingError):
    """No evaluator of that name can be used here."""


class BoxError(GradingError):
    """A gateway's runtime API refused, or was not reached."""
