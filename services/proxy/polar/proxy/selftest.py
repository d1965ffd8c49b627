"""What an engine is asked before anything of it is captured: one prompt, one token, at two temperatures.

The answer has to have its ids and as many log-probabilities, and shows what these are. Processed ones are of the
distribution that was sampled from, so at temperature T the gap between two tokens shrinks to 1/T of that at 1; raw
ones do not move. Pure: the asking is `engine`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from polar.schemas import LogprobsMode, Sampling, SamplingSpec

from .calls import Json
from .errors import EngineRefused
from .sampling import engine_fields, resolve

SELF_TEST = "polar-self-test"
"""The id of such a request."""
TEMPERATURES = (1.0, 2.0)
TOP = 5
SMALLEST_GAP = 0.05
"""Nats; below it rounding decides."""


def probe(model: str, temperature: float, token_fields: Json) -> Json:
    """The body of one question; `token_fields` ask this kind of engine for its tokens."""
    spec = SamplingSpec(temperature=temperature, max_tokens=1)
    return {
        **engine_fields(resolve(spec, Sampling(), n=1, session_id="", call=0)),
        "model": model,
        "messages": [{"role": "user", "content": "Say a word."}],
        **token_fields,
        "top_logprobs": TOP,
    }


def read_mode(first: Sequence[tuple[str, float]], second: Sequence[tuple[str, float]]) -> LogprobsMode:
    """The mode from the likeliest tokens and their log-probabilities at both temperatures."""
    ones, twos = dict(first), dict(second)
    common = sorted((token for token in ones if token in twos), key=lambda token: ones[token])
    if len(common) < 2:
        return LogprobsMode.UNKNOWN
    low, high = common[0], common[-1]
    gap = ones[high] - ones[low]
    if gap < SMALLEST_GAP:
        return LogprobsMode.UNKNOWN
    ratio = (twos[high] - twos[low]) / gap
    raw, processed = TEMPERATURES[0], TEMPERATURES[0] / TEMPERATURES[1]
    return LogprobsMode.RAW if abs(ratio - raw) < abs(ratio - processed) else LogprobsMode.PROCESSED


def check_mode(mode: LogprobsMode, temperature: float | None) -> None:
    """Refuses log-probabilities that a trainer would take for others.

    At temperature 0 both modes tell the values before temperature, and the call is not trained on.

    Raises:
        EngineRefused: raw or unknown ones at another temperature than 1.
    """
    if mode is LogprobsMode.PROCESSED or temperature in (0.0, 1.0):
        return
    raise EngineRefused(
        f"The engine's log-probabilities are {mode}, which is wrong at temperature {temperature:g}: sample at "
        "temperature 1, start the engine with --logprobs-mode processed_logprobs, or say so in "
        "POLAR_PROXY_LOGPROBS_MODE.",
        code="logprobs_mode",
        param="temperature",
    )
