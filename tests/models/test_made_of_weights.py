"""What is made of weights alone is made once, and never of other weights than those of now."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch.func import functional_call

from rayrec.models.base.made_of_weights import MadeOfWeights
from rayrec.models.generative.flat_softmax import FlatPrefixModel
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.sequence.item_losses import CrossEntropy
from rayrec.models.sequence.next_item import DenseNextItemModel
from rayrec.models.sequence.sequence_model import SequenceModel
from rayrec.models.sequence.sequence_program import SequenceProgram
from tests.models.generative.networks import CODES, NUM_ITEMS, composed, content, prefix
from tests.models.networks import CPU, DIM, backbone, histories, shares
from tests.models.recipes import SETTINGS

ROWS = [[0, 3, 2], [6, 2], [4, 0, 3]]


def of_words() -> SequenceModel:
    return DenseNextItemModel(backbone(), CrossEntropy(), NUM_ITEMS, DIM, content=content())


def of_directions() -> SequenceModel:
    return DenseNextItemModel(backbone(), CrossEntropy(), NUM_ITEMS, DIM, temperature=0.1)


def one_softmax() -> SequenceModel:
    return FlatPrefixModel(prefix(0.0)[0], CrossEntropy())


def composed_prefixes() -> SequenceModel:
    return GenerativeRecommender(composed(0.0)[0], CODES, NUM_ITEMS, 3)


MODELS = (of_words, of_directions, one_softmax, composed_prefixes)


@pytest.fixture(params=MODELS, ids=[build.__name__ for build in MODELS])
def build(request):
    return request.param


def program(build, fused: bool = False) -> SequenceProgram:
    torch.manual_seed(0)
    settings = dataclasses.replace(SETTINGS, fused=fused)
    return SequenceProgram(build(), settings, CPU, seed=0)


def step(trained: SequenceProgram) -> None:
    (features,) = shares(ROWS, NUM_ITEMS, codes_IL=CODES.numpy())
    trained.backward(features, {})
    trained.update()


def scores(asked: SequenceProgram) -> np.ndarray:
    return asked.recommend(histories(ROWS, NUM_ITEMS), {}, NUM_ITEMS, None).scores_BK


def untouched(asked: SequenceProgram, build) -> np.ndarray:
    """What a program ranks that was given these weights before it was asked anything."""
    other = program(build)
    other.load(asked.weights(), None)
    return scores(other)


@pytest.mark.parametrize("fused", [False, True])
def test_weights_that_were_trained_rank_at_once(build, fused):
    trained = program(build, fused)
    before = scores(trained)

    for _ in range(2):
        step(trained)
        after = scores(trained)
        np.testing.assert_array_equal(after, untouched(trained, build))
        assert not np.array_equal(before, after)
        before = after


def test_weights_that_were_loaded_rank_at_once(build):
    trained, asked = program(build), program(build)
    scores(asked)
    step(trained)

    asked.load(trained.weights(), None)

    np.testing.assert_array_equal(scores(asked), scores(trained))


def test_weights_that_were_written_in_place_or_given_for_a_call_rank_at_once(build):
    trained, asked = program(build), program(build)
    before = scores(asked)
    step(trained)
    batch = asked._batch(histories(ROWS, NUM_ITEMS), {}, training=False)
    given = {f"_module.{name}": weight for name, weight in trained.model.named_parameters()}

    class Asked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self._module = asked.model

        def forward(self):
            return self._module.recommend(batch, NUM_ITEMS, None).scores_BK

    with torch.no_grad():
        np.testing.assert_array_equal(functional_call(Asked(), given, ()).numpy(), scores(trained))
        np.testing.assert_array_equal(scores(asked), before)
        for mine, theirs in zip(asked.model.parameters(), trained.model.parameters(), strict=True):
            mine.copy_(theirs)
    np.testing.assert_array_equal(scores(asked), scores(trained))


def test_requests_to_a_version_share_what_is_made(build, monkeypatch):
    asked, made = program(build), []
    ask = MadeOfWeights.forward
    monkeypatch.setattr(
        MadeOfWeights,
        "forward",
        lambda self, weights, make: ask(self, weights, lambda: (made.append(self), make())[1]),
    )

    for _ in range(3):
        scores(asked)

    (keeper,) = made
    assert keeper._kept is not None
    copied = [each for each in copy.deepcopy(asked.model).modules() if isinstance(each, MadeOfWeights)]
    assert all(each._kept is None for each in copied)


def test_gradients_flow_through_what_is_made():
    asked = program(one_softmax)
    scores(asked)
    batch = asked._batch(histories(ROWS, NUM_ITEMS), {}, training=False)

    asked.model.recommend(batch, 1, None).scores_BK.sum().backward()

    assert all(own_VD.grad is not None for own_VD in asked.model.backbone.own_VD)
