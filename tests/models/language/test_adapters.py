"""LoRA: what is frozen stays, what is saved is small, and what was learned can be added to the base."""

import numpy as np
import pytest
import torch

from rayrec.models.language.adapters import merge_adapters
from rayrec.platform.errors import InputError
from tests.helpers.examples import cases
from tests.helpers.optional import skip_without
from tests.models.language.texts import FIRST_NEW, LLAMA, NUM_TOKENS, SHAPE, optimizer, program, text

skip_without("peft")


LORA = {"rank": 4}
TIED = {"tied": {"tie_word_embeddings": True}, "untied": {"tie_word_embeddings": False}}


def adapted(settings=LLAMA, **more):
    return program(settings, lora=LORA, optimizer=optimizer(weight_decay=0.1), **more)


def train(trained, steps):
    losses = []
    for step in steps:
        losses.append(trained.backward(text(step=step), {}).loss_sum)
        trained.update()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("tied", cases(TIED, ["tied"]))
def test_only_adapters_and_rows_of_new_tokens_are_trained(tied):
    model = adapted(LLAMA | TIED[tied])
    before = {name: weight.clone() for name, weight in model.model.frozen_weights.items()}
    plain = program(LLAMA | TIED[tied])

    losses = train(model, range(100))

    assert losses[0] == pytest.approx(plain.backward(text(), {}).loss_sum, rel=1e-6)  # no effect at first
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(weight, before[name]) for name, weight in model.model.frozen_weights.items())
    trained = {name for name, weight in model.model.named_parameters() if weight.requires_grad}
    assert all("lora_" in name or "trainable_tokens" in name for name in trained)
    rows = [
        tuple(weight.shape)
        for name, weight in model.model.named_parameters()
        if name in trained and "trainable_tokens" in name
    ]
    assert rows == [(NUM_TOKENS - FIRST_NEW, SHAPE["hidden_size"])] * (1 if tied == "tied" else 2)


@pytest.mark.parametrize("tied", TIED)
def test_merged_weights_say_what_the_adapters_said(tied):
    model = adapted(LLAMA | TIED[tied])
    train(model, range(5))
    expected_B = model.log_likelihoods(text(), {})
    merged = adapted(LLAMA | TIED[tied])
    merged.load(model.weights(), None)

    merge_adapters(merged.model.network)

    np.testing.assert_allclose(merged.log_likelihoods(text(), {}), expected_B, rtol=1e-5)
    plain = program(LLAMA | TIED[tied])
    assert [name for name, _ in merged.model.named_parameters()] == [
        name for name, _ in plain.model.named_parameters()
    ]
    plain.load({name: weight.detach().numpy() for name, weight in merged.model.named_parameters()}, None)
    np.testing.assert_allclose(plain.log_likelihoods(text(), {}), expected_B, rtol=1e-5)


def test_a_snapshot_has_what_was_trained_and_goes_on_with_the_same_bits():
    straight, stopped = adapted(), adapted()
    train(straight, range(6))
    train(stopped, range(3))
    weights, state = stopped.weights(), stopped.optimizer_state()

    resumed = adapted()
    resumed.load(weights, state)
    train(resumed, range(3, 6))

    assert sum(weight.nbytes for weight in weights.values()) < 0.25 * sum(
        weight.nbytes for weight in program().weights().values()
    )
    assert resumed.weights().keys() == straight.weights().keys()
    for name, weight in straight.weights().items():
        np.testing.assert_array_equal(resumed.weights()[name], weight, err_msg=name)


def test_adapters_are_refused_beside_another_base():
    weights = adapted(seed=0).weights()

    with pytest.raises(ValueError, match="trained beside another base than"):
        adapted(seed=1).load(weights, None)
    with pytest.raises(ValueError, match="those of adapters, and this network has none"):
        program().load(weights, None)
    with pytest.raises(ValueError, match="those of a whole network, and this one has a frozen base"):
        adapted().load(program().weights(), None)


def test_layers_are_chosen_by_name():
    model = program(LLAMA, lora={"rank": 2, "targets": ["q_proj", "v_proj"]})

    layers = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in model.weights() if "lora_" in name}
    assert layers == {"q_proj", "v_proj"}
    with pytest.raises(InputError, match=r"model\.lora\.targets: the network has no layer 'query'; linear"):
        program(LLAMA, lora={"targets": ["query"]})
