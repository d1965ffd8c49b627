"""Where system messages stand in a prompt, for chat templates that take them at its head only. Pure.

They are left where they were sent; only where the engine's template refuses or silently drops them there are they told
inside the user message before them, so that the head of the prompt stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from .calls import Call, Json

PLAIN: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "How are you?"},
]
LATE: list[Json] = [*PLAIN[:2], {"role": "system", "content": "Answer in one word."}, *PLAIN[2:]]
"""As `PLAIN`, with one more message, which a template that takes it renders to more tokens."""


def has_late_system(messages: Sequence[Json]) -> bool:
    """Whether a system message follows another one."""
    return any(message["role"] == "system" for message in messages[1:])


def fold_late_system(messages: Sequence[Json]) -> list[Json]:
    """The conversation with at most one system message, its first."""
    found: list[Json] = []
    made = False
    """Whether the last message found is a user's only because a system message was folded."""
    for message in messages:
        last = found[-1] if found else None
        role, parts = message["role"], _parts(message["content"])
        if role == "system" and last is not None:
            if last["role"] == "system":
                found[-1] = {**last, "content": _parts(last["content"]) + parts}
                continue
            reminders = [_reminder(part) for part in parts]
            made = made or last["role"] != "user"
            if last["role"] == "user":
                found[-1] = {**last, "content": _parts(last["content"]) + reminders}
            else:
                found.append({"role": "user", "content": reminders})
        elif role == "user" and made and last is not None:
            # templates that are strict about system messages are so about turns that alternate too
            found[-1] = {**last, "content": _parts(last["content"]) + parts}
            made = False
        else:
            found.append(message)
            made = False
    return found


def _parts(content: str | list[Json] | None) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


def _reminder(part: Json) -> Json:
    # the tag that Claude Code itself puts around what the system says in a user's turn
    return {"type": "text", "text": f"<system-reminder>\n{part['text']}\n</system-reminder>"}


def tokenize_body(call: Call, model: str) -> Json:
    """What is posted to the engine's /tokenize for the prompt that it would make of `call`."""
    extras = call.extras
    body: Json = {"model": model, "messages": call.messages, "add_generation_prompt": True}
    body |= {name: extras[name] for name in ("add_generation_prompt", "continue_final_message") if name in extras}
    kwargs = {name: extras[name] for name in ("reasoning_effort",) if name in extras}
    kwargs |= extras.get("chat_template_kwargs") or {}
    if kwargs:
        body["chat_template_kwargs"] = kwargs
    if call.tools is not None:
        body["tools"] = call.tools
    return body
