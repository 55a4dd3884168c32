"""Recorded ranking, by a stand-in for a device's graphs: it answers as eager ranking does, and once it is
recorded it allocates nothing, reads no value on the host and meets no new shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.compiled_ranking.buckets import Bucket, Buckets
from rayrec.models.compiled_ranking.captured import CapturedRun, capture, captured_programs
from rayrec.models.compiled_ranking.compiler_process import difference, example, network
from rayrec.models.compiled_ranking.job import Job, RankingModel
from rayrec.models.compiled_ranking.ranking import CompiledRanking
from rayrec.models.decoding.beam_policy import BeamPolicy
from rayrec.models.sequence.sequence_model import TopItems
from rayrec.models.sequence.sequence_program import SequenceProgram
from rayrec.platform.schedule import RateSchedule
from tests.helpers.recorded_graphs import Counting, NotRecordableError, RecordingGraphs
from tests.models.compiled_ranking.test_padded_ranking import BEAMS, IDS, KINDS, LENGTH, asked

CPU = torch.device("cpu")
GENERATIVE = ("causal", "lazy", "light", "prefix")


def recorded(kind, bucket):
    settings, catalog, signature = KINDS[kind]
    job = Job(RankingModel(settings, catalog), signature, bucket)
    model = network(job).eval()
    graphs = RecordingGraphs()
    return job, model, graphs, CapturedRun(model, signature, bucket, CPU, graphs)


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("kind", [*GENERATIVE, "sasrec"])
def test_a_recording_ranks_other_batches_as_eager_ranking_does(kind, num_rows):
    bucket = Bucket(num_rows, LENGTH + 2, 16 if kind == "sasrec" else BEAMS)
    job, model, _, run = recorded(kind, bucket)

    for seed in range(3):
        inputs = example(job, seed)
        assert difference(job, model, run([], inputs), inputs) is None


@torch.inference_mode()
@pytest.mark.parametrize("kind", GENERATIVE)
def test_a_recording_has_the_bits_of_the_padded_batch_that_it_repeats(kind):
    bucket = Bucket(2, LENGTH, BEAMS)
    job, model, _, run = recorded(kind, bucket)
    inputs = example(job, seed=1)
    batch, excluded_BE = job.signature.batch(bucket, inputs)

    items, scores = run([], inputs)

    expected = model.recommend(batch, BEAMS, excluded_BE, [BEAMS] * 2)
    there = expected.items_BK >= 0
    assert torch.equal(items, expected.items_BK)
    assert torch.equal(scores[there], expected.scores_BK[there])


@torch.inference_mode()
def test_after_the_recording_inputs_are_copied_and_nothing_else_is_allocated():
    bucket = Bucket(2, LENGTH, BEAMS)
    job, _, graphs, run = recorded("causal", bucket)
    (recording,) = graphs.recordings
    inputs, expected = example(job, seed=1), run([], example(job, seed=1))
    memory = [each.data_ptr() for operation in recording.operations for each in operation.results]
    counted, replay = Counting(), run._replay

    def replay_uncounted():
        with torch.utils._python_dispatch._disable_current_modes():
            replay()

    run._replay = replay_uncounted
    with counted:
        for _ in range(3):
            found = run([], inputs)

    # The inputs go to where they are read; of the answer there is a copy, which the next one leaves alone.
    assert counted.names == (["copy_"] * len(inputs) + ["clone"] * 2) * 3
    assert recording.num_replays == 4
    assert [each.data_ptr() for operation in recording.operations for each in operation.results] == memory
    assert torch.equal(found[0], expected[0])


def test_a_model_that_reads_a_value_is_not_recorded():
    class Reads(torch.nn.Module):
        def recommend(self, batch, width, excluded_BE, beams_B):
            found = batch.items_N[: int(batch.layout.lengths_on_device_B().max())]
            return TopItems(found, found)

    with pytest.raises(NotRecordableError, match="reads values"):
        CapturedRun(Reads(), KINDS["prefix"][2], Bucket(1, LENGTH, BEAMS), CPU, RecordingGraphs())


@pytest.mark.parametrize(
    "works",
    [
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.to(device="cpu"),
        lambda x: x.item(),
        lambda x: torch.asarray([1.0]),
        lambda x: torch.tensor([1.0]),
        lambda x: x.new_tensor([1.0]),
    ],
)
def test_the_stand_in_records_no_copies_from_or_to_the_host(works):
    x = torch.ones(1)
    before = [getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu", "to", "new_tensor")]

    with pytest.raises(NotRecordableError):
        RecordingGraphs().capture(lambda: works(x))

    assert [getattr(torch.Tensor, n) for n in ("tolist", "numpy", "cpu", "to", "new_tensor")] == before
    assert works(x) is not None


@pytest.fixture
def program():
    settings, catalog, signature = KINDS["prefix"]
    model = network(Job(RankingModel(settings, catalog), signature, Bucket(1, LENGTH, BEAMS)))
    optimizer = DenseOptimizerSettings(0.01, 0.0, RateSchedule(), max_grad_norm=None, fused=True)
    return SequenceProgram(model, optimizer, CPU, seed=0)


def frozen(program, graphs, buckets):
    """The program with these buckets recorded."""
    model = RankingModel(KINDS["prefix"][0], IDS)
    shapes = Buckets([each.num_rows for each in buckets], [each.length for each in buckets])
    program.compiled = CompiledRanking(captured_programs(model, shapes, CPU), program.model)
    program.recommend(asked([[1, 2, 3]])[1], {}, 3, None)
    return capture(program.compiled, graphs, buckets)


def test_once_frozen_batches_are_replayed_and_those_without_a_bucket_are_eager(program):
    eager = [
        program.recommend(asked(rows)[1], {}, 3, None) for rows in ([[1, 2]], [[5], [1, 2, 3]], [[1]] * 5)
    ]
    graphs = RecordingGraphs()
    assert frozen(program, graphs, [Bucket(1, LENGTH, BEAMS), Bucket(2, LENGTH, BEAMS)]) == 2
    program.compiled.answered.clear()

    found = [
        program.recommend(asked(rows)[1], {}, 3, None) for rows in ([[1, 2]], [[5], [1, 2, 3]], [[1]] * 5)
    ]

    for one, other in zip(found, eager, strict=True):
        assert one.items_BK.tolist() == other.items_BK.tolist()
        np.testing.assert_allclose(one.scores_BK, other.scores_BK, rtol=1e-5)
    assert program.compiled.answered == {"compiled": 2, "eager": 1}
    assert len(graphs.recordings) == 2
    assert program.compiled.programs.ready == [Bucket(1, LENGTH, BEAMS), Bucket(2, LENGTH, BEAMS)]


def test_rows_with_a_policy_are_ranked_eagerly(program):
    frozen(program, RecordingGraphs(), [Bucket(1, LENGTH, BEAMS)])
    program.compiled.answered.clear()

    program.recommend(asked([[1, 2]])[1], {}, 1, None, [BeamPolicy((BEAMS, 2))])

    assert program.compiled.answered == {"eager": 1}


def test_a_bucket_that_cannot_be_recorded_is_said_and_ranked_eagerly(program, caplog):
    class Broken:
        num_tried = 0

        def capture(self, work):
            self.num_tried += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    broken = Broken()
    assert frozen(program, broken, [Bucket(1, LENGTH, BEAMS), Bucket(2, LENGTH, BEAMS)]) == 0
    assert broken.num_tried == 1, "nothing more goes to memory that a failed recording may hold"

    assert "not permitted when stream is capturing" in caplog.text
    assert program.recommend(asked([[1, 2]])[1], {}, 3, None).items_BK.shape == (1, 3)


def test_a_wide_bucket_that_cannot_be_recorded_costs_no_usual_one(program, caplog):
    class Small(RecordingGraphs):
        """Has memory for three recordings."""

        def capture(self, work):
            if len(self.recordings) == 3:
                raise RuntimeError("out of memory")
            return super().capture(work)

    usual = [Bucket(1, LENGTH, BEAMS), Bucket(2, LENGTH, BEAMS)]
    wide = [Bucket(rows, LENGTH, BEAMS + more) for more in (2, 1) for rows in (1, 2)]

    assert frozen(program, Small(), [*wide, *usual]) == 3

    # Of the wide ones, the least wide is first.
    assert program.compiled.programs.ready == sorted([*usual, Bucket(2, LENGTH, BEAMS + 1)])
    assert "out of memory" in caplog.text
