"""What `polar demo` runs: short questions that a 135M model gets right sometimes, and how they are graded.

Measured on the embedded model at temperature 1 and 20 tokens, right of 24 samples: capitals 19, opposites 9, colors 11.
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
MAX_TOKENS = 20
WORKSPACE_AGENT = "/polar/session/workspace/demo_agent.py"


@dataclass(frozen=True)
class DemoTask:
    """One task: its name for the agent, what it asks in a sentence, and the command that grades the answers."""

    name: str
    title: str
    check: str


COLORS = "(red|green|blue|yellow|white|black)"
TASKS = (
    DemoTask(
        "capitals",
        "the capitals of Japan and of France",
        "sed -n 1p answers.txt | grep -qi tokyo && sed -n 2p answers.txt | grep -qi paris",
    ),
    DemoTask(
        "opposites",
        "the opposites of hot and of big",
        "sed -n 1p answers.txt | grep -qi cold && sed -n 2p answers.txt | grep -qiE 'small|little'",
    ),
    DemoTask("colors", "three colors", f"grep -qiE '{COLORS}.*{COLORS}.*{COLORS}' answers.txt"),
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
