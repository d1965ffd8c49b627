"""SGLang's words for what vLLM says otherwise: the scripted engine with `kind="sglang"` speaks them.

By SGLang's own source and documentation (0.5.13 and later), not by a running one. Pure: vLLM's body in, SGLang's out.
"""

from collections.abc import Sequence
from typing import Any

from .choice import Choice
from .engine import Call
from .errors import ApiError

Json = dict[str, Any]
VERSION = "0.5.13"
NOT_ITS = (
    "/version",
    "/weight_info",
    "/pause",
    "/resume",
    "/is_paused",
    "/abort_requests",
    "/finish_weight_update",
    "/update_weight_version",
    "/inference/v1/generate",
)
"""vLLM's routes that it has not."""


def refuse_stream(call: Call) -> None:
    """Raises `ApiError` where ids are asked of a stream."""
    request = call.request
    if request is not None and request.stream:
        for name in ("return_prompt_token_ids", "return_token_ids"):
            if request.body.get(name):
                raise ApiError(f"{name} is not supported with streaming on /v1/chat/completions.", type="BadRequest")


def answer(body: Json, call: Call, choices: Sequence[Choice]) -> Json:
    """The body of a chat answer."""
    assert call.request is not None
    asked = call.request.body
    told = {name: body[name] for name in ("id", "object", "created", "model", "choices", "usage")}
    told["choices"] = []
    for shown, choice in zip(body["choices"], choices, strict=True):
        message = dict(shown["message"])
        message["reasoning_content"] = message.pop("reasoning", None)
        one = {
            "index": shown["index"],
            "message": message,
            "logprobs": shown["logprobs"],
            "finish_reason": shown["finish_reason"],
            "matched_stop": shown["stop_reason"],
        }
        if asked.get("return_prompt_token_ids"):
            one["prompt_token_ids"] = call.prompt_ids
        if asked.get("return_meta_info"):
            one["meta_info"] = {
                "id": call.id,
                "finish_reason": {"type": shown["finish_reason"]},
                "prompt_tokens": len(call.prompt_ids),
                "completion_tokens": len(choice.ids),
                "weight_version": choice.spans[-1]["version"] if choice.spans else "default",
            }
            if shown["logprobs"] is not None:
                one["meta_info"]["output_token_logprobs"] = [
                    [entry["logprob"], token, None] for token, entry in zip(choice.ids, choice.entries, strict=True)
                ]
        told["choices"].append(one)
    told["metadata"] = {"weight_version": "default"}
    return told


def error(refused: ApiError) -> Json:
    """The body of a refusal, which is told bare."""
    return {
        "object": "error",
        "message": refused.message,
        "type": refused.type,
        "param": refused.param,
        "code": refused.status,
    }
