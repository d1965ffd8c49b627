"""The dialect openai.responses: what a session may come back to, and for how long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.proxy.dialects import OpenAIResponses
from polar.proxy.dialects.responses import Responses
from polar.proxy.errors import BadRequest, ProxyError
from polar.schemas import SamplingSpec
from polar.service.tokens import SessionToken
from tests.proxy.responses_harness import ASKED, TOLD, TOOLS, USER, memory, parse, reply


def token(session: str = "s1", attempt: int = 1) -> SessionToken:
    return SessionToken(
        session_id=session, attempt=attempt, task_id="t", group_id="g", sample=0, model="m",
        sampling=SamplingSpec(), tenant="x", harness="h", not_after_ms=1,
    )  # fmt: skip


def told(speaking: OpenAIResponses, completion: str, said: str = "Yes.", **fields: Any) -> str:
    """One call and its reply; the response's id."""
    call = parse(speaking=speaking, **fields)
    body = json.loads(speaking.reply(call, TOLD._replace(completion_id=completion), reply({"content": said})))
    return str(body["id"])


def test_a_conversation_goes_on_from_a_response() -> None:
    speaking = OpenAIResponses(memory().of(token()))
    first = told(speaking, "c-1", instructions="Be brief.")
    second = told(speaking, "c-2", "And?", previous_response_id=first, input="More.")
    found = parse(speaking=speaking, previous_response_id=second, input="So?").messages
    assert [message["content"] for message in found] == [ASKED, "Yes.", "More.", "And?", "So?"]
    # another branch
    found = parse(speaking=speaking, previous_response_id=first, input="So?").messages
    assert [message["content"] for message in found] == [ASKED, "Yes.", "So?"]
    assert json.loads(speaking.retrieved(first))["output"][0]["content"][0]["text"] == "Yes."


def test_tools_that_an_item_declared_stay() -> None:
    speaking = OpenAIResponses(memory().of(token()))
    item = {"type": "additional_tools", "role": "developer", "tools": TOOLS[:1]}
    first = told(speaking, "c-1", input=[item, *USER])
    second = told(speaking, "c-2", input=[item, *USER], previous_response_id=first)
    assert len(parse(speaking=speaking, previous_response_id=second).tools or ()) == 1


def test_an_item_may_be_referred_to() -> None:
    speaking = OpenAIResponses(memory().of(token()))
    told(speaking, "c-1")
    found = parse(speaking=speaking, input=[*USER, {"type": "item_reference", "id": "msg_c-1"}, *USER]).messages
    assert found[1] == {"role": "assistant", "content": "Yes."}


def test_what_was_not_to_be_stored_or_is_anothers_is_not_there() -> None:
    kept = memory()
    speaking = OpenAIResponses(kept.of(token()))
    unstored, stored = told(speaking, "c-1", store=False), told(speaking, "c-2")
    assert parse(speaking=speaking, previous_response_id=stored)
    cases = [(speaking, unstored), (OpenAIResponses(kept.of(token("s2"))), stored)]
    for other, name in cases:
        with pytest.raises(ProxyError, match=f"Previous response with id '{name}' not found") as refused:
            parse(speaking=other, previous_response_id=name)
        assert (refused.value.status, refused.value.code) == (400, "previous_response_not_found")
        with pytest.raises(BadRequest) as missing:
            other.retrieved(name)
        assert missing.value.status == 404
    with pytest.raises(BadRequest):
        parse(speaking=OpenAIResponses(kept.of(token(attempt=2))), previous_response_id=stored)


def test_memory_is_bounded_and_what_is_over_is_freed() -> None:
    kept = Responses(attempt_bytes=5_000, total_bytes=12_000)
    for session in ("a", "b", "c", "d"):
        speaking = OpenAIResponses(kept.of(token(session)))
        names = [told(speaking, f"c-{i}") for i in range(9)]
        assert kept.size <= 12_000
        assert parse(speaking=speaking, previous_response_id=names[-1])
        with pytest.raises(BadRequest):
            parse(speaking=speaking, previous_response_id=names[0])
    with pytest.raises(BadRequest):
        OpenAIResponses(kept.of(token("a"))).retrieved("resp_c-8")
    told(OpenAIResponses(kept.of(token("d"))), "c-9", input="x" * 6_000)
    with pytest.raises(BadRequest):
        OpenAIResponses(kept.of(token("d"))).retrieved("resp_c-9")
    for session in ("a", "b", "c", "d"):
        kept.close(session, 1)
    assert kept.size == 0
