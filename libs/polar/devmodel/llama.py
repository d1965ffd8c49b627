"""The forward pass of a small llama model in NumPy, float32.

Promise: what one sequence computes does not depend on what is computed beside it, bit for bit. So a prompt is read
alone, in chunks of fixed size; attention is done one sequence at a time; and the matrix products of a decode step,
the only place where sequences share a call, go through `Matrix`, which is checked for it when the model is loaded.
(BLAS libraries choose kernels by shape, so a plain product of 1 row and of 9 rows gives other last bits, and after
some tokens other text.)

Heavy and blocking: use it from one thread that is not the event loop's. One BLAS thread is fastest at these sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .checkpoint import Checkpoint, Floats

ROWS = 16  # rows of one shared product; more run in further products
PREFILL = 128  # prompt tokens per chunk: large enough to be fast, small enough that running calls go on in between
# Weights are cut into blocks of so many outputs, the first size that treats rows alike. Small blocks are also 3 to 4
# times faster for up to 16 rows: OpenBLAS then reads the weights in place instead of packing them first (measured on
# AVX-512, where 64 outputs of 576 inputs still count as small and 96 do not).
BLOCKS = (128, 96, 64, 48, 32, 16)


class Matrix:
    """A weight [out, in], applied to up to `ROWS` rows at once: each row's result is the same whatever the others are.

    `block` is what `alike` found for this shape; None goes row by row, which needs no finding out.
    """

    def __init__(self, weight: Floats, block: int | None) -> None:
        self._weight = weight
        self._together = block is not None
        size = block or max(BLOCKS)
        starts = range(0, len(weight), size)
        self._parts = [(slice(at, at + size), weight[at : at + size].T) for at in starts]

    def many(self, rows: Floats) -> Floats:
        """[n, in] -> [n, out] for the rows of one prompt: fast, and no promise across different n."""
        result: Floats = rows @ self._weight.T
        return result

    def apply(self, rows: Floats) -> Floats:
        """[n, in] -> [n, out], n up to `ROWS`, each row independent of the others."""
        count = len(rows)
        if count == 1 and self._together:
            # a single row would take another kernel (matrix times vector)
            return self.apply(np.concatenate([rows, rows]))[:1]
        result = np.empty((count, len(self._weight)), np.float32)
        for part, transposed in self._parts:
            if self._together:
                np.matmul(rows, transposed, out=result[:, part])
            else:
                for i in range(count):
                    np.matmul(rows[i], transposed, out=result[i, part])
        return result


def alike(weight: Floats, rng: np.random.Generator) -> int | None:
    """The largest of `BLOCKS` with which this machine's BLAS gives each row the same bits in any company, else None."""
    rows = rng.standard_normal((ROWS, weight.shape[1]), dtype=np.float32)
    for block in BLOCKS:
        matrix = Matrix(weight, block)
        whole = matrix.apply(rows)
        if all(np.array_equal(matrix.apply(rows[-count:].copy()), whole[-count:]) for count in range(1, ROWS)):
            return block
    return None


@dataclass(slots=True)
class Cache:
    """Keys and values of one sequence: [layer, kv head, position, head width] each. Memory is touched as it fills."""

    keys: Floats
    values: Floats
    length: int = 0


@dataclass(frozen=True, slots=True)
class _Block:
    attention_norm: Floats
    feed_norm: Floats
    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix


@dataclass(slots=True)
class Llama:
    """The model. Ids are ints below the vocabulary's size; logits are float32 [vocabulary]."""

    checkpoint: Checkpoint
    rows_together: bool = field(init=False)
    """Whether decode steps share products (else each row has its own: slower, as exact)."""
    _blocks: list[_Block] = field(init=False)
    _logits: Matrix = field(init=False)
    _turns: NDArray[np.complex64] = field(init=False)

    def __post_init__(self) -> None:
        c, rng = self.checkpoint, np.random.default_rng(0)
        # every layer has the same four shapes, so the first one speaks for all
        first = c.layers[0]
        shapes = {name: alike(getattr(first, name), rng) for name in ("qkv", "output", "gate_up", "down")}
        logits = alike(c.embedding, rng)
        self.rows_together = None not in (*shapes.values(), logits)
        self._logits = Matrix(c.embedding, logits)
        self._blocks = [
            _Block(
                layer.attention_norm,
                layer.feed_norm,
                Matrix(layer.qkv, shapes["qkv"]),
                Matrix(layer.output, shapes["output"]),
                Matrix(layer.gate_up, shapes["gate_up"]),
                Matrix(layer.down, shapes["down"]),
            )
            for layer in c.layers
        ]
        half = c.width // c.heads // 2
        steps = np.arange(c.context)[:, None] * c.rope_base ** (-np.arange(half) / half)
        self._turns = np.exp(1j * steps).astype(np.complex64)

    def cache(self, capacity: int) -> Cache:
        """An empty cache for `capacity` positions."""
        c = self.checkpoint
        shape = (len(c.layers), c.kv_heads, capacity, c.width // c.heads)
        return Cache(np.empty(shape, np.float32), np.empty(shape, np.float32))

    def read(self, ids: Sequence[int], cache: Cache) -> Floats:
        """Take prompt ids (at most `PREFILL`) into the cache; returns the last one's hidden state [width].

        A prompt must be cut at the same places each time for the same bits: `PREFILL` ids per call, the rest last.
        """
        c, start, count = self.checkpoint, cache.length, len(ids)
        end = start + count
        groups, size = c.heads // c.kv_heads, c.width // c.heads
        hidden = c.embedding[list(ids)]
        hides = np.triu(np.full((count, count), -np.inf, np.float32), 1)
        turns = self._turns[start:end, None, :]
        for number, block in enumerate(self._blocks):
            q, k, v = self._project(block.qkv.many(self._scaled(hidden, block.attention_norm)), turns)
            keys, values = cache.keys[number], cache.values[number]
            keys[:, start:end] = k.transpose(1, 0, 2)
            values[:, start:end] = v.transpose(1, 0, 2)
            # [kv head, group * count, size]: the query heads that share a key head together
            asked = q.reshape(count, c.kv_heads, groups, size).transpose(1, 2, 0, 3).reshape(c.kv_heads, -1, size)
            scores = (asked @ keys[:, :end].transpose(0, 2, 1)).reshape(c.kv_heads, groups, count, end)
            scores[..., start:] += hides
            mixed = _softmax(scores).reshape(c.kv_heads, -1, end) @ values[:, :end]
            joined = mixed.reshape(c.kv_heads, groups, count, size).transpose(2, 0, 1, 3).reshape(count, c.width)
            hidden = hidden + block.output.many(np.ascontiguousarray(joined))
            gate, up = np.split(block.gate_up.many(self._scaled(hidden, block.feed_norm)), 2, axis=1)
            hidden = hidden + block.down.many(_silu(gate) * up)
        cache.length = end
        last: Floats = hidden[-1]
        return last

    def logits(self, hidden: Floats) -> Floats:
        """[n, width] -> [n, vocabulary], n up to `ROWS`."""
        return self._logits.apply(self._scaled(hidden, self.checkpoint.norm))

    def step(self, ids: Sequence[int], caches: Sequence[Cache]) -> Floats:
        """One new token for each of up to `ROWS` sequences; returns their logits [n, vocabulary]."""
        c, count = self.checkpoint, len(ids)
        groups, size = c.heads // c.kv_heads, c.width // c.heads
        hidden = c.embedding[list(ids)]
        turns = self._turns[[cache.length for cache in caches], None, :]
        joined = np.empty((count, c.width), np.float32)
        for number, block in enumerate(self._blocks):
            q, k, v = self._project(block.qkv.apply(self._scaled(hidden, block.attention_norm)), turns)
            asked = q.reshape(count, c.kv_heads, groups, size)
            for i, cache in enumerate(caches):
                at = cache.length
                keys, values = cache.keys[number], cache.values[number]
                keys[:, at] = k[i]
                values[:, at] = v[i]
                weights = _softmax(asked[i] @ keys[:, : at + 1].transpose(0, 2, 1))
                joined[i] = (weights @ values[:, : at + 1]).reshape(c.width)
            hidden = hidden + block.output.apply(joined)
            gate, up = np.split(block.gate_up.apply(self._scaled(hidden, block.feed_norm)), 2, axis=1)
            hidden = hidden + block.down.apply(_silu(np.ascontiguousarray(gate)) * up)
        for cache in caches:
            cache.length += 1
        return self.logits(hidden)

    def _project(self, qkv: Floats, turns: NDArray[np.complex64]) -> tuple[Floats, Floats, Floats]:
        """Split into heads [n, heads, size]; rotate queries and keys by position, scale queries."""
        c = self.checkpoint
        size = c.width // c.heads
        turned = (c.heads + c.kv_heads) * size
        # GGUF keeps the two parts of each rotated pair side by side: a complex number in memory
        pairs = np.ascontiguousarray(qkv[:, :turned]).view(np.complex64).reshape(len(qkv), -1, size // 2) * turns
        both = pairs.view(np.float32).reshape(len(qkv), -1, size)
        values = qkv[:, turned:].reshape(len(qkv), c.kv_heads, size)
        scale = np.float32(size**-0.5)
        return np.ascontiguousarray(both[:, : c.heads]) * scale, both[:, c.heads :], values

    def _scaled(self, hidden: Floats, weight: Floats) -> Floats:
        """Root-mean-square norm."""
        square = np.mean(hidden * hidden, axis=-1, keepdims=True)
        result: Floats = hidden * (1.0 / np.sqrt(square + np.float32(self.checkpoint.epsilon))) * weight
        return result


def _softmax(scores: Floats) -> Floats:
    """Over the last axis, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def _silu(gate: Floats) -> Floats:
    result: Floats = np.divide(gate, 1 + np.exp(-gate), dtype=np.float32)
    return result
