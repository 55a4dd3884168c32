"""FLOPs of language models, by which a run's MFU is printed, against PyTorch's own counter."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

from rayrec.models.base.compute import ComputeSettings
from rayrec.models.language.networks import padded_attention
from rayrec.models.language.text_program import TextProgramSpec
from rayrec.models.language.vocabulary import Vocabulary
from rayrec.models.program.program import ProgramPlacement
from tests.helpers.optional import skip_without
from tests.models.language.texts import (
    LLAMA,
    NUM_TOKENS,
    PROMPTS,
    ROWS,
    SHAPE,
    VOCABULARY,
    config,
    optimizer,
    program,
    text,
)

skip_without("peft")

ATTENTION_WIDTH = SHAPE["hidden_size"]
CASES = {
    "whole": {},
    "adapters": {"lora": {"rank": 2}},
    # Without rows of new tokens, which would be trained, too.
    "some adapters": {
        "lora": {"rank": 2, "targets": ["down_proj"]},
        "vocabulary": Vocabulary(NUM_TOKENS, NUM_TOKENS, 0, (1,)),
    },
}


def counted_by_torch(model, rows, prompts, attention_backward=2):
    """Of forward and backward by the network's own code, row by row; attention by the pairs it shows."""
    network, total = model.model.network, 0
    network.train()
    with padded_attention(network):
        network.set_attn_implementation("eager")
        for row, given in zip(rows, prompts, strict=True):
            ids = torch.tensor([row])
            with FlopCounterMode(display=False) as counter:
                vectors = network.get_input_embeddings()(ids)
                hidden = network.base_model(inputs_embeds=vectors, use_cache=False).last_hidden_state[0]
                head = network.get_output_embeddings()
                logits = head(hidden[given - 1 : -1])
                torch.nn.functional.cross_entropy(logits, ids[0, given:], reduction="sum").backward()
            total += counter.get_total_flops()
            # The plain attention computes all pairs; half of them are not seen.
            unseen = len(row) ** 2 - len(row) * (len(row) + 1) // 2
            total -= (1 + attention_backward) * SHAPE["num_hidden_layers"] * 4 * unseen * ATTENTION_WIDTH
    return total


@pytest.mark.parametrize("case", CASES)
def test_packed_rows_count_as_torch_counts_each_alone(case):
    """With adapters, weights that are frozen get no gradient, and nothing below the first adapter does."""
    model = program(LLAMA, **CASES[case])
    rows, prompts = ROWS[2:3], PROMPTS[2:3]
    found = model.flops(text(rows, prompts), {})

    if case == "some adapters":
        # The attention of the first layer is below all adapters.
        layers, length = SHAPE["num_hidden_layers"], len(rows[0])
        unseen = length**2 - length * (length + 1) // 2
        expected = counted_by_torch(model, rows, prompts, 0)
        expected -= 2 * (layers - 1) * 4 * unseen * ATTENTION_WIDTH
    else:
        expected = counted_by_torch(model, rows, prompts)
    assert found == pytest.approx(expected, rel=1e-9)


def test_adapters_take_less_than_whole_training_and_more_than_two_thirds_of_nothing():
    whole, adapted = (program(LLAMA, **CASES[name]).flops(text(), {}) for name in ("whole", "adapters"))

    # Forward and the gradients of activations stay; those of weights, a third, go.
    assert 0.6 * whole < adapted < 0.85 * whole


def test_padding_counts_for_nothing():
    packed, padded = program(LLAMA), program(LLAMA, rows="padded")
    alone = sum(padded.flops(text([row], [given]), {}) for row, given in zip(ROWS, PROMPTS, strict=True))

    assert padded.flops(text(), {}) == pytest.approx(alone, rel=1e-9)
    # What remains is the half of the pairs that a padded kernel computes and nobody sees.
    assert packed.flops(text(), {}) < alone < 1.05 * packed.flops(text(), {})


def test_of_a_split_network_every_trainer_counts_its_own_rows():
    """All go through the rows of all, each with a part of every layer: the printed share divides the sum of
    these by the rates of all of them."""
    spec = TextProgramSpec(config(), VOCABULARY, optimizer())
    found = []
    for rows in (slice(0, 1), slice(1, None)):
        made = spec.build(
            ProgramPlacement(
                torch.device("cpu"),
                0,
                sum_over_trainers=lambda values: lambda: None,
                compute=ComputeSettings(parallel="tensor"),
            )
        )
        found.append(made.flops(text(ROWS[rows], PROMPTS[rows]), {}))

    assert sum(found) == pytest.approx(program().flops(text(), {}), rel=1e-9)
    assert np.all(np.array(found) > 0)
