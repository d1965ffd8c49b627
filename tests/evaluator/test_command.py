"""How the `command` evaluator reads a check's ending."""

from __future__ import annotations

import pytest

from polar.evaluator.box import ExecResult
from polar.evaluator.errors import ConfigWrong, GradingError
from polar.evaluator.evaluators.command import Command, judged
from polar.schemas import EvaluatorSpec


def ended(code: int | None, stdout: str = "") -> ExecResult:
    return ExecResult(return_code=code, stdout=stdout, stderr="", timed_out=False, truncated=False)


@pytest.mark.parametrize(
    ("code", "stdout", "reward", "rewards"),
    [
        (0, "", 1.0, {}),
        (1, "", 0.0, {}),
        (0, "all fine\n", 1.0, {}),
        (0, "0.25\n", 0.25, {}),
        (0, "checked 4 files\n0.5\n", 0.5, {}),
        (0, '{"reward": 0.5, "rewards": {"tests": 1, "style": 0}}', 0.5, {"tests": 1.0, "style": 0.0}),
        (0, '{\n "reward": 2\n}\n', 2.0, {}),
        (0, 'log\n{"reward": -1}', -1.0, {}),
        (0, '{"passed": 3}', 1.0, {}),
        (0, "true", 1.0, {}),
        (0, "NaN", 1.0, {}),
        (3, '{"reward": 1}', 0.0, {}),
    ],
)
def test_exit_code_decides_and_json_says_more(code: int, stdout: str, reward: float, rewards: dict[str, float]) -> None:
    assert judged(ended(code, stdout)) == (reward, rewards)


@pytest.mark.parametrize("stdout", ['{"reward": "high"}', '{"reward": true}', '{"reward": 1, "rewards": [1]}'])
def test_a_reward_that_is_no_number_is_the_graders_failure(stdout: str) -> None:
    with pytest.raises(GradingError, match="reward"):
        judged(ended(0, stdout))


@pytest.mark.parametrize("config", [{}, {"command": 3}, {"command": "x", "comand": "y"}])
def test_a_wrong_config_names_the_field(config: dict[str, object]) -> None:
    with pytest.raises(ConfigWrong, match="command"):
        Command(EvaluatorSpec(strategy="command", config=config))


def test_a_fresh_box_is_refused_by_name() -> None:
    spec = EvaluatorSpec(strategy="command", config={"command": "true"}, refresh_runtime=True)
    with pytest.raises(ConfigWrong, match="refresh_runtime"):
        Command(spec)
