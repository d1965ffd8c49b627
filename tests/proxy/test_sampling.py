"""Sampling is explicit and pinned; what is recorded of versions and sizes."""

import pytest

from polar.proxy.calls import Call, ReplyChoice, Version
from polar.proxy.engine import cache_salt
from polar.proxy.errors import RecordRefused
from polar.proxy.record import reply_room, spans
from polar.proxy.sampling import call_seed, constraints, engine_fields, resolve
from polar.schemas import Logprobs, PolicySpan, Sampling, SamplingSpec, TokenIds

ASKED = Sampling(temperature=0.2, top_p=0.9, max_tokens=50, seed=3, stop=["x"], presence_penalty=0.5)


def test_a_pinned_task_overrides_the_harness() -> None:
    found = resolve(SamplingSpec(max_tokens=40), ASKED, n=2, session_id="s", call=0)
    assert engine_fields(found) == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 2,
        "max_completion_tokens": 40,
        "stop": ["x"],
    }


def test_where_allowed_the_harness_wins_and_the_rest_is_the_tasks() -> None:
    spec = SamplingSpec(override="allow", temperature=0.7, top_k=20)
    found = resolve(spec, ASKED, n=1, session_id="s", call=0)
    assert (found.temperature, found.top_p, found.top_k, found.seed) == (0.2, 0.9, 20, 3)
    assert found.max_tokens == 50
    call = Call(dialect="d", model="m", messages=[], asked=ASKED, constraints=("grammar",))
    assert constraints(call, found) == ["grammar", "penalties"]


def test_seeds_follow_from_session_and_call() -> None:
    spec = SamplingSpec(seed_calls=True)
    seeds = [resolve(spec, ASKED, n=1, session_id="s", call=call).seed for call in (0, 1, 0)]
    assert seeds[0] == seeds[2] == call_seed("s", 0)
    assert len({*seeds, call_seed("t", 0)}) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert resolve(SamplingSpec(), ASKED, n=1, session_id="s", call=0).seed is None


def choice(size: int, *versions: Version) -> ReplyChoice:
    return ReplyChoice(
        index=0,
        ids=TokenIds([1] * size),
        logprobs=Logprobs([0.0] * size),
        message={},
        finish="stop",
        stop=None,
        versions=versions,
    )


def test_the_answers_own_word_on_its_weights_comes_first() -> None:
    told = choice(3, Version("a", 0, 1), Version("b", 1, 3))
    assert spans(told, "x", "y") == [
        PolicySpan(start=0, end=1, version="a", exact=True),
        PolicySpan(start=1, end=3, version="b", exact=True),
    ]


@pytest.mark.parametrize("versions", [(), (Version("a", 0, 2),), (Version("a", 1, 3),), (Version("a", 0, 9),)])
def test_else_the_word_before_and_after_the_call(versions: tuple[Version, ...]) -> None:
    told = choice(3, *versions)
    assert spans(told, "x", "x") == [PolicySpan(start=0, end=3, version="x", exact=True)]
    assert spans(told, "x", "y") == [PolicySpan(start=0, end=3, version="y", exact=False)]
    assert spans(told, "x", None) == []
    assert spans(told, None, None) == []
    assert spans(choice(0), "x", "x") == []


def test_the_cache_is_apart_for_each_tenant_and_version() -> None:
    assert len({cache_salt("a", None), cache_salt("b", None), cache_salt("a", "1"), cache_salt("a", "2")}) == 4


def asking(size: int, n: int = 1) -> Call:
    return Call(dialect="d", model="m", messages=[{"role": "user", "content": "x" * size}], asked=Sampling(), n=n)


def test_a_reply_that_fits_has_no_other_bound_than_its_own() -> None:
    assert reply_room(asking(10_000), max_model_len=32_768, max_tokens=None, limit=1_000_000) is None
    assert reply_room(asking(10_000), max_model_len=32_768, max_tokens=50, limit=1_000_000) == 50


def test_a_reply_that_might_not_fit_is_bounded() -> None:
    room = reply_room(asking(10, n=16), max_model_len=32_768, max_tokens=None, limit=1_000_000)
    assert room is not None
    assert 2_000 < room < 3_000


def test_a_conversation_that_cannot_fit_is_refused() -> None:
    with pytest.raises(RecordRefused):
        reply_room(asking(950_000), max_model_len=32_768, max_tokens=None, limit=1_000_000)
    with pytest.raises(RecordRefused):
        reply_room(asking(300_000), max_model_len=None, max_tokens=10, limit=1_000_000)
