"""Records as bytes: round trips, old and new versions, errors that name the field."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.schemas import (
    CompletionCaptured,
    DecodeError,
    Event,
    FailureKind,
    NodeHeartbeat,
    Part,
    RecordRef,
    SessionResult,
    Stage,
    StageChanged,
    TaskRequest,
    TaskResult,
    canonical,
    decode,
    decode_json,
    encode,
    headers,
    sha256,
    to_builtins,
    to_json_bytes,
)
from polar.schemas.topics import TABLE
from polar.schemas.wire import unknown_fields
from tests.schemas import record_strategies

every_event = pytest.mark.parametrize("kind", record_strategies.EVENTS, ids=lambda kind: kind.__name__)
few = settings(max_examples=40, deadline=None)

STAGE = StageChanged(session_id="s", task_id="t", attempt=1, stage=Stage.READY, at_ms=5, node="n")


# --- round trips ---


@every_event
def test_messagepack_round_trip(kind: type[Event]) -> None:
    @few
    @given(record_strategies.structs(kind))
    def check(event: Event) -> None:
        data = encode(event)
        assert decode(data, [kind]) == event
        assert encode(decode(data, [kind])) == data, "the same value, the same bytes"

    check()


@every_event
def test_json_round_trip(kind: type[Event]) -> None:
    @few
    @given(record_strategies.structs(kind))
    def check(event: Event) -> None:
        data = to_json_bytes(event)
        assert decode_json(data, [kind]) == event
        assert json.loads(data)["type"] == kind.__name__
        assert to_builtins(event) == msgspec.json.decode(data)

    check()


@pytest.mark.parametrize("spec", TABLE, ids=lambda spec: spec.name)
def test_a_topics_values_are_told_apart(spec: Any) -> None:
    @few
    @given(st.one_of([record_strategies.structs(kind) for kind in spec.values]))
    def check(event: Event) -> None:
        found = decode(encode(event), spec.values)
        assert type(found) is type(event)
        assert found == event

    check()


def test_defaults_take_no_bytes() -> None:
    lean = to_builtins(STAGE)
    assert set(lean) == {"type", "session_id", "task_id", "attempt", "stage", "at_ms", "node"}


def test_arrays_are_binary_on_the_log_and_lists_for_people() -> None:
    event = next(kind for kind in record_strategies.EVENTS if kind is CompletionCaptured)
    field = {one.name: one for one in msgspec.structs.fields(event)}["prompt"]
    prompt = field.type(ids=record_strategies.TokenIds([1, 2, 300]))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(prompt, enc_hook=lambda one: one.data))["ids"] == (
        b"\x01\0\0\0\x02\0\0\0\x2c\x01\0\0"
    )
    assert to_builtins(prompt)["ids"] == [1, 2, 300]


# --- versions ---


class OldReport(Event, frozen=True, kw_only=True, tag="StageChanged"):
    """As a first version might have had it: fewer fields."""

    session_id: str
    task_id: str
    attempt: int
    stage: Stage
    at_ms: int


class NewPart(Part, frozen=True, kw_only=True):
    colour: str


class NewReport(StageChanged, frozen=True, kw_only=True, tag="StageChanged"):
    """As a later version may have it: more fields, each with a default."""

    mood: str = "calm"
    parts: list[NewPart] = []


def test_an_old_record_decodes_with_newer_types() -> None:
    old = encode(OldReport(session_id="s", task_id="t", attempt=1, stage=Stage.READY, at_ms=5))
    assert decode(old, [StageChanged]) == StageChanged(
        session_id="s", task_id="t", attempt=1, stage=Stage.READY, at_ms=5
    )
    assert decode(encode(STAGE), [NewReport]) == NewReport(**msgspec.structs.asdict(STAGE))


def test_a_newer_record_decodes_with_older_types() -> None:
    new = encode(NewReport(**msgspec.structs.asdict(STAGE), mood="new", parts=[NewPart(colour="red")]))
    assert decode(new, [StageChanged]) == STAGE
    assert decode(new, [OldReport]) == OldReport(session_id="s", task_id="t", attempt=1, stage=Stage.READY, at_ms=5)


@every_event
def test_unknown_fields_from_a_newer_writer_are_ignored(kind: type[Event]) -> None:
    @few
    @given(
        record_strategies.structs(kind),
        st.dictionaries(st.sampled_from(["zzz", "yyy_new"]), st.integers(0, 9), min_size=1),
    )
    def check(event: Event, extra: dict[str, int]) -> None:
        loose = msgspec.msgpack.decode(encode(event))
        assert decode(msgspec.msgpack.encode({**loose, **extra}), [kind]) == event

    check()


@every_event
def test_only_what_was_there_first_is_required(kind: type[Event]) -> None:
    """A record with the required fields alone decodes: every field that came later has a default."""

    @few
    @given(record_strategies.structs(kind))
    def check(event: Event) -> None:
        required = {field.encode_name for field in msgspec.structs.fields(kind) if field.required}
        loose = {
            name: value
            for name, value in msgspec.msgpack.decode(encode(event)).items()
            if name in required or name == "type"
        }
        found = decode(msgspec.msgpack.encode(loose), [kind])
        for name in required:
            assert getattr(found, name) == getattr(event, name)

    check()


def test_required_fields_of_the_first_version() -> None:
    """Adding a required field breaks every record already on a log; so the list is fixed here for the busiest types."""

    def required(kind: type[Event]) -> set[str]:
        return {field.name for field in msgspec.structs.fields(kind) if field.required}

    assert required(TaskRequest) == {"instruction", "agent"}
    assert required(StageChanged) == {"session_id", "task_id", "attempt", "stage", "at_ms"}
    assert required(TaskResult) == {"task_id", "group_id", "status", "counts", "at_ms"}
    assert required(NodeHeartbeat) == {"node_id", "boot_id", "capacity", "beat", "at_ms"}


# --- what cannot be read ---


def problem_of(data: bytes, kind: type[Event], *, as_json: bool = False) -> Any:
    with pytest.raises(DecodeError) as caught:
        (decode_json if as_json else decode)(data, [kind])
    return caught.value.problem


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"attempt": "one"}, "attempt", "expected `int`, got `str`"),
        ({"stage": "ASLEEP"}, "stage", "invalid enum value 'ASLEEP'"),
        ({"at_ms": None}, "at_ms", "expected `int`, got `null`"),
        ({"outcome": {"status": 1}}, "outcome.status", "expected `str`, got `int`"),
        ({"outcome": {}}, "outcome.status", "is required"),
        ({"artifacts": [{"name": "a"}]}, "artifacts[0].claim", "is required"),
        ({"timing_ms": {"run": "long"}}, "timing_ms[...]", "expected `float`, got `str`"),
        ({"built": [1]}, "built", "expected `object | null`, got `array`"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_mistyped_field_is_named(change: dict[str, Any], field: str, message: str, as_json: bool) -> None:
    loose = {**to_builtins(STAGE), **change}
    data = json.dumps(loose).encode() if as_json else msgspec.msgpack.encode(loose)
    problem = problem_of(data, StageChanged, as_json=as_json)
    assert problem.field == field
    # MessagePack and JSON name the same thing a little differently: nil and null, map and object
    assert message.split(",")[0] in problem.message


def test_a_missing_field_is_named() -> None:
    loose = to_builtins(STAGE)
    del loose["task_id"]
    problem = problem_of(msgspec.msgpack.encode(loose), StageChanged)
    assert (problem.field, problem.message, problem.code) == ("task_id", "is required", "missing")


def test_bad_arrays_are_named() -> None:
    @few
    @given(record_strategies.structs(CompletionCaptured))
    def check(event: Event) -> None:
        loose = msgspec.msgpack.decode(encode(event))
        loose["prompt"]["ids"] = b"\x01\x02\x03"
        problem = problem_of(msgspec.msgpack.encode(loose), CompletionCaptured)
        assert problem.field == "prompt.ids"
        assert "3 bytes are no whole number of int32 values" in problem.message
        loose["prompt"]["ids"] = "x"
        assert problem_of(msgspec.msgpack.encode(loose), CompletionCaptured).field == "prompt.ids"

    check()


@pytest.mark.parametrize("data", [b"", b"\xc1", b"hello", b"\x81", b"\xff" * 100, b"{"])
def test_bytes_that_are_no_record(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(data, [StageChanged])
    with pytest.raises(DecodeError):
        decode_json(data, [StageChanged])


def test_an_unknown_type_is_said_to_be() -> None:
    for loose in ({"type": "Nonsense"}, {"type": 3}):
        problem = problem_of(msgspec.msgpack.encode(loose), StageChanged)
        assert problem.field in ("type", "")
    two = (StageChanged, SessionResult)
    with pytest.raises(DecodeError) as caught:
        decode(msgspec.msgpack.encode({"type": "TaskResult"}), two)
    assert "TaskResult" in caught.value.problem.message


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_no_bytes_raise_anything_but_a_decode_error(data: bytes) -> None:
    for kind in (StageChanged, CompletionCaptured, TaskRequest):
        for read in (decode, decode_json):
            try:
                read(data, [kind])
            except DecodeError:
                continue


# --- around it ---


def test_unknown_fields_say_where_and_what_is_near() -> None:
    loose = {
        "instruction": "x",
        "agent": {"harness": "shell", "custm_shell": {}, "mcp_servers": [{"name": "a", "transprot": "stdio"}]},
        "num_sample": 3,
        "metadata": {"anything": {"goes": 1}},
        "type": "TaskRequest",
    }
    found = {one.field: one.message for one in unknown_fields(loose, TaskRequest)}
    assert found == {
        "agent.custm_shell": "is not a field here; did you mean `custom_shell`?",
        "agent.mcp_servers[0].transprot": "is not a field here; did you mean `transport`?",
        "num_sample": "is not a field here; did you mean `num_samples`?",
    }


@given(st.dictionaries(st.text(max_size=5), st.integers(-(2**53), 2**53) | st.text(max_size=5), max_size=6))
def test_canonical_json_does_not_know_the_order(value: dict[str, Any]) -> None:
    backwards = dict(reversed(list(value.items())))
    assert canonical(value) == canonical(backwards)
    assert sha256(value) == sha256(backwards)


def test_sha256_of_text_bytes_and_values() -> None:
    assert sha256("abc") == sha256(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256({"a": 1}) == sha256(b'{"a":1}')


def test_headers_say_type_form_and_source() -> None:
    source = RecordRef(topic="tasks", partition=2, offset=17)
    found = dict(headers(STAGE, source=source, traceparent="00-ab-cd-01"))
    assert found == {
        "content-type": b"application/msgpack",
        "polar-schema": b"StageChanged.v1",
        "source": b"tasks/2/17",
        "traceparent": b"00-ab-cd-01",
    }
    assert set(dict(headers(STAGE))) == {"content-type", "polar-schema"}


def test_the_words_of_failure_are_the_designs() -> None:
    assert {one.value for one in FailureKind} == {
        "task",
        "infra",
        "harness",
        "provider",
        "policy",
        "evaluator",
        "cancelled",
        "timeout",
        "no_completions",
    }


def test_a_record_nested_too_deep_to_read_is_a_decode_error() -> None:
    inner = b"\x91" * 5_000 + b"\x01"
    data = b"\x82\xa4type\xabTaskRequest\xa8metadata\x81\xa1a" + inner
    with pytest.raises(DecodeError):
        decode(data, (TaskRequest,))
