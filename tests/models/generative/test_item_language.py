"""Words and codes in one network, against its own forward pass; parts of batches, tables, adapters."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rayrec.models.base.compute import ComputeSettings
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.decoding.beam_cache import BeamCache
from rayrec.models.generative.causal_lm import CausalLmBackbone
from rayrec.models.sequence.sequence_program import SequenceProgram
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.platform.schedule import RateSchedule
from tests.models.generative.language_models import CODES_IL, LEVEL_SIZES, NUM_ITEMS
from tests.models.generative.prompt_models import (
    FIRST_TOKENS,
    LLAMA,
    ROWS,
    USER,
    VOCABULARY,
    WORDS,
    features,
    model,
    users_of,
)
from tests.models.networks import CPU, histories, shares, tensor_batch

transformers = pytest.importorskip("transformers")


def tensors(batch, training=False):
    return TensorBatch.build(batch, users_of(batch), seed=0, device=CPU, training=training)


def own_logits(made, tokens, user_D=None):
    """[tokens, vocabulary] by the network's own code, for one row alone."""
    network = made.backbone.network
    vectors = network.get_input_embeddings()(torch.tensor([tokens]))
    if user_D is not None:
        vectors = vectors.clone()
        vectors[0, 0] = made.backbone.language.projections["user"](user_D)
    network.set_attn_implementation("eager")
    logits = network(inputs_embeds=vectors, use_cache=False).logits[0]
    network.set_attn_implementation("rayrec")
    return logits


@pytest.mark.parametrize("softmax", ["codes", "children"])
def test_words_are_predicted_among_all_tokens_and_codes_among_those_of_their_level(softmax):
    made, batch = model(softmax=softmax), features()

    loss = made.loss(tensors(batch)).item()

    users, by_hand, place = torch.tensor(users_of(batch)["user"]), 0.0, 0
    for tokens, given in ROWS:
        user_D = None
        if tokens[0] == USER:
            user_D, place = users[place], place + 1
        logits = own_logits(made, tokens, user_D)
        for index in range(given, len(tokens)):
            token, allowed = tokens[index], range(VOCABULARY.num_tokens)
            for level, (first, size) in enumerate(zip(FIRST_TOKENS, LEVEL_SIZES, strict=True)):
                if first <= token < first + size:
                    allowed = range(first, first + size)
                    if softmax == "children":  # targets are items of the catalog
                        before_L = np.array(tokens[index - level : index]) - FIRST_TOKENS[:level]
                        siblings_IL = CODES_IL[(CODES_IL[:, :level] == before_L).all(axis=1)]
                        allowed = np.unique(siblings_IL[:, level]) + first
            said = logits[index - 1][list(allowed)].log_softmax(0)
            by_hand -= said[list(allowed).index(token)].item()
    assert loss == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("softmax", ["codes", "children"])
def test_a_batch_may_have_words_alone(softmax):
    made = model(softmax=softmax)

    loss = made.loss(tensors(features([ROWS[1]])))
    loss.backward()

    assert loss.isfinite()
    assert loss > 0
    assert all(weight.grad.isfinite().all() for weight in made.parameters() if weight.grad is not None)


@pytest.mark.parametrize("tied", [False, True], ids=["two matrices", "one matrix"])
@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapters"])
def test_codes_behind_a_prompt_are_scored_alike_step_by_step_at_once_and_by_the_network(lora, tied):
    if lora is not None:
        pytest.importorskip("peft")
    base = {"kind": "settings", "settings": {**LLAMA, "tie_word_embeddings": tied}}
    made, batch = (
        model(lora=lora, base=base),
        features([(tokens[:given], given) for tokens, given in ROWS if given > 2]),
    )
    context = made.backbone.encode_context(tensors(batch))
    codes_BWL = torch.tensor(CODES_IL)[torch.tensor([[0, 3], [6, 2]])]

    at_once = made.backbone.sequence_logits(context, codes_BWL)

    cache, unchanged_BW = BeamCache(), torch.arange(2).expand(2, -1)
    users = torch.tensor(users_of(batch)["user"])
    for level, (first, size) in enumerate(zip(FIRST_TOKENS, LEVEL_SIZES, strict=True)):
        if level > 1:
            cache.reorder(unchanged_BW)
        stepped = made.backbone.step(context, cache, level, codes_BWL[:, :, :level])
        torch.testing.assert_close(at_once[level], stepped.expand_as(at_once[level]), rtol=1e-5, atol=1e-5)
        for row, (tokens, given) in enumerate([row for row in ROWS if row[1] > 2]):
            codes = codes_BWL[row, 1, :level] + torch.tensor(FIRST_TOKENS[:level], dtype=torch.int64)
            user_D = users[0] if tokens[0] == USER else None
            logits = own_logits(made, [*tokens[:given], *codes.tolist()], user_D)[-1, first : first + size]
            torch.testing.assert_close(at_once[level][row, 1], logits, rtol=1e-4, atol=1e-5)


def program(made, micro_batches=1):
    optimizer = DenseOptimizerSettings(0.01, 0.1, RateSchedule(), max_grad_norm=None, fused=False)
    return SequenceProgram(made, optimizer, CPU, seed=0, compute=ComputeSettings(micro_batches=micro_batches))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_pieces_of_a_batch_add_up_for_weights_and_rows(dropout):
    batch = features()
    whole, pieces = program(model(dropout=dropout)), program(model(dropout=dropout), micro_batches=3)

    one, three = (each.backward(batch, users_of(batch)) for each in (whole, pieces))

    assert one.loss_sum == pytest.approx(three.loss_sum, rel=1e-6)
    np.testing.assert_allclose(one.row_grads["user"], three.row_grads["user"], rtol=1e-4, atol=1e-7)
    assert (np.abs(one.row_grads["user"]).sum(axis=1) > 0).all()
    for ours, theirs in zip(whole._module.parameters(), pieces._module.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_dropout_is_that_of_training_alone():
    plain, dropped, batch = model(), model(dropout=0.3), features()
    expected, judged = (made.loss(tensors(batch)) for made in (plain, dropped))
    losses = [
        program(made).backward(features(step=step), users_of(batch)).loss_sum
        for made, step in ((plain, 0), (dropped, 0), (dropped, 0), (dropped, 1))
    ]

    assert torch.equal(judged, expected)
    assert losses[0] == pytest.approx(expected.item(), rel=1e-6)
    assert losses[1] == losses[2] != losses[3]
    assert losses[1] != pytest.approx(losses[0], rel=1e-3)


def test_beside_a_frozen_base_adapters_projections_and_new_tokens_are_trained():
    pytest.importorskip("peft")
    made, batch = model(lora={"rank": 2}), features()
    before = {name: weight.clone() for name, weight in made.frozen_weights.items()}
    trained = {name: weight.clone() for name, weight in made.named_parameters() if weight.requires_grad}
    trainer = program(made)
    assert before

    for step in range(3):
        trainer.backward(features(step=step), users_of(batch))
        trainer.update()

    assert all(torch.equal(weight, before[name]) for name, weight in made.frozen_weights.items())
    changed = [
        name
        for name, weight in made.named_parameters()
        if name in trained and not torch.equal(weight, trained[name])
    ]
    for part in ("lora_A", "projections.user", "trainable_tokens"):
        assert any(part in name for name in changed), part
    saved = trainer.weights()
    assert not before.keys() & saved.keys()
    other = program(model(lora={"rank": 2}))
    with torch.no_grad():
        next(iter(other.model.frozen_weights.values())).add_(1.0)
    with pytest.raises(ValueError, match=r"another base than model\.base"):
        program(other.model).load(saved, None)


def test_a_row_of_a_batch_is_recommended_to_as_alone():
    made = program(model())
    rows = [(tokens[:given], given) for tokens, given in ROWS]
    batch = features(rows)
    together = made.recommend(batch, users_of(batch), NUM_ITEMS, None)

    for row in (1, 3):  # without a row of a user
        alone = features([rows[row]])
        found = made.recommend(alone, users_of(alone), NUM_ITEMS, None)
        np.testing.assert_allclose(found.scores_BK[0], together.scores_BK[row], atol=1e-5)
    np.testing.assert_allclose(np.exp(together.scores_BK).sum(axis=1), 1.0, atol=1e-5)


def test_in_16_bits_a_step_is_about_the_same():
    batch = features()
    optimizer = DenseOptimizerSettings(0.01, 0.1, RateSchedule(), max_grad_norm=None, fused=False)
    narrow = SequenceProgram(model(), optimizer, CPU, 0, compute=ComputeSettings(precision="bfloat16"))

    loss = narrow.backward(batch, users_of(batch))

    wide = program(model()).backward(batch, users_of(batch))
    assert loss.loss_sum == pytest.approx(wide.loss_sum, rel=2e-2)
    np.testing.assert_allclose(loss.row_grads["user"], wide.row_grads["user"], rtol=0.2, atol=2e-3)


def test_of_codes_alone_it_is_a_causal_lm():
    made, rows = model(prompt="{history}"), [[0, 3, 5, 2], [4, 0, 1, 1, 6, 2]]
    other = CausalLmBackbone(made.backbone.network, torch.tensor(CODES_IL), LEVEL_SIZES, WORDS).eval()
    tokens = [(CODES_IL[row] + np.array(FIRST_TOKENS)).flatten().tolist() for row in rows]
    (theirs,) = shares(rows, NUM_ITEMS)

    ours = made.loss(tensors(without_users(features([(row, 3) for row in tokens]))))

    batch = tensor_batch(theirs)
    expected = other.loss(batch, torch.tensor(CODES_IL)[batch.targets_N])
    assert ours.item() == pytest.approx(expected.item(), rel=1e-6)
    asked = without_users(features([(row, len(row)) for row in tokens]))
    found = made.backbone.encode_context(tensors(asked))
    read = other.encode_context(tensor_batch(histories(rows, NUM_ITEMS)))
    torch.testing.assert_close(found.last_BD, read.last_BD)


def without_users(batch):
    return replace(batch, lookups={}, prompts=replace(batch.prompts, filled_P={}))
