"""Ids as text, on a real tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from polar.cli.tokens import NoTokenizer, load_tokenizer, pieces, retokenized
from polar.devmodel import ChatTokenizer

TOKENIZER: Tokenizer = ChatTokenizer.small().tokenizer
SIZE = TOKENIZER.get_vocab_size()
IDS = st.lists(st.integers(0, SIZE - 1), max_size=40)


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


@given(st.text(max_size=200))
def test_the_pieces_of_a_text_are_the_text(text: str) -> None:
    ids = encode(text)
    assert "".join(pieces(TOKENIZER, ids)) == TOKENIZER.decode(ids, skip_special_tokens=False)


@given(IDS)
def test_the_pieces_of_any_ids_are_what_the_tokenizer_decodes(ids: list[int]) -> None:
    """But for how many U+FFFD stand for bytes that are no characters."""
    found = pieces(TOKENIZER, ids)
    assert len(found) == len(ids)
    whole = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert "".join(found).replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_a_character_of_several_tokens_stands_with_the_last() -> None:
    ids = encode("a🦀b")
    found = pieces(TOKENIZER, ids)
    assert "".join(found) == "a🦀b"
    assert found[0] == "a"
    crab = found.index("🦀")
    assert found[1:crab] == [""] * (crab - 1)


def test_a_character_that_is_cut_off_is_shown_as_such_and_not_with_what_follows() -> None:
    cut = encode("🦀")[:-1]
    end = encode("<|im_end|>")
    assert pieces(TOKENIZER, cut)[-1] == "\ufffd"
    assert pieces(TOKENIZER, cut + end)[-2:] == ["\ufffd", "<|im_end|>"]
    follow = encode("hello")
    assert pieces(TOKENIZER, cut + follow, {len(cut)}) == [*pieces(TOKENIZER, cut), *pieces(TOKENIZER, follow)]


def test_an_id_that_the_tokenizer_lacks_is_told() -> None:
    assert pieces(TOKENIZER, [*encode("a"), SIZE + 7, *encode("b")]) == ["a", f"[{SIZE + 7}?]", "b"]


@given(st.text(max_size=100))
def test_canonical_ids_are_unchanged(text: str) -> None:
    ids = encode(text)
    again = encode(TOKENIZER.decode(ids, skip_special_tokens=False))
    assert bool(retokenized(TOKENIZER, np.array(ids, np.int32)).any()) == (again != ids)


@given(st.lists(st.sampled_from(encode("the of and abc <> 01 _ theofand a b c d"))))
def test_ids_are_changed_exactly_where_the_text_is_tokenized_otherwise(ids: list[int]) -> None:
    changed = retokenized(TOKENIZER, np.array(ids, np.int32))
    again = encode("".join(pieces(TOKENIZER, ids)))
    assert changed.shape == (len(ids),)
    assert bool(changed.any()) == (again != ids)
    assert int((~changed).sum()) <= len(again)


@settings(max_examples=50)
@given(IDS)
def test_any_ids_can_be_asked_about(ids: list[int]) -> None:
    assert retokenized(TOKENIZER, np.array(ids, np.int32)).shape == (len(ids),)


def test_only_the_tokens_that_differ_are_marked() -> None:
    word = encode(" return")
    assert len(word) == 1
    spelled = [one for letter in " return" for one in encode(letter)]
    ids = [*encode("x ="), *spelled, *encode("\n")]
    changed = retokenized(TOKENIZER, np.array(ids, np.int32))
    start = len(encode("x ="))
    assert changed.tolist() == [False] * start + [True] * len(spelled) + [False] * (len(ids) - start - len(spelled))


def test_a_tokenizer_is_loaded_from_a_file_or_its_folder(tmp_path: Path) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(str(place)).encode("a b").ids == TOKENIZER.encode("a b").ids


def test_what_is_no_tokenizer_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(NoTokenizer, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(NoTokenizer, match="is no file"):
        load_tokenizer(str(tmp_path / "missing"))
