"""`command`: a check, run in the session's own box after the harness has ended.

Exit code 0 is reward 1, any other reward 0. A check that ends with 0 may say more: if its output, or the last line of
it, is a JSON number, that is the reward; if it is an object with `reward` (and perhaps `rewards`, a mapping of named
parts), those are. A check that runs out of time is a failure of the grader, not a reward.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

import msgspec

from polar.schemas import EvaluatorSpec, Grade

from ..box import ExecResult
from ..errors import ConfigWrong, GradingError
from ..registry import Case

TAIL: Final = 4096
"""Characters of each output stream that go into the report."""


class CommandConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: str
    """For the box's shell."""
    cwd: str | None = None
    """Absolute, or relative to the workspace, where it starts otherwise."""
    timeout_s: float | None = None
    """Of the command alone; at most what the task's evaluation_timeout leaves."""


class Command:
    version: ClassVar[str] = "1"

    def __init__(self, spec: EvaluatorSpec) -> None:
        config: Any = spec.config
        try:
            self.config = msgspec.convert(config, CommandConfig)
        except msgspec.ValidationError as error:
            raise ConfigWrong(f"evaluator.config of command: {error}") from None
        if spec.refresh_runtime:
            raise ConfigWrong(
                "evaluator command works in the session's own box; a fresh one (refresh_runtime) is not part of this "
                "version"
            )
        self._env = spec.env

    async def grade(self, case: Case) -> Grade:
        if case.box is None:
            raise GradingError("evaluator command needs the session's box, and the assignment names none")
        limit = min(self.config.timeout_s or case.timeout_s, case.timeout_s)
        result = await case.box.exec(self.config.command, cwd=self.config.cwd, env=self._env, timeout_s=limit)
        report = {
            "exit_code": result.return_code,
            "stdout": result.stdout[-TAIL:],
            "stderr": result.stderr[-TAIL:],
            "truncated": result.truncated,
        }
        if result.timed_out or result.return_code is None:
            raise GradingError(f"the check was not done within {limit:g} s", detail=report)
        reward, rewards = judged(result)
        return Grade(reward=reward, rewards=rewards, report=report)


def judged(result: ExecResult) -> tuple[float, dict[str, float]]:
    """Reward and named rewards of a check that has ended.

    Raises:
        GradingError: it gave a reward that is no number.
    """
    if result.return_code != 0:
        return 0.0, {}
    text = result.stdout.strip()
    for candidate in (text, text.rsplit("\n", 1)[-1]):
        try:
            value = msgspec.json.decode(candidate)
        except msgspec.DecodeError:
            continue
        if isinstance(value, dict) and "reward" in value:
            parts = value.get("rewards") or {}
            if not isinstance(parts, dict):
                raise GradingError("the check's `rewards` is no mapping of names to numbers")
            return _number(value["reward"], "reward"), {str(name): _number(one, name) for name, one in parts.items()}
        if isinstance(value, int | float) and not isinstance(value, bool):
            return _number(value, "reward"), {}
    return 1.0, {}


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise GradingError(f"the check's {name} is no finite number: {value!r}")
    return float(value)
