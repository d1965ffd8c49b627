"""What `polar demo` runs: short questions that a 135M model gets right sometimes, and how they are graded.

The embedded model at temperature 1 gets about half of them right, so that groups have rewards of both kinds.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import resources

from polar.schemas import (
    AgentSpec,
    CustomShell,
    EvaluatorSpec,
    PrepareAction,
    RuntimeSpec,
    SamplingSpec,
    TaskRequest,
)

SAMPLES = 8
MAX_TOKENS = 32
WORKSPACE_AGENT = "/polar/session/workspace/demo_agent.py"


@dataclass(frozen=True)
class DemoTask:
    """One task: its name for the agent, what it asks in a sentence, and the command that grades the answers."""

    name: str
    title: str
    check: str


FOODS = "sushi|ramen|rice|noodle|tempura|udon|soba|miso|fish"
COLORS = "(red|green|blue|yellow|white|black)"
TASKS = (
    DemoTask("colors", "three colors", f"grep -qiE '{COLORS}.*{COLORS}.*{COLORS}' answers.txt"),
    DemoTask(
        "capitals",
        "the capitals of France and of Italy",
        "sed -n 1p answers.txt | grep -qi paris && sed -n 2p answers.txt | grep -qi rome",
    ),
    DemoTask(
        "tokyo",
        "the capital of Japan and a food of that city",
        f"sed -n 1p answers.txt | grep -qi tokyo && sed -n 2p answers.txt | grep -qiE '{FOODS}'",
    ),
)


def agent_source() -> str:
    """The program of the agent."""
    return resources.files(__package__).joinpath("agent.py").read_text()


def request(task: DemoTask, suffix: str = "", *, samples: int = SAMPLES) -> TaskRequest:
    """The task as it is submitted: the same every time, apart from `suffix` in its id."""
    return TaskRequest(
        task_id=f"demo-{task.name}{suffix}",
        instruction=f"Find out {task.title}.",
        num_samples=samples,
        timeout_seconds=300.0,
        evaluation_timeout=120.0,
        agent=AgentSpec(harness="shell", custom_shell=CustomShell(command=f"{python()} demo_agent.py {task.name}")),
        runtime=RuntimeSpec(
            prepare=[PrepareAction(type="upload_file", target=WORKSPACE_AGENT, content=agent_source())]
        ),
        evaluator=EvaluatorSpec(strategy="command", config={"command": task.check}),
        sampling=SamplingSpec(max_tokens=MAX_TOKENS, seed_calls=True),
    )


def python() -> str:
    """The Python that has `openai`: the first on PATH in a box is the one this runs on."""
    return "python3" if sys.platform != "win32" else "python"
