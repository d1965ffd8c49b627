"""What engines have in common and where they differ: how a call is asked, and how their own affairs are told.

vLLM is the reference; SGLang's Chat Completions differ in the fields that ask for tokens, in what a stream can tell
(no ids, so it is asked unstreamed), and in the routes of weights and pauses. Answers of both go through `answer`. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from .calls import Call, Json
from .errors import EngineAway, EngineError, EngineFailed, EngineRefused, ModelUnknown, PromptTooLong

REFUSALS = (400, 413, 422)
BUSY = (408, 429, 503)
TOO_LONG = ("maximum context length", "longer than the model's context length")
"""In the words of vLLM and of SGLang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One kind of engine. Paths are below its root, without `/v1`."""

    name: str
    streams_tokens: bool
    """Whether a stream tells ids and log-probabilities."""
    token_fields: Json
    """What asks for ids and log-probabilities of both prompt and reply."""
    id_field: str | None
    """Where the request's id goes in the body, besides the header."""
    version_path: str
    """Where `weight_version` is told, where it is told at all."""
    build_path: str
    """Where `version` is told."""
    paused_path: str | None
    pause_modes: Mapping[str, tuple[str, Json | None]]
    """Ours to its path and body."""
    resume: tuple[str, Json | None]


VLLM = Shape(
    name="vllm",
    streams_tokens=True,
    token_fields={"return_token_ids": True, "return_weight_versions": True, "logprobs": True},
    id_field=None,
    version_path="/weight_info",
    build_path="/version",
    paused_path="/is_paused",
    pause_modes={"abort": ("/pause?mode=abort", None), "keep": ("/pause?mode=keep", None)},
    resume=("/resume", None),
)
SGLANG = Shape(
    name="sglang",
    streams_tokens=False,
    token_fields={"return_meta_info": True, "return_prompt_token_ids": True, "logprobs": True},
    id_field="rid",
    version_path="/model_info",
    build_path="/server_info",
    paused_path=None,
    pause_modes={
        "abort": ("/pause_generation", {"mode": "abort"}),
        "keep": ("/pause_generation", {"mode": "in_place"}),
    },
    resume=("/continue_generation", {}),
)
SHAPES = {shape.name: shape for shape in (VLLM, SGLANG)}


def request_body(call: Call, model: str, sampling: Json, *, cache_salt: str, shape: Shape = VLLM) -> Json:
    """What is posted, save the stream's fields."""
    body: Json = {
        **call.extras,
        **sampling,
        "model": model,
        "messages": call.messages,
        **shape.token_fields,
        "top_logprobs": call.top_logprobs,
        "cache_salt": cache_salt,
    }
    if call.tools is not None:
        body["tools"] = call.tools
    return body


def cache_salt(tenant: str, version: str | None) -> str:
    """Separates the prefix cache by tenant, and by weights: engines keep prefixes computed with older ones."""
    return hashlib.sha256(f"{tenant}\n{version or ''}".encode()).hexdigest()[:32]


def refusal(status: int, text: bytes, headers: Mapping[str, str]) -> EngineError:
    """An engine's error answer as an error of ours; its key and its model are the operator's, not the client's."""
    try:
        told = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = None
    error = told.get("error", told) if isinstance(told, dict) else None  # SGLang tells it bare
    message = error.get("message") if isinstance(error, dict) else None
    param = error.get("param") if isinstance(error, dict) else None
    message, param = message if isinstance(message, str) else None, param if isinstance(param, str) else None
    if status in REFUSALS:
        if param == "input_tokens" or any(words in (message or "") for words in TOO_LONG):
            return PromptTooLong(message or "the prompt is longer than the model takes")
        return EngineRefused(message or "the engine refuses the request", status=status, param=param)
    if status in BUSY:
        return EngineAway("the engine takes no calls now", retry_after=seconds(headers.get("Retry-After")) or 1.0)
    if status in (401, 403):
        return EngineFailed("the engine refuses the proxy's key; set POLAR_PROXY_ENGINE_API_KEY")
    if status == 404 and message is not None:
        return ModelUnknown("the engine does not serve the model; see POLAR_PROXY_MODEL and POLAR_PROXY_ENGINES")
    return EngineFailed(f"the engine answered {status}")


def seconds(text: str | None) -> float | None:
    """A `Retry-After` of seconds; None: not said, or said as a date."""
    try:
        return max(0.0, float(text)) if text is not None else None
    except ValueError:
        return None
