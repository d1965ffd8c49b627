"""Draw one token from logits, with the log-probability of the distribution it was drawn from.

Pure given its random generator. The order is vLLM's: bias and end-of-turn mask, penalties, temperature, min_p, top_k,
top_p. The log-probabilities are the processed ones (after all of these, renormalised), float32; at temperature 0,
where nothing is drawn, they are those before temperature and truncation, as in vLLM.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .choice import Sampled
from .request import Sampling

Logits = NDArray[np.float64]
GREEDY = 1e-5  # temperatures below this are greedy, as in vLLM


class Sampler:
    """The sampling state of one sequence: its random generator and what was seen so far."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int], forbidden: Iterable[int], seed: int) -> None:
        """`forbidden` may not be sampled before `min_tokens`; `seed` decides every draw."""
        self._sampling = sampling
        self._forbidden = sorted(forbidden)
        self._rng = np.random.default_rng(seed % 2**64)
        self._prompt = np.unique(np.asarray(prompt_ids, np.int64))
        self._counts: Counter[int] = Counter()
        self._sampled = 0

    def draw(self, logits: NDArray[np.float32]) -> Sampled:
        """The next token; `logits` [vocabulary] are not changed."""
        s = self._sampling
        scores = self._penalized(logits.astype(np.float64))
        if s.temperature < GREEDY:
            logprobs = _normalized(scores)
            token = int(scores.argmax())
        else:
            logprobs = _normalized(_truncated(scores / s.temperature, s))
            # searching the running sum draws with one number per token, so one more draw elsewhere shifts nothing
            edges = np.exp(logprobs).cumsum()
            token = int(edges.searchsorted(self._rng.random() * edges[-1], side="right"))
            token = min(token, len(edges) - 1)
        self._counts[token] += 1
        self._sampled += 1
        told = logprobs.astype(np.float32)
        return Sampled(token, float(told[token]), _top(told, s.top_logprobs or 0))

    def _penalized(self, scores: Logits) -> Logits:
        s = self._sampling
        for token, bias in s.logit_bias.items():
            scores[token] += bias
        if self._sampled < s.min_tokens and self._forbidden:
            scores[self._forbidden] = -np.inf
        output = np.fromiter(self._counts, np.int64, len(self._counts))
        if s.repetition_penalty != 1.0:
            seen = np.union1d(self._prompt, output)
            scores[seen] = np.where(
                scores[seen] > 0, scores[seen] / s.repetition_penalty, scores[seen] * s.repetition_penalty
            )
        if s.frequency_penalty or s.presence_penalty:
            counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
            scores[output] -= s.frequency_penalty * counts + s.presence_penalty
        return scores


def _normalized(scores: Logits) -> Logits:
    """Log-probabilities of scores."""
    shifted = scores - scores.max()
    result: Logits = shifted - np.log(np.exp(shifted).sum())
    return result


def _truncated(scores: Logits, s: Sampling) -> Logits:
    """Scores with everything outside min_p, top_k and top_p at minus infinity."""
    if s.min_p > 0:
        scores[scores < scores.max() + np.log(s.min_p)] = -np.inf
    if 0 < s.top_k < len(scores):
        scores[scores < np.partition(scores, -s.top_k)[-s.top_k]] = -np.inf
    if s.top_p < 1:
        order = np.argsort(-scores, kind="stable")
        mass = np.exp(_normalized(scores)[order]).cumsum()
        # the token that reaches top_p stays, and so does at least one
        out = order[1:][mass[:-1] >= s.top_p]
        scores[out] = -np.inf
    return scores


def _top(logprobs: NDArray[np.float32], count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    # one more than asked: the sampled token takes a place of its own in the list
    best = np.argpartition(-logprobs, count)[: count + 1]
    best = best[np.argsort(-logprobs[best], kind="stable")]
    return tuple((int(token), float(logprobs[token])) for token in best)
