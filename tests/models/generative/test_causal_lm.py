"""A causal language model over semantic IDs, against the network's own forward pass on whole sequences."""

import copy
import json
import logging
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional

from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.base.meta_device import MetaWeights
from rayrec.models.decoding.beam import beam_search
from rayrec.models.decoding.beam_cache import BeamCache
from rayrec.models.generative.causal_lm_config import CausalLmConfig
from rayrec.models.language.networks import ignored_generation_settings
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.sequence_program import SequenceProgram, build_model
from rayrec.platform.errors import InputError
from rayrec.platform.schedule import RateSchedule
from tests.models.generative.language_models import (
    CATALOG,
    CODES_IL,
    LEVEL_SIZES,
    NETWORKS,
    NUM_ITEMS,
    NUM_LEVELS,
    ROWS,
    SHAPE,
    recommender,
)
from tests.models.networks import CPU, histories, shares, tensor_batch

transformers = pytest.importorskip("transformers")

FIRST_TOKENS = np.array([0, 3, 6])


def saved(folder, **generation):
    """A folder with a network of 11 words, made by transformers alone."""
    config = transformers.Qwen3Config(
        vocab_size=11, head_dim=8, num_key_value_heads=2, max_position_embeddings=64, **SHAPE
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **generation}))
    return {"kind": "folder", "folder": str(folder)}


def ranking_batch(rows=ROWS):
    return tensor_batch(histories(rows, NUM_ITEMS))


def own_logits(model, items, codes=(), first_tokens=FIRST_TOKENS):
    """[tokens, vocabulary] logits of the network by its own code, for one row alone."""
    network = model.backbone.network
    tokens = (CODES_IL[items] + first_tokens).flatten().tolist()
    tokens += [int(code + first) for code, first in zip(codes, first_tokens, strict=False)]
    network.set_attn_implementation("eager")
    logits = network(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    network.set_attn_implementation("rayrec")
    return logits


def level_logits(logits, level, first_tokens=FIRST_TOKENS):
    return logits[first_tokens[level] : first_tokens[level] + LEVEL_SIZES[level]]


def item_log_probs(model, items):
    """Log-probability of every item, each level normalized over the codes that lead to an item."""
    scores = []
    for codes in CODES_IL:
        logits, score = own_logits(model, items, codes[:-1]), 0.0
        for level, code in enumerate(codes.tolist()):
            same_prefix = (CODES_IL[:, :level] == codes[:level]).all(axis=1)
            allowed = sorted(set(CODES_IL[same_prefix, level].tolist()))
            after = level_logits(logits[NUM_LEVELS * len(items) - 1 + level], level)
            score += after[allowed].log_softmax(0)[allowed.index(code)].item()
        scores.append(score)
    return scores


@pytest.mark.parametrize("name", NETWORKS)
def test_loss_is_that_of_the_next_codes_among_those_of_their_level(name):
    model = recommender(NETWORKS[name])
    (features,) = shares(ROWS, NUM_ITEMS)

    loss = model.loss(tensor_batch(features)).item()

    by_hand = 0.0
    for row in ROWS:
        logits = own_logits(model, row)
        for event in range(1, len(row)):
            for level, code in enumerate(CODES_IL[row[event]].tolist()):
                before = logits[NUM_LEVELS * event + level - 1]
                by_hand -= level_logits(before, level).log_softmax(0)[code].item()
    assert loss == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_steps_with_a_cache_are_the_networks_own_logits(name):
    """Beams are chosen crosswise, so that caches have to follow them."""
    model, rows = recommender(NETWORKS[name]), [[0, 3, 5, 2], [6], [4, 0, 1]]
    step = model.backbone.start(model.backbone.encode_context(ranking_batch(rows)))
    codes_BWd = torch.zeros(len(rows), 1, 0, dtype=torch.int64)
    parent_BW = None
    chosen = [([[0, 0, 0]] * 3, [[2, 0, 1]] * 3), ([[2, 0, 2], [1, 1, 0], [0, 1, 2]], [[0, 1, 2]] * 3)]
    for depth in range(NUM_LEVELS):
        logits_BWK = step(depth, codes_BWd, parent_BW)
        for row, items in enumerate(rows):
            for beam, codes in enumerate(codes_BWd[row].tolist()):
                expected_K = level_logits(own_logits(model, items, codes)[-1], depth)
                torch.testing.assert_close(logits_BWK[row, beam], expected_K, rtol=1e-5, atol=1e-5)
        if depth < len(chosen):
            parent_BW, code_BW = map(torch.tensor, chosen[depth])
            grown_BWd = codes_BWd.gather(1, parent_BW[:, :, None].expand(-1, -1, depth))
            codes_BWd = torch.cat((grown_BWd, code_BW[:, :, None]), dim=2)


@pytest.mark.parametrize("name", NETWORKS)
def test_sequences_scored_at_once_are_those_scored_step_by_step(name):
    model = recommender(NETWORKS[name])
    context = model.backbone.encode_context(ranking_batch())
    codes_BWL = torch.tensor(CODES_IL)[torch.tensor([[0, 6, 3], [1, 1, 2], [5, 4, 0], [2, 3, 6]])]
    unchanged_BW = torch.arange(3).expand(len(ROWS), -1)

    at_once = model.backbone.sequence_logits(context, codes_BWL)

    cache = BeamCache()
    for level in range(NUM_LEVELS):
        if level > 1:
            cache.reorder(unchanged_BW)
        stepped = model.backbone.step(context, cache, level, codes_BWL[:, :, :level])
        torch.testing.assert_close(at_once[level], stepped.expand_as(at_once[level]), rtol=1e-5, atol=1e-5)


def test_gradients_of_scored_sequences_reach_the_whole_network():
    model = recommender()
    context = model.backbone.encode_context(ranking_batch())
    codes_BWL = torch.tensor(CODES_IL)[torch.tensor([[0, 6], [1, 2], [5, 4], [2, 3]])]

    model.backbone.sequence_logprob(context, codes_BWL).sum().backward()

    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_beam_as_wide_as_the_catalog_ranks_exhaustively(name):
    model = recommender(NETWORKS[name])

    ranking = model.recommend(ranking_batch(), NUM_ITEMS, None)

    for row, items in enumerate(ROWS):
        scores = item_log_probs(model, items)
        assert ranking.items_BK[row].tolist() == sorted(range(NUM_ITEMS), key=lambda item: -scores[item])
        np.testing.assert_allclose(
            ranking.scores_BK[row].detach(), sorted(scores, reverse=True), rtol=1e-5, atol=1e-5
        )


def test_a_row_does_not_depend_on_the_rows_beside_it():
    """Rows without any history among them."""
    model, rows = recommender(), [[], *ROWS, []]
    together = model.recommend(ranking_batch(rows), 4, None)

    for row, items in enumerate(rows):
        if items:
            alone = model.recommend(ranking_batch([items]), 4, None)
            assert together.items_BK[row].tolist() == alone.items_BK[0].tolist()
            torch.testing.assert_close(together.scores_BK[row], alone.scores_BK[0], rtol=1e-5, atol=1e-5)


def test_rows_of_a_context_can_be_decoded_apart():
    model = recommender()
    context = model.backbone.encode_context(ranking_batch())

    apart = beam_search(model.distribution(context.some_rows(slice(1, 3))), 3)

    together = beam_search(model.distribution(context), 3)
    assert apart.items_BW.tolist() == together.items_BW[1:3].tolist()


def test_several_trainers_shares_add_up_to_the_loss_of_the_batch():
    """One of the trainers gets rows without any target."""
    model, rows = recommender(), [*ROWS, [2], [5]]
    (whole,) = shares(rows, NUM_ITEMS)
    parts = shares(rows, NUM_ITEMS, num_trainers=2)

    summed = sum(model.loss(tensor_batch(part)).item() for part in parts)

    assert summed == pytest.approx(model.loss(tensor_batch(whole)).item(), rel=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_training_is_repeatable_to_the_bit_and_learns(name):
    """gpt2 has three kinds of dropout by default, all of the global generator's."""

    def losses(global_seed):
        settings = DenseOptimizerSettings(0.01, 0.0, RateSchedule(), max_grad_norm=None, fused=True)
        program = SequenceProgram(recommender(NETWORKS[name]), settings, CPU, seed=0)
        torch.manual_seed(global_seed)
        found = []
        for step in range(15):
            (features,) = shares(ROWS, NUM_ITEMS, step=step)
            found.append(program.backward(features, {}).loss_sum)
            program.update()
        return found

    first = losses(1)

    assert losses(2) == first
    assert first[-1] < 0.7 * first[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_dropout_falls_on_what_is_read_and_on_what_each_layer_adds(name):
    """All that a layer adds is lost almost always, so that hidden states are vectors of tokens, scaled."""
    model = recommender(NETWORKS[name], dropout=0.25).train()
    layers = model.backbone.network.base_model.get_submodule("h" if name == "gpt2" else "layers")
    seen = []
    for layer in layers:
        layer.register_forward_hook(
            lambda _, given, kwargs, made: seen.append((given, kwargs, made)), with_kwargs=True
        )
    (features,) = shares(ROWS, NUM_ITEMS)

    model.loss(tensor_batch(features))

    read_ND = (seen[0][0] or (seen[0][1]["hidden_states"],))[0][0]
    assert 0.15 < (read_ND == 0).float().mean() < 0.35 or name == "gpt2"  # which adds positions behind it
    for given, kwargs, made in seen:
        before_ND = (given or (kwargs["hidden_states"],))[0][0]
        after_ND = (made[0] if isinstance(made, tuple) else made)[0]
        assert 0.15 < (after_ND == before_ND).float().mean() < 0.35


@pytest.mark.parametrize("name", NETWORKS)
def test_dropout_depends_on_step_and_row_and_not_on_who_computes_it(name):
    model, rows = recommender(NETWORKS[name], dropout=0.3), [*ROWS, [2], [5]]
    (whole,), (later,) = shares(rows, NUM_ITEMS), shares(rows, NUM_ITEMS, step=1)
    parts = shares(rows, NUM_ITEMS, num_trainers=2)
    expected, without = model.train().loss(tensor_batch(whole)), model.eval().loss(tensor_batch(whole))

    model.train()

    summed = sum(model.loss(tensor_batch(part)).item() for part in parts)
    assert summed == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(model.loss(tensor_batch(whole)), expected)
    assert not torch.equal(model.loss(tensor_batch(later)), expected)
    assert not torch.equal(without, expected)
    plain = recommender(NETWORKS[name]).train()
    assert torch.equal(plain.loss(tensor_batch(whole)), without)


def test_recommendations_know_no_dropout():
    plain, dropped = recommender(), recommender(dropout=0.5)

    expected, ranking = (model.recommend(ranking_batch(), 4, None) for model in (plain, dropped))

    assert torch.equal(ranking.items_BK, expected.items_BK)
    assert torch.equal(ranking.scores_BK, expected.scores_BK)


def test_a_copy_of_a_network_has_dropout_of_its_own():
    model = recommender(dropout=0.5).train()
    copied, (features,) = copy.deepcopy(model), shares(ROWS, NUM_ITEMS)
    batch = tensor_batch(features)
    expected = copied.loss(batch)

    model.eval()

    assert torch.equal(copied.loss(batch), expected)


def test_dropout_of_layers_that_are_not_found_is_refused(monkeypatch):
    monkeypatch.setattr("rayrec.models.program.sharding.BLOCKS", ("trunks",))

    with pytest.raises(InputError, match=r"backbone.dropout: .* Qwen3ForCausalLM are not found; set it to 0"):
        recommender(dropout=0.1)


def test_weights_travel_to_another_network():
    """Output and input share a matrix: it is there once."""
    settings = DenseOptimizerSettings(0.01, 0.0, RateSchedule(), max_grad_norm=None, fused=True)
    trained, fresh = (SequenceProgram(recommender(seed=seed), settings, CPU, seed=0) for seed in (0, 1))
    features = histories(ROWS, NUM_ITEMS)

    fresh.load(trained.weights(), trained.optimizer_state())

    assert not any("lm_head" in name for name in trained.weights())
    expected, ranked = (program.recommend(features, {}, 5, None) for program in (trained, fresh))
    np.testing.assert_array_equal(ranked.items_BK, expected.items_BK)
    np.testing.assert_array_equal(ranked.scores_BK, expected.scores_BK)


def test_initial_weights_depend_on_the_seed_alone():
    config = CausalLmConfig.parse({"name": "causal_lm", "backbone": {"network": NETWORKS["qwen3"]}})

    def weights(seed):
        return torch.cat([weight.flatten() for weight in build_model(config, CATALOG, seed).parameters()])

    first = weights(3)
    torch.manual_seed(17)

    assert torch.equal(first, weights(3))
    assert not torch.equal(first, weights(4))


def test_codes_follow_the_words_of_a_saved_network(tmp_path):
    network = saved(tmp_path)
    words_ID = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path).get_input_embeddings().weight
    model = build_model(
        CausalLmConfig.parse({"name": "causal_lm", "backbone": {"max_length": 6, "network": network}}),
        CATALOG,
        seed=0,
    ).eval()

    embeddings_VD = model.backbone.network.get_input_embeddings().weight
    assert len(embeddings_VD) == 11 + sum(LEVEL_SIZES)
    assert torch.equal(embeddings_VD[:11], words_ID)
    step = model.backbone.start(model.backbone.encode_context(ranking_batch([[0, 3]])))
    logits_K = step(0, torch.zeros(1, 1, 0, dtype=torch.int64), None)[0, 0]
    own_K = level_logits(own_logits(model, [0, 3], first_tokens=FIRST_TOKENS + 11)[-1], 0, FIRST_TOKENS + 11)
    torch.testing.assert_close(logits_K, own_K, rtol=1e-5, atol=1e-5)


def test_generation_settings_of_a_folder_are_ignored(tmp_path, caplog):
    quiet, loud = (tmp_path / name for name in ("quiet", "loud"))
    expected = recommender(saved(quiet)).recommend(ranking_batch(), 4, None)
    network = saved(loud, num_beams=1, temperature=0.1, forced_eos_token_id=2)
    (quiet / "model.safetensors").rename(loud / "model.safetensors")

    with caplog.at_level(logging.WARNING, logger="rayrec"):
        ranking = recommender(network).recommend(ranking_batch(), 4, None)

    # Every process that builds the network would say so: it is the driver's to say.
    assert not [record for record in caplog.records if "generation_config" in record.getMessage()]
    assert "forced_eos_token_id, num_beams, temperature are ignored" in ignored_generation_settings(loud)
    assert ignored_generation_settings(quiet) is None
    assert torch.equal(ranking.items_BK, expected.items_BK)
    assert torch.equal(ranking.scores_BK, expected.scores_BK)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{not json", "cannot be read as JSON"),
        ("null", "an object of settings, got null"),
        ("[]", r"an object of settings, got \[\]"),
        ('"beams"', 'got "beams"'),
    ],
)
def test_generation_settings_that_are_no_object_are_refused_by_the_name_of_their_file(
    content, message, tmp_path
):
    network = saved(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)

    with pytest.raises(InputError, match=rf"{tmp_path}/generation_config.json: .*{message}"):
        recommender(network)


@pytest.mark.parametrize("kind", ["saved", *NETWORKS])
def test_a_network_is_counted_without_its_weights(kind, tmp_path):
    network = saved(tmp_path) if kind == "saved" else NETWORKS[kind]
    expected = recommender(network)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()  # nobody reads it

    config = CausalLmConfig.parse(
        {"name": "causal_lm", "backbone": {"max_length": 6, "network": network}, "beam_width": NUM_ITEMS}
    )
    with MetaWeights():
        on_meta = build_model(config, CATALOG, 0)

    shapes = {name: weight.shape for name, weight in on_meta.named_parameters()}
    assert shapes == {name: weight.shape for name, weight in expected.named_parameters()}
    # Norms are made of ones, which are few.
    assert all(weight.is_meta for weight in on_meta.parameters() if weight.ndim > 1)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"kind": "folder", "folder": "Qwen/Qwen3-0.6B"}, "nothing is downloaded from a hub"),
        ({"kind": "transformers", "settings": {"model_type": "qwen33"}}, "did you mean 'qwen3'"),
        (
            {"kind": "transformers", "settings": {"model_type": "qwen3", "vocab_size": 9}},
            "'vocab_size' follows",
        ),
        (
            {"kind": "transformers", "settings": {"model_type": "llama", **SHAPE, "hidden_size": 17}},
            "makes no",
        ),
        (
            {
                "kind": "transformers",
                "settings": {"model_type": "llama", **SHAPE, "max_position_embeddings": 9},
            },
            "knows 9 positions, and a row has up to 21 tokens",
        ),
        ({"kind": "transformers", "settings": {"model_type": "bloom", "n_head": 2}}, "0 attend"),
        (
            {"kind": "transformers", "settings": {"model_type": "bert", **SHAPE}},
            "logits of BertLMHeadModel are off",
        ),
        (
            {"kind": "transformers", "settings": {"model_type": "gemma2", **SHAPE, "head_dim": 4}},
            "caps its attention scores",
        ),
        (
            {
                "kind": "transformers",
                "settings": {"model_type": "llama4_text", **SHAPE, "num_key_value_heads": 4},
            },
            r"Llama4ForCausalLM cannot be adapted \(AttributeError: .*choose another model_type",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused_in_a_sentence(network, message):
    with pytest.raises(InputError, match=message):
        recommender(network)


def test_a_window_narrower_than_the_longest_history_is_refused_at_once():
    settings = {"model_type": "mistral", **SHAPE, "num_key_value_heads": 2, "sliding_window": 10}

    with pytest.raises(
        InputError, match=r"sees 10 tokens, and a history has \d+: lower model.backbone.max_length"
    ):
        recommender({"kind": "transformers", "settings": settings})


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    catalog = Catalog(2, np.array([[0], [1]]), (2,))

    with pytest.raises(InputError, match=r"pip install 'rayrec\[hf\]'"):
        build_model(CausalLmConfig(name="causal_lm"), catalog, 0)


def test_ids_of_one_code_are_learned_and_ranked():
    """IDs of one code: nothing is ever fed back."""
    catalog = Catalog(3, np.array([[2], [0], [1]]), (3,))
    config = CausalLmConfig.parse({"name": "causal_lm", "backbone": {"network": NETWORKS["qwen3"]}})
    model = build_model(config, catalog, 0).eval()
    (features,) = shares([[0, 1, 2], [1, 0]], 3)

    assert model.loss(tensor_batch(features)).item() == pytest.approx(
        3 * functional.cross_entropy(torch.zeros(1, 3), torch.tensor([0])).item(), rel=0.2
    )
    assert sorted(model.recommend(tensor_batch(histories([[0, 1]], 3)), 3, None).items_BK[0].tolist()) == [
        0,
        1,
        2,
    ]
