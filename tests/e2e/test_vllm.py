"""The line on Apache Kafka and real vLLM with a real model: what was captured is what the model says.

The independent check is a forward pass by transformers (`rescore.py`), over each completion's own prompt and over the
merged traces. vLLM and transformers run the same bfloat16 weights through other kernels, so they differ by noise; the
differences are printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from polar.client import PolarClient
from polar.schemas import CompletionCaptured, Context, GroupClosed, Trajectory
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.sandbox, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
NOISE = 0.35
"""Natural logarithm; the largest difference on one token. bfloat16 has 8 bits: logits near 20 are told to 0.06."""
MEAN_NOISE = 0.02


@pytest.fixture(scope="module")
def vllm() -> str:
    url = os.environ.get("VLLM_BASE_URL")
    if not url:
        pytest.skip("needs a running vLLM (VLLM_BASE_URL, VLLM_MODEL)")
    return url


def rescore(sequences: list[dict[str, object]]) -> list[list[list[float]]]:
    python, model = os.environ.get("POLAR_TEST_TORCH_PYTHON"), os.environ.get("POLAR_TEST_SMOLLM2")
    if not python or not model:
        pytest.skip("needs torch and the weights (POLAR_TEST_TORCH_PYTHON, POLAR_TEST_SMOLLM2)")
    done = subprocess.run(
        [python, str(Path(__file__).with_name("rescore.py")), model],
        input=json.dumps(sequences),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def compare(name: str, captured: list[float], scored: list[float]) -> None:
    difference = np.abs(np.array(captured) - np.array(scored))
    print(
        f"{name}: {len(difference)} tokens, difference of log-probability "
        f"mean {difference.mean():.4f}, p99 {np.quantile(difference, 0.99):.4f}, largest {difference.max():.4f}"
    )
    assert difference.mean() < MEAN_NOISE
    assert difference.max() < NOISE


async def test_an_agent_with_the_openai_sdk_run_eight_times_is_captured_exactly(
    make_stack: object, vllm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stack: Stack = make_stack(vllm)  # type: ignore[operator]
    stack.start("all")
    await asyncio.to_thread(stack.wait_ready, 120)
    ran = await stack.apolar(
        "run",
        "--samples",
        "8",
        "--check",
        "grep -qi tokyo answer.txt",
        "--max-tokens",
        "48",
        "--seed-calls",
        "--",
        "python",
        "examples/capitals_agent.py",
        cwd=ROOT,
        timeout_s=400,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr + stack.tails()
    async with PolarClient(stack.bus_settings()) as client:
        events = [event async for event in client.trajectories(follow=False)]
        reader = await client.bus.reader(["completions"])
        completions = [record.value async for record in reader.to_end() if isinstance(record.value, CompletionCaptured)]
        await reader.close()
    trajectories = [one for one in events if isinstance(one, Trajectory)]
    assert len(trajectories) == 8
    assert isinstance(events[-1], GroupClosed)
    rewards = [one.reward for one in trajectories]
    assert set(rewards) <= {0.0, 1.0}
    assert 1.0 in rewards

    calls = [(one, choice) for one in completions for choice in one.choices]
    assert len(calls) >= 8
    scores = rescore(
        [
            {
                "ids": [*one.prompt.ids, *choice.ids],
                "spans": [[len(one.prompt.ids), len(one.prompt.ids) + len(choice.ids)]],
            }
            for one, choice in calls
        ]
    )
    with capsys.disabled():
        print(f"\nrewards {rewards}")
        compare(
            "completions on their own prompts",
            [value for _, choice in calls for value in choice.logprobs],
            [value for one in scores for span in one for value in span],
        )

    traces = [(one, trace) for one in trajectories for trace in one.traces]
    sequences = []
    for one, trace in traces:
        view = one.view(trace)
        ids = np.concatenate([view.prompt_ids, view.response_ids]).tolist()
        sequences.append({"ids": ids, "spans": [[turn.start, turn.end] for turn in trace.turns]})
    rescored = rescore(sequences)
    by_context: dict[Context, tuple[list[float], list[float]]] = {}
    for (one, trace), spans in zip(traces, rescored, strict=True):
        view = one.view(trace)
        logprobs = np.concatenate([np.zeros(len(view.prompt_ids), np.float32), view.response_logprobs])
        for turn, span in zip(trace.turns, spans, strict=True):
            captured, scored = by_context.setdefault(turn.context, ([], []))
            captured += logprobs[turn.start : turn.end].tolist()
            scored += span
    captured, scored = by_context[Context.EXACT]
    with capsys.disabled():
        compare("merged traces, exact context", captured, scored)
        if Context.RETOKENIZED in by_context:
            off, on = (np.array(values) for values in by_context[Context.RETOKENIZED])
            print(
                f"merged traces, retokenized context: {len(off)} tokens, mean difference {np.abs(off - on).mean():.4f}"
            )
    sampled = sum(len(choice.ids) for _, choice in calls)
    in_traces = sum(turn.end - turn.start for _, trace in traces for turn in trace.turns)
    aside = {one.completion_id for trajectory in trajectories for one in trajectory.set_aside}
    assert in_traces == sampled - sum(len(choice.ids) for one, choice in calls if one.completion_id in aside)
