"""The line on Apache Kafka and real vLLM with a real model: what was captured is what the model says.

The independent check is a forward pass by transformers (`rescore.py`), over each completion's own prompt and over the
merged traces. transformers runs the same weights in float32, vLLM in bfloat16, so vLLM differs from it by
noise, which is measured in the same run by letting vLLM score the same ids as a prompt. All differences are printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import urllib.request
import uuid
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from polar.client import PolarClient
from polar.schemas import CompletionCaptured, Context, GroupClosed, Trajectory
from polar.schemas.prompts import Prompts
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.sandbox, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
RESCORED = 0.5
"""Of vLLM's own distance from the float32 truth in the same run: how far it may be from itself, in the mean, when it
reads ids as a prompt that it sampled before, in batches of other sizes. Seen: 0.12, 0.43; another id is nats away."""


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


def reread(url: str, sequences: list[dict[str, object]]) -> list[list[list[float]]]:
    """vLLM's own log-probabilities of the same ids, given as a prompt."""
    found = []
    for one in sequences:
        ids: list[int] = one["ids"]  # type: ignore[assignment]
        body = {
            "model": os.environ["VLLM_MODEL"],
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1,
            "prompt_logprobs": 0,
            "cache_salt": uuid.uuid4().hex,  # nothing kept from the call that sampled them
        }
        request = urllib.request.Request(
            f"{url}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            told = json.load(answer)["choices"][0]["prompt_logprobs"]
        spans: list[list[int]] = one["spans"]  # type: ignore[assignment]
        found.append([[told[i][str(ids[i])]["logprob"] for i in range(start, end)] for start, end in spans])
    return found


def flat(scores: list[list[list[float]]]) -> np.ndarray:
    return np.array([value for one in scores for span in one for value in span])


def compare(name: str, captured: np.ndarray, again: np.ndarray, independent: np.ndarray) -> None:
    """Captured values against vLLM's own second reading and against the independent pass, on the same ids."""
    itself, truth, noise = (
        np.abs(a - b) for a, b in ((captured, again), (captured, independent), (again, independent))
    )
    for what, values in (("vLLM reading again", itself), ("transformers", truth), ("vLLM again - transformers", noise)):
        print(
            f"{name}, {what}: {len(values)} tokens, mean {values.mean():.4f}, "
            f"p99 {np.quantile(values, 0.99):.4f}, largest {values.max():.4f}"
        )
    assert itself.mean() < RESCORED * noise.mean()
    # bfloat16 engines differ from the float32 truth by so much whatever they are asked
    assert truth.mean() < 1.25 * noise.mean() + 0.002
    assert np.quantile(truth, 0.99) < 1.5 * np.quantile(noise, 0.99) + 0.02


async def test_an_agent_with_the_openai_sdk_run_eight_times_is_captured_exactly(
    make_stack: object, vllm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stack: Stack = make_stack(vllm, env={"POLAR_PROXY_LOGPROBS_MODE": "auto"})  # type: ignore[operator]
    stack.start("all")
    await asyncio.to_thread(stack.wait_ready, 120)
    ran = await stack.apolar(
        "run",
        "--samples",
        "8",
        "--check",
        "grep -qi paris answer.txt",
        "--max-tokens",
        "48",
        "--seed-calls",
        "--",
        "python",
        "examples/capitals_agent.py",
        "France",
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
    attempts: defaultdict[tuple[str, int], Prompts] = defaultdict(Prompts)
    sequences: list[dict[str, object]] = []
    for one in completions:
        prompt = attempts[one.session_id, one.attempt].take(one).ids
        for choice in one.choices:
            spans = [[len(prompt), len(prompt) + len(choice.ids)]]
            sequences.append({"ids": [*prompt, *choice.ids], "spans": spans})
    captured = np.array([value for _, choice in calls for value in choice.logprobs])
    again = await asyncio.to_thread(reread, vllm, sequences)
    independent = await asyncio.to_thread(rescore, sequences)
    with capsys.disabled():
        print(f"\nrewards {rewards}")
        compare("completions on their own prompts", captured, flat(again), flat(independent))

    traces = [(one, trace) for one in trajectories for trace in one.traces]
    merged: list[dict[str, object]] = []
    for one, trace in traces:
        view = one.view(trace)
        ids = np.concatenate([view.prompt_ids, view.response_ids]).tolist()
        merged.append({"ids": ids, "spans": [[turn.start, turn.end] for turn in trace.turns]})
    again = await asyncio.to_thread(reread, vllm, merged)
    independent = await asyncio.to_thread(rescore, merged)
    by_context: dict[Context, list[list[list[float]]]] = {}
    for (one, trace), *scored in zip(traces, again, independent, strict=True):
        view = one.view(trace)
        logprobs = np.concatenate([np.zeros(len(view.prompt_ids), np.float32), view.response_logprobs])
        for turn, *spans in zip(trace.turns, *scored, strict=True):
            told = by_context.setdefault(turn.context, [[], [], []])
            told[0].append(logprobs[turn.start : turn.end].tolist())
            told[1].append(spans[0])
            told[2].append(spans[1])
    exact = [np.concatenate(values) for values in by_context[Context.EXACT]]
    with capsys.disabled():
        compare("merged traces, exact context", *exact)
        if Context.RETOKENIZED in by_context:
            off, on, _ = (np.concatenate(values) for values in by_context[Context.RETOKENIZED])
            mean = np.abs(off - on).mean()
            print(f"merged traces, retokenized context: {len(off)} tokens, mean difference {mean:.4f}")
    sampled = sum(len(choice.ids) for _, choice in calls)
    in_traces = sum(turn.end - turn.start for _, trace in traces for turn in trace.turns)
    aside = {one.completion_id for trajectory in trajectories for one in trajectory.set_aside}
    assert in_traces == sampled - sum(len(choice.ids) for one, choice in calls if one.completion_id in aside)
