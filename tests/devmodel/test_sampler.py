"""Sampling: the log-probability told is that of the distribution drawn from, and a seed decides every draw."""

import numpy as np
import pytest

from polar.devmodel.request import Sampling
from polar.devmodel.sampler import Sampler

LOGITS = np.array([2.0, 1.0, 0.0, -1.0, 3.0], np.float32)


def draw(logits=LOGITS, *, prompt=(), forbidden=(), seed=0, **sampling):
    return Sampler(Sampling(**sampling), prompt, forbidden, seed).draw(logits)


def log_softmax(values):
    values = np.asarray(values, np.float64)
    return values - values.max() - np.log(np.exp(values - values.max()).sum())


def test_draws_follow_the_distribution_that_is_told():
    sampler = Sampler(Sampling(temperature=0.7, top_p=0.9), [], [], 5)
    drawn = [sampler.draw(LOGITS) for _ in range(4000)]
    told = {token.id: token.logprob for token in drawn}
    assert sum(np.exp(list(told.values()))) == pytest.approx(1, abs=1e-6)
    for token, logprob in told.items():
        share = sum(one.id == token for one in drawn) / len(drawn)
        assert share == pytest.approx(np.exp(logprob), abs=0.03)


def test_the_same_seed_draws_the_same():
    one, two = (Sampler(Sampling(), [], [], 9) for _ in range(2))
    assert [one.draw(LOGITS) for _ in range(50)] == [two.draw(LOGITS) for _ in range(50)]
    other = Sampler(Sampling(), [], [], 10)
    assert [one.draw(LOGITS).id for _ in range(50)] != [other.draw(LOGITS).id for _ in range(50)]


def test_greedy_takes_the_best_and_tells_it_before_temperature():
    token = draw(temperature=0, top_k=1)
    assert (token.id, token.logprob) == (4, pytest.approx(log_softmax(LOGITS)[4], abs=1e-6))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 2}, {4, 0}),
        ({"top_p": 0.6}, {4}),
        ({"top_p": 0.7}, {4, 0}),
        ({"min_p": 0.3}, {4, 0}),
        ({"top_k": 3, "top_p": 0.8}, {4, 0}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
    ],
)
def test_truncation_keeps_the_likeliest_and_renormalises(sampling, kept):
    seen = {}
    for seed in range(400):
        token = draw(seed=seed, **sampling)
        seen[token.id] = token.logprob
    assert set(seen) <= kept
    assert kept - {2, 3} <= set(seen)
    expected = log_softmax([LOGITS[i] for i in sorted(kept)])
    for token, logprob in seen.items():
        assert logprob == pytest.approx(expected[sorted(kept).index(token)], abs=1e-6)


def test_penalties_and_bias_move_the_scores():
    assert draw(temperature=0, logit_bias={3: 9.0}).id == 3
    assert draw(temperature=0, repetition_penalty=9.0, prompt=[4]).id == 0
    sampler = Sampler(Sampling(temperature=0, presence_penalty=1.5), [], [], 0)
    assert [sampler.draw(LOGITS).id for _ in range(2)] == [4, 0]
    sampler = Sampler(Sampling(temperature=0, frequency_penalty=0.6), [], [], 0)
    assert [sampler.draw(LOGITS).id for _ in range(3)] == [4, 4, 0]


def test_ends_are_forbidden_until_min_tokens():
    sampler = Sampler(Sampling(temperature=0, min_tokens=2), [], [4], 0)
    assert [sampler.draw(LOGITS).id for _ in range(3)] == [0, 0, 4]


def test_top_lists_the_likeliest_first():
    token = draw(temperature=0, top_logprobs=2)
    assert [number for number, _ in token.top] == [4, 0, 1]  # one more, for when the sampled one takes a place
