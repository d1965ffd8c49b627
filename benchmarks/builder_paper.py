"""Prefix merging as one reads it in the paper (section 3.4.2), in plain Python, for `benchmarks/builder.py`.

Token ids are lists of ints, prefixes are compared by slices, keys are lists of JSON texts. Nothing is done twice on
purpose, and nothing is made quicker than the formulas say. Records are decoded, prompts made whole and traces encoded
by the same libraries as the builder's, so that the difference is the merging and the shape of its data.

For a call with prompt `q`, among the chains so far:

1. candidate: the normalized messages of `q` begin with those of the chain's last prompt and its reply;
2. strict prefix: `q[:len(p)] == p`, where `p` is the chain's last prompt;
3. end of turn: the first such id in `q[len(p):]` ends the canonical rendering of the last reply, and what follows it is
   the interstitial (results, the next generation prompt);
4. the trace goes on with the interstitial (mask 0, log-probability 0.0), then with the sampled ids (mask 1, their own).

Where a step fails, the call begins a chain. The paper's trace (A.4) comes out, with plain lists.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from polar.schemas import CallStarted, CompletionCaptured, SessionClosed, SessionOpened, decode
from polar.schemas.prompts import Prompts

RECORDS = (SessionOpened, CallStarted, CompletionCaptured, SessionClosed)


def merge(values: Iterable[bytes], end_of_turn: int) -> list[dict[str, Any]]:
    """The traces of one session's records."""
    prompts = Prompts()
    chains: list[dict[str, Any]] = []
    for value in values:
        event = decode(value, RECORDS)
        if not isinstance(event, CompletionCaptured):
            continue
        prompt, choice = prompts.take(event), event.choices[0]
        ids: list[int] = list(prompt.ids)
        key = [normalized(message) for message in prompt.messages]
        sampled: list[int] = list(choice.ids)
        logprobs: list[float] = list(choice.logprobs)
        for chain in reversed(chains):
            if key[: len(chain["key"])] != chain["key"] or chain["tools"] != prompt.tools:
                continue
            before = chain["last_prompt"]
            if ids[: len(before)] != before:
                continue
            rest = ids[len(before) :]
            if end_of_turn not in rest:
                continue
            interstitial = rest[rest.index(end_of_turn) + 1 :]
            chain["response_ids"] += interstitial
            chain["loss_mask"] += [0] * len(interstitial)
            chain["response_logprobs"] += [0.0] * len(interstitial)
            chain["response_messages"] += prompt.messages[len(chain["key"]) :]
            break
        else:
            chain = {
                "prompt_ids": ids,
                "response_ids": [],
                "loss_mask": [],
                "response_logprobs": [],
                "prompt_messages": prompt.messages,
                "response_messages": [],
                "tools": prompt.tools,
                "metadata": {"completions": []},
            }
            chains.append(chain)
        chain["response_ids"] += sampled
        chain["loss_mask"] += [1] * len(sampled)
        chain["response_logprobs"] += logprobs
        chain["response_messages"].append(choice.message)
        chain["finish_reason"] = choice.finish
        chain["metadata"]["completions"].append(event.completion_id)
        chain["last_prompt"] = ids
        chain["key"] = [*key, normalized(choice.message)]
    return [{name: value for name, value in chain.items() if name not in ("last_prompt", "key")} for chain in chains]


def encode(traces: list[dict[str, Any]]) -> bytes:
    return msgspec.msgpack.encode({"traces": traces})


def normalized(message: dict[str, Any]) -> str:
    """What a prompt shows of a message: role, text, and calls with parsed arguments, without their ids."""
    shown: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        calls.append({"name": function["name"], "arguments": json.loads(function["arguments"])})
    if calls:
        shown["tool_calls"] = calls
    return json.dumps(shown, sort_keys=True)
