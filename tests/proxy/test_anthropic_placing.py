"""System messages where a chat template takes them, and images among a prompt's ids."""

from __future__ import annotations

from typing import Any

import pytest

from polar.proxy.calls import Call, Media
from polar.proxy.media import place
from polar.proxy.placing import fold_late_system, has_late_system, tokenize_body
from polar.schemas import Sampling, TokenIds


def said(role: str, *texts: str) -> dict[str, Any]:
    if len(texts) == 1:
        return {"role": role, "content": texts[0]}
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


def test_a_late_system_message_is_told_in_the_user_message_before_it() -> None:
    sent = [said("system", "a"), said("user", "b"), said("system", "c"), said("assistant", "d"), said("user", "e")]
    assert has_late_system(sent)
    folded = fold_late_system(sent)
    assert folded == [said("system", "a"), said("user", "b", reminder("c")), *sent[3:]]
    # what comes later changes nothing of it
    assert fold_late_system(sent[:3]) == folded[:2]


def test_a_system_message_after_a_reply_is_a_users_turn_with_what_the_user_says_next() -> None:
    head = [said("user", "b"), said("assistant", "d")]
    folded = fold_late_system(
        [*head, said("system", "c"), said("user", "e"), said("assistant", "f"), said("user", "g")]
    )
    assert folded == [*head, said("user", reminder("c"), "e"), said("assistant", "f"), said("user", "g")]
    alone = fold_late_system([*head, said("system", "c")])
    assert alone[2]["content"] == [{"type": "text", "text": reminder("c")}]


def test_several_system_messages_at_the_head_are_one() -> None:
    assert fold_late_system([said("system", "a"), said("system", "b"), said("user", "c")]) == [
        said("system", "a", "b"),
        said("user", "c"),
    ]


def test_a_conversation_without_late_system_messages_is_left_alone() -> None:
    sent = [said("system", "a"), said("user", "b"), said("user", "c")]
    assert not has_late_system(sent)
    assert fold_late_system(sent) == sent


@pytest.mark.parametrize(
    ("ids", "placeholder", "places"),
    [
        ([1, 9, 9, 2, 9, 3], 9, [(1, 2), (4, 1)]),
        ([9, 1, 9], 9, [(0, 1), (2, 1)]),
        ([9, 9, 1], 9, [(-1, 0), (-1, 0)]),
        ([1, 2], None, [(-1, 0), (-1, 0)]),
    ],
)
def test_images_stand_where_their_placeholders_do(
    ids: list[int], placeholder: int | None, places: list[tuple[int, int]]
) -> None:
    media = [Media("image", "aa"), Media("image", "bb")]
    found = place(media, TokenIds(ids), placeholder)
    assert [(one.offset, one.length) for one in found] == places
    assert [one.sha256 for one in found] == ["aa", "bb"]
    assert place([], TokenIds(ids), placeholder) == []


def test_a_prompt_is_counted_as_it_is_asked_for() -> None:
    call = Call(
        dialect="d",
        model="x",
        messages=[said("user", "a")],
        tools=[{"type": "function"}],
        asked=Sampling(),
        extras={
            "reasoning_effort": "low",
            "chat_template_kwargs": {"thinking": True},
            "continue_final_message": True,
            "add_generation_prompt": False,
            "tool_choice": "auto",
        },
    )
    assert tokenize_body(call, "m") == {
        "model": "m",
        "messages": [said("user", "a")],
        "tools": [{"type": "function"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"reasoning_effort": "low", "thinking": True},
    }
