"""Padding changes no answer: what is compiled ranks as the model does without padding."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.compiled_ranking.buckets import Bucket, Buckets
from rayrec.models.compiled_ranking.compiler_process import (
    compile_package,
    difference,
    example,
    network,
    rank_eagerly,
)
from rayrec.models.compiled_ranking.inputs import Signature, TableInput
from rayrec.models.compiled_ranking.job import Job, RankingModel
from rayrec.models.compiled_ranking.packages import load
from rayrec.models.compiled_ranking.program import MadeVectors, PaddedRanking, first_difference, weights_of
from rayrec.models.compiled_ranking.ranking import CompiledPrograms, CompiledRanking
from rayrec.models.generative.prefix_composer import PrefixComposer
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.item_content import BagSums
from rayrec.models.sequence.sequence_model import SequenceModel
from rayrec.models.sequence.sequence_program import SequenceProgram
from rayrec.platform.item_bags import ItemBags
from rayrec.platform.schedule import RateSchedule
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.features.features import SequenceFeatures
from tests.helpers.data import sample_batch

NUM_ITEMS, DIM, LENGTH, BEAMS = 40, 8, 6, 5
READER: dict[str, Any] = {"dim": DIM, "num_layers": 2, "num_heads": 2, "max_length": LENGTH}
CODES_IL = np.stack([np.arange(NUM_ITEMS) // 8, np.arange(NUM_ITEMS) % 8], axis=1)
LABELS: Any = {"behavior": ("view", "buy"), "scenario": ("home", "search", "cart")}
ITEMS = Catalog(NUM_ITEMS, negative_log_q_I=np.zeros(NUM_ITEMS), labels=LABELS)
IDS = replace(ITEMS, codes_IL=CODES_IL, level_sizes=(5, 8))
SAID = ItemBags(np.arange(NUM_ITEMS + 1), np.arange(NUM_ITEMS) % 8, np.ones(NUM_ITEMS, dtype=np.float32))
CONTENT: dict[str, Any] = {"content": {"buckets": 8}}
GENERATES: dict[str, Any] = {"backbone": READER, "beam_width": BEAMS}

KINDS: dict[str, tuple[dict[str, Any], Catalog, Signature]] = {
    "sasrec": ({"name": "sasrec", "backbone": READER}, ITEMS, Signature(LENGTH)),
    "bsarec": ({"name": "bsarec", "backbone": READER}, ITEMS, Signature(LENGTH)),
    "sparse": (
        {"name": "sasrec", "backbone": READER, "item_matrix": "sparse", "user_embedding": True},
        ITEMS,
        Signature(LENGTH, tables=(TableInput("item", "event", (), DIM), TableInput("user", "row", (), DIM))),
    ),
    "hstu": ({"name": "hstu", "backbone": READER}, ITEMS, Signature(LENGTH, has_times=True)),
    "prefix": ({"name": "prefix_decoder", **GENERATES}, IDS, Signature(LENGTH)),
    "sasrec that reads content": (
        {"name": "sasrec", "backbone": READER, **CONTENT},
        replace(ITEMS, content=SAID),
        Signature(LENGTH),
    ),
    "prefixes that read content": (
        {"name": "prefix_decoder", **GENERATES, **CONTENT},
        replace(IDS, content=SAID),
        Signature(LENGTH),
    ),
    "composed prefixes": ({"name": "prefix_decoder", "composed": 4, **GENERATES}, IDS, Signature(LENGTH)),
    "one softmax": (
        {"name": "prefix_decoder", "softmax": "items", "backbone": READER},
        IDS,
        Signature(LENGTH),
    ),
    "hybrid": ({"name": "prefix_decoder", "softmax": "hybrid", **GENERATES}, IDS, Signature(LENGTH)),
    "light": (
        {"name": "light_decoder", **GENERATES},
        IDS,
        Signature(LENGTH, tables=(TableInput("code", "event", (2,), DIM),)),
    ),
    "lazy": (
        {
            "name": "lazy_decoder",
            "instruction": {"parts": ["behavior", "scenario"]},
            "event_labels": ["behavior"],
            **GENERATES,
        },
        IDS,
        Signature(LENGTH, labels=("behavior",), parts=("behavior", "scenario")),
    ),
    "causal": (
        {
            "name": "causal_lm",
            "backbone": {
                "network": {
                    "kind": "qwen3",
                    "dim": DIM,
                    "num_layers": 2,
                    "num_heads": 2,
                    "num_key_heads": 1,
                    "feedforward_dim": 2 * DIM,
                },
                "max_length": LENGTH,
            },
            "beam_width": BEAMS,
        },
        IDS,
        Signature(LENGTH),
    ),
    "encoder": ({"name": "encoder_decoder", **GENERATES}, IDS, Signature(LENGTH)),
}


MAKE_VECTORS = ("sasrec that reads content", "prefixes that read content", "composed prefixes", "one softmax")
"""Once, of weights, for all batches."""


def width_of(kind: str) -> int:
    return 16 if KINDS[kind][1].codes_IL is None or kind == "one softmax" else BEAMS


def taken(model: SequenceModel) -> list[torch.Tensor]:
    """What programs of a model take, which has ranked a batch."""
    return [*weights_of(model).values(), *MadeVectors(model).tensors]


def padded_against_eager(kind: str, bucket: Bucket) -> str | None:
    """What the padded batch is ranked otherwise in."""
    settings, catalog, signature = KINDS[kind]
    job = Job(RankingModel(settings, catalog), signature, bucket)
    model = network(job).eval()
    if model.table_of_catalog is not None:
        model.set_catalog(torch.randn(NUM_ITEMS, DIM))
    with torch.inference_mode():
        rank_eagerly(job, model, example(job, seed=9))
        program, weights = PaddedRanking(model, signature, bucket), taken(model)
        for seed in range(3):
            inputs = example(job, seed)
            found = difference(job, model, program(weights, inputs), inputs)
            if found is not None:
                return found
    return None


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "encoder"])
def test_padding_changes_no_answer(kind, num_rows):
    # Longer than what is read: what is left out of an answer may be more than what made it.
    assert padded_against_eager(kind, Bucket(num_rows, LENGTH + 2, width_of(kind))) is None


def test_a_model_that_reads_lengths_on_the_host_is_found_out():
    found = padded_against_eager("encoder", Bucket(4, LENGTH, BEAMS))

    assert found is not None


@pytest.mark.parametrize("kind", ["prefix", *MAKE_VECTORS])
def test_weights_come_with_the_call_and_what_was_made_of_them_is_not_made_again(kind, monkeypatch):
    settings, catalog, signature = KINDS[kind]
    bucket = Bucket(2, LENGTH, width_of(kind))
    job = Job(RankingModel(settings, catalog), signature, bucket)
    one, other = network(job).eval(), network(job).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    inputs = example(job, seed=0)

    with torch.inference_mode():
        for model in (one, other):
            rank_eagerly(job, model, inputs)
        assert bool(MadeVectors(other).tensors) == (kind in MAKE_VECTORS)
        program = PaddedRanking(one, signature, bucket)
        with monkeypatch.context() as patch:
            for part in (BagSums, PrefixComposer):
                patch.setattr(part, "forward", lambda *_: pytest.fail("made again"))
            ranked = program(taken(other), inputs)

        assert difference(job, other, ranked, inputs) is None
        assert difference(job, one, ranked, inputs) is not None


def test_differences_within_rounding_may_reorder_ties_alone():
    items, scores = torch.tensor([[1, 2, 3]]), torch.tensor([[0.0, -1.0, -1.0]])

    assert first_difference(items, scores, torch.tensor([[1, 3, 2]]), scores, 1e-4) is None
    assert first_difference(items, scores, torch.tensor([[1, 2, 9]]), scores, 1e-4) is None
    assert first_difference(items, scores, torch.tensor([[2, 1, 3]]), scores, 1e-4) is not None
    assert first_difference(items, scores, items, scores - 0.01, 1e-4) is not None
    assert first_difference(items, scores, torch.tensor([[1, 2, -1]]), scores, 1e-4) is not None


def test_the_key_of_a_program_is_that_of_all_it_depends_on(tmp_path):
    settings, catalog, signature = KINDS["lazy"]
    job = Job(RankingModel(settings, catalog), signature, Bucket(1, 8, BEAMS))
    others = [
        replace(job, bucket=Bucket(2, 8, BEAMS)),
        replace(job, threads=2),
        replace(job, signature=replace(signature, parts=())),
        replace(job, model=RankingModel(settings | {"beam_width": BEAMS + 1}, catalog)),
        replace(job, model=RankingModel(settings, replace(catalog, codes_IL=CODES_IL[::-1]))),
    ]
    job.save(tmp_path)

    assert Job.load(tmp_path).key == job.key
    assert len({each.key for each in (job, *others)}) == 1 + len(others)


class Programs:
    """Programs that are the model itself, and what was ordered of them."""

    def __init__(self, model: Any, settings: dict[str, Any], catalog: Catalog, most: int = 8) -> None:
        self.ordered: list[Bucket] = []
        self.calls: list[Bucket] = []
        self.model = model
        self.of = CompiledPrograms(
            RankingModel(settings, catalog),
            Buckets([1, 2, 4], [LENGTH, 4 * LENGTH]),
            lambda programs, bucket: self.ordered.append(bucket),
            torch.device("cpu"),
            threads=1,
            most=most,
        )

    def deliver(self, bucket: Bucket) -> None:
        assert self.of.signature is not None
        program = PaddedRanking(self.model, self.of.signature, bucket)

        def run(weights: Any, inputs: Any) -> Any:
            self.calls.append(bucket)
            return program(weights, inputs)

        self.of.add(bucket, run)


def asked(rows: list[list[int]]) -> tuple[SampleBatch, Any]:
    samples = sample_batch(rows)
    return samples, SequenceFeatures(np.arange(NUM_ITEMS), max_length=LENGTH, tables=()).ranking(samples)


@pytest.fixture
def ranked() -> tuple[SequenceProgram, Programs]:
    settings, catalog, signature = KINDS["prefix"]
    model = network(Job(RankingModel(settings, catalog), signature, Bucket(1, LENGTH, BEAMS)))
    optimizer = DenseOptimizerSettings(0.01, 0.0, RateSchedule(), max_grad_norm=None, fused=True)
    program = SequenceProgram(model, optimizer, torch.device("cpu"), seed=0)
    programs = Programs(model, settings, catalog)
    program.compiled = CompiledRanking(programs.of, model)
    return program, programs


def test_a_shape_is_eager_until_its_program_comes_and_is_ordered_once(ranked):
    program, programs = ranked
    _, features = asked([[1, 2, 3], [4], []])
    excluded_BE = np.array([[1, 2, 3], [4, -1, -1], [-1, -1, -1]])

    eager = program.recommend(features, {}, 3, excluded_BE)
    program.recommend(features, {}, 3, excluded_BE)
    assert programs.ordered == [Bucket(4, LENGTH, BEAMS)]
    programs.deliver(Bucket(4, LENGTH, BEAMS))
    programs.calls.clear()
    compiled = program.recommend(features, {}, 3, excluded_BE)

    assert programs.calls == [Bucket(4, LENGTH, BEAMS)]
    assert compiled.items_BK.tolist() == eager.items_BK.tolist()
    np.testing.assert_allclose(compiled.scores_BK, eager.scores_BK, rtol=1e-5)
    assert compiled.items_BK[2].tolist() == [-1, -1, -1]


def test_a_program_that_fails_at_a_batch_is_given_up_and_the_batch_is_ranked_eagerly(ranked, caplog):
    program, programs = ranked
    _, features = asked([[1, 2, 3], [4], []])
    bucket, fails = Bucket(4, LENGTH, BEAMS), []
    eager = program.recommend(features, {}, 3, None)
    network = PaddedRanking(programs.model, programs.of.signature, bucket)

    def run(weights: Any, inputs: Any) -> Any:
        if fails:
            raise RuntimeError("run_func_ failed")
        return network(weights, inputs)

    programs.of.add(bucket, run)
    program.recommend(features, {}, 3, None)
    assert program.compiled.answered["compiled"] == 1
    fails.append(True)
    for _ in range(2):
        assert program.recommend(features, {}, 3, None).items_BK.tolist() == eager.items_BK.tolist()

    assert program.compiled.answered == {"compiled": 1, "eager": 3}
    assert caplog.text.count("run_func_ failed") == 1
    assert programs.of.ready == []
    assert programs.ordered == [bucket]  # it is not compiled again


def test_more_excluded_items_than_events_read_are_a_longer_bucket(ranked):
    program, programs = ranked
    _, features = asked([[1, 2]])

    program.recommend(features, {}, 3, np.arange(LENGTH + 1)[None])

    assert programs.ordered == [Bucket(1, 4 * LENGTH, BEAMS)]


def test_more_items_than_beams_are_ranked_eagerly_and_order_nothing(ranked):
    program, programs = ranked
    _, features = asked([[1, 2]])

    found = program.recommend(features, {}, BEAMS + 1, None)

    assert found.items_BK.shape == (1, BEAMS + 1)
    assert not programs.ordered


def test_fewer_beams_are_a_program_of_their_own(ranked):
    program, programs = ranked
    _, features = asked([[1, 2]])

    program.recommend(features, {}, 1, None, [2])

    assert programs.ordered == [Bucket(1, LENGTH, 2)]


def test_rows_of_different_beams_are_ranked_eagerly(ranked):
    program, programs = ranked
    _, features = asked([[1, 2], [3]])

    program.recommend(features, {}, 1, None, [2, 1])

    assert not programs.ordered


def test_there_are_as_many_orders_as_there_may_be():
    settings, catalog, signature = KINDS["sasrec"]
    model = network(Job(RankingModel(settings, catalog), signature, Bucket(1, LENGTH, 16)))
    programs = Programs(model, settings, catalog, most=2)
    ranking = CompiledRanking(programs.of, model)

    for rows in ([[1]], [[1], [2]], [[1], [2], [3]]):
        assert ranking.recommend(asked(rows)[1], {}, 3, None) is None

    assert programs.ordered == [Bucket(1, LENGTH, 16), Bucket(2, LENGTH, 16)]
    assert ranking.answered == {"eager": 3}


def test_a_version_of_other_shapes_is_refused():
    settings, catalog, signature = KINDS["sasrec"]
    model = network(Job(RankingModel(settings, catalog), signature, Bucket(1, LENGTH, 16)))
    programs = Programs(model, settings, catalog)
    CompiledRanking(programs.of, model)
    wider = {**settings, "backbone": READER | {"dim": 2 * DIM}}
    other = network(Job(RankingModel(wider, catalog), signature, Bucket(1, LENGTH, 16)))

    with pytest.raises(ValueError, match="other shapes"):
        CompiledRanking(programs.of, other)


@pytest.mark.parametrize("kind", MAKE_VECTORS)
def test_a_model_that_makes_vectors_orders_programs_when_it_has_made_them(kind, monkeypatch):
    settings, catalog, signature = KINDS[kind]
    model = network(Job(RankingModel(settings, catalog), signature, Bucket(1, LENGTH, BEAMS))).eval()
    programs = Programs(model, settings, catalog)
    optimizer = DenseOptimizerSettings(0.01, 0.0, RateSchedule(), max_grad_norm=None, fused=True)
    program = SequenceProgram(model, optimizer, torch.device("cpu"), seed=0)
    program.compiled = CompiledRanking(programs.of, model)
    _, features = asked([[1, 2, 3], [4]])

    with monkeypatch.context() as patch:
        patch.setattr(model, "recommend", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            program.recommend(features, {}, 3, None)
    eager = program.recommend(features, {}, 3, None)
    assert programs.ordered == []  # nothing is made before a batch was ranked
    assert programs.of.newest is program.compiled
    program.recommend(features, {}, 3, None)
    (bucket,) = programs.ordered
    programs.deliver(bucket)
    compiled = program.recommend(features, {}, 3, None)

    assert program.compiled.answered == {"eager": 3, "compiled": 1}
    assert compiled.items_BK.tolist() == eager.items_BK.tolist()
    np.testing.assert_allclose(compiled.scores_BK, eager.scores_BK, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("kind", MAKE_VECTORS)
def test_models_that_make_vectors_are_compiled(kind, tmp_path):
    settings, catalog, signature = KINDS[kind]
    job = Job(RankingModel(settings, catalog), signature, Bucket(2, LENGTH, width_of(kind)))
    other = network(job).eval()
    inputs = example(job, seed=7)

    compile_package(job, tmp_path / "package.pt2")  # and compares it with eager ranking

    with torch.inference_mode():
        for parameter in other.parameters():
            parameter.mul_(-1.5)
        rank_eagerly(job, other, inputs)
        assert difference(job, other, load(tmp_path / "package.pt2")(taken(other), inputs), inputs) is None
