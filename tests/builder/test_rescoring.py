"""Trained tokens scored again on their merged trace, by the engine that sampled them (real vLLM, VLLM_BASE_URL).

Sessions of several turns at temperature 1.0 through the real proxy and a real broker; their records are built by each
strategy, and each trace is given to vLLM as a prompt whose log-probabilities are asked for. What decoding and scoring
differ by for the same ids, and two scorings of the same trace, are the engine's own noise. Where a context is
retokenized, the engine's own word is asked for both: that they are one text, and what it gives the reply in each.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest

from polar.builder import Entry, rebuild
from polar.bus import Bus, BusSettings
from polar.proxy import ProxyService, ProxySettings
from polar.schemas import (
    BuilderSpec,
    Context,
    Outcome,
    RecordRef,
    SamplingSpec,
    SessionClosed,
    SessionFinal,
    Status,
    Trajectory,
)
from polar.schemas.topics import Service
from tests.builder.toy import Session
from tests.proxy.harness import SECRET, Door, GatedSender, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("VLLM_BASE_URL" not in os.environ, reason="needs VLLM_BASE_URL"),
    pytest.mark.timeout(600),
]
SESSIONS, TURNS, TOKENS = 6, 4, 40
ASKED = (
    "Tell me something about the sea, in one sentence.",
    "Name three animals that live there, with their Latin names.",
    "Write a line of Python that prints them.",
    "Now say it all again in other words.",
)


@pytest.fixture
async def door(bus_settings: BusSettings) -> AsyncIterator[Door]:
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(Bus(bus_settings, Service.PROXY))
        scheduler = await stack.enter_async_context(Bus(bus_settings, Service.SCHEDULER))
        await bus.prepare()
        settings = ProxySettings(
            port=0, engine_urls=os.environ["VLLM_BASE_URL"], logprobs_mode="processed_logprobs", drain_timeout=5
        )
        sender = GatedSender(bus)
        service = ProxyService(settings, bus, SECRET, sender=sender)
        await stack.enter_async_context(running(service))
        yield Door(service, bus, scheduler, sender)


async def converse(door: Door, name: str) -> None:
    """A chat of several turns; what the model said is sent back as text."""
    async with door.client(name, sampling=SamplingSpec(max_tokens=TOKENS, temperature=1.0)) as client:
        messages: list[Any] = []
        for text in ASKED[:TURNS]:
            messages.append({"role": "user", "content": text})
            reply = await client.chat.completions.create(model="m", messages=messages, timeout=240)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})


def entries(records: list[Any], name: str) -> list[Entry]:
    """The session as a builder reads it; here nobody schedules, so its frame is made."""
    session = Session(session_id=name)
    opening = session.records[0]
    outcome = Outcome(status=Status.COMPLETED, exit_code=0)
    framed = [
        *records,
        SessionClosed(session_id=name, attempt=1, outcome=outcome, at_ms=0),
        SessionFinal(session_id=name, attempt=1, at_ms=0),
    ]
    refs = (RecordRef(topic="completions", partition=0, offset=1 + at) for at in range(len(framed)))
    return [opening, *(Entry(ref, event) for ref, event in zip(refs, framed, strict=True))]


class Scorer:
    """vLLM's log-probability of each id of a sequence given those before it."""

    def __init__(self, http: aiohttp.ClientSession, model: str) -> None:
        self._http = http
        self._model = model

    async def score(self, ids: list[int]) -> np.ndarray:
        """Shape `(n,)`; NaN for the first. Nothing is taken from the prefix cache."""
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "cache_salt": uuid.uuid4().hex,
        }
        async with self._http.post(os.environ["VLLM_BASE_URL"] + "/completions", json=body) as response:
            response.raise_for_status()
            told = (await response.json())["choices"][0]["prompt_logprobs"]
        assert len(told) == len(ids)
        return np.array([np.nan if one is None else one[str(i)]["logprob"] for one, i in zip(told, ids, strict=True)])

    async def text(self, ids: list[int]) -> str:
        """The text of ids, control tokens written out."""
        body = {"model": self._model, "tokens": ids}
        url = os.environ["VLLM_BASE_URL"].removesuffix("/v1") + "/detokenize"
        async with self._http.post(url, json=body) as response:
            response.raise_for_status()
            return str((await response.json())["prompt"])


class Scored(NamedTuple):
    """Trained ids of a trajectory: captured and scored log-probabilities."""

    captured: np.ndarray
    once: np.ndarray
    again: np.ndarray
    exact: np.ndarray
    """Whether the id's context is exact."""
    keys: list[tuple[str, int]]
    """Completion and place in its reply."""


async def scored(scorer: Scorer, trajectory: Trajectory) -> Scored:
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    keys: list[tuple[str, int]] = []
    for trace in trajectory.traces:
        view = trajectory.view(trace)
        ids = [*view.prompt_ids.tolist(), *view.response_ids.tolist()]
        once, again = await scorer.score(ids), await scorer.score(ids)
        for turn in trace.turns:
            place = slice(turn.start - trace.prompt_length, turn.end - trace.prompt_length)
            assert view.loss_mask[place].all()
            exact = np.full(turn.end - turn.start, turn.context is Context.EXACT)
            whole = slice(turn.start, turn.end)
            parts.append((view.response_logprobs[place], once[whole], again[whole], exact))
            keys += [(turn.completion_id, at) for at in range(turn.end - turn.start)]
    columns = [np.concatenate(one) for one in zip(*parts, strict=True)]
    return Scored(columns[0], columns[1], columns[2], columns[3], keys)


async def assert_same_text(scorer: Scorer, merged: Trajectory, apart: Trajectory) -> None:
    """What stands before each reply of `merged` is the text that the engine had, whatever its ids are."""
    own = {trace.turns[0].completion_id: apart.view(trace).prompt_ids.tolist() for trace in apart.traces}
    for trace in merged.traces:
        view = merged.view(trace)
        ids = [*view.prompt_ids.tolist(), *view.response_ids.tolist()]
        for turn in trace.turns:
            before = own[turn.completion_id]
            assert (ids[: turn.start] == before) == (turn.context is Context.EXACT)
            if turn.context is not Context.EXACT:
                assert await scorer.text(ids[: turn.start]) == await scorer.text(before)


def told(name: str, differences: np.ndarray) -> str:
    if not len(differences):
        return f"{name}: none"
    mean, most = differences.mean(), differences.max()
    rank = np.quantile(differences, 0.99)
    return f"{name}: {len(differences)} ids, mean {mean:.5f}, 99 % below {rank:.5f}, most {most:.5f}"


async def test_exact_spans_score_as_captured_and_retokenized_ones_are_reported(
    door: Door, record_property: Callable[[str, object], None]
) -> None:
    names = [f"rescored-{number}" for number in range(SESSIONS)]
    await asyncio.gather(*(converse(door, name) for name in names))
    exact: list[np.ndarray] = []
    retokenized: list[np.ndarray] = []
    twice: list[np.ndarray] = []
    own: list[np.ndarray] = []
    same: list[np.ndarray] = []
    other_same: list[np.ndarray] = []
    merges: list[dict[str, int]] = []
    async with aiohttp.ClientSession() as http:
        async with http.get(os.environ["VLLM_BASE_URL"] + "/models") as response:
            model = (await response.json())["data"][0]["id"]
        scorer = Scorer(http, model)
        for name in names:
            records = entries(await door.settled(name), name)
            merged = rebuild(records)
            assert merged.error is None
            assert merged.captured == TURNS
            merges.append(merged.statistics().merges)
            found = await scored(scorer, merged)
            alone = rebuild(records, BuilderSpec(strategy="per_request"))
            await assert_same_text(scorer, merged, alone)
            apart = await scored(scorer, alone)
            assert sorted(found.keys) == sorted(apart.keys)
            exact.append(np.abs(found.captured - found.once)[found.exact])
            retokenized.append(np.abs(found.captured - found.once)[~found.exact])
            twice.append(np.abs(found.once - found.again))
            # the same ids in the same context, decoded one by one and scored at once
            noise_of = dict(zip(apart.keys, np.abs(apart.captured - apart.once).tolist(), strict=True))
            own.append(np.array(list(noise_of.values())))
            noise_by_id = np.array([noise_of[key] for key in found.keys])
            same.append(noise_by_id[found.exact])
            other_same.append(noise_by_id[~found.exact])
    parts = (own, exact, retokenized, twice, same, other_same)
    noise, exact_, other, again, same_, other_same_ = map(np.concatenate, parts)
    for line in (
        f"{SESSIONS} sessions of {TURNS} calls; merges {merges}",
        told("scored twice", again),
        told("decoded against scored, own prompt", noise),
        told("exact spans, merged trace", exact_),
        told("retokenized spans, merged trace", other),
        told("the same, each with its own prompt", other_same_),
    ):
        print(line)
        record_property("rescored", line)
    assert len(exact_)
    # the merged trace is longer, so the engine's kernels cut it otherwise: noise of the same size, not the same noise
    assert exact_.max() <= 1.5 * same_.max() + again.max() + 1e-3
    assert exact_.mean() <= 1.5 * same_.mean() + again.mean() + 1e-3
