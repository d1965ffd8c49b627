"""How a call is sampled: the task's specification against what the harness asks, every parameter explicit.

Nothing is left to an engine's defaults, since its `--generation-config` fills unset parameters from the model's own
file. Pure.
"""

from __future__ import annotations

import hashlib

from polar.schemas import Sampling, SamplingSpec

from .calls import Call, Json

NEUTRAL_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
PINNED = ("temperature", "top_p", "top_k", "min_p", *NEUTRAL_PENALTIES)


def call_seed(session_id: str, call: int) -> int:
    """The seed of a session's call, 31 bits: the same session and call number give the same seed.

    The number goes on from the replies that a request's history shows, so that a replica that has just started, or that
    takes turns with others, does not repeat the seeds of earlier calls.
    """
    return int.from_bytes(hashlib.sha256(f"{session_id}/{call}".encode()).digest()[:4], "big") >> 1


def resolve(spec: SamplingSpec, asked: Sampling, *, n: int, session_id: str, call: int) -> Sampling:
    """What is in effect; every field but `max_tokens` and `seed` has a value.

    `pin`: the task's values, whatever was asked. `allow`: what was asked wins, where anything was. The task's
    `max_tokens` bounds both. A client's own seed counts with `allow` only: it would sample a group's replies alike.
    """
    allow = spec.override == "allow"
    values = {
        name: wish if allow and (wish := getattr(asked, name)) is not None else getattr(spec, name) for name in PINNED
    }
    bounds = [bound for bound in (spec.max_tokens, asked.max_tokens) if bound is not None]
    seed = call_seed(session_id, call) if spec.seed_calls else asked.seed if allow else None
    return Sampling(**values, max_tokens=min(bounds, default=None), seed=seed, stop=asked.stop, n=n)


def constraints(call: Call, sampling: Sampling) -> list[str]:
    """What forces or masks tokens in this call."""
    penal = any(getattr(sampling, name) != neutral for name, neutral in NEUTRAL_PENALTIES.items())
    return [*call.constraints, *(["penalties"] if penal else [])]


def engine_fields(sampling: Sampling) -> Json:
    """The parameters under the engine's names; what has no value is left out."""
    fields: Json = {name: getattr(sampling, name) for name in PINNED}
    fields["n"] = sampling.n
    if sampling.max_tokens is not None:
        fields["max_completion_tokens"] = sampling.max_tokens
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.stop:
        fields["stop"] = sampling.stop
    return fields
