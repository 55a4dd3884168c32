"""What is made of weights alone is made once, and never of other weights than those of now."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch.func import functional_call

from rayrec.models.base.made_of_weights import MadeOfWeights, made_of_weights
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
    return DenseNextItemModel(backbone(), CrossEntropy(), NUM_ITEMS, DIM, 0.1, content=content())


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
@pytest.mark.parametrize("without_dropout", [False, True])
def test_weights_that_were_trained_rank_at_once(build, fused, without_dropout, monkeypatch):
    """Without dropout, as reinforcement learning trains, nothing but the update tells of the training."""
    trained = program(build, fused)
    if without_dropout:
        monkeypatch.setattr(trained, "_begin_training", trained.model.eval)
    before = scores(trained)

    for _ in range(2):
        step(trained)
        after = scores(trained)
        np.testing.assert_array_equal(after, untouched(trained, build))
        assert not np.array_equal(before, after)
        before = after


def test_asking_between_gradients_and_update_keeps_nothing_old(build):
    trained = program(build, fused=True)
    (features,) = shares(ROWS, NUM_ITEMS, codes_IL=CODES.numpy())
    trained.backward(features, {})
    scores(trained)
    trained.update()

    np.testing.assert_array_equal(scores(trained), untouched(trained, build))


def test_weights_that_were_loaded_rank_at_once(build):
    trained, asked = program(build), program(build)
    scores(asked)
    step(trained)

    asked.load(trained.weights(), None)

    np.testing.assert_array_equal(scores(asked), scores(trained))


def ranked(asked: SequenceProgram) -> torch.Tensor:
    batch = asked._batch(histories(ROWS, NUM_ITEMS), {}, training=False)
    return asked.model.recommend(batch, NUM_ITEMS, None).scores_BK


class Ranking(torch.nn.Module):
    def __init__(self, asked: SequenceProgram) -> None:
        super().__init__()
        self.model, self._asked = asked.model, [asked]

    def forward(self) -> torch.Tensor:
        return ranked(self._asked[0])


def test_weights_that_are_given_for_a_call_rank_in_it_alone(build):
    asked, others = program(build), program(build)
    before = scores(asked)
    step(others)
    expected = scores(others)
    # Fresh tensors, whose versions are those that the model's own have.
    given = {f"model.{name}": weight.detach().clone() for name, weight in others.model.named_parameters()}

    with torch.no_grad():
        found = functional_call(Ranking(asked), given, ())
        np.testing.assert_array_equal(found.numpy(), expected)
        np.testing.assert_array_equal(scores(asked), before)


def test_weights_that_were_written_in_place_rank_at_once(build):
    trained, asked = program(build), program(build)
    scores(asked)
    step(trained)

    with torch.no_grad():
        for mine, theirs in zip(asked.model.parameters(), trained.model.parameters(), strict=True):
            mine.copy_(theirs)

    np.testing.assert_array_equal(scores(asked), scores(trained))


def test_requests_of_another_precision_do_not_change_the_next_ones(build):
    asked = program(build)
    before = scores(asked)

    with torch.autocast("cpu", torch.bfloat16):
        short = scores(asked)
    assert not np.array_equal(short, before)
    np.testing.assert_array_equal(scores(asked), before)
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_array_equal(scores(asked), short)


def test_a_network_that_moves_to_another_type_ranks_by_it(build):
    asked = program(build)
    before = scores(asked)

    asked.model.double()

    with torch.no_grad():
        scores_BK = ranked(asked)
    assert scores_BK.dtype == torch.float64
    np.testing.assert_allclose(scores_BK.numpy(), before, rtol=1e-4, atol=1e-5)


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
    assert keeper.kept is not None
    assert all(each.kept is None for each in made_of_weights(copy.deepcopy(asked.model)))


def test_gradients_flow_through_what_is_made(build):
    asked = program(build)
    scores(asked)
    (keeper, *_) = (each for each in made_of_weights(asked.model) if each.kept is not None)

    ranked(asked).sum().backward()

    weights = [weight for weight, _ in keeper._kept[0][0]]
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in weights)
