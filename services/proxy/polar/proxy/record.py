"""What goes on the log of a call: `CompletionCaptured` from a call and its reply, and how large it may get.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from polar.schemas import (
    CallStarted,
    Choice,
    ClientHints,
    CompletionCaptured,
    Engine,
    PolicySpan,
    Prompt,
    Sampling,
    sha256,
)
from polar.service.tokens import SessionToken

from .calls import Call, Json, Reply, ReplyChoice
from .dialects.marks import known_by, marked
from .errors import BadRequest, RecordRefused
from .media import place
from .sampling import constraints

HINT_LENGTH = 200
ID_BYTES, LOGPROB_BYTES = 4, 4
TEXT_BYTES_PER_TOKEN = 16
"""Of a reply's message; English takes 4 to 5, and the record is measured again before it is written."""
LEAST_REPLY = 1024
"""Tokens."""
FIXED_BYTES = 16 * 1024
"""Ids, sampling, engine and the like, generously."""


def hints(
    headers: Mapping[str, str],
    marks: Mapping[str, str],
    messages: Sequence[Json] = (),
    tools: Sequence[Json] | None = None,
) -> ClientHints:
    """What a client says of its call: in headers, else in its body (`marks`), else by the prompt that it always sends
    for calls of that kind."""
    agent = headers.get("User-Agent")
    said = {**known_by(agent or "", messages, tools or ()), **marks, **marked(headers)}
    return ClientHints(
        user_agent=agent[:HINT_LENGTH] if agent else None, **{name: text[:HINT_LENGTH] for name, text in said.items()}
    )


def reply_room(call: Call, *, max_model_len: int | None, max_tokens: int | None, limit: int) -> int | None:
    """How many tokens each choice may have at most, so that the record fits into `limit` bytes; None: no bound needed.

    The prompt is bounded from above (a token is at least one byte, a template adds little), the reply is an estimate.

    Raises:
        RecordRefused: the prompt leaves no room for a reply worth generating.
        BadRequest: the request holds what no record can.
    """
    try:
        text = len(msgspec.msgpack.encode([call.messages, call.tools, call.asked]))
    except OverflowError:
        # now: after the generation it would leave the call without an end
        raise BadRequest("The request holds an integer of more than 64 bits.") from None
    except RecursionError:
        raise BadRequest("The request is nested too deep.") from None
    prompt = text + ID_BYTES * (text if max_model_len is None else min(text, max_model_len))
    room = (limit - FIXED_BYTES - prompt) // (call.n * (ID_BYTES + LOGPROB_BYTES + TEXT_BYTES_PER_TOKEN))
    if room < min(LEAST_REPLY, LEAST_REPLY if max_tokens is None else max_tokens):
        raise RecordRefused(
            f"The conversation takes about {prompt} bytes of the {limit} that a record holds. Send shorter messages or "
            "a smaller `n`, or raise POLAR_KAFKA_MAX_RECORD_BYTES."
        )
    longest = min((bound for bound in (max_tokens, max_model_len) if bound is not None), default=room)
    # more than the model's length is refused by the engine, so a bound is set only where it binds
    return max_tokens if longest <= room else room


def spans(choice: ReplyChoice, before: str | None, after: str | None) -> list[PolicySpan]:
    """Which weights sampled the choice: the answer's own word, else what the engine said before and after the call."""
    size = len(choice.ids)
    if size == 0:
        return []
    told = choice.versions
    edges = [0, *(span.end for span in told)]
    if (
        told
        and edges[-1] == size
        and all(edge == span.start < span.end for edge, span in zip(edges, told, strict=False))
    ):
        return [PolicySpan(start=span.start, end=span.end, version=span.version, exact=True) for span in told]
    if before is None or after is None:
        return []
    return [PolicySpan(start=0, end=size, version=after, exact=before == after)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a call besides its reply."""

    token: SessionToken
    started: CallStarted
    call: Call
    sampling: Sampling
    engine: Engine
    request_sha256: str
    hints: ClientHints
    image_token: int | None = None
    """The id that stands for a piece of an image."""
    retry_of: str | None = None
    """The call with an equal body whose client did not get all of its reply."""


def captured(
    facts: Facts,
    reply: Reply,
    *,
    before: str | None,
    after: str | None,
    first_token_ms: int | None,
    ended_ms: int,
    complete: bool = True,
) -> CompletionCaptured:
    """The record. `before`, `after`: the engine's word on its weights around the call."""
    call, token, started = facts.call, facts.token, facts.started
    return CompletionCaptured(
        completion_id=started.completion_id,
        session_id=token.session_id,
        attempt=token.attempt,
        task_id=token.task_id,
        group_id=token.group_id,
        sample=token.sample,
        call=started.call,
        started_ms=started.at_ms,
        first_token_ms=first_token_ms,
        ended_ms=ended_ms,
        dialect=call.dialect,
        streamed=call.stream,
        harness=token.harness,
        hints=facts.hints,
        request_sha256=facts.request_sha256,
        prompt=Prompt(
            ids=reply.prompt_ids,
            messages=call.messages,
            tools=call.tools,
            tools_sha256=None if call.tools is None else sha256(call.tools),
            media=place(call.media, reply.prompt_ids, facts.image_token),
        ),
        choices=[
            Choice(
                index=choice.index,
                ids=choice.ids,
                logprobs=choice.logprobs,
                message=choice.message,
                finish=choice.finish,
                stop=choice.stop,
                spans=spans(choice, before, after),
            )
            for choice in reply.choices
        ],
        sampling_asked=call.asked,
        sampling=facts.sampling,
        constraints=constraints(call, facts.sampling),
        engine=facts.engine,
        usage=reply.usage,
        retry_of=facts.retry_of,
        complete=complete,
    )
