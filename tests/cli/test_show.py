"""How `polar show` prints a trajectory."""

from __future__ import annotations

import asyncio
import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console
from tokenizers import Tokenizer

from polar.cli.show import marked, show, show_named
from polar.cli.words import engine_named
from polar.devmodel import ChatTokenizer, Script, ScriptedEngine
from polar.schemas import Drift, FailureKind, Label, Logprobs, Pool, SetAside, TokenIds, Trajectory
from tests.cli.records import failed, trace, trajectory

TOKENIZER: Tokenizer = ChatTokenizer.small().tokenizer


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def printed(
    found: Trajectory, tokenizer: Tokenizer | None = TOKENIZER, *, colours: bool = False, width: int = 80, **how: Any
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, force_terminal=colours, color_system=None)
    if colours:
        console = Console(file=out, width=width, highlight=False, force_terminal=True, color_system="truecolor")
    show(console, found, tokenizer, **how)
    return out.getvalue()


def told(given: str, sampled: str, **more: Any) -> Trajectory:
    prompt, response = encode(given), encode(sampled)
    ids = prompt + response
    return trajectory(ids, [trace(len(prompt), [(len(prompt), len(ids))], len(ids))], **more)


def test_without_colours_brackets_tell_what_trains() -> None:
    assert "Question?⟦ Answer.⟧" in printed(told("Question?", " Answer."))


def test_with_colours_given_text_is_dim_and_trained_text_coloured_by_probability() -> None:
    found = told("Question?", " Answer")
    text = printed(found, colours=True)
    assert "\x1b[2m" in text
    assert "\x1b[33m Answer" in text or "\x1b[33m A" in text, repr(text)
    assert "⟦" not in text


def test_a_turn_that_does_not_train_has_other_brackets() -> None:
    found = told("Q", " A")
    (one,) = found.traces
    turn = replace(one.turns[0], trainable=False, untrainable="temperature 0")
    text = printed(replace(found, traces=[replace(one, turns=[turn])]))
    assert "Q⟨ A⟩" in text
    assert "not trained: temperature 0" in text
    assert "mean log-probability" not in text


def test_a_retokenized_token_is_marked_and_counted() -> None:
    given = encode("x =")
    spelled = [one for letter in " return" for one in encode(letter)]
    ids = given + spelled
    found = trajectory(ids, [trace(len(given), [(len(given), len(ids))], len(ids))])
    text = printed(found)
    assert "⟦~ ~r~e~t~u~r~n⟧" in text
    assert f"would change {len(spelled)} of {len(spelled)} trained tokens" in text
    assert "\x1b[4" in printed(found, colours=True)


def test_nothing_that_a_model_or_an_agent_wrote_commands_the_terminal() -> None:
    outcome = failed(message="\x1b[31mred\x07", output_tail="bad \x1b]0;title\x07\n[bold]fine[/]\r")
    for colours in (True, False):
        text = printed(told("a\x1b[2J", "b\x9b31m\x00 [red]c[/]", outcome=outcome), colours=colours)
        assert "\x1b[2J" not in text
        assert "\x1b]0" not in text
        assert not set(text) & {"\x07", "\x9b", "\x00", "\r"}
        assert "[bold]fine[/]" in text
    assert "a␛[2J⟦b�31m␀ [red]c[/]⟧" in text


def test_odd_utf8_at_the_end_of_a_turn_stays_in_the_turn() -> None:
    given, cut, after = encode("Q"), encode("🦀")[:-1], encode("<|im_end|>next")
    ids = given + cut + after
    found = trajectory(ids, [trace(len(given), [(len(given), len(given + cut))], len(ids))])
    assert "�⟧<|im_end|>next" in printed(found)


def test_without_a_tokenizer_ids_are_shown_and_it_says_how_to_see_text() -> None:
    text = printed(told("Q", " A"), None)
    assert "--tokenizer" in text
    assert f"{encode('Q')[0]} ⟦{encode(' A')[0]} ⟧" in text


async def named_by(url: str, found: Trajectory, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is printed where settings name an engine, and nobody a tokenizer."""
    monkeypatch.setenv("POLAR_PROXY_ENGINE_URLS", url)
    out = io.StringIO()
    console = Console(file=out, width=120, highlight=False, color_system=None)
    await asyncio.to_thread(show_named, console, found, None)
    return out.getvalue()


async def test_without_a_tokenizer_the_engine_that_settings_name_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(Script(), model="policy") as engine:
        text = await named_by(engine.base_url, told("Question?", " Answer.", models=["policy"]), monkeypatch)
    assert "Question?⟦ Answer.⟧" in text
    assert "re-tokenizing the text would change 0 of" in text


async def test_ids_are_not_named_by_an_engine_that_serves_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(Script(), model="other") as engine:
        text = await named_by(engine.base_url, told("Question?", " Answer.", models=["policy"]), monkeypatch)
    assert "the engine serves other now, not policy" in text
    assert f"⟦{encode(' Answer.')[0]} " in text


async def test_ids_are_shown_where_the_engine_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    text = await named_by("http://127.0.0.1:9/v1", told("Q", " A"), monkeypatch)
    assert "the engine does not name the ids" in text
    assert f"⟦{encode(' A')[0]} ⟧" in text


def test_the_engine_is_the_first_that_the_settings_name(tmp_path: Path) -> None:
    assert engine_named({}) is None
    assert engine_named({"POLAR_PROXY_ENGINE_URLS": "http://a/v1/, http://b/v1"}) == "http://a/v1"
    (tmp_path / "polar.yaml").write_text("proxy: {engine_urls: [http://c/v1]}\n")
    assert engine_named({"POLAR_CONFIG": str(tmp_path / "polar.yaml")}) == "http://c/v1"


def test_of_several_models_the_engine_that_serves_the_sessions_is_asked() -> None:
    pools = [{"model": "a", "urls": ["http://a/v1"]}, {"model": "b", "served": "org/b", "urls": ["http://b/v1"]}]
    environ = {"POLAR_PROXY_ENGINES": json.dumps(pools), "POLAR_PROXY_ENGINE_URLS": "http://c/v1"}
    assert engine_named(environ, ["org/b"]) == "http://b/v1"
    assert engine_named(environ, ["gone"]) == "http://a/v1"


def test_a_wrong_tokenizer_is_noticed() -> None:
    ids = [5, 6, TOKENIZER.get_vocab_size() + 1]
    assert "1 ids are not in this tokenizer" in printed(trajectory(ids, [trace(1, [(1, 3)], 3)]))


def test_numbers_stand_behind_trained_tokens_only() -> None:
    text = printed(told("Q", " A"), numbers=True)
    assert "Q⟦ A(0.61)⟧" in text


def test_an_unknown_log_probability_is_no_error() -> None:
    found = told("Q", " A")
    pool = Pool(tokens=found.pool.tokens, logprobs=Logprobs([np.nan] * len(found.pool.tokens)))
    assert "⟦ A(nan)⟧" in printed(replace(found, pool=pool), numbers=True)


def test_one_trace_of_many_can_be_chosen() -> None:
    ids = encode("one two")
    traces = [trace(1, [(1, len(ids))], len(ids), trace_id=str(n), label=Label.SIDE) for n in range(3)]
    text = printed(trajectory(ids, traces), only=1)
    assert "trace 1 (side)" in text
    assert "trace 0" not in text


def test_failures_show_the_last_output_and_what_was_set_aside_its_reason() -> None:
    aside = SetAside(completion_id="c9", reason="unfinished", attempt=1, detail="no end")
    found = trajectory(outcome=failed(FailureKind.HARNESS, "ended with 3", output_tail="a\nlast"), set_aside=[aside])
    text = printed(found)
    assert "harness: ended with 3" in text
    assert "  | last" in text
    assert "set aside: c9 (unfinished): no end" in text


def test_drift_is_told() -> None:
    found = told("Q", " A")
    drift = Drift(turn=0, position=2, sampled=3, canonical=1)
    text = printed(replace(found, traces=[replace(found.traces[0], drift=[drift], break_reason="rewrite")]))
    assert "the engine later read 1 ids where 3 were sampled" in text
    assert "ended by rewrite" in text


def test_a_limit_keeps_the_end_and_says_so() -> None:
    text = printed(told("word " * 100, " the end"), limit=4)
    assert "tokens before (--limit 0 shows all)" in text
    assert " end⟧" in text
    assert "word word word" not in text


def test_marks_agree_with_the_arrays_a_trainer_gets() -> None:
    found = told("Q", " A B")
    one = marked(found, found.traces[0], TOKENIZER)
    view = found.view(found.traces[0])
    assert one.ids.tolist() == [*view.prompt_ids, *view.response_ids]
    assert one.trained[len(view.prompt_ids) :].tolist() == view.loss_mask.astype(bool).tolist()


def test_a_trace_of_a_hundred_thousand_tokens_is_shown_in_seconds() -> None:
    ids = (encode("def f(x):\n    return x + 1  # done 🦀\n") * 8_000)[:100_000]
    turns = [(start, start + 500) for start in range(1_000, 100_000, 1_000)]
    found = trajectory(ids, [trace(1_000, turns, len(ids))])
    began = time.monotonic()
    text = printed(found, limit=2_000)
    assert time.monotonic() - began < 20
    assert "… 87 turns before" in text
    assert TokenIds(ids) == found.pool.tokens
