"""Token ids and log-probabilities: exact, binary, immutable."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.schemas import Logprobs, TokenIds
from polar.schemas.arrays import from_either, to_json, to_wire

ids = st.lists(st.integers(0, 2**31 - 1), max_size=50)
numbers = st.lists(st.floats(width=32, allow_infinity=False, allow_nan=False), max_size=50)


@given(ids)
def test_token_ids_are_little_endian_int32(values: list[int]) -> None:
    packed = TokenIds(values)
    assert packed.data == b"".join(one.to_bytes(4, "little") for one in values)
    assert TokenIds(packed.data) == packed
    assert hash(TokenIds(packed.data)) == hash(packed)
    assert list(packed) == values
    assert len(packed) == len(values)
    assert packed.array.dtype == np.int32
    assert packed.array.shape == (len(values),)


@given(numbers)
def test_logprobs_survive_json_exactly(values: list[float]) -> None:
    packed = Logprobs(values)
    text = msgspec.json.encode(to_json(packed))
    assert from_either(Logprobs, msgspec.json.decode(text)) == packed


@given(ids, st.integers(0, 60), st.integers(0, 60))
def test_slices_and_concatenation_agree_with_lists(values: list[int], a: int, b: int) -> None:
    packed = TokenIds(values)
    low, high = min(a, b), max(a, b)
    assert list(packed.slice(low, high)) == values[low:high]
    cut = min(low, len(values))
    assert TokenIds.concat([packed.slice(0, cut), packed.slice(cut, len(values))]) == packed
    assert TokenIds.concat([]) == TokenIds()


def test_a_missing_logprob_is_nan_here_and_null_for_people() -> None:
    packed = Logprobs([-0.5, float("nan"), 0.0])
    assert to_json(packed) == [-0.5, None, 0.0]
    again = from_either(Logprobs, [-0.5, None, 0.0])
    assert again == packed
    assert math.isnan(list(again)[1])


def test_people_read_short_decimals() -> None:
    assert to_json(Logprobs([-0.1, -1e-7])) == [-0.1, -1e-7]


def test_views_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        TokenIds([1, 2]).array[0] = 3


def test_numpy_arrays_of_other_widths_are_taken() -> None:
    assert TokenIds(np.array([1, 2], dtype=np.int64)) == TokenIds([1, 2])
    assert TokenIds(np.array([1, 2], dtype=np.uint16)) == TokenIds([1, 2])
    assert Logprobs(np.array([-1.0], dtype=np.float64)) == Logprobs([-1.0])
    assert TokenIds(np.array([], dtype=np.float64)) == TokenIds()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([-1], "between 0 and"),
        ([2**31], "between 0 and"),
        ([1.5], "token ids are integers"),
        ([[1, 2]], "expected one dimension"),
        (b"123", "no whole number of int32"),
    ],
)
def test_what_is_no_token_id_is_refused(values: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TokenIds(values)


def test_text_is_no_log_probability() -> None:
    with pytest.raises(ValueError, match="log-probabilities are numbers"):
        Logprobs(np.array(["a"]))


@pytest.mark.parametrize("value", [[True], ["1"], [None], [[1]], {"a": 1}, 3, "not base64!"])
def test_foreign_json_that_is_no_array(value: object) -> None:
    with pytest.raises(ValueError, match=r"expected|base64"):
        from_either(TokenIds, value)


def test_base64_text_is_an_array_too() -> None:
    assert from_either(TokenIds, "AQAAAAIAAAA=") == TokenIds([1, 2])


def test_values_never_show_in_a_repr() -> None:
    assert repr(TokenIds([11, 22])) == "TokenIds(<2 values>)"


def test_kinds_are_not_equal_to_each_other() -> None:
    assert TokenIds() != Logprobs()
    assert TokenIds([1]) != [1]


def test_hooks_refuse_what_they_do_not_know() -> None:
    for hook in (to_wire, to_json):
        with pytest.raises(NotImplementedError, match="object has no"):
            hook(object())
    with pytest.raises(NotImplementedError, match="has no decoder"):
        from_either(int, b"")
