"""Sampling: keyed by seeds, bounded as asked, and told with the model's own probabilities."""

import numpy as np
import pytest

from rayrec.models.generation.sampler import Sampling, TokenSampler

LOGITS_V = np.log(np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32))


def drawn(count, **settings):
    sampler = TokenSampler(Sampling(**settings), ends=[0])
    return [sampler.choose(LOGITS_V, 1).token for _ in range(count)]


def test_equal_seeds_draw_equal_tokens_and_others_others():
    assert drawn(50, seed=7) == drawn(50, seed=7)
    assert drawn(50, seed=7) != drawn(50, seed=8)
    assert drawn(50, seed=7) != drawn(50, seed=7, index=1)


def test_tokens_come_as_often_as_they_are_probable():
    counts = np.bincount(drawn(4000, seed=1), minlength=4) / 4000

    assert np.abs(counts - [0.1, 0.2, 0.3, 0.4]).max() < 0.03


def test_no_temperature_is_the_most_probable_token():
    assert set(drawn(20, temperature=0)) == {3}


def test_top_k_and_top_p_leave_the_rest_out():
    assert set(drawn(300, top_k=2)) == {2, 3}
    assert set(drawn(300, top_p=0.65)) == {2, 3}
    assert set(drawn(300, top_p=0.01)) == {3}


def test_what_was_said_is_penalized():
    assert drawn(4, temperature=0, frequency_penalty=5) == [3, 2, 1, 0]
    assert drawn(2, temperature=0, presence_penalty=0.2) == [3, 3]


def test_a_bias_moves_a_token():
    assert set(drawn(20, logit_bias={0: 100.0})) == {0}
    assert 3 not in drawn(200, logit_bias={3: -100.0})


def test_log_probabilities_are_those_of_the_model_alone():
    sampler = TokenSampler(Sampling(temperature=0.2, seed=3, num_top=2, logit_bias={0: 100.0}), ends=[])
    chosen = sampler.choose(LOGITS_V, 1)

    assert chosen.token == 0
    assert chosen.logprob == pytest.approx(np.log(0.1), abs=1e-5)
    assert [token for token, _ in chosen.top] == [3, 2]
    assert chosen.top[0][1] == pytest.approx(np.log(0.4), abs=1e-5)
