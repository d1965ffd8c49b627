"""Tokens open one door, until one moment."""

from __future__ import annotations

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.schemas.tasks import SamplingSpec
from polar.service.tokens import (
    SESSION_AUDIENCE,
    BoxKey,
    SessionToken,
    TokenInvalid,
    sign_box,
    sign_session,
    verify_box,
    verify_session,
)

SECRET = "a secret of more than thirty-two characters"
NOW = 1_763_700_000_000
TOKEN = SessionToken(
    session_id="s",
    attempt=2,
    task_id="t",
    group_id="g",
    sample=3,
    model="policy",
    sampling=SamplingSpec(temperature=0.7, seed_calls=True),
    tenant="acme",
    harness="shell",
    not_after_ms=NOW,
)
KEY = BoxKey(session_id="s", attempt=2, not_after_ms=NOW)


def reason(check: object, *args: object) -> str:
    with pytest.raises(TokenInvalid) as caught:
        check(*args)  # type: ignore[operator]
    return caught.value.reason


def test_what_was_signed_comes_back() -> None:
    assert verify_session(sign_session(TOKEN, SECRET), SECRET, NOW - 1) == TOKEN
    assert verify_box(sign_box(KEY, SECRET), SECRET, NOW - 1) == KEY


def test_a_token_is_good_until_its_moment() -> None:
    text = sign_session(TOKEN, SECRET)
    verify_session(text, SECRET, NOW - 1)
    assert reason(verify_session, text, SECRET, NOW) == "expired"


def test_one_kind_is_never_good_for_the_other() -> None:
    assert reason(verify_box, sign_session(TOKEN, SECRET), SECRET, 0) == "forged"
    assert reason(verify_session, sign_box(KEY, SECRET), SECRET, 0) == "forged"


def test_another_secret_is_forged() -> None:
    assert reason(verify_session, sign_session(TOKEN, SECRET + "x"), SECRET, 0) == "forged"


def test_an_unsigned_token_is_refused() -> None:
    claims = {"aud": SESSION_AUDIENCE, "session_id": "s", "not_after_ms": NOW}
    assert reason(verify_session, jwt.encode(claims, "", algorithm="none"), SECRET, 0) == "forged"


@pytest.mark.parametrize("text", ["", "x", "a.b.c", "é", "sk-123", ".."])
def test_what_is_no_token_is_malformed(text: str) -> None:
    assert reason(verify_session, text, SECRET, 0) == "malformed"


def test_a_signed_token_without_its_fields_is_malformed() -> None:
    text = jwt.encode({"aud": SESSION_AUDIENCE, "session_id": "s"}, SECRET, algorithm="HS256")
    assert reason(verify_session, text, SECRET, 0) == "malformed"


@given(st.integers(min_value=0), st.characters(codec="ascii"))
def test_a_token_with_one_character_changed_is_refused(place: int, character: str) -> None:
    text = sign_session(TOKEN, SECRET)
    place %= len(text) - 1  # the last character of base64 has bits that mean nothing
    changed = text[:place] + character + text[place + 1 :]
    if changed != text:
        assert reason(verify_session, changed, SECRET, 0) in ("forged", "malformed")


@given(st.text(), st.integers(0, 2**31), st.integers(1, 2**53))
def test_any_session_round_trips(name: str, attempt: int, until: int) -> None:
    token = SessionToken(
        session_id=name, attempt=attempt, task_id=name, group_id=name, sample=0, model=name, not_after_ms=until
    )
    assert verify_session(sign_session(token, SECRET), SECRET, until - 1) == token
