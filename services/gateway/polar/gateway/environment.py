"""What a harness sees: the environment of its commands, and the token that is its one key to the one door.

Names are the public Polar's, so that its users' scripts work here. Polar's own variables win over a task's: a harness
that talks to another address than its door captures nothing. Pure.
"""

from __future__ import annotations

from polar.schemas import SessionAssigned
from polar.service.tokens import SessionToken

INSTRUCTION_FILE = "instruction.md"


def session_token(event: SessionAssigned, model: str, not_after_ms: int) -> SessionToken:
    """One session, one attempt, one model, one deadline."""
    task = event.task
    return SessionToken(
        session_id=event.session_id,
        attempt=event.attempt,
        task_id=event.task_id,
        group_id=event.group_id,
        sample=event.sample,
        model=model,
        sampling=task.sampling,
        capture=task.capture,
        keep_reasoning=task.keep_reasoning,
        tenant=task.tenant,
        harness=task.agent.harness or task.agent.import_path or "",
        not_after_ms=not_after_ms,
    )


def workspace(session_dir: str, workdir: str | None) -> str:
    """Where the agent works, as its commands see it."""
    return workdir or f"{session_dir}/workspace"


def instruction_file(session_dir: str) -> str:
    return f"{session_dir}/{INSTRUCTION_FILE}"


def preparation(event: SessionAssigned, session_dir: str) -> dict[str, str]:
    """The variables of `prepare` commands: names and folders; no model and no key, since RUN has not begun."""
    task = event.task
    return {
        "SESSION_ID": event.session_id,
        "TASK_ID": event.task_id,
        "SESSION_DIR": session_dir,
        "ARTIFACTS_DIR": f"{session_dir}/artifacts",
        "LOGS_DIR": f"{session_dir}/logs",
        "AGENT_LOG_DIR": f"{session_dir}/logs",
        "POLAR_INSTRUCTION_FILE": instruction_file(session_dir),
        "POLAR_ATTEMPT": str(event.attempt),
        "POLAR_SAMPLE": str(event.sample),
        "POLAR_WORKSPACE": workspace(session_dir, task.runtime.workdir),
    }


def harness_environment(
    event: SessionAssigned,
    *,
    session_dir: str,
    instruction: str,
    inline_bytes: int,
    model: str,
    base_url: str | None,
    key: str,
) -> dict[str, str]:
    """Polar's own variables. `base_url`: the door as the box reaches it; None: no network, so no model."""
    found = {**preparation(event, session_dir), "POLAR_MODEL": model, "OPENAI_MODEL": model}
    if len(instruction.encode()) <= inline_bytes and "\0" not in instruction:
        found["POLAR_INSTRUCTION"] = instruction
    if base_url is not None:
        found |= {
            "POLAR_BASE_URL": base_url,
            "OPENAI_BASE_URL": f"{base_url}/v1",
            "OPENAI_API_BASE": f"{base_url}/v1",
            "ANTHROPIC_BASE_URL": base_url,
            "GOOGLE_API_URL": base_url,
            "GOOGLE_GEMINI_BASE_URL": base_url,
            **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GOOGLE_API_KEY", "GEMINI_API_KEY"), key),
        }
    return found
