"""What is read of old events in the place of the events."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch

from rayrec.models.base.keyed_random import KeyedDropout
from rayrec.models.generative.causal_lm_config import CausalLmConfig
from rayrec.models.generative.cross_decoder_config import EncoderDecoderConfig, LazyDecoderConfig
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.sequence_program import build_model
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.pipelines.inference.summaries import Summaries, with_known
from rayrec.samples.base.batches import FeatureBatch
from rayrec.samples.features.features import SequenceFeatures
from tests.helpers.data import sample_batch
from tests.models.networks import CPU

NUM_ITEMS, LEVELS = 12, (3, 2, 2)
CODES_IL = np.array([[item // 4, item // 2 % 2, item % 2] for item in range(NUM_ITEMS)])
LABELS = {"behavior": ("BUY", "VIEW")}
SIZE, NEWEST = 3, 2
LONG = {"chunk_events": SIZE, "summary_tokens": 2, "newest": NEWEST, "max_chunks": 4}
BACKBONE = {"dim": 8, "num_layers": 2, "num_heads": 2, "feedforward_dim": 16, "dropout": 0.3}
CONFIGS = {
    "lazy_decoder": LazyDecoderConfig(
        name="lazy_decoder", backbone=BACKBONE, long_history=LONG, event_labels=["behavior"]
    ),
    "encoder_decoder": EncoderDecoderConfig(name="encoder_decoder", backbone=BACKBONE, long_history=LONG),
    "causal_lm": CausalLmConfig(name="causal_lm", long_history=LONG, backbone={"dropout": 0.3}),
}
LENGTHS = [0, 1, 4, 5, 11, 40]


@pytest.fixture(scope="module", params=CONFIGS)
def config(request):
    if request.param == "causal_lm":
        pytest.importorskip("transformers")
    return CONFIGS[request.param]


def network_of(config):
    catalog = Catalog(NUM_ITEMS, CODES_IL, LEVELS, negative_log_q_I=None, labels=LABELS)
    model = build_model(config, catalog, seed=1).eval()
    with torch.no_grad():
        for weight in model.parameters():  # initial ones are so small that hardly anything matters
            weight.mul_(4.0)
    return model


def features_of(config):
    return SequenceFeatures(
        np.arange(NUM_ITEMS),
        max_length=config.history_length,
        window_step=config.windows_begin_at,
        chunk_events=SIZE,
        max_chunks=LONG["max_chunks"],
        tables=(),
        label_sizes={label: len(LABELS[label]) for label in config.needs_labels},
    )


def samples_of(config, rows, codes=None):
    batch = sample_batch(rows)
    if codes is None:
        codes = np.concatenate([np.arange(len(row)) % 2 for row in rows])
    return dataclasses.replace(batch, labels=dict.fromkeys(config.needs_labels, codes))


def histories():
    random = np.random.default_rng(3)
    return [random.integers(0, NUM_ITEMS, length).tolist() for length in LENGTHS]


def tensors(features: FeatureBatch) -> TensorBatch:
    return TensorBatch.build(features, {}, 0, CPU, training=False)


def log_probs(model, features: FeatureBatch):
    """[B, items] of each item coming next."""
    context = model.backbone.encode_context(tensors(features))
    codes_BWL = torch.tensor(CODES_IL).expand(len(context), -1, -1)
    return model.backbone.sequence_logprob(context, codes_BWL).sum(2)


def with_summaries(features: FeatureBatch, known) -> FeatureBatch:
    return dataclasses.replace(features, old_chunks=with_known(features.old_chunks, known))


def summaries_of(model, features: FeatureBatch) -> list[Summaries]:
    chunks = features.old_chunks
    vectors_XKD = model.summarize(tensors(features).old_chunks).numpy()
    return [
        Summaries(chunks.hashes_X[first:stop], vectors_XKD[first:stop])
        for first, stop in zip(chunks.offsets_B1, chunks.offsets_B1[1:], strict=False)
    ]


@torch.no_grad()
def test_what_is_predicted_depends_on_events_that_are_only_summarized(config):
    model, features, rows = network_of(config), features_of(config), histories()
    other = [*rows[:-1], [(rows[-1][0] + 1) % NUM_ITEMS, *rows[-1][1:]]]
    oldest_read = [*rows[:-1], [*rows[-1][:27], (rows[-1][27] + 1) % NUM_ITEMS, *rows[-1][28:]]]

    said = log_probs(model, features.ranking(samples_of(config, rows)))

    # Of forty events, the first 36 are twelve chunks, of which four are read.
    unread = log_probs(model, features.ranking(samples_of(config, other)))
    assert torch.equal(unread, said)
    read = log_probs(model, features.ranking(samples_of(config, oldest_read)))
    assert torch.equal(read[:-1], said[:-1])
    assert not torch.allclose(read[-1], said[-1], atol=1e-4)


@torch.no_grad()
def test_a_request_sees_what_training_has_seen(config):
    """The loss of a row's last target is what is said of that item when it is the next one."""
    model, features = network_of(config), features_of(config)
    for row in histories():
        if len(row) < 2:
            continue
        said = log_probs(model, features.ranking(samples_of(config, [row[:-1]])))[0, row[-1]]

        (trained,) = features(samples_of(config, [row]))

        batch = tensors(trained)
        only_last = torch.zeros(len(trained.items_N))
        if config.name == "encoder_decoder":  # which is trained on one target of a row, chosen by its key
            keys_N = batch.keys_N.clone()
            keys_N[-1] = len(trained.items_N) - 1
            batch = dataclasses.replace(batch, keys_N=keys_N)
        only_last[-1] = 1.0
        loss = model.backbone.loss(batch, torch.tensor(CODES_IL[trained.targets_N]), only_last)
        if config.name == "encoder_decoder":
            loss = loss / len(trained.items_N)
        torch.testing.assert_close(loss, -said, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("which", ["all", "some"])
def test_summaries_that_are_there_are_those_that_would_be_computed(config, which):
    model, features = network_of(config), features_of(config)
    asked = features.ranking(samples_of(config, histories()))
    said, known = log_probs(model, asked), summaries_of(model, asked)
    if which == "some":
        known = [Summaries(each.hashes_F[1::2], each.vectors_FKD[1::2]) for each in known]
        known[-2] = None

    with_products = with_summaries(asked, known)

    torch.testing.assert_close(log_probs(model, with_products), said, atol=1e-5, rtol=1e-5)
    # They are taken, and not computed again.
    doubled = [each and Summaries(each.hashes_F, 2 * each.vectors_FKD) for each in known]
    assert not torch.allclose(log_probs(model, with_summaries(asked, doubled)), said, atol=1e-3)


@torch.no_grad()
def test_summaries_of_other_events_are_never_taken(config):
    model, features = network_of(config), features_of(config)
    rows = histories()
    asked = features.ranking(samples_of(config, rows))
    late = [[*row[:1], 5, *row[1:]] for row in rows]  # one event that comes late moves all chunks

    wrong = [
        Summaries(each.hashes_F, np.full_like(each.vectors_FKD, np.nan))
        for each in summaries_of(model, features.ranking(samples_of(config, late)))
    ]

    assert not with_summaries(asked, wrong).old_chunks.is_known_X.any()
    assert torch.equal(log_probs(model, with_summaries(asked, wrong)), log_probs(model, asked))


def test_a_full_chunk_does_not_change_when_events_follow(config):
    features, row = features_of(config), histories()[-1]
    hashes = [
        features.ranking(samples_of(config, [row[:length]])).old_chunks.hashes_X for length in range(5, 17)
    ]

    for before, after in pairwise(hashes):
        assert len(before) <= len(after) <= len(before) + 1
        np.testing.assert_array_equal(after[: len(before)], before)
    assert len(hashes[-1]) == (16 - NEWEST) // SIZE


def test_hashes_know_items_order_and_labels():
    config = CONFIGS["lazy_decoder"]
    features = features_of(config)

    def hash_of(items, codes):
        (found,) = features.ranking(samples_of(config, [items], np.array(codes))).old_chunks.hashes_X
        return found

    items, codes = [1, 2, 3, 4, 5], [0, 1, 0, 0, 0]
    assert hash_of(items, codes) == hash_of([1, 2, 3, 7, 8], [0, 1, 0, 1, 1])
    others = [([1, 2, 4, 4, 5], codes), ([2, 1, 3, 4, 5], codes), (items, [1, 1, 0, 0, 0])]
    assert len({hash_of(items, codes), *(hash_of(*each) for each in others)}) == 4


def test_dropouts_of_a_network_do_not_share_their_masks(config):
    model = network_of(config)
    indices = [each.index for each in model.modules() if isinstance(each, KeyedDropout)]

    assert len(set(indices)) == len(indices)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window_step": 2}, "leave window_step out"),
        ({"backbone": BACKBONE | {"max_length": 20}}, "max_length is 20.*up to 4 events.*leave max_length"),
        ({"retrieval": {}, "name": "encoder_decoder"}, "set one of the two"),
    ],
)
def test_settings_that_say_otherwise_what_is_read_are_refused(settings, message):
    values = {"name": "lazy_decoder", "backbone": BACKBONE, "long_history": LONG} | settings
    config = EncoderDecoderConfig if values["name"] == "encoder_decoder" else LazyDecoderConfig

    with pytest.raises(ValueError, match=message):
        config.model_validate(values)
