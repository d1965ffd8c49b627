"""A task that is wrong is refused with every field and reason; one that is right is taken as it was meant."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.schemas import CancelRequest, CloseRequest, TaskRequest, decode, encode
from polar.schemas.catalog import BACKENDS, BUILDERS, EVALUATORS, HARNESSES
from polar.schemas.validation import Limits, Refused, check, check_cancel, group_of, parse, parse_object

LIMITS = Limits()

SHELL = {"harness": "shell", "custom_shell": {"command": "python agent.py"}}
TASK: dict[str, Any] = {"task_id": "t1", "instruction": "do it", "agent": SHELL}


def body(**change: Any) -> dict[str, Any]:
    """A good task with fields replaced; `a__b` is field b of a."""
    made = json.loads(json.dumps(TASK))
    for path, value in change.items():
        inner = made
        *way, last = path.split("__")
        for step in way:
            inner = inner.setdefault(step, {})
        if value is ...:
            inner.pop(last, None)
        else:
            inner[last] = value
    return made


def refused(loose: Any, limits: Limits = LIMITS) -> list[tuple[str, str, str]]:
    """(field, code, message) of everything found wrong."""
    with pytest.raises(Refused) as caught:
        taken(loose, limits)
    return [(one.field, one.code, one.message) for one in caught.value.problems]


def taken(loose: Any, limits: Limits = LIMITS) -> Any:
    request = parse(loose if isinstance(loose, bytes) else json.dumps(loose).encode())
    assert isinstance(request, TaskRequest)
    return check(request, limits)


def test_the_smallest_task() -> None:
    checked = taken({"instruction": "x", "agent": SHELL})
    assert checked.notices == []
    assert checked.task.num_samples == 1
    assert checked.task.builder.strategy == "prefix_merging"
    assert checked.task.evaluator.strategy == "session_completed"


# --- bad input (each with field and reason) ---


@pytest.mark.parametrize(
    ("change", "field", "code", "reason"),
    [
        # missing
        ({"instruction": ...}, "instruction", "missing", "is required"),
        ({"agent": ...}, "agent", "missing", "is required"),
        ({"agent__harness": ..., "agent__custom_shell": ...}, "agent", "missing", "exactly one of"),
        ({"agent__custom_shell": ...}, "agent.custom_shell.command", "missing", "is required with harness `shell`"),
        ({"agent__custom_shell": {}}, "agent.custom_shell.command", "missing", "is required"),
        ({"agent__custom_shell__command": " "}, "agent.custom_shell.command", "missing", "is required"),
        ({"evaluator__strategy": "command"}, "evaluator.config.command", "missing", "a shell command"),
        ({"runtime__prepare": [{"type": "exec"}]}, "runtime.prepare[0].command", "missing", "for `exec`"),
        (
            {"runtime__prepare": [{"type": "upload_file", "source": "a"}]},
            "runtime.prepare[0].target",
            "missing",
            "for `upload_file`",
        ),
        (
            {"runtime__prepare": [{"type": "upload_file", "target": "a"}]},
            "runtime.prepare[0]",
            "invalid",
            "takes exactly one of `source`",
        ),
        (
            {"runtime__eval_prepare": [{"type": "upload_dir", "target": "a"}]},
            "runtime.eval_prepare[0].source",
            "missing",
            "for `upload_dir`",
        ),
        # mistyped
        ({"num_samples": "eight"}, "num_samples", "invalid", "expected `int`, got `str`"),
        ({"num_samples": 1.5}, "num_samples", "invalid", "expected `int`, got `float`"),
        ({"instruction": 3}, "instruction", "invalid", "expected `str | object`, got `int`"),
        ({"agent": "shell"}, "agent", "invalid", "expected `object`, got `str`"),
        ({"agent__mcp_servers": {}}, "agent.mcp_servers", "invalid", "expected `array`"),
        ({"runtime__prepare": ["pip install x"]}, "runtime.prepare[0]", "invalid", "expected `object`"),
        ({"metadata": []}, "metadata", "invalid", "expected `object`"),
        ({"sampling__override": "maybe"}, "sampling.override", "invalid", "invalid enum value"),
        ({"timeout_seconds": None}, "timeout_seconds", "invalid", "expected `float`, got `null`"),
        ({"task_id": 7}, "task_id", "invalid", "expected `str | null`"),
        # unknown names
        (
            {"agent__harness": "emacs", "agent__custom_shell": ...},
            "agent.harness",
            "unknown_name",
            "is no harness; known",
        ),
        ({"builder__strategy": "magic"}, "builder.strategy", "unknown_name", "is no builder"),
        ({"evaluator__strategy": "vibes"}, "evaluator.strategy", "unknown_name", "is no evaluator"),
        ({"runtime__backend": "vmware"}, "runtime.backend", "unknown_name", "is no backend; known: local"),
        ({"runtime__network": "vpn"}, "runtime.network", "unknown_name", "is none of"),
        ({"runtime__prepare": [{"type": "copy"}]}, "runtime.prepare[0].type", "unknown_name", "is none of"),
        (
            {"agent__mcp_servers": [{"name": "a", "transport": "carrier-pigeon"}]},
            "agent.mcp_servers[0].transport",
            "unknown_name",
            "is none of",
        ),
        ({"type": "Task"}, "type", "unknown_name", "is none of TaskRequest"),
        # known names that this version does not have
        (
            {"agent__harness": "codex", "agent__custom_shell": ...},
            "agent.harness",
            "not_available",
            "polar-rollout[gateway]",
        ),
        (
            {"agent__harness": "claude-code", "agent__custom_shell": ...},
            "agent.harness",
            "not_available",
            "`claude_code`",
        ),
        ({"runtime__backend": "docker"}, "runtime.backend", "not_available", "polar-rollout[gateway]"),
        ({"evaluator__strategy": "harbor"}, "evaluator.strategy", "not_available", "polar-rollout[evaluator]"),
        # fields that do not exist, with the nearest that does
        ({"num_sample": 8}, "num_sample", "unknown_field", "did you mean `num_samples`?"),
        ({"agent__harnes": "shell"}, "agent.harnes", "unknown_field", "did you mean `harness`?"),
        # values out of range
        ({"timeout_seconds": -1}, "timeout_seconds", "invalid", "must be above 0"),
        ({"timeout_seconds": 0}, "timeout_seconds", "invalid", "must be above 0"),
        ({"queue_ttl": -1}, "queue_ttl", "invalid", "must be above 0"),
        ({"init_timeout": 0}, "init_timeout", "invalid", "must be above 0"),
        ({"evaluation_timeout": 1e12}, "evaluation_timeout", "invalid", "at most 604800"),
        ({"num_samples": 0}, "num_samples", "invalid", "at least 1"),
        ({"num_samples": 100_000}, "num_samples", "invalid", "at most 4096"),
        ({"max_attempts": 0}, "max_attempts", "invalid", "at least 1"),
        ({"group_quorum": 2}, "group_quorum", "invalid", "at most 1"),
        ({"group_deadline": -5}, "group_deadline", "invalid", "must be above 0"),
        ({"runtime__cpus": 0}, "runtime.cpus", "invalid", "must be above 0"),
        ({"runtime__memory_mb": 1}, "runtime.memory_mb", "invalid", "at least 16"),
        ({"runtime__gpus": -1}, "runtime.gpus", "invalid", "at least 0"),
        ({"sampling__temperature": -0.1}, "sampling.temperature", "invalid", "at least 0"),
        ({"sampling__top_p": 0}, "sampling.top_p", "invalid", "must be above 0"),
        ({"sampling__max_tokens": 0}, "sampling.max_tokens", "invalid", "at least 1"),
        # ids, paths, addresses
        ({"task_id": "a/b"}, "task_id", "invalid", "no slashes"),
        ({"task_id": "../../etc/passwd"}, "task_id", "invalid", "no slashes"),
        ({"task_id": ""}, "task_id", "invalid", "is empty"),
        ({"metadata__group_id": "g/1"}, "metadata.group_id", "invalid", "no slashes"),
        ({"metadata__group_id": 5}, "metadata.group_id", "invalid", "expected text, got int"),
        ({"metadata__group_size": 4}, "metadata.group_size", "invalid", "goes with `metadata.group_id` only"),
        ({"artifacts": ["/etc/passwd"]}, "artifacts[0]", "invalid", "below the workspace"),
        ({"artifacts": ["ok", "../x"]}, "artifacts[1]", "invalid", "below the workspace"),
        ({"callback_url": "file:///etc/passwd"}, "callback_url", "invalid", "http or https"),
        ({"instruction": "  ", "agent": {"harness": "codex"}}, "instruction", "invalid", "is empty"),
        # what an operator has to allow
        ({"agent": {"import_path": "os:system"}}, "agent.import_path", "not_allowed", "`os:system`"),
        ({"builder__strategy": "mine:Builder"}, "builder.strategy", "not_allowed", "`mine:Builder`"),
        ({"agent__import_path": "os:system"}, "agent", "invalid", "exactly one of"),
        (
            {"agent__harness": "codex"},
            "agent.custom_shell",
            "invalid",
            "goes with harness `shell` only",
        ),
    ],
)
def test_bad_input_is_refused_with_field_and_reason(change: dict[str, Any], field: str, code: str, reason: str) -> None:
    found = refused(body(**change))
    assert [(f, c) for f, c, message in found if reason in message and f == field] == [(field, code)], found


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("place", ["metadata", "agent__settings", "runtime__kwargs", "builder__config"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [(2**64, "64 bits"), (-(2**63) - 1, "64 bits"), (nested(40), "nested more than 32 deep"), ([[2**70]], "64 bits")],
)
def test_what_no_record_holds_is_refused_where_it_stands(place: str, value: Any, reason: str) -> None:
    field = place.replace("__", ".")
    assert [(f, reason in message) for f, _, message in refused(body(**{f"{place}__x": value}))] == [(field, True)]


@pytest.mark.parametrize("value", [{1: 2}, {b"x": 1}, msgspec.msgpack.Ext(5, b"x"), b"x"])
def test_what_json_has_no_form_for_is_refused_in_a_binary_task(value: Any) -> None:
    data = msgspec.msgpack.encode({"type": "TaskRequest", **body(), "metadata": {"a": [value]}})
    task = decode(data, (TaskRequest,))
    assert isinstance(task, TaskRequest)
    with pytest.raises(Refused) as caught:
        check(task, LIMITS)
    assert [one.field for one in caught.value.problems] == ["metadata"]


@pytest.mark.parametrize("number", [10**400, -(10**400), 2**64])
def test_integers_beyond_all_bounds_are_refused(number: int) -> None:
    assert "num_samples" in {field for field, _, _ in refused(body(num_samples=number))}
    refused(body(metadata={"group_id": "g", "group_size": number}))


def test_unknown_fields_are_told_up_to_a_number() -> None:
    found = refused(body(**{f"field{i}": i for i in range(10_000)}))
    assert 0 < len(found) <= 50


@pytest.mark.parametrize(
    "request_",
    [
        CancelRequest(task_id="a/b"),
        CancelRequest(task_id="t", session_id=""),
        CancelRequest(task_id="t", reason="x" * 501),
    ],
)
def test_a_cancel_without_proper_ids_is_refused(request_: CancelRequest) -> None:
    with pytest.raises(Refused):
        check_cancel(request_)


def test_every_problem_is_told_at_once() -> None:
    found = refused(body(num_samples=0, timeout_seconds=-1, builder__strategy="magic", task_id="a b"))
    assert {field for field, _, _ in found} == {"num_samples", "timeout_seconds", "builder.strategy", "task_id"}


def test_a_type_error_does_not_hide_unknown_fields() -> None:
    found = refused(body(num_samples="x", timeout=5))
    assert {field for field, _, _ in found} == {"num_samples", "timeout"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "expected an object, got list"),
        (b'"x"', "expected an object, got str"),
        (b"null", "expected an object, got NoneType"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_no_json_object(data: bytes, reason: str) -> None:
    ((field, _, message),) = refused(data)
    assert field == ""
    assert reason in message


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(number: str) -> None:
    refused(json.dumps(body()).replace('"do it"', f'"do it", "timeout_seconds": {number}').encode())


def test_the_refusal_knows_whose_it_is() -> None:
    with pytest.raises(Refused) as caught:
        taken(body(num_samples="x"))
    assert caught.value.task_id == "t1"
    assert "num_samples: expected `int`" in str(caught.value)


@given(st.binary(max_size=100))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_taken_or_refused(data: bytes) -> None:
    with suppress(Refused):  # anything else fails the test
        parse(data)


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*TaskRequest.__struct_fields__, "type", "other"]), _json, max_size=5))
@settings(max_examples=200, deadline=None)
def test_any_object_is_taken_or_refused(loose: dict[str, Any]) -> None:
    with suppress(Refused):  # anything else fails the test
        request = parse(json.dumps({**TASK, **loose}).encode())
        if isinstance(request, TaskRequest):
            check(request, LIMITS)


# --- what is taken ---


def test_aliases_become_the_name() -> None:
    checked = taken(body(evaluator__strategy="session_completion"))
    assert checked.task.evaluator.strategy == "session_completed"


@pytest.mark.parametrize("kind", [HARNESSES, BACKENDS, BUILDERS, EVALUATORS], ids=lambda kind: kind.noun)
def test_the_catalog_is_sound(kind: Any) -> None:
    names = [one.name for one in kind.entries]
    assert len(set(names)) == len(names)
    assert set(kind.aliases.values()) <= set(names)
    assert not set(kind.aliases) & set(names)
    assert kind.names()
    assert all(kind.resolve(name).name == name for name in names)
    assert kind.resolve("nothing") is None


@pytest.mark.parametrize("network", ["host", "bridge"])
def test_a_network_without_permission_becomes_the_proxy_only_one_with_a_notice(network: str) -> None:
    checked = taken(body(runtime__network=network))
    assert checked.task.runtime.network == "proxy-only"
    ((field, message),) = [(one.field, one.message) for one in checked.notices]
    assert field == "runtime.network"
    assert f"`{network}` is not permitted here" in message
    assert "POLAR_SUBMIT_ALLOW_NETWORKS" in message


def test_a_network_with_permission_stays() -> None:
    limits = LIMITS._replace(allow_networks=frozenset({"host"}))
    checked = taken(body(runtime__network="host"), limits)
    assert checked.task.runtime.network == "host"
    assert checked.notices == []


def test_import_paths_that_are_allowed_by_name() -> None:
    limits = LIMITS._replace(import_paths=frozenset({"mine:Agent", "mine:Builder"}))
    checked = taken(body(agent={"import_path": "mine:Agent"}, builder__strategy="mine:Builder"), limits)
    assert checked.task.agent.import_path == "mine:Agent"
    assert checked.task.builder.strategy == "mine:Builder"


def test_a_five_megabyte_instruction_is_no_problem_of_the_schema() -> None:
    assert len(taken(body(instruction="x" * 5_000_000)).task.instruction) == 5_000_000


def test_the_other_requests_parse() -> None:
    cancel = parse(b'{"type": "CancelRequest", "task_id": "t"}')
    assert cancel == CancelRequest(task_id="t")
    close = parse_object({"type": "CloseRequest", "task_id": "t", "session_id": "s"})
    assert close == CloseRequest(task_id="t", session_id="s")


PAPER: dict[str, Any] = {
    # the fields of the paper's A.3 with upstream's names; placeholders filled
    "task_id": "swe-django-11099",
    "instruction": "Fix the issue described below in the repository at /testbed.",
    "num_samples": 8,
    "timeout_seconds": 1800,
    "runtime": {
        "backend": "docker",
        "image": "swebench/sweb.eval.x86_64.django_1776_django-11099:latest",
        "prepare": [
            {"type": "upload_dir", "source": "/data/harness/codex", "target": "/opt/codex"},
            {"type": "upload_file", "source": "/data/setup.sh", "target": "/tmp/setup.sh"},
            {"type": "exec", "command": "bash /tmp/setup.sh", "cwd": "/testbed", "env": {"CI": "1"}},
        ],
        "eval_prepare": None,
        "env": {"LANG": "C.UTF-8"},
        "network": "host",
        "workdir": "/testbed",
        "cpus": 2,
        "memory_mb": 8192,
        "storage_mb": 20480,
        "gpus": 0,
        "allow_internet": True,
        "kwargs": {"shm_size": "1g"},
    },
    "agent": {
        "harness": "codex",
        "model_name": "policy",
        "settings": {"sandbox_mode": "danger-full-access"},
        "env": {"CODEX_HOME": "/opt/codex"},
        "mcp_servers": [{"name": "files", "transport": "stdio", "command": "mcp-files", "args": ["/testbed"]}],
        "skills_path": None,
    },
    "builder": {"strategy": "prefix_merging", "config": {}},
    "evaluator": {
        "strategy": "swebench_harness",
        "config": {"instance": {"instance_id": "django__django-11099"}, "repo_dir": "/testbed", "test_timeout": 1200},
        "env": {},
        "refresh_runtime": True,
    },
    "callback_url": "http://trainer.example:9000/callbacks/task",
    "metadata": {"group_id": "django-11099-step-17", "policy_version": 17, "rollout_step": 17},
}


def test_the_papers_payload_parses_as_printed() -> None:
    request = parse(json.dumps(PAPER).encode())
    assert isinstance(request, TaskRequest)
    assert request.runtime.prepare[2].cwd == "/testbed"
    assert request.runtime.eval_prepare is None
    assert request.metadata["rollout_step"] == 17


def test_the_papers_payload_is_refused_only_for_what_this_version_lacks() -> None:
    found = refused(PAPER)
    assert {code for _, code, _ in found} == {"not_available"}
    assert {field for field, _, _ in found} == {"agent.harness", "runtime.backend", "evaluator.strategy"}


def test_the_papers_payload_runs_with_what_this_version_has() -> None:
    mine = json.loads(json.dumps(PAPER))
    mine["agent"] = SHELL
    mine["runtime"]["backend"] = "local"
    mine["evaluator"] = {"strategy": "session_completed"}
    checked = taken(mine)
    assert [one.field for one in checked.notices] == ["runtime.network"]


# --- groups ---


def test_a_task_is_a_group() -> None:
    assert group_of(taken(body(num_samples=8)).task, "s", LIMITS) == ("t1", 8)


def test_a_group_may_span_tasks() -> None:
    task = taken(body(metadata={"group_id": "g", "group_size": 4})).task
    assert group_of(task, "s", LIMITS) == ("g", 4)
    whole = taken(body(num_samples=3, metadata={"group_id": "g"})).task
    assert group_of(whole, "s", LIMITS) == ("g", 3)


def test_a_task_of_too_many_samples_is_no_group() -> None:
    assert group_of(taken(body(num_samples=300)).task, "s7", LIMITS) == ("s7", 1)
    assert group_of(taken(body(num_samples=256)).task, "s7", LIMITS) == ("t1", 256)


def test_an_explicit_group_of_too_many_is_refused() -> None:
    found = refused(body(num_samples=300, metadata={"group_id": "g"}))
    assert [field for field, _, _ in found] == ["num_samples"]
    found = refused(body(metadata={"group_id": "g", "group_size": 300}))
    assert [field for field, _, _ in found] == ["metadata.group_size"]
    assert refused(body(num_samples=4, metadata={"group_id": "g", "group_size": 2}))[0][0] == "metadata.group_size"


def test_a_quorum_counts_within_the_whole_group() -> None:
    assert taken(body(group_quorum=3, metadata={"group_id": "g", "group_size": 4})).task.group_quorum == 3


@pytest.mark.parametrize("size", [True, 2.0, "4"])
def test_a_group_size_that_is_no_number(size: Any) -> None:
    found = refused(body(metadata={"group_id": "g", "group_size": size}))
    assert found[0][0] == "metadata.group_size"


def test_what_is_taken_can_be_written() -> None:
    """Text that JSON can hold and UTF-8 cannot must not get as far as the log."""
    lone = json.dumps(body()).replace("do it", "\\ud800")
    try:
        task = taken(lone.encode()).task
    except Refused:
        return
    encode(task)
