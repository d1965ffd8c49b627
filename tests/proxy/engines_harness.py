"""What the tests of the engines' side share: one question over every official client, and what came of it."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
from google.genai import errors as google_errors

from polar.proxy.upstreams.engines import Engines
from polar.proxy.upstreams.upstream import Upstream
from tests.proxy import anthropic_harness, google_harness
from tests.proxy.harness import Door

DIALECTS = ["chat", "responses", "anthropic", "google"]
QUICK = {"engine_probe_every": 0.05, "engine_cooldown": 0.05}
"""Settings of proxies whose engines come and go."""
PROMPT = "What is the weather in Paris?"


async def asked(door: Door, dialect: str, session: str = "s1", **changes: Any) -> Any:
    """One whole reply."""
    if dialect == "anthropic":
        async with anthropic_harness.client(door, session, **changes) as claude:
            return await claude.messages.create(**anthropic_harness.fields())
    if dialect == "google":
        google = google_harness.client(door, session, **changes)
        return await google.aio.models.generate_content(model="gemini-x", contents=PROMPT)
    async with door.client(session, **changes) as client:
        if dialect == "responses":
            return await client.responses.create(model="gpt-x", input=PROMPT)
        return await client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": PROMPT}])


async def refusal_of(door: Door, dialect: str, session: str = "s1", **changes: Any) -> tuple[int, str, dict[str, str]]:
    """Status, whole body and headers of the error that its official client raises."""
    try:
        reply = await asked(door, dialect, session, **changes)
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        return error.status_code, error.response.text, dict(error.response.headers)
    except google_errors.APIError as error:
        headers = {} if error.response is None else dict(error.response.headers)
        return error.code, str(error.details), {name.lower(): value for name, value in headers.items()}
    raise AssertionError(f"there was a reply: {reply}")


def engines_of(door: Door) -> Engines:
    """The proxy's, from its running service."""
    engines = door.service.engines
    assert engines is not None
    return engines


def upstream_of(door: Door, url: str) -> Upstream:
    return next(one for one in engines_of(door).all if one.url == url)


def sample(door: Door, name: str, **labels: str) -> float | None:
    """A metric's value."""
    labels = labels | ({"model": "*"} if "engine" in labels else {})
    return door.service.registry.get_sample_value(name, labels)
