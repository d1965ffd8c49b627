"""Errors in OpenAI's shape: as a body, and as the failure of a response that has begun. Pure.

https://platform.openai.com/docs/guides/error-codes; Codex 0.169.0 goes by the codes of a failed response: it compacts
at `context_length_exceeded`, waits and asks again at `rate_limit_exceeded` with "try again in Ns", gives up at
`server_is_overloaded`, and tries others again.
"""

from __future__ import annotations

from ...calls import Json
from ...errors import RETRY_AFTER_S, PromptTooLong, ProxyError
from ..openai_chat import STATUS_TYPES

TOO_LONG = "Your input exceeds the context window of this model. Please adjust your input and try again."


def body_of(error: ProxyError) -> Json:
    """The body of an error."""
    kind = STATUS_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    param = "input" if isinstance(error, PromptTooLong) else error.param
    return {"error": {"message": message_of(error), "type": kind, "param": param, "code": error.code}}


def failure_of(error: ProxyError) -> Json:
    """The `error` of a response that failed after its headers."""
    if isinstance(error, PromptTooLong):
        return {"code": error.code, "message": message_of(error)}
    if error.status in (429, 503):
        # the one code that a client was seen to wait at, for as long as these words say
        wait = RETRY_AFTER_S if error.retry_after is None else error.retry_after
        return {"code": "rate_limit_exceeded", "message": f"{error.message} Please try again in {wait:g}s."}
    return {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}


def message_of(error: ProxyError) -> str:
    """Its message, in the provider's words where clients read them."""
    if not isinstance(error, PromptTooLong):
        return error.message
    if error.tokens is None or error.limit is None:
        return f"{TOO_LONG} ({error.message})"
    # the other half in the words of the Chat API: LiteLLM 1.106 knows an overflow by them alone, and else asks again
    limit = f"This model's maximum context length is {error.limit} tokens, input and output together"
    return f"{TOO_LONG} ({limit}; your input has {error.tokens} tokens.)"
