"""What a task must fulfil beyond its types. Pure; the same at HTTP, on Kafka and in the CLI."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from .catalog import BACKENDS, BUILDERS, EVALUATORS, HARNESSES, MCP_TRANSPORTS, NETWORKS, PREPARE_TYPES, Kind
from .ids import id_problem
from .stages import Notice, Problem
from .tasks import CancelRequest, CloseRequest, TaskRequest
from .wire import DecodeError, decode_json, encode, unknown_fields

Request = TaskRequest | CancelRequest | CloseRequest

MAX_DEPTH = 32
"""Of lists and objects within each other in what a task hands through: every reader decodes it recursively."""
MAX_REASON = 500
"""Characters of a cancel's reason: it ends up in several records of each session."""


class Limits(NamedTuple):
    """What an operator allows; each is a setting of submit."""

    max_samples: int = 4096
    max_group: int = 256
    """Tasks of more samples, that are no explicit group, get a group per session."""
    max_timeout_s: float = 7 * 86_400.0
    max_attempts: int = 10
    allow_networks: frozenset[str] = frozenset({"proxy-only", "none"})
    import_paths: frozenset[str] = frozenset()
    """`module:Class` of outside harnesses, builders and evaluators that may be loaded."""


class Refused(ValueError):
    """A request that is not taken, with every reason found."""

    def __init__(self, problems: list[Problem], task_id: str | None = None) -> None:
        super().__init__("; ".join(f"{one.field or 'request'}: {one.message}" for one in problems))
        self.problems = problems
        self.task_id = task_id


class Checked(NamedTuple):
    task: TaskRequest
    notices: list[Notice]


def parse(data: bytes) -> Request:
    """A value of `polar.tasks` from a person's JSON; strict about unknown fields.

    Raises:
        Refused: with the field and the reason.
    """
    try:
        loose = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused([Problem(field="", message=f"is not JSON: {error}")]) from None
    if not isinstance(loose, dict):
        raise Refused([Problem(field="", message=f"expected an object, got {type(loose).__name__}")])
    return parse_object(loose, data)


def parse_object(loose: dict[str, Any], data: bytes | None = None) -> Request:
    """As `parse`, from the decoded object (`data`: the text it came from, where there is one)."""
    raw_id = loose.get("task_id")
    task_id = raw_id if isinstance(raw_id, str) else None
    tag = loose.get("type", "TaskRequest")
    kinds: dict[str, type[Request]] = {one.__name__: one for one in (TaskRequest, CancelRequest, CloseRequest)}
    if not isinstance(tag, str) or tag not in kinds:
        raise Refused([Problem(field="type", message=f"is none of {', '.join(kinds)}", code="unknown_name")], task_id)
    kind = kinds[tag]
    try:
        request = decode_json(data if data is not None else msgspec.json.encode(loose), (kind,))
    except DecodeError as error:
        raise Refused([error.problem, *unknown_fields(loose, kind)], task_id) from None
    extra = unknown_fields(loose, kind)
    if extra:
        raise Refused(extra, task_id)
    assert isinstance(request, kind)
    return request


def check(task: TaskRequest, limits: Limits) -> Checked:
    """The task as it will run, aliases resolved, and what was changed.

    Raises:
        Refused: with every problem, not only the first.
    """
    found: list[Problem] = unrecordable(task)
    notices: list[Notice] = []

    def bad(field: str, message: str, code: str = "invalid") -> None:
        found.append(Problem(field=field, message=message, code=code))

    def number(field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
        # so that NaN fails, and an integer that no float holds is never converted to one
        if not low <= value <= high or (above and value <= low):
            least = "above" if above else "at least"
            bad(field, f"must be {least} {low:g} and at most {high:g}, got {str(value)[:40]}")

    if task.task_id is not None and (reason := id_problem(task.task_id)):
        bad("task_id", reason)
    if isinstance(task.instruction, str) and not task.instruction.strip() and task.agent.harness != "shell":
        bad("instruction", "is empty")
    number("num_samples", task.num_samples, 1, limits.max_samples)
    number("max_attempts", task.max_attempts, 1, limits.max_attempts)
    for field in ("timeout_seconds", "queue_ttl", "init_timeout", "evaluation_timeout"):
        number(field, getattr(task, field), 0, limits.max_timeout_s, above=True)
    if task.group_deadline is not None:
        number("group_deadline", task.group_deadline, 0, limits.max_timeout_s, above=True)
    if task.group_quorum is not None:
        number("group_quorum", task.group_quorum, 1, max(task.num_samples, _group_size(task) or 0))
    _check_metadata(task, limits, bad)
    _check_sampling(task, number, bad)

    agent = task.agent
    if (agent.harness is None) == (agent.import_path is None):
        bad(
            "agent",
            "takes exactly one of `harness` and `import_path`",
            "missing" if agent.harness is None else "invalid",
        )
    harness = agent.harness
    if harness is not None:
        harness = _name(HARNESSES, "agent.harness", harness, bad)
    if agent.import_path is not None and agent.import_path not in limits.import_paths:
        bad(
            "agent.import_path",
            f"`{agent.import_path}` is not among the import paths this installation allows",
            "not_allowed",
        )
    if agent.custom_shell is not None and harness not in (None, "shell"):
        bad("agent.custom_shell", "goes with harness `shell` only")
    if harness == "shell" and (agent.custom_shell is None or not agent.custom_shell.command.strip()):
        bad("agent.custom_shell.command", "is required with harness `shell`", "missing")
    for i, server in enumerate(agent.mcp_servers):
        if server.transport not in MCP_TRANSPORTS:
            bad(f"agent.mcp_servers[{i}].transport", f"is none of {', '.join(MCP_TRANSPORTS)}", "unknown_name")

    runtime = task.runtime
    backend = runtime.backend
    if backend is not None:
        backend = _name(BACKENDS, "runtime.backend", backend, bad)
    network = runtime.network
    if network is not None and network not in NETWORKS:
        bad("runtime.network", f"is none of {', '.join(NETWORKS)}", "unknown_name")
    elif network is not None and network not in limits.allow_networks:
        notices.append(
            Notice(
                field="runtime.network",
                message=f"`{network}` is not permitted here; the session gets `proxy-only` "
                "(an operator permits it with POLAR_SUBMIT_ALLOW_NETWORKS)",
            )
        )
        network = "proxy-only"
    for name, steps in (("prepare", runtime.prepare), ("eval_prepare", runtime.eval_prepare or [])):
        for i, step in enumerate(steps):
            where = f"runtime.{name}[{i}]"
            if step.type not in PREPARE_TYPES:
                bad(f"{where}.type", f"is none of {', '.join(PREPARE_TYPES)}", "unknown_name")
            elif step.type == "exec" and not step.command:
                bad(f"{where}.command", "is required for `exec`", "missing")
            elif step.type != "exec" and not step.target:
                bad(f"{where}.target", f"is required for `{step.type}`", "missing")
            elif step.type == "upload_file" and [step.source, step.content, step.blob].count(None) != 2:
                bad(where, "takes exactly one of `source`, `content` and `blob`")
            elif step.type == "upload_dir" and not step.source:
                bad(f"{where}.source", "is required for `upload_dir`", "missing")
    if runtime.cpus is not None:
        number("runtime.cpus", runtime.cpus, 0, 1024, above=True)
    if runtime.memory_mb is not None:
        number("runtime.memory_mb", runtime.memory_mb, 16, 16 * 1024 * 1024)
    number("runtime.gpus", runtime.gpus, 0, 64)

    builder = _plugin(BUILDERS, "builder.strategy", task.builder.strategy, limits, bad)
    evaluator = _plugin(EVALUATORS, "evaluator.strategy", task.evaluator.strategy, limits, bad)
    if evaluator == "command" and not isinstance(task.evaluator.config.get("command"), str):
        bad("evaluator.config.command", "is required with evaluator `command`: a shell command", "missing")
    if evaluator == "command" and task.evaluator.refresh_runtime:
        bad(
            "evaluator.refresh_runtime",
            "grading in a fresh box is not part of this version; use false",
            "not_available",
        )
    for i, pattern in enumerate(task.artifacts):
        if pattern.startswith("/") or ".." in pattern.split("/"):
            bad(f"artifacts[{i}]", "is a pattern below the workspace: no leading slash, no `..`")
    if task.callback_url is not None and not task.callback_url.startswith(("http://", "https://")):
        bad("callback_url", "is not an http or https URL")

    if found:
        raise Refused(found, task.task_id)
    replace = msgspec.structs.replace
    return Checked(
        replace(
            task,
            agent=replace(agent, harness=harness),
            runtime=replace(runtime, backend=backend, network=network),
            builder=replace(task.builder, strategy=builder),
            evaluator=replace(task.evaluator, strategy=evaluator),
        ),
        notices,
    )


def check_cancel(request: CancelRequest) -> None:
    """What a cancel must fulfil beyond its types: it is remembered under its ids.

    Raises:
        Refused: with every problem.
    """
    found = [
        Problem(field=field, message=reason)
        for field, value in (("task_id", request.task_id), ("session_id", request.session_id))
        if value is not None and (reason := id_problem(value))
    ]
    if len(request.reason) > MAX_REASON:
        found.append(Problem(field="reason", message=f"is longer than {MAX_REASON} characters"))
    if found:
        raise Refused(found, request.task_id)


def unrecordable(task: TaskRequest) -> list[Problem]:
    """What would not survive records and JSON, in the open fields (`metadata` and the like) or at all."""
    places: tuple[tuple[str, Any], ...] = (
        ("metadata", task.metadata),
        ("agent.settings", task.agent.settings),
        ("runtime.kwargs", task.runtime.kwargs),
        ("builder.config", task.builder.config),
        ("evaluator.config", task.evaluator.config),
    )
    found = [
        Problem(field=field, message=reason)
        for field, value in places
        if (reason := _unrecordable(value, MAX_DEPTH)) is not None
    ]
    if not found:
        try:
            encode(task)
        except OverflowError:
            found.append(Problem(field="", message="holds an integer of more than 64 bits"))
        except UnicodeEncodeError:
            found.append(Problem(field="", message="holds text that is no Unicode (a lone surrogate)"))
    return found


def _unrecordable(value: Any, depth: int) -> str | None:
    if value is None or isinstance(value, str | bool | float):
        return None
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**64 else "holds an integer of more than 64 bits"
    if depth == 0:
        return f"is nested more than {MAX_DEPTH} deep"
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            return "has a name that is no text"
        value = value.values()
    elif not isinstance(value, list):
        return f"holds what JSON has no form for ({type(value).__name__})"
    return next((reason for one in value if (reason := _unrecordable(one, depth - 1)) is not None), None)


def _name(kind: Kind, field: str, name: str, bad: Any) -> str:
    entry = kind.resolve(name)
    if entry is None:
        bad(field, f"`{name}` is no {kind.noun}; known: {', '.join(kind.names())}", "unknown_name")
        return name
    if not entry.built:
        bad(
            field,
            f"{kind.noun} `{entry.name}` is not part of this version of polar-rollout[{entry.extra}]; "
            f"available: {', '.join(kind.names())}",
            "not_available",
        )
    return entry.name


def _plugin(kind: Kind, field: str, name: str, limits: Limits, bad: Any) -> str:
    if ":" not in name:
        return _name(kind, field, name, bad)
    if name not in limits.import_paths:
        bad(field, f"`{name}` is not among the import paths this installation allows", "not_allowed")
    return name


def _group_size(task: TaskRequest) -> int | None:
    size = task.metadata.get("group_size")
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def _check_metadata(task: TaskRequest, limits: Limits, bad: Any) -> None:
    group = task.metadata.get("group_id")
    if group is not None:
        if not isinstance(group, str):
            bad("metadata.group_id", f"expected text, got {type(group).__name__}")
        elif reason := id_problem(group):
            bad("metadata.group_id", reason)
    size = task.metadata.get("group_size")
    if size is not None:
        if _group_size(task) is None:
            bad("metadata.group_size", f"expected a number, got {type(size).__name__}")
        elif group is None:
            bad("metadata.group_size", "goes with `metadata.group_id` only")
        elif not task.num_samples <= size <= limits.max_group:
            bad("metadata.group_size", f"must be at least num_samples and at most {limits.max_group}, got {size}")
    if group is not None and task.num_samples > limits.max_group:
        bad("num_samples", f"a group holds at most {limits.max_group} sessions, got {task.num_samples}")


def _check_sampling(task: TaskRequest, number: Any, bad: Any) -> None:
    sampling = task.sampling
    number("sampling.temperature", sampling.temperature, 0, 100)
    number("sampling.top_p", sampling.top_p, 0, 1, above=True)
    number("sampling.min_p", sampling.min_p, 0, 1)
    number("sampling.repetition_penalty", sampling.repetition_penalty, 0, 100, above=True)
    number("sampling.presence_penalty", sampling.presence_penalty, -2, 2)
    number("sampling.frequency_penalty", sampling.frequency_penalty, -2, 2)
    if sampling.top_k != -1:
        number("sampling.top_k", sampling.top_k, 1, 2**31 - 1)
    if sampling.max_tokens is not None:
        number("sampling.max_tokens", sampling.max_tokens, 1, 2**31 - 1)


def group_of(task: TaskRequest, session: str, limits: Limits) -> tuple[str, int]:
    """Group id and size of a session of an accepted task (design, section 2)."""
    assert task.task_id is not None
    explicit = task.metadata.get("group_id")
    if explicit is not None:
        return str(explicit), _group_size(task) or task.num_samples
    if task.num_samples > limits.max_group:
        return session, 1
    return task.task_id, task.num_samples
