"""Token ids and log-probabilities as binary arrays.

One record of a long session holds tens of thousands of numbers; as Python lists they would cost ten times the memory
and a walk per encode. Here they are little-endian bytes from the wire to the trainer, with NumPy views on top.
Immutable, comparable and hashable, so that events stay values. In JSON, which is for people, they are plain lists.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", int, float)


class _Packed(Generic[Number]):
    """A one-dimensional array of fixed-width little-endian numbers, held as bytes."""

    __slots__ = ("data",)

    dtype: ClassVar[np.dtype[Any]]
    data: bytes

    def __init__(self, values: bytes | npt.ArrayLike = b"") -> None:
        """`values`: packed bytes, or anything one-dimensional that NumPy converts without loss of range."""
        if isinstance(values, bytes):
            if len(values) % self.dtype.itemsize:
                raise ValueError(f"{len(values)} bytes are no whole number of {self.dtype.name} values")
            self.data = values
            return
        array = np.asarray(values)
        if array.size == 0:
            self.data = b""
            return
        if array.ndim != 1:
            raise ValueError(f"expected one dimension, got {array.ndim}")
        self.data = self._convert(array).tobytes()

    @classmethod
    def _convert(cls, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array.astype(cls.dtype, copy=False)

    @classmethod
    def concat(cls, parts: Iterable[Any]) -> Any:
        """One array of the parts in order; each part is of this class."""
        return cls(b"".join(part.data for part in parts))

    def __len__(self) -> int:
        return len(self.data) // self.dtype.itemsize

    def __iter__(self) -> Iterator[Number]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.data == self.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        # never the values: records end up in logs and assertion messages
        return f"{type(self).__name__}(<{len(self)} values>)"

    def slice(self, start: int, end: int) -> Any:
        """Values `start` to `end` (exclusive) as a new array of this class."""
        width = self.dtype.itemsize
        return type(self)(self.data[start * width : end * width])

    @property
    def array(self) -> npt.NDArray[Any]:
        """A read-only view of shape `(len(self),)`; no copy."""
        return np.frombuffer(self.data, dtype=self.dtype)


class TokenIds(_Packed[int]):
    """Token ids: `int32`, shape `(n,)`, each at least 0."""

    __slots__ = ()
    dtype = np.dtype("<i4")

    @classmethod
    def _convert(cls, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if array.dtype.kind not in "iu":
            raise ValueError(f"token ids are integers, got {array.dtype.name}")
        if int(array.min()) < 0 or int(array.max()) > 2**31 - 1:
            raise ValueError("token ids lie between 0 and 2**31 - 1")
        return array.astype(cls.dtype, copy=False)


class Logprobs(_Packed[float]):
    """Natural log-probabilities: `float32`, shape `(n,)`; NaN where a token was not sampled."""

    __slots__ = ()
    dtype = np.dtype("<f4")

    @classmethod
    def _convert(cls, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if array.dtype.kind not in "fiu":
            raise ValueError(f"log-probabilities are numbers, got {array.dtype.name}")
        return array.astype(cls.dtype, copy=False)


def to_wire(value: Any) -> Any:
    """msgspec hook for MessagePack: arrays as bytes."""
    if isinstance(value, _Packed):
        return value.data
    raise NotImplementedError(f"{type(value).__name__} has no wire form")


def to_json(value: Any) -> Any:
    """msgspec hook for JSON: arrays as lists; NaN, which JSON lacks, as null."""
    if isinstance(value, TokenIds):
        return value.array.tolist()
    if isinstance(value, Logprobs):
        # through decimal text of float32, so that people read -0.1 and not -0.10000000149011612
        return [None if number != number else float(str(number)) for number in value.array]
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


def from_either(kind: type[Any], value: Any) -> Any:
    """msgspec hook for decoding: bytes (MessagePack), or a list or base64 text (JSON).

    Raises:
        ValueError: not an array of that kind; msgspec adds the field's path.
    """
    if not (isinstance(kind, type) and issubclass(kind, _Packed)):
        raise NotImplementedError(f"{kind!r} has no decoder")
    if isinstance(value, bytes | bytearray | memoryview):
        return kind(bytes(value))
    if isinstance(value, str):
        try:
            return kind(base64.b64decode(value, validate=True))
        except binascii.Error as error:
            raise ValueError(f"not base64: {error}") from None
    if isinstance(value, list):
        if kind is Logprobs:
            value = [float("nan") if number is None else number for number in value]
        if any(isinstance(number, bool) or not isinstance(number, int | float) for number in value):
            raise ValueError("expected an array of numbers")
        return kind(value)
    raise ValueError(f"expected an array of numbers, got {type(value).__name__}")
