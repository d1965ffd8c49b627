"""The bodies and chunks of vLLM 0.32's answers, field for field.

Pure: finished choices and deltas in, plain dictionaries out. Absent and null fields are as observed on the real server.
"""

import json
from typing import Any

from .choice import Choice, Delta
from .engine import Call

Json = dict[str, Any]
VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-devmodel"


def dumps(value: object) -> str:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def sse(value: Json | str) -> bytes:
    """One server-sent event."""
    return f"data: {value if isinstance(value, str) else dumps(value)}\n\n".encode()


def usage(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def completion(call: Call, model: str, created: int, choices: list[Choice]) -> Json:
    """The body of a chat answer that is not streamed."""
    request = call.request
    assert request is not None
    sampled = sum(len(choice.ids) for choice in choices)
    return {
        "id": f"chatcmpl-{call.id}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [_choice(choice, call) for choice in choices],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(len(call.prompt_ids), sampled)
        | {"prompt_tokens_details": None, "completion_tokens_details": None},
        "prompt_logprobs": None,
        "prompt_token_ids": call.prompt_ids if request.return_token_ids else None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _choice(choice: Choice, call: Call) -> Json:
    request = call.request
    assert request is not None
    message = choice.message()
    called = "tool_calls" in message and choice.finish == "stop"
    body = {
        "index": choice.index,
        "message": message,
        "logprobs": {"content": choice.entries} if call.sampling.top_logprobs is not None else None,
        "finish_reason": "tool_calls" if called else choice.finish,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.ids if request.return_token_ids else None,
        "routed_experts": None,
    }
    if request.return_weight_versions:
        body["weight_versions"] = choice.spans
    return body


class Chunks:
    """The chunks of one streamed chat answer, in order."""

    def __init__(self, call: Call, model: str, created: int, choices: list[Choice]) -> None:
        assert call.request is not None
        self._call, self._request = call, call.request
        self._choices = choices
        self._open = len(choices)
        self._head = {
            "id": f"chatcmpl-{call.id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }

    def roles(self) -> list[Json]:
        """The first chunk of each choice; carries the prompt's ids."""
        ids = self._call.prompt_ids if self._request.return_token_ids else None
        chunks = []
        for choice in self._choices:
            first = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            chunk = {**self._head, "choices": [{**first, "finish_reason": None}], **self._usage_so_far(0)}
            chunks.append({**chunk, "prompt_token_ids": ids, "prompt_text": None})
        return chunks

    def delta(self, delta: Delta) -> Json:
        """The chunk of one delta."""
        body: Json = {
            "index": delta.index,
            "delta": delta.message(),
            "logprobs": {"content": delta.entries} if self._call.sampling.top_logprobs is not None else None,
            "finish_reason": delta.finish,
        }
        if delta.finish is not None:
            body["stop_reason"] = delta.stop_reason
        body["token_ids"] = delta.ids if self._request.return_token_ids else None
        if delta.finish is not None and self._request.return_weight_versions:
            body["weight_versions"] = self._choices[delta.index].spans
        chunk = {**self._head, "choices": [body], **self._usage_so_far(len(self._choices[delta.index].ids))}
        self._open -= delta.finish is not None
        if not self._open and not self._request.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        return chunk

    def last(self) -> Json | None:
        """The usage chunk, where it was asked for."""
        if not self._request.include_usage:
            return None
        sampled = sum(len(choice.ids) for choice in self._choices)
        counted = usage(len(self._call.prompt_ids), sampled)
        return {**self._head, "choices": [], "usage": counted, "system_fingerprint": FINGERPRINT}

    def _usage_so_far(self, sampled: int) -> Json:
        if not (self._request.include_usage and self._request.continuous_usage):
            return {}
        return {"usage": usage(len(self._call.prompt_ids), sampled) | {"completion_tokens_details": None}}
