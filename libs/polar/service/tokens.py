"""Signed keys: one for a session's model, one for a session's box. HS256 by PyJWT.

A session token opens the proxy, for one session, one attempt, one model, until one moment; a box key opens the runtime
API of a gateway, for one box. They have different audiences, so that one is never good for the other. Pure: the time
is passed in.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import jwt
import msgspec

from polar.schemas.base import Part
from polar.schemas.tasks import SamplingSpec

ALGORITHM = "HS256"
SESSION_AUDIENCE = "polar.session"
BOX_AUDIENCE = "polar.box"

Reason = Literal["expired", "forged", "malformed"]


class TokenInvalid(Exception):
    """A token is not good; `reason` says why."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class SessionToken(Part, frozen=True, kw_only=True):
    """What the proxy must know of a session."""

    session_id: str
    attempt: int
    task_id: str
    group_id: str
    sample: int
    model: str
    """The name the harness was given."""
    sampling: SamplingSpec = SamplingSpec()
    capture: Literal["rendered", "token_in"] | None = None
    keep_reasoning: Literal["as_template", "always"] | None = None
    """None, of both: as the proxy is set."""
    tenant: str = "default"
    harness: str | None = None
    not_after_ms: int
    """Milliseconds since the epoch."""


class BoxKey(Part, frozen=True, kw_only=True):
    """Which box, and until when."""

    session_id: str
    attempt: int
    not_after_ms: int


TokenT = TypeVar("TokenT", SessionToken, BoxKey)


def sign_session(token: SessionToken, secret: str) -> str:
    return _sign(token, secret, SESSION_AUDIENCE)


def verify_session(text: str, secret: str, now_ms: int) -> SessionToken:
    """The token, if `secret` signed it as a session token and its time is not over.

    Raises:
        TokenInvalid: `malformed` (no such token at all), `forged` (another secret, or made for something else) or
            `expired`.
    """
    return _verify(text, secret, now_ms, SESSION_AUDIENCE, SessionToken)


def sign_box(key: BoxKey, secret: str) -> str:
    return _sign(key, secret, BOX_AUDIENCE)


def verify_box(text: str, secret: str, now_ms: int) -> BoxKey:
    """As `verify_session`, for a box key."""
    return _verify(text, secret, now_ms, BOX_AUDIENCE, BoxKey)


def _sign(token: SessionToken | BoxKey, secret: str, audience: str) -> str:
    claims: dict[str, Any] = msgspec.to_builtins(token)
    return jwt.encode({"aud": audience, **claims}, secret, algorithm=ALGORITHM)


def _verify(text: str, secret: str, now_ms: int, audience: str, kind: type[TokenT]) -> TokenT:
    try:
        # no `exp` claim: PyJWT would hold it against its own clock
        claims = jwt.decode(text, secret, algorithms=[ALGORITHM], audience=audience, options={"require": ["aud"]})
        token = msgspec.convert(claims, kind)
    except (jwt.InvalidSignatureError, jwt.InvalidAlgorithmError, jwt.InvalidAudienceError):
        raise TokenInvalid("forged", "the token was not made here, or not for this") from None
    except (jwt.InvalidTokenError, msgspec.ValidationError, UnicodeError, ValueError):
        raise TokenInvalid("malformed", "this is no token of Polar's") from None
    if now_ms >= token.not_after_ms:
        raise TokenInvalid("expired", "the token's time is over")
    return token
