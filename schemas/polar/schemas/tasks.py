"""What a user asks for: the values of `polar.tasks` and the body of `POST /rollout/task/submit`.

Names are the public Polar's (the paper, A.3), so that its users' payloads and bridges work here. Times are seconds,
memory is MiB. A JSON record without `type` is a `TaskRequest`.
"""

from __future__ import annotations

from typing import Any, Literal

from .base import Claim, Event, Part

DEFAULT_QUEUE_TTL = 86_400.0


class PrepareAction(Part, frozen=True, kw_only=True):
    """One step that makes a box ready, in the order given."""

    type: str
    """`upload_file`, `upload_dir` or `exec`."""
    source: str | None = None
    target: str | None = None
    command: str | None = None
    cwd: str | None = None
    env: dict[str, str] = {}
    content: str | None = None
    """For `upload_file`: the text itself, so that a client on another machine needs no shared path."""
    blob: Claim | None = None
    """For `upload_file`: the same for what is no text or too long, kept in the blob store."""


class RuntimeSpec(Part, frozen=True, kw_only=True):
    """The box a session runs in."""

    backend: str | None = None
    """`local`, `docker`, `apptainer`; None: the gateway's default."""
    image: str | None = None
    prepare: list[PrepareAction] = []
    eval_prepare: list[PrepareAction] | None = None
    """None: replay `prepare` in a fresh grading box; []: nothing."""
    env: dict[str, str] = {}
    network: str | None = None
    """None or `proxy-only`: the model's door and nothing else; `host` and others need the operator's permission."""
    workdir: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int = 0
    allow_internet: bool = True
    """Upstream's name. It is a wish: it takes effect only where the operator permits networks."""
    kwargs: dict[str, Any] = {}


class McpServer(Part, frozen=True, kw_only=True):
    name: str
    transport: str = "stdio"
    """`stdio`, `sse` or `streamable-http`."""
    command: str | None = None
    args: list[str] = []
    url: str | None = None
    env: dict[str, str] = {}


class CustomShell(Part, frozen=True, kw_only=True):
    """The program of harness `shell`."""

    command: str
    cwd: str | None = None
    env: dict[str, str] = {}


class AgentSpec(Part, frozen=True, kw_only=True):
    """The harness; exactly one of `harness` and `import_path`."""

    harness: str | None = None
    import_path: str | None = None
    """`module:Class` of one's own adapter; must be allowed by name in the gateway's settings."""
    model_name: str | None = None
    settings: dict[str, Any] = {}
    env: dict[str, str] = {}
    mcp_servers: list[McpServer] = []
    skills_path: str | None = None
    custom_shell: CustomShell | None = None


class BuilderSpec(Part, frozen=True, kw_only=True):
    strategy: str = "prefix_merging"
    config: dict[str, Any] = {}


class EvaluatorSpec(Part, frozen=True, kw_only=True):
    strategy: str = "session_completed"
    config: dict[str, Any] = {}
    env: dict[str, str] = {}
    refresh_runtime: bool = False
    """Grade in a fresh box instead of the session's own."""


class SamplingSpec(Part, frozen=True, kw_only=True):
    """How the policy samples. The defaults are those under which log-probabilities are the trainer's too."""

    override: Literal["pin", "allow"] = "pin"
    """`pin`: these values replace what the harness asks; `allow`: the harness's values win where it gives any."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None
    """Upper bound per call; None: what the harness asks, up to the model's length."""
    seed_calls: bool = False
    """Give each call a seed derived from session and call number: the same run again samples the same."""


class TaskRequest(Event, frozen=True, kw_only=True):
    """One task: an instruction for an agent, sampled `num_samples` times."""

    task_id: str | None = None
    """Chosen by the caller, or made at the edge."""
    instruction: str | Claim
    agent: AgentSpec
    num_samples: int = 1
    timeout_seconds: float = 600.0
    """The agent's own time, from the start of RUN."""
    queue_ttl: float = DEFAULT_QUEUE_TTL
    """How long a session may wait for a node before it ends as `infra`."""
    init_timeout: float = 600.0
    evaluation_timeout: float = 1_800.0
    max_attempts: int = 3
    """Tries per session, counting the first; only retryable failures are tried again."""
    runtime: RuntimeSpec = RuntimeSpec()
    builder: BuilderSpec = BuilderSpec()
    evaluator: EvaluatorSpec = EvaluatorSpec()
    sampling: SamplingSpec = SamplingSpec()
    capture: Literal["rendered", "token_in"] | None = None
    """`rendered`: each prompt is rendered from messages; `token_in`: it keeps the exact tokens of the prompt and the
    reply before it, which needs an engine with --enable-scale-out. None: as the proxy is set (`capture_mode`)."""
    keep_reasoning: Literal["as_template", "always"] | None = None
    """With `token_in`, where the chat template strips earlier thinking: `as_template` follows it (the prompt is
    rendered, and the record says so), `always` keeps the sampled thinking. None: as the proxy is set."""
    group_quorum: int | None = None
    """Decide the group once this many of its sessions have ended with a reward; None: wait for all."""
    group_deadline: float | None = None
    """Decide the group this many seconds after acceptance at the latest."""
    artifacts: list[str] = []
    """Glob patterns below the workspace, kept after the session, e.g. `*.patch`."""
    callback_url: str | None = None
    tenant: str = "default"
    metadata: dict[str, Any] = {}
    """Handed through to the trajectory. `group_id`, `group_size`, `policy_version`, `rollout_step` have a meaning."""


class CancelRequest(Event, frozen=True, kw_only=True):
    """Ends a task's sessions, or one of them, as `cancelled`."""

    task_id: str
    session_id: str | None = None
    reason: str = "cancelled by request"


class CloseRequest(Event, frozen=True, kw_only=True):
    """Ends a manual session: its agent, run by hand, is done."""

    task_id: str
    session_id: str
    reason: str = "closed by request"
